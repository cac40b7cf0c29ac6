"""Gemma 1, 2 and 3 as their config.json describe them."""

import dataclasses

import pytest

from maxtext_layers import config
from maxtext_layers import norm
from maxtext_layers import rope
from maxtext_models import registry

# config.json of google/gemma-2b, google/gemma-2-27b, google/gemma-3-1b-pt, and the text_config of google/gemma-3-12b-pt
GEMMA = {
  'architectures': ['GemmaForCausalLM'], 'attention_bias': False, 'attention_dropout': 0.0, 'bos_token_id': 2,
  'eos_token_id': 1, 'head_dim': 256, 'hidden_act': 'gelu', 'hidden_activation': None, 'hidden_size': 2048,
  'initializer_range': 0.02, 'intermediate_size': 16384, 'max_position_embeddings': 8192, 'model_type': 'gemma',
  'num_attention_heads': 8, 'num_hidden_layers': 18, 'num_key_value_heads': 1, 'pad_token_id': 0, 'rms_norm_eps': 1e-06,
  'rope_scaling': None, 'rope_theta': 10000.0, 'torch_dtype': 'bfloat16', 'use_cache': True, 'vocab_size': 256000,
}  # fmt: skip
GEMMA2 = {
  'architectures': ['Gemma2ForCausalLM'], 'attention_bias': False, 'attention_dropout': 0.0,
  'attn_logit_softcapping': 50.0, 'bos_token_id': 2, 'cache_implementation': 'hybrid', 'eos_token_id': 1,
  'final_logit_softcapping': 30.0, 'head_dim': 128, 'hidden_act': 'gelu_pytorch_tanh',
  'hidden_activation': 'gelu_pytorch_tanh', 'hidden_size': 4608, 'initializer_range': 0.02, 'intermediate_size': 36864,
  'max_position_embeddings': 8192, 'model_type': 'gemma2', 'num_attention_heads': 32, 'num_hidden_layers': 46,
  'num_key_value_heads': 16, 'pad_token_id': 0, 'query_pre_attn_scalar': 144, 'rms_norm_eps': 1e-06,
  'rope_theta': 10000.0, 'sliding_window': 4096, 'sliding_window_size': 4096, 'torch_dtype': 'float32',
  'use_cache': True, 'vocab_size': 256000,
}  # fmt: skip
GEMMA3_1B = {
  'architectures': ['Gemma3ForCausalLM'], 'attention_bias': False, 'attention_dropout': 0.0,
  'attn_logit_softcapping': None, 'bos_token_id': 2, 'cache_implementation': 'hybrid', 'eos_token_id': [1, 106],
  'final_logit_softcapping': None, 'head_dim': 256, 'hidden_activation': 'gelu_pytorch_tanh', 'hidden_size': 1152,
  'initializer_range': 0.02, 'intermediate_size': 6912, 'max_position_embeddings': 32768, 'model_type': 'gemma3_text',
  'num_attention_heads': 4, 'num_hidden_layers': 26, 'num_key_value_heads': 1, 'pad_token_id': 0,
  'query_pre_attn_scalar': 256, 'rms_norm_eps': 1e-06, 'rope_local_base_freq': 10000, 'rope_scaling': None,
  'rope_theta': 1000000, 'sliding_window': 512, 'sliding_window_pattern': 6, 'torch_dtype': 'bfloat16',
  'use_cache': True, 'vocab_size': 262144,
}  # fmt: skip
GEMMA3_12B = {
  'hidden_size': 3840, 'intermediate_size': 15360, 'model_type': 'gemma3_text', 'num_attention_heads': 16,
  'num_hidden_layers': 48, 'num_key_value_heads': 8, 'rope_scaling': {'factor': 8.0, 'rope_type': 'linear'},
  'sliding_window': 1024,
}  # fmt: skip


@pytest.mark.parametrize(
  'name, source',
  [('gemma-2b', GEMMA), ('gemma2-27b', GEMMA2), ('gemma3-1b', GEMMA3_1B), ('gemma3-12b', GEMMA3_12B)],
)
def test_the_published_config_is_the_card(name, source):
  """A13: none of them says that the table is tied, which is what their classes assume."""
  named = registry.card(name)
  found = registry.card_from_hf(source)
  assert found.tied
  assert dataclasses.replace(found, name=name, source=named.source, dtype=None) == named


def test_the_text_part_of_an_image_text_model():
  """A13: 4B, 12B and 27B were published as wholes."""
  whole = {
    'architectures': ['Gemma3ForConditionalGeneration'], 'model_type': 'gemma3', 'text_config': GEMMA3_12B,
    'torch_dtype': 'bfloat16', 'vision_config': {'hidden_size': 1152, 'model_type': 'siglip_vision_model'},
  }  # fmt: skip
  named, found = registry.card('gemma3-12b'), registry.card_from_hf(whole)
  assert dataclasses.replace(found, name=named.name, source=named.source) == dataclasses.replace(
    named, dtype='bfloat16'
  )


def test_norms_of_all_gemmas_are_differences_from_one():
  """A16."""
  for source in (GEMMA, GEMMA2, GEMMA3_1B):
    found = registry.card_from_hf(source)
    spec = found.blocks()[0]
    around = [spec.norm] if isinstance(spec.norm, norm.Spec) else [spec.norm.before, spec.norm.after]
    assert {n.offset for n in around} == {1.0} == {found.final_norm().offset}
  assert registry.card_from_hf(GEMMA3_1B).blocks()[0].mixer.qk_norm == norm.Spec(1e-6, 1.0)


def test_the_two_rope_bases_of_gemma3_flat_nested_and_both():
  """A9, A11."""
  nested = {
    **GEMMA3_12B,
    'rope_scaling': None,
    'rope_parameters': {
      'full_attention': {'rope_type': 'linear', 'factor': 8.0, 'rope_theta': 1000000.0},
      'sliding_attention': {'rope_type': 'default', 'rope_theta': 10000.0},
    },
  }
  flat = registry.card_from_hf(GEMMA3_12B)
  assert registry.card_from_hf(nested) == flat == registry.card_from_hf(flat.hf_config())
  other = {**nested, 'rope_theta': 1000000.0, 'rope_scaling': {'factor': 4.0, 'rope_type': 'linear'}}
  with pytest.raises(config.Error, match='contradicts itself'):
    registry.card_from_hf(other)
  stretched = {
    **nested['rope_parameters'],
    'sliding_attention': {'rope_type': 'linear', 'factor': 8.0, 'rope_theta': 1e4},
  }
  with pytest.raises(config.Error, match=r"rope_parameters.sliding_attention.rope_type='linear' is not supported"):
    registry.card_from_hf({**nested, 'rope_parameters': stretched})
  with pytest.raises(config.Error, match='has other keys than full_attention and sliding_attention'):
    registry.card_from_hf({**nested, 'rope_parameters': {'rope_theta': 10000.0}})
  own = registry.card_from_hf({**GEMMA3_1B, 'rope_local_base_freq': 5000})
  assert own.blocks()[0].mixer.rope == rope.Spec(256, 5000.0) and own.blocks()[5].mixer.rope == rope.Spec(256, 1e6)


def test_which_layers_slide():
  """A list, a pattern, or what the class assumes."""
  types = (['sliding_attention'] * 5 + ['full_attention']) * 4 + ['sliding_attention'] * 2
  plain = registry.card_from_hf(GEMMA3_1B)
  assert registry.card_from_hf({**GEMMA3_1B, 'layer_types': types}) == plain
  assert registry.card_from_hf({**GEMMA3_1B, 'sliding_window_pattern': None}) == plain
  third = registry.card_from_hf({**GEMMA3_1B, 'sliding_window_pattern': 3})
  assert [spec.mixer.window for spec in third.blocks()[:4]] == [512, 512, None, 512]
  assert registry.card_from_hf(third.hf_config()) == third
  assert [spec.mixer.window for spec in registry.card_from_hf(GEMMA2).blocks()[:3]] == [4096, None, 4096]
  with pytest.raises(config.Error, match=r'layer_types=.* is not supported; known: one word for each of 26 layers'):
    registry.card_from_hf({**GEMMA3_1B, 'layer_types': types[::-1]})


@pytest.mark.parametrize(
  'source, said',
  [
    ({k: v for k, v in GEMMA2.items() if k != 'query_pre_attn_scalar'}, 'lacks query_pre_attn_scalar'),
    ({k: v for k, v in GEMMA2.items() if k != 'attn_logit_softcapping'}, 'lacks attn_logit_softcapping'),
    ({k: v for k, v in GEMMA2.items() if k != 'final_logit_softcapping'}, 'lacks final_logit_softcapping'),
    ({k: v for k, v in GEMMA2.items() if k != 'sliding_window'}, 'lacks sliding_window'),
    ({k: v for k, v in GEMMA.items() if k != 'head_dim'}, 'lacks head_dim'),
    ({**GEMMA, 'hidden_act': 'relu'}, "hidden_act='relu'"),
    ({**GEMMA2, 'hidden_activation': 'gelu'}, "hidden_activation='gelu'"),  # the exact one, unlike in a Gemma 1
    ({**GEMMA, 'attention_bias': True}, 'attention_bias=True'),
    ({**GEMMA3_1B, 'use_bidirectional_attention': True}, 'use_bidirectional_attention=True'),
    ({**GEMMA3_1B, 'attn_logit_softcapping': 50.0}, 'attn_logit_softcapping=50.0'),
    ({**GEMMA2, 'attn_logit_softcapping': -1.0}, 'attn_logit_softcapping=-1.0 is not positive'),
  ],
)
def test_what_is_not_supported_is_named(source, said):
  with pytest.raises(config.Error) as error:
    registry.card_from_hf(source)
  assert said in str(error.value) and '\n' not in str(error.value)


def test_a_gemma2_without_caps():
  """null is a statement: no cap."""
  found = registry.card_from_hf({**GEMMA2, 'attn_logit_softcapping': None, 'final_logit_softcapping': None})
  assert found.final_cap() is None and found.blocks()[0].mixer.cap is None
  assert registry.card_from_hf(found.hf_config()) == found


@pytest.mark.parametrize(
  'name, field, value',
  [('gemma2-2b', 'window', 0), ('gemma2-2b', 'full_every', 0), ('gemma2-2b', 'query_scalar', -1),
   ('gemma2-2b', 'logit_cap', 0.0), ('gemma3-1b', 'local_theta', -1.0), ('gemma-2b', 'theta', 0.0)],
)  # fmt: skip
def test_check_names_field_and_value(name, field, value):
  broken = registry.card(name)
  setattr(broken, field, value)
  with pytest.raises(config.Error, match=f'{field}={value}'):
    broken.check()
