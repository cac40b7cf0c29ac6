"""Reference cases of Llama 4: what make_goldens.py makes them from.

Chunks of 80 and 60 of 256 tokens, a temperature that steps every 50 positions, rotary positions whose stretch begins
within the head, experts in all layers and in every second one, one expert a token and two.
"""

_SMALL = dict(
  vocab_size=89, hidden_size=40, intermediate_size=24, intermediate_size_mlp=56, num_attention_heads=4,
  num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, rms_norm_eps=1e-5, attn_implementation='eager',
  floor_scale=50, attn_scale=0.4,
)  # fmt: skip

# case -> (weights, config class, fields, rows, tokens a row)
CASES = {
  'llama4_scout': (
    'llama4_scout',
    'Llama4Text',
    dict(_SMALL, num_hidden_layers=4, num_local_experts=3, num_experts_per_tok=1, attention_chunk_size=80,
         rope_parameters=dict(rope_type='llama3', rope_theta=500000.0, factor=16.0, low_freq_factor=1.0,
                              high_freq_factor=1.0, original_max_position_embeddings=64)),
    1,
    256,
  ),
  'llama4_maverick': (
    'llama4_maverick',
    'Llama4Text',
    dict(_SMALL, num_hidden_layers=4, num_local_experts=5, num_experts_per_tok=2, attention_chunk_size=60,
         use_qk_norm=False, interleave_moe_layer_step=2, no_rope_layer_interval=3, attention_bias=True,
         rope_parameters=dict(rope_type='default', rope_theta=500000.0)),
    1,
    256,
  ),
}  # fmt: skip
