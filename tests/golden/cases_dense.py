"""Reference cases of the dense families: what make_goldens.py makes them from.

Windows are shorter than the rows, head sizes are not the width over the heads, scalars of queries are not the head
size, caps are low enough to bend, and rotary scalings differ between kinds of layers.
"""

import numpy as np

_PLAIN = dict(rope_type='default', rope_theta=10000.0)
_SMALL = dict(
  vocab_size=97, hidden_size=48, intermediate_size=56, num_hidden_layers=2, num_attention_heads=6,
  num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, rms_norm_eps=1e-5, attn_implementation='eager',
)  # fmt: skip
_MISTRAL = dict(_SMALL, rope_parameters=_PLAIN)
# no padding id: to the row of that id a torch embedding passes no gradient
_GEMMA = dict(_SMALL, num_attention_heads=4, rms_norm_eps=1e-6, pad_token_id=None)

# case -> (weights, config class, fields, rows, tokens a row)
CASES = {
  'qwen2': (
    'qwen2',
    'Qwen2',
    dict(_SMALL, num_hidden_layers=3, use_sliding_window=True, sliding_window=50, max_window_layers=1,
         rope_parameters=dict(_PLAIN, rope_theta=1000000.0)),
    1,
    256,
  ),
  'qwen2_tied': (
    'qwen2_tied', 'Qwen2', dict(_SMALL, tie_word_embeddings=True, rope_parameters=_PLAIN), 1, 96,
  ),
  'mistral': ('mistral', 'Mistral', dict(_MISTRAL, sliding_window=60), 1, 256),
  'mistral_2': ('mistral', 'Mistral', dict(_MISTRAL, sliding_window=2), 2, 10),
  'mistral_1': ('mistral', 'Mistral', dict(_MISTRAL, sliding_window=1), 2, 10),
  'mistral_none': ('mistral', 'Mistral', dict(_MISTRAL, sliding_window=None), 1, 96),
  'gemma': ('gemma', 'Gemma', dict(_GEMMA, num_key_value_heads=1, head_dim=24, rope_parameters=_PLAIN), 1, 128),
  'gemma2': (
    'gemma2',
    'Gemma2',
    dict(_GEMMA, num_hidden_layers=4, sliding_window=50,
         query_pre_attn_scalar=40, attn_logit_softcapping=6.0, final_logit_softcapping=5.0, rope_parameters=_PLAIN),
    1,
    256,
  ),
  'gemma3': (
    'gemma3',
    'Gemma3Text',
    dict(_GEMMA, vocab_size=47, hidden_size=24, intermediate_size=32, num_hidden_layers=7,
         sliding_window=40, sliding_window_pattern=3, query_pre_attn_scalar=20,
         rope_parameters=dict(
           full_attention=dict(rope_type='linear', factor=8.0, rope_theta=1000000.0),
           sliding_attention=_PLAIN)),
    1,
    1024,
  ),
  'olmo3': (
    'olmo3',
    'Olmo3',
    dict(_SMALL, intermediate_size=40, num_hidden_layers=4, num_attention_heads=4, sliding_window=50,
         rope_parameters=dict(
           full_attention=dict(rope_type='yarn', factor=8.0, rope_theta=500000.0, original_max_position_embeddings=64),
           sliding_attention=dict(_PLAIN, rope_theta=500000.0))),
    1,
    256,
  ),
  'gpt2': (
    'gpt2',
    'GPT2',
    dict(vocab_size=97, n_embd=60, n_inner=88, n_layer=2, n_head=5, n_positions=260, layer_norm_epsilon=1e-5,
         attn_implementation='eager'),
    1,
    256,
  ),
}  # fmt: skip


def randomise(weights, name, draw):
  """The value of a parameter that is not drawn as all others are, from a standard normal draw; else None."""
  if weights.startswith('gemma'):
    if 'norm' in name:
      return 0.3 * draw  # a difference from one
    if 'q_proj' in name:
      return 1.5 * draw / draw.shape[1] ** 0.5
  if weights == 'gpt2':
    if 'ln_' in name:
      return 1 + 0.3 * draw if name.endswith('weight') else 0.3 * draw
    if 'wte' in name or 'wpe' in name:
      return 0.5 * draw
    if name.endswith('weight'):  # [in, out]
      return draw / draw.shape[0] ** 0.5
  return None


def more(output):
  """gemma_bfloat16.npz: ids [32, 8] and what transformers in bfloat16 says comes next, where it is sure of it.

  A tied table makes the id itself the likeliest by far, so that one does not count. Of random rows those are kept in
  which the best of the others is 0.25 ahead of the next at every position: ties are nobody's.
  """
  import pathlib
  import shutil
  import tempfile

  import torch
  import transformers

  with tempfile.TemporaryDirectory() as folder:
    shutil.copyfile(output / 'gemma.json', pathlib.Path(folder, 'config.json'))
    shutil.copyfile(output / 'gemma.safetensors', pathlib.Path(folder, 'model.safetensors'))
    model = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.bfloat16, attn_implementation='eager'
    ).eval()
  tokens = np.random.default_rng(8).integers(0, model.config.vocab_size, (20000, 8))
  with torch.no_grad():
    logits = model(torch.from_numpy(tokens)).logits.float().numpy()
  np.put_along_axis(logits, tokens[..., None], -np.inf, -1)
  best = np.sort(logits, -1)
  sure = (best[..., -1] - best[..., -2] > 0.25).all(-1)
  kept = np.flatnonzero(sure)[:32]
  said = logits[kept].argmax(-1)
  print(f'gemma_bfloat16: {sure.sum()} rows of {len(tokens)} are sure, {len(np.unique(said))} ids are said')
  np.savez_compressed(output / 'gemma_bfloat16.npz', tokens=tokens[kept].astype(np.int32), said=said.astype(np.int32))
