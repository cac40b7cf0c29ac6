"""Reference case of DeepSeek V4: what make_goldens.py makes it from.

All three kinds of layer, tables and scores of experts, and so many tokens that windows, entries of both kinds and the
indexer's choice count; stretches of positions (trained at 64) belong to the layers that compress.
"""

MARGIN = 2e-5  # of every choice of keys and experts, see make_goldens.least_gap
CASES = {
  'deepseek4': (
    'deepseek4',
    'DeepseekV4',
    dict(
      vocab_size=101, hidden_size=36, moe_intermediate_size=12, num_hidden_layers=4, num_attention_heads=6, head_dim=24,
      q_lora_rank=20, num_experts_per_tok=2, n_routed_experts=6, routed_scaling_factor=1.4,
      max_position_embeddings=1024,
      hc_mult=3, hc_sinkhorn_iters=4, hc_eps=1e-3, swiglu_limit=1.5, sliding_window=21, o_groups=3, o_lora_rank=7,
      layer_types=['sliding_attention', 'compressed_sparse_attention', 'heavily_compressed_attention',
                   'compressed_sparse_attention'],
      mlp_layer_types=['hash_moe', 'moe', 'moe', 'moe'],
      compress_rates={'compressed_sparse_attention': 4, 'heavily_compressed_attention': 20},
      index_n_heads=9, index_head_dim=14, index_topk=6, partial_rotary_factor=1 / 3, rms_norm_eps=1e-6,
      rope_theta=100.0, compress_rope_theta=1600.0, pad_token_id=None, attn_implementation='eager',
      rope_parameters=dict(rope_type='yarn', factor=4.0, original_max_position_embeddings=64, beta_fast=32.0,
                           beta_slow=1.0),
    ),
    1,
    256,
  ),
}  # fmt: skip


def randomise(weights, name, draw):
  """The value of what is not drawn as all others are; else None."""
  if weights != 'deepseek4':
    return None
  if 'experts' in name:
    return 1.5 * draw / draw.shape[-1] ** 0.5
  if name.endswith(('_hc.scale', 'hc_scale')):
    return 1 + 0.5 * draw
  if name.endswith(('base', 'sinks', 'position_bias')):
    return 0.5 * draw
  if name.endswith('e_score_correction_bias'):
    return 0.3 * draw
  if name.endswith('tid2eid'):
    return draw.abs().mul(997).long() % 6
  return None


def published(name):
  """The name that the published files have for a tensor, where what transformers writes is none that they use."""
  name = name.removeprefix('model.').replace('.attn.norm.', '.attn.kv_norm.').replace('hc_head.hc_', 'hc_head_')
  return name.replace('embed_tokens.', 'embed.')
