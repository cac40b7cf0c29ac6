"""Writes smollm2.npz and smollm2_tokens.json: what `transformers` computes for the converted SmolLM2-135M-Instruct.

Run in an environment with torch and transformers, on a directory that tests/smollm2.py made:

    python -c "from tests import smollm2; smollm2.convert(smollm2.find(), '/tmp/smollm2')"
    python tests/golden/make_smollm2_golden.py --hf=/tmp/smollm2 --out=tests/golden

Logits of 49152 ids at 96 positions would be 19 MB: kept are the 16 largest with their ids, mean, standard deviation and
log-sum-exp of every position, and all logits of two positions. The model sees float32 and plain ("eager") attention.
"""

import argparse
import json
import os

import numpy as np
import torch
import transformers

TEXT = (
  'The tide tables of 1847 list 365 high waters for the harbour at St. Malo. "Why," asked the pilot, "do they '
  'differ by 50 minutes a day?" Because the moon is late: d(theta)/dt = 2*pi/24.84 h. In Python: '
  '`def late(day): return 50 * day`. '
)
CHAT = [{'role': 'user', 'content': 'What is the capital of France?'}]
STRINGS = [
  '',
  ' ',
  'Hello world',
  ' leading and trailing ',
  'tabs\tand\r\nnewlines\n\n\n  x',
  'digits 1234567890 3.14159 0x1F 1e-9',
  "it's I'll we've don't 'tis",
  'naïve café Ångström ß ﬁ',
  '日本語のテキスト и русский, עברית عربى',
  '👩‍👩‍👧‍👦 family, 🇫🇷 flag, e\u0301 combining',
  'def f(x):\n    return x ** 2  # comment\n',
  '<|im_start|>user\nhi<|im_end|>\n',
  'a<|im_end|>b <|endoftext|> c',
  '<|im_start|',
  '\u200bzero\u00a0width\ufeff',
  'x' * 50 + '=' * 33,
]
FULL = (40, 95)  # positions whose logits are kept whole


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--hf', required=True)
  parser.add_argument('--out', required=True)
  args = parser.parse_args()
  tokenizer = transformers.AutoTokenizer.from_pretrained(args.hf)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    args.hf, dtype=torch.float32, attn_implementation='eager'
  ).eval()
  tokens = tokenizer(TEXT * 2, add_special_tokens=False).input_ids[:96]
  with torch.no_grad():
    logits = model(torch.tensor([tokens])).logits[0].double()
    top = logits.topk(16)
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :]
  np.savez_compressed(
    os.path.join(args.out, 'smollm2.npz'),
    tokens=np.array(tokens, np.int32),
    top_ids=top.indices.numpy().astype(np.int32),
    top_logits=top.values.numpy().astype(np.float32),
    mean=logits.mean(-1).numpy().astype(np.float32),
    std=logits.std(-1).numpy().astype(np.float32),
    logsumexp=logits.logsumexp(-1).numpy().astype(np.float32),
    positions=np.array(FULL, np.int32),
    logits=logits[list(FULL)].numpy().astype(np.float32),
    prompt=np.array(prompt, np.int32),
    answer=answer.numpy().astype(np.int32),
  )
  strings = [{'text': text, 'ids': tokenizer(text, add_special_tokens=False).input_ids} for text in STRINGS]
  made_with = {'torch': torch.__version__, 'transformers': transformers.__version__}
  with open(os.path.join(args.out, 'smollm2_tokens.json'), 'w', encoding='utf-8') as file:
    json.dump({'made_with': made_with, 'strings': strings}, file, ensure_ascii=True, indent=1)
    file.write('\n')
  print(tokenizer.decode(answer))


if __name__ == '__main__':
  main()
