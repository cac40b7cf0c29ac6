"""Reference cases of DeepSeek V2 and V3: what make_goldens.py makes them from.

Sizes break every symmetry: heads of queries, keys and values differ in size from each other and from the latents, and
no number of experts is a power of two. Positions cross the bands of the scaling (trained at 64).
"""

SMALL = dict(
  vocab_size=101, hidden_size=40, intermediate_size=56, num_hidden_layers=3, num_attention_heads=5,
  num_key_value_heads=5, max_position_embeddings=1024, kv_lora_rank=20, qk_nope_head_dim=10, qk_rope_head_dim=8,
  v_head_dim=12, moe_intermediate_size=16, n_shared_experts=2, first_k_dense_replace=1, rms_norm_eps=1e-6,
  attn_implementation='eager',
)  # fmt: skip
YARN = dict(
  rope_type='yarn', rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0,
  mscale=0.8, mscale_all_dim=1.3,
)  # fmt: skip
V2 = dict(SMALL, n_routed_experts=6, num_experts_per_tok=2, routed_scaling_factor=1.7)
V3 = dict(
  SMALL, n_routed_experts=10, num_experts_per_tok=3, routed_scaling_factor=1.4, q_lora_rank=24, n_shared_experts=1
)
BASE = dict(rope_type='default', rope_theta=10000.0)

# case -> (weights, config class, fields, rows, tokens a row)
CASES = {
  'deepseek2': ('deepseek2', 'DeepseekV2', dict(V2, q_lora_rank=None, rope_parameters=YARN, topk_method='greedy',
                n_group=1, topk_group=1), 1, 256),
  'deepseek2_groups': ('deepseek2_groups', 'DeepseekV2', dict(V2, q_lora_rank=24, rope_parameters=BASE, n_group=3,
                       num_experts_per_tok=3, topk_group=2, topk_method='group_limited_greedy'), 1, 256),
  'deepseek3': ('deepseek3', 'DeepseekV3', dict(V3, rope_parameters=YARN, n_group=5, topk_group=2), 1, 256),
  'deepseek3_halves': ('deepseek3_halves', 'DeepseekV3', dict(V3, rope_parameters=BASE, n_group=1, topk_group=1,
                       rope_interleave=False, norm_topk_prob=False, attention_bias=True), 1, 256),
}  # fmt: skip


def randomise(weights, name, draw):
  """The value of what is not drawn as all others are: stacked experts, and the bias that selects; else None."""
  if not weights.startswith('deepseek'):
    return None
  if 'mlp.experts' in name:
    return 1.5 * draw / draw.shape[-1] ** 0.5
  if name.endswith('e_score_correction_bias'):
    return 0.3 * draw
  return None


def more(output):
  """deepseek3_mtp, with the copies of the table and of the head that are published, too."""
  import mtp

  def published(name, layers):
    return f'model.layers.{layers}.' + name.removeprefix('block.').replace('post_norm', 'shared_head.norm')

  def copies(model):
    table, head = model.model.embed_tokens.weight, model.lm_head.weight
    there = f'model.layers.{len(model.model.layers)}'
    return {f'{there}.embed_tokens.weight': table, f'{there}.shared_head.head.weight': head}

  mtp.make('deepseek3', output, lambda name, draw: randomise('deepseek3', name, draw), published, copies)
