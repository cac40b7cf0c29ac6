"""transformers' `generate` on a CPU: greedy, dynamic cache, random weights, prompts without padding.

Runs in an environment with torch and transformers. Says `ready` when the model is there; then each line `BATCH NEW` on
stdin is answered by one line of JSON: wall and processor seconds of one `generate` of NEW tokens for BATCH prompts.
"""

import argparse
import json
import sys
import time

import torch
import transformers


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--shape', required=True, help='JSON: layers d_model d_ff heads kv_heads head_dim vocab tied')
  parser.add_argument('--prompt', type=int, required=True)
  parser.add_argument('--threads', type=int, required=True)
  flags = parser.parse_args()
  torch.set_num_threads(flags.threads)
  torch.manual_seed(0)
  shape = json.loads(flags.shape)
  model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
      vocab_size=shape['vocab'],
      hidden_size=shape['d_model'],
      intermediate_size=shape['d_ff'],
      num_hidden_layers=shape['layers'],
      num_attention_heads=shape['heads'],
      num_key_value_heads=shape['kv_heads'],
      head_dim=shape['head_dim'],
      max_position_embeddings=2048,
      tie_word_embeddings=shape['tied'],
    )
  ).eval()
  print('ready', flush=True)
  for line in sys.stdin:
    batch, new = map(int, line.split())
    ids = torch.randint(3, shape['vocab'], (batch, flags.prompt))
    options = {'max_new_tokens': new, 'min_new_tokens': new, 'do_sample': False, 'pad_token_id': 0}
    wall, cpu = time.perf_counter(), time.process_time()
    with torch.no_grad():
      out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert out.shape == (batch, flags.prompt + new)
    print(json.dumps({'seconds': wall, 'cpu': cpu}), flush=True)


if __name__ == '__main__':
  main()
