"""Reference cases of Gemma 4: what make_goldens.py makes them from.

Windows shorter than the rows, full layers with heads of another size, values that are keys, experts beside the dense
layer, and per-layer inputs with layers that read keys and values of earlier ones, of both kinds.
"""

_ROPE = dict(
  sliding_attention=dict(rope_type='default', rope_theta=10000.0),
  full_attention=dict(rope_type='proportional', rope_theta=1000000.0, partial_rotary_factor=0.25),
)
_SMALL = dict(
  vocab_size=89, hidden_size=40, intermediate_size=56, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
  global_head_dim=24, max_position_embeddings=1024, rms_norm_eps=1e-6, sliding_window=50, rope_parameters=_ROPE,
  hidden_size_per_layer_input=0, vocab_size_per_layer_input=89, final_logit_softcapping=6.0,
  attn_implementation='eager',
)  # fmt: skip
_LARGE = dict(_SMALL, attention_k_eq_v=True, num_global_key_value_heads=1)


def _kinds(*periods):
  return [kind for n in periods for kind in ['sliding_attention'] * (n - 1) + ['full_attention']]


# case -> (weights, config class, fields, rows, tokens a row)
CASES = {
  'gemma4': ('gemma4', 'Gemma4Text', dict(_LARGE, num_hidden_layers=6, layer_types=_kinds(3, 3)), 1, 256),
  'gemma4_experts': (
    'gemma4_experts',
    'Gemma4Text',
    dict(_LARGE, num_hidden_layers=4, layer_types=_kinds(2, 2), enable_moe_block=True, num_experts=5, top_k_experts=2,
         moe_intermediate_size=24),
    1,
    256,
  ),
  'gemma4_small': (
    'gemma4_small',
    'Gemma4Text',
    dict(_SMALL, hidden_size=32, intermediate_size=24, head_dim=12, global_head_dim=20, num_hidden_layers=9,
         layer_types=_kinds(3, 3, 3), num_kv_shared_layers=4, use_double_wide_mlp=True,
         hidden_size_per_layer_input=12),
    1,
    256,
  ),
}  # fmt: skip


def randomise(weights, name, draw):
  """The value of a parameter that is not drawn as all others are, from a standard normal draw; else None."""
  if name.endswith(('layer_scalar', 'router.scale', 'per_expert_scale')):
    return 1 + 0.3 * draw
  if name.endswith('q_norm.weight'):
    return 0.4 * (1 + 0.3 * draw)  # scores are not divided by the root of the head size
  if name.endswith('experts.gate_up_proj'):  # [E, 2 F, D]
    return draw / draw.shape[2] ** 0.5
  if name.endswith('experts.down_proj'):  # [E, D, F]
    return draw / draw.shape[2] ** 0.5
  return None
