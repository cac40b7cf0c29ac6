import dataclasses

import pytest

from maxtext_layers import config
from maxtext_layers import norm
from maxtext_layers import residual
from maxtext_layers import rope
from maxtext_models import registry

# allenai/Olmo-3-1025-7B, config.json
PUBLISHED = {
  'architectures': ['Olmo3ForCausalLM'], 'attention_bias': False, 'attention_dropout': 0.0, 'eos_token_id': 100257,
  'hidden_act': 'silu', 'hidden_size': 4096, 'initializer_range': 0.02, 'intermediate_size': 11008,
  'layer_types': (['sliding_attention'] * 3 + ['full_attention']) * 8, 'max_position_embeddings': 65536,
  'model_type': 'olmo3', 'num_attention_heads': 32, 'num_hidden_layers': 32, 'num_key_value_heads': 32,
  'pad_token_id': 100277, 'rms_norm_eps': 1e-06,
  'rope_scaling': {
    'attention_factor': 1.2079441541679836, 'beta_fast': 32.0, 'beta_slow': 1.0, 'factor': 8.0,
    'original_max_position_embeddings': 8192, 'rope_type': 'yarn',
  },
  'rope_theta': 500000, 'sliding_window': 4096, 'tie_word_embeddings': False, 'torch_dtype': 'bfloat16',
  'use_cache': False, 'vocab_size': 100278,
}  # fmt: skip


def test_the_published_config_is_the_card():
  named = registry.card('olmo3-7b')
  found = registry.card_from_hf(PUBLISHED)
  assert dataclasses.replace(found, name=named.name, source=named.source, dtype=None) == named


def test_only_layers_without_window_are_stretched():
  """A9: three layers slide, the fourth sees everything at stretched positions."""
  blocks = registry.card_from_hf(PUBLISHED).blocks()
  yarn = rope.Yarn(factor=8.0, trained=8192, attention=1.2079441541679836)
  local, full = rope.Spec(128, 500000.0), rope.Spec(128, 500000.0, yarn)
  assert [(spec.mixer.window, spec.mixer.rope) for spec in blocks] == ([(4096, local)] * 3 + [(None, full)]) * 8


def test_norms_stand_behind_the_layers_and_go_over_all_heads():
  spec = registry.card_from_hf(PUBLISHED).blocks()[0]
  assert spec.norm == residual.post(norm.Spec(1e-6))
  assert spec.mixer.qk_norm == norm.Spec(1e-6) and spec.mixer.qk_norm_over == 'heads'


def test_flat_and_nested_rope_forms_are_the_same_card():
  """A11."""
  flat = registry.card_from_hf(PUBLISHED)
  forms = flat.hf_config()
  nested = {k: v for k, v in forms.items() if k not in ('rope_theta', 'rope_scaling')}
  assert registry.card_from_hf(nested) == flat == registry.card_from_hf(forms)


@pytest.mark.parametrize(
  'source, said',
  [
    ({k: v for k, v in PUBLISHED.items() if k != 'rope_theta'}, 'no rope base'),
    ({k: v for k, v in PUBLISHED.items() if k != 'sliding_window'}, 'lacks sliding_window'),
    ({**PUBLISHED, 'layer_types': ['full_attention'] * 31 + ['sliding_attention']}, 'layer_types='),
    (
      {
        **{k: v for k, v in PUBLISHED.items() if k not in ('rope_theta', 'rope_scaling')},
        'rope_parameters': {'full_attention': {'rope_theta': 5e5}, 'sliding_attention': {'rope_theta': 1e4}},
      },
      'rope_theta=10000.0 of sliding layers is not supported',
    ),
  ],
)
def test_what_is_not_supported_is_named(source, said):
  with pytest.raises(config.Error) as error:
    registry.card_from_hf(source)
  assert said in str(error.value) and '\n' not in str(error.value)
