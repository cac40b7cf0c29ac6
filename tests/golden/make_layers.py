"""Makes layers.npz, what single layers of transformers compute; not a test. Needs torch and transformers.

    python tests/golden/make_layers.py [OUTPUT_DIR]

Two tiny models are run, and of the layers that are hooked their parameters, inputs and outputs are kept:
CASE/w/NAME, CASE/x, CASE/y (and CASE/post, CASE/comb of a hyper-connection). Everything is drawn at random, away from
its initial value. Made with torch 2.13.0 and transformers 5.24.0.
"""

import pathlib
import sys

import numpy as np
import torch
import transformers

VOCAB, LENGTH = 61, 45
SPARSE = dict(
  vocab_size=VOCAB, hidden_size=24, intermediate_size=20, num_hidden_layers=1, num_attention_heads=3, q_lora_rank=10,
  num_key_value_heads=3, kv_lora_rank=12, qk_rope_head_dim=8, qk_nope_head_dim=6, v_head_dim=5, index_topk=7,
  index_head_dim=12, index_n_heads=9, rms_norm_eps=1e-5, mlp_layer_types=['dense'], attn_implementation='eager',
  n_routed_experts=3, n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=8, pad_token_id=None,
  rope_parameters=dict(rope_type='default', rope_theta=100.0),
)  # fmt: skip
COMPRESSED = dict(
  vocab_size=VOCAB, hidden_size=24, moe_intermediate_size=12, num_hidden_layers=3, num_attention_heads=4, head_dim=16,
  q_lora_rank=10, num_experts_per_tok=2, n_routed_experts=3, hc_mult=3, hc_eps=1e-3, hc_sinkhorn_iters=3,
  layer_types=['sliding_attention', 'compressed_sparse_attention', 'heavily_compressed_attention'],
  compress_rates={'compressed_sparse_attention': 4, 'heavily_compressed_attention': 6},
  mlp_layer_types=['hash_moe', 'moe', 'moe'], sliding_window=7, o_groups=2, o_lora_rank=5, index_n_heads=9,
  index_head_dim=12, index_topk=3, rope_theta=100.0, compress_rope_theta=500.0, partial_rotary_factor=0.5,
  rms_norm_eps=1e-5, attn_implementation='eager',
  rope_parameters=dict(
    rope_type='yarn', factor=4.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0
  ),
)  # fmt: skip


def randomise(model):
  """Draws every parameter and selection bias anew."""
  generator = torch.Generator().manual_seed(0)
  for name, p in [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n.endswith('bias'))]:
    draw = torch.randn(p.shape, generator=generator)
    if 'norm' in name and name.endswith('weight'):
      value = 1 + 0.3 * draw
    elif p.dim() == 1 or 'position_bias' in name:
      value = 0.5 * draw + ('scale' in name)
    else:
      value = draw * (2 if 'q_b' in name or 'wq_b' in name else 1) / p.shape[-1] ** 0.5
    p.data.copy_(value)


def hook(module, case, found):
  """Keeps what the module gets and gives."""

  def keep(module, args, kwargs, out):
    found[f'{case}/x'] = (args[0] if args else kwargs['hidden_states']).detach()
    names = ('post', 'comb', 'y') if isinstance(out, tuple) and len(out) == 3 else ('y',)
    for name, value in zip(names, out if isinstance(out, tuple) else (out,)):
      found[f'{case}/{name}'] = value.detach()
    for name, value in module.state_dict().items():
      found[f'{case}/w/{name}'] = value

  module.register_forward_hook(keep, with_kwargs=True)


def main():
  output = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
  tokens = torch.from_numpy(np.random.default_rng(7).integers(0, VOCAB, (2, LENGTH)))
  found = {}
  sparse = transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**SPARSE)).float().eval()
  hook(sparse.model.layers[0].self_attn, 'sparse', found)
  compressed = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**COMPRESSED)).float().eval()
  for case, layer in zip(('window', 'light', 'heavy'), compressed.model.layers):
    hook(layer.self_attn, case, found)
  hook(compressed.model.layers[1].attn_hc, 'connection', found)
  hook(compressed.model.hc_head, 'collapse', found)
  for model in (sparse, compressed):
    randomise(model)
    with torch.no_grad():
      model(tokens)
  arrays = {name: value.numpy().astype(np.float32) for name, value in found.items()}
  np.savez_compressed(output / 'layers.npz', **arrays)
  for name, value in arrays.items():
    print(name, value.shape, f'{value.std():.2f}')


if __name__ == '__main__':
  main()
