"""Reference cases of Qwen 3 Next and Qwen 3.5: what make_goldens.py makes them from.

Rows cross two borders of a delta net's chunks, layers are two periods of three (dense: of two), and no two sizes are
alike. A delta net that forgets fast reads almost nothing from its matrix now and then. The norm behind it makes one of
that again, and of the rounding of float32 as well: with A_log and dt_bias drawn around 0.5 two right programs are 1e-3
apart, around -1 they are 1e-4. Around -2.5, and with logits whose standard deviation is little above 1, they are less
than 3e-5 apart, which leaves the tolerance of 1e-4 to mistakes.
"""

HYBRID = dict(
  vocab_size=96, hidden_size=32, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
  max_position_embeddings=512, attn_implementation='eager', rms_norm_eps=1e-6,
  layer_types=['linear_attention', 'linear_attention', 'full_attention'] * 2, linear_num_key_heads=2,
  linear_num_value_heads=6, linear_key_head_dim=8, linear_value_head_dim=10, linear_conv_kernel_dim=4,
)  # fmt: skip
ROUTED = dict(
  HYBRID, moe_intermediate_size=12, shared_expert_intermediate_size=14, num_experts=7, num_experts_per_tok=3
)
TURN = dict(rope_type='default', rope_theta=10000.0, partial_rotary_factor=0.25)
NEXT = dict(ROUTED, intermediate_size=40, rope_parameters=TURN)

# case -> (weights, config class, fields, rows, tokens a row)
CASES = {
  'qwen3_next': ('qwen3_next', 'Qwen3Next', NEXT, 2, 150),
  'qwen3_next_raw': ('qwen3_next', 'Qwen3Next', dict(NEXT, norm_topk_prob=False), 1, 150),
  'qwen3_5_moe': ('qwen3_5_moe', 'Qwen3_5MoeText', dict(ROUTED, rope_parameters=TURN), 1, 150),
  'qwen3_5': (
    'qwen3_5',
    'Qwen3_5Text',
    dict(HYBRID, intermediate_size=44, tie_word_embeddings=True, rope_parameters=dict(TURN, partial_rotary_factor=0.5),
         num_hidden_layers=4, layer_types=['linear_attention', 'full_attention'] * 2),
    1,
    150,
  ),
}  # fmt: skip


def randomise(weights, name, draw):
  """The value of a parameter that is not drawn as all others are, from a standard normal draw; else None."""
  if name.endswith('linear_attn.norm.weight'):
    return 1 + 0.3 * draw
  if name == 'model.norm.weight' and weights == 'qwen3_5':  # a tied head has no scale of its own
    return 0.3 * draw - 0.4
  if 'norm' in name:  # stored as a difference from one
    return 0.3 * draw
  if name.endswith(('A_log', 'dt_bias')):
    return 0.5 * draw - 2.5
  if name.endswith('conv1d.weight'):
    return 0.6 * draw
  if name.endswith('mlp.gate.weight'):
    return 2.0 * draw / draw.shape[1] ** 0.5
  if 'lm_head' in name:
    return 1.15 * draw / draw.shape[1] ** 0.5
  if 'experts.' in name and draw.ndim == 3:
    return draw / draw.shape[2] ** 0.5
  return None


def more(output):
  """qwen3_next_mtp and qwen3_5_mtp, under the names of Qwen3-Next-80B-A3B-Instruct's files."""
  import mtp

  parts = {'enorm': 'pre_fc_norm_embedding', 'hnorm': 'pre_fc_norm_hidden', 'eh_proj': 'fc', 'post_norm': 'norm'}

  def published(name, layers):
    del layers
    head, _, rest = name.partition('.')
    return f'mtp.layers.0.{rest}' if head == 'block' else f'mtp.{parts[head]}.{rest}'

  for case in ('qwen3_next', 'qwen3_5'):
    mtp.make(case, output, lambda name, draw, case=case: randomise(case, name, draw), published)
