"""Reference cases of the families with experts: what make_goldens.py makes them from.

Numbers of experts are no powers of two; the bounds of the gate are low enough to act; windows are shorter than rows.
"""

_PLAIN = dict(rope_type='default', rope_theta=10000.0)
_SMALL = dict(
  vocab_size=97, hidden_size=40, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=16,
  max_position_embeddings=1024, rms_norm_eps=1e-5, attn_implementation='eager', rope_parameters=_PLAIN,
)  # fmt: skip
_MIXTRAL = dict(_SMALL, intermediate_size=24, num_local_experts=5, num_experts_per_tok=2)
_QWEN = dict(_SMALL, intermediate_size=28, moe_intermediate_size=20, num_experts=6, num_experts_per_tok=3)

# case -> (weights, config class, fields, rows, tokens a row)
CASES = {
  'mixtral': ('mixtral', 'Mixtral', _MIXTRAL, 2, 96),
  'mixtral_window': ('mixtral', 'Mixtral', dict(_MIXTRAL, sliding_window=30), 1, 96),
  'qwen3_moe': (
    'qwen3_moe', 'Qwen3Moe', dict(_QWEN, num_hidden_layers=3, norm_topk_prob=True, mlp_only_layers=[1]), 1, 96,
  ),
  'qwen3_moe_plain': (
    'qwen3_moe_plain', 'Qwen3Moe',
    dict(_QWEN, norm_topk_prob=False, decoder_sparse_step=2, tie_word_embeddings=True, attention_bias=True), 1, 96,
  ),
  'gpt_oss': (
    'gpt_oss',
    'GptOss',
    dict(_SMALL, num_hidden_layers=3, intermediate_size=24, num_local_experts=5, num_experts_per_tok=3,
         sliding_window=50, swiglu_limit=1.5,
         rope_parameters=dict(
           rope_type='yarn', rope_theta=150000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
           original_max_position_embeddings=64)),
    1,
    192,
  ),
}  # fmt: skip


def randomise(weights, name, draw):
  """The value of a parameter that is not drawn as all others are, from a standard normal draw; else None."""
  if name.endswith('sinks'):
    return draw
  if name.endswith(('mlp.gate.weight', 'mlp.router.weight')):
    return 2 * draw / draw.shape[1] ** 0.5
  if 'mlp.experts' in name and draw.ndim == 3:  # [E, out, in], but [E, in, out] in one family
    return 1.5 * draw / draw.shape[1 if weights == 'gpt_oss' else 2] ** 0.5
  return None
