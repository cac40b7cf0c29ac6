"""DeepSeek V4: numbers that do not come from the card, and what its config.json may say."""

import dataclasses

import pytest

from maxtext_layers import config
from maxtext_layers import plan
from maxtext_layers import rope
from maxtext_models import registry

FLASH = registry.card('deepseek4-284b')
# config.json of huggingface.co/deepseek-ai/DeepSeek-V4-Flash, the fields that say what the model is
PUBLISHED = {
  'model_type': 'deepseek_v4',
  'architectures': ['DeepseekV4ForCausalLM'],
  'hidden_size': 4096,
  'num_hidden_layers': 43,
  'num_attention_heads': 64,
  'num_key_value_heads': 1,
  'head_dim': 512,
  'qk_rope_head_dim': 64,
  'q_lora_rank': 1024,
  'o_lora_rank': 1024,
  'o_groups': 8,
  'vocab_size': 129280,
  'max_position_embeddings': 1048576,
  'rms_norm_eps': 1e-6,
  'hidden_act': 'silu',
  'moe_intermediate_size': 2048,
  'n_routed_experts': 256,
  'n_shared_experts': 1,
  'num_experts_per_tok': 6,
  'num_hash_layers': 3,
  'norm_topk_prob': True,
  'routed_scaling_factor': 1.5,
  'scoring_func': 'sqrtsoftplus',
  'swiglu_limit': 10.0,
  'sliding_window': 128,
  'index_n_heads': 64,
  'index_head_dim': 128,
  'index_topk': 512,
  'hc_mult': 4,
  'hc_sinkhorn_iters': 20,
  'hc_eps': 1e-6,
  'rope_theta': 10000,
  'compress_rope_theta': 160000,
  'compress_ratios': [0, 0, *[4, 128] * 20, 4, 0],  # the last one is that of a module that looks ahead
  'rope_scaling': {
    'type': 'yarn', 'factor': 16, 'original_max_position_embeddings': 65536, 'beta_fast': 32, 'beta_slow': 1,
  },
}  # fmt: skip


def test_totals_are_those_of_the_report():
  """284B, of which 13B for a token: huggingface.co/deepseek-ai/DeepSeek-V4-Flash, table of models."""
  assert FLASH.parameters() / 1e9 == pytest.approx(284, abs=0.5)
  assert (FLASH.active_parameters() - FLASH.vocab * FLASH.d_model) / 1e9 == pytest.approx(13, abs=0.5)


def test_total_by_hand():
  """The shapes of the published tensors, written out: attention of three kinds, streams, experts of two."""
  d, heads, h, q, g, r, s = 4096, 64, 512, 1024, 8, 1024, 4
  attention = q * d + q + heads * h * q + h * d + h + heads + g * r * (heads // g * h) + d * g * r
  pool = lambda ratio, size, series: 2 * d * series * size + ratio * series * size + size
  indexer = 64 * 128 * q + 64 * d + pool(4, 128, 2)
  mixers = 43 * attention + 20 * pool(128, h, 1) + 21 * (pool(4, h, 2) + indexer)
  streams = 43 * 2 * (24 * s * d + 24 + 3) + s * s * d + s + 1
  ffn = 43 * (257 * 3 * 2048 * d + 256 * d) + 40 * 256 + 3 * 129280 * 6
  assert FLASH.parameters() == 2 * 129280 * d + d + 43 * 2 * d + mixers + streams + ffn


def test_memory_by_hand():
  """What 1024 more tokens take: a quarter of an entry of 512 and of 128 in 21 layers, a 128th of one in 20 others."""
  more = FLASH.cache_bytes(2048) - FLASH.cache_bytes(1024)
  assert more == 1024 * 2 * (21 * (512 + 128) // 4 + 20 * 512 // 128)


def test_the_published_config_is_the_card():
  """And what is written, in the form of transformers 5, is read as the same."""
  read = registry.card_from_hf(PUBLISHED)
  assert dataclasses.replace(read, name=FLASH.name, source=FLASH.source) == FLASH
  back = registry.card_from_hf(read.hf_config())
  assert back == read and back.hf_config() == read.hf_config()


def test_scan_plan():
  """As in the architecture: two windows, the last hashed layer, then large and small entries by turns: 4 blocks."""
  segments = plan.plan(FLASH.blocks())
  assert [(len(s.specs), s.count) for s in segments] == [(1, 2), (1, 1), (2, 20)]


def test_what_no_tolerance_sees_reaches_the_layers():
  """eps of norms and of streams, both bases, and that only layers which compress are stretched, without temperature."""
  window, light, heavy = (FLASH.blocks()[l] for l in (0, 2, 3))
  assert (window.norm.eps, window.streams.eps, window.streams.norm_eps, window.mixer.norm.eps) == (1e-6,) * 4
  assert (window.mixer.rope.theta, light.mixer.rope.theta, heavy.mixer.rope.theta) == (1e4, 1.6e5, 1.6e5)
  assert window.mixer.rope.scaling is None and light.mixer.rope == heavy.mixer.rope
  assert rope.temperature(light.mixer.rope) == 1 and light.mixer.rope.scaling.factor == 16


def test_names_as_people_type_them():
  for name in ('deepseek-ai/DeepSeek-V4-Flash', 'deepseek-v4-flash-base'):
    assert registry.card(name) == FLASH


@pytest.mark.parametrize(
  'changes, said',
  [
    ({'compress_ratios': [0, 4, 8] * 15}, 'compress_ratios holds 8'),
    ({'compress_ratios': 'x'}, "compress_ratios='x' is not a list"),
    ({'compress_ratios': None}, 'lacks layer_types, or compress_ratios'),
    ({'num_hash_layers': None}, 'lacks mlp_layer_types, or num_hash_layers'),
    ({'rope_parameters': {'main': {}}}, 'rope_parameters.main and rope_parameters.compress are not two objects'),
    ({'num_hash_layers': 44}, 'hashed=44 is not between 0 and layers=43'),
    ({'scoring_func': 'sigmoid'}, "scoring_func='sigmoid' is not supported"),
    ({'norm_topk_prob': False}, 'norm_topk_prob=False is not supported'),
    ({'n_shared_experts': 2}, 'n_shared_experts=2 is not supported'),
    ({'o_groups': 7}, 'heads=64 is no multiple of groups=7'),
    ({'qk_rope_head_dim': 130}, 'rope_dim=130 is odd or larger'),
    ({'hc_sinkhorn_iters': 0}, 'hc_sinkhorn_iters=0 is not positive'),
    ({'num_experts_per_tok': 300}, 'top_k=300'),
    ({'rope_scaling': {'type': 'llama4', 'factor': 2}}, "rope_type='llama4' is not supported"),
    ({'rope_parameters': {'main': {'rope_type': 'linear', 'rope_theta': 1e4, 'factor': 2.0},
                          'compress': {'rope_theta': 1e5}}}, 'rope_parameters.main.rope_type can only be default'),
    ({'layer_types': ['full_attention'] * 43}, "layer_types holds 'full_attention'"),
    ({'mlp_layer_types': ['moe', 'hash_moe'] + ['moe'] * 41}, 'is not some hash_moe and then moe'),
  ],
)  # fmt: skip
def test_what_is_not_supported_is_named(changes, said):
  with pytest.raises(config.Error, match=said):
    registry.card_from_hf({**PUBLISHED, **changes})
