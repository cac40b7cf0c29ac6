import dataclasses

import pytest

from maxtext_layers import config
from maxtext_models import registry

# mistralai/Mistral-7B-v0.1 and -v0.3, config.json
V1 = {
  'architectures': ['MistralForCausalLM'], 'bos_token_id': 1, 'eos_token_id': 2, 'hidden_act': 'silu',
  'hidden_size': 4096, 'initializer_range': 0.02, 'intermediate_size': 14336, 'max_position_embeddings': 32768,
  'model_type': 'mistral', 'num_attention_heads': 32, 'num_hidden_layers': 32, 'num_key_value_heads': 8,
  'rms_norm_eps': 1e-05, 'rope_theta': 10000.0, 'sliding_window': 4096, 'tie_word_embeddings': False,
  'torch_dtype': 'bfloat16', 'transformers_version': '4.34.0.dev0', 'use_cache': True, 'vocab_size': 32000,
}  # fmt: skip
V3 = {**V1, 'rope_theta': 1000000.0, 'sliding_window': None, 'attention_dropout': 0.0, 'vocab_size': 32768}


@pytest.mark.parametrize('name, source', [('mistral-7b-v0.1', V1), ('mistral-7b-v0.3', V3)])
def test_the_published_config_is_the_card(name, source):
  named = registry.card(name)
  assert dataclasses.replace(registry.card_from_hf(source), name=name, source=named.source, dtype=None) == named


def test_every_layer_slides_or_none():
  """A4: 4096 keys, the query's own among them, in version 0.1; later versions have no window."""
  assert [spec.mixer.window for spec in registry.card_from_hf(V1).blocks()] == [4096] * 32
  assert [spec.mixer.window for spec in registry.card_from_hf(V3).blocks()] == [None] * 32


@pytest.mark.parametrize(
  'source, said',
  [
    (
      {k: v for k, v in V1.items() if k != 'sliding_window'},
      'lacks sliding_window (null: none)',
    ),  # 4096, says its class
    ({**V1, 'sliding_window': -1}, 'sliding_window=-1 is not positive'),
    ({**V1, 'layer_types': ['full_attention'] * 32}, 'layer_types='),
    ({**V1, 'hidden_act': 'gelu'}, "hidden_act='gelu'"),
  ],
)
def test_what_is_not_supported_is_named(source, said):
  with pytest.raises(config.Error) as error:
    registry.card_from_hf(source)
  assert said in str(error.value) and '\n' not in str(error.value)


def test_a_window_is_a_number_of_keys():
  broken = registry.card('mistral-7b')
  for value in (0, 1.5, True):
    broken.window = value
    with pytest.raises(config.Error, match=f'window={value} is neither a positive whole number nor None'):
      broken.check()
