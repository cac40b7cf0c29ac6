import dataclasses

import pytest

from maxtext_layers import config
from maxtext_models import registry

# Qwen/Qwen2.5-7B, config.json
PUBLISHED = {
  'architectures': ['Qwen2ForCausalLM'], 'attention_dropout': 0.0, 'bos_token_id': 151643, 'eos_token_id': 151643,
  'hidden_act': 'silu', 'hidden_size': 3584, 'initializer_range': 0.02, 'intermediate_size': 18944,
  'max_position_embeddings': 131072, 'max_window_layers': 28, 'model_type': 'qwen2', 'num_attention_heads': 28,
  'num_hidden_layers': 28, 'num_key_value_heads': 4, 'rms_norm_eps': 1e-06, 'rope_theta': 1000000.0,
  'sliding_window': 131072, 'tie_word_embeddings': False, 'torch_dtype': 'bfloat16', 'transformers_version': '4.40.1',
  'use_cache': True, 'use_mrope': False, 'use_sliding_window': False, 'vocab_size': 152064,
}  # fmt: skip
SLIDING = {**PUBLISHED, 'use_sliding_window': True, 'sliding_window': 4096, 'max_window_layers': 21}


def test_the_published_config_is_the_card():
  named = registry.card('qwen2.5-7b')
  found = registry.card_from_hf(PUBLISHED)
  assert dataclasses.replace(found, name=named.name, source=named.source, dtype=None) == named


def test_queries_keys_and_values_have_biases_and_nothing_else():
  """A8."""
  spec = registry.card_from_hf(PUBLISHED).blocks()[0]
  assert spec.mixer.bias == ('q', 'k', 'v') and spec.ffn.bias == ()
  rows = [row[0] for row in registry.card_from_hf(PUBLISHED).rows()]
  assert [row.split('.')[-2] for row in rows if row.endswith('.b')] == ['q', 'k', 'v']
  assert registry.card_from_hf({**PUBLISHED, 'attention_bias': False}) == registry.card_from_hf(PUBLISHED)


def test_windows_begin_after_the_full_layers():
  found = registry.card_from_hf(SLIDING)
  assert [spec.mixer.window for spec in found.blocks()] == [None] * 21 + [4096] * 7
  assert registry.card_from_hf(found.hf_config()) == found
  types = ['full_attention'] * 21 + ['sliding_attention'] * 7
  assert registry.card_from_hf({**SLIDING, 'layer_types': types}) == found
  found.layers = 4
  assert [spec.mixer.window for spec in found.blocks()] == [None] * 4
  everywhere = registry.card_from_hf({**SLIDING, 'max_window_layers': 0})
  assert [spec.mixer.window for spec in everywhere.blocks()] == [4096] * 28


@pytest.mark.parametrize(
  'source, said',
  [
    ({**SLIDING, 'sliding_window': None}, 'lacks sliding_window'),
    ({k: v for k, v in SLIDING.items() if k != 'max_window_layers'}, 'lacks max_window_layers'),
    ({**SLIDING, 'max_window_layers': -1}, 'full_layers=-1'),
    ({**SLIDING, 'sliding_window': 0}, 'sliding_window=0 is not positive'),
    ({**PUBLISHED, 'layer_types': ['sliding_attention'] * 28}, 'is not what its other fields make of it'),
  ],
)
def test_what_makes_no_sense_is_named(source, said):
  with pytest.raises(config.Error) as error:
    registry.card_from_hf(source)
  assert said in str(error.value) and '\n' not in str(error.value)
