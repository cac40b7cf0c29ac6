import dataclasses

import pytest

from maxtext_layers import config
from maxtext_layers import mlp
from maxtext_layers import rope
from maxtext_layers import router
from maxtext_models import config_json
from maxtext_models import registry

BASE = {
  'model_type': 'llama', 'architectures': ['LlamaForCausalLM'], 'num_hidden_layers': 2, 'hidden_size': 64,
  'intermediate_size': 88, 'num_attention_heads': 4, 'num_key_value_heads': 2, 'vocab_size': 151, 'hidden_act': 'silu',
  'max_position_embeddings': 1024, 'rms_norm_eps': 1e-5, 'tie_word_embeddings': False, 'rope_theta': 500000.0,
}  # fmt: skip
LLAMA3 = {
  'rope_type': 'llama3', 'factor': 32.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
  'original_max_position_embeddings': 8192,
}  # fmt: skip
QWEN3 = {**BASE, 'model_type': 'qwen3', 'architectures': ['Qwen3ForCausalLM'], 'head_dim': 24}


def without(source, *names):
  return {k: v for k, v in source.items() if k not in names}


@pytest.mark.parametrize(
  'change, said',
  [
    (dict(heads=6, kv_heads=4), 'heads=6 is no multiple of kv_heads=4'),
    (dict(layers=0), 'layers=0'),
    (dict(d_ff=-1), 'd_ff=-1'),
    (dict(vocab=1.5), 'vocab=1.5'),
    (dict(head_dim=15), 'head_dim=15 is odd'),
    (dict(eps=0.0), 'eps=0.0'),
    (dict(eps='small'), "eps='small'"),
    (dict(dtype='float64'), "dtype='float64'"),
    (dict(theta=-1.0), 'theta=-1.0'),
    (dict(activation='relu'), "activation='relu'"),
    (dict(tied=False, tied_copy=True), 'tied_copy=True'),
    (dict(vocab_multiple=0), 'vocab_multiple=0'),
  ],
)
def test_check_names_field_and_value(change, said):
  broken = dataclasses.replace(registry.card('smollm2-135m'), **change)
  with pytest.raises(config.Error) as error:
    broken.check()
  assert said in str(error.value)
  assert '\n' not in str(error.value)


def test_padded_vocab_is_the_next_multiple():
  small = dataclasses.replace(registry.card('smollm2-135m'), vocab=151)
  assert small.padded_vocab == 151
  assert dataclasses.replace(small, vocab_multiple=256).padded_vocab == 256
  assert dataclasses.replace(small, vocab_multiple=151).padded_vocab == 151


def test_flat_and_nested_rope_forms_are_the_same_card():
  """A11: rope_theta with rope_scaling, rope_parameters, and both at once."""
  plain = registry.card_from_hf(BASE)
  assert plain.theta == 500000.0 and plain.scaling is None
  assert registry.card_from_hf({**without(BASE, 'rope_theta'), 'rope_parameters': {'rope_theta': 500000.0}}) == plain
  flat = registry.card_from_hf({**BASE, 'rope_scaling': LLAMA3})
  nested = registry.card_from_hf({**without(BASE, 'rope_theta'), 'rope_parameters': {'rope_theta': 500000.0, **LLAMA3}})
  older = {'type' if k == 'rope_type' else k: v for k, v in LLAMA3.items()}
  assert flat == nested == registry.card_from_hf({**BASE, 'rope_scaling': older})
  assert flat.scaling == rope.Llama3(factor=32.0, low=1.0, high=4.0, trained=8192)
  both = {**BASE, 'rope_scaling': LLAMA3, 'rope_parameters': {'rope_theta': 500000.0, **LLAMA3}}
  assert registry.card_from_hf(both) == flat


@pytest.mark.parametrize(
  'change, said',
  [
    ({'rope_parameters': {'rope_type': 'default', 'rope_theta': 10000.0}}, 'rope_parameters.rope_theta=10000.0'),
    ({'rope_parameters': {'rope_theta': 500000.0}, 'rope_scaling': LLAMA3}, 'contradicts itself'),
    ({'rope_scaling': {**LLAMA3, 'type': 'yarn'}}, "rope_type='llama3/yarn'"),
    ({'rope_scaling': {'rope_type': 'dynamic', 'factor': 2.0}}, "rope_scaling.rope_type='dynamic'"),
    ({'rope_scaling': without(LLAMA3, 'low_freq_factor')}, 'lacks low_freq_factor'),
    ({'rope_scaling': {'rope_type': 'linear'}}, 'lacks factor'),
    ({'rope_scaling': {'rope_type': 'linear', 'factor': 2.0, 'long_factor': [1.0]}}, 'rope_scaling.long_factor=[1.0]'),
    ({'rope_parameters': {'rope_theta': 500000.0, 'partial_rotary_factor': 0.5}}, 'partial_rotary_factor'),
    ({'rope_parameters': {'rope_theta': '5e5'}}, "rope_parameters.rope_theta='5e5' is not a number"),
    ({'rope_scaling': [2.0]}, 'rope_scaling=[2.0] is not an object'),
    ({'rope_scaling': {**LLAMA3, 'factor': '8.0'}}, "rope_scaling.factor='8.0' is not a number"),
    ({'rope_scaling': {**LLAMA3, 'low_freq_factor': 5.0}}, 'low_freq_factor=5.0 is above high_freq_factor=4.0'),
  ],
)
def test_rope_settings_that_are_not_understood_are_named(change, said):
  with pytest.raises(config.Error) as error:
    registry.card_from_hf({**BASE, **change})
  assert said in str(error.value)


def test_no_rope_base_names_both_places():
  """A10, A11: a base is never assumed."""
  for source in (
    without(BASE, 'rope_theta'),
    {**without(BASE, 'rope_theta'), 'rope_parameters': {'rope_type': 'default'}},
  ):
    with pytest.raises(config.Error, match=r'neither rope_theta nor rope_parameters\.rope_theta'):
      registry.card_from_hf(source)


NEEDED = (
  'num_hidden_layers', 'hidden_size', 'intermediate_size', 'num_attention_heads', 'vocab_size', 'hidden_act',
  'max_position_embeddings', 'rms_norm_eps',
)  # fmt: skip


@pytest.mark.parametrize('name', NEEDED)
def test_a_missing_field_is_never_a_default(name):
  """A10: no field that the mathematics needs has a default."""
  with pytest.raises(config.Error, match=f'lacks {name}'):
    registry.card_from_hf(without(BASE, name))


def test_documented_defaults_hold_where_hugging_face_documents_them():
  """A10: Llama derives head_dim and num_key_value_heads; Qwen 3 does not."""
  assert registry.card_from_hf(BASE).head_dim == 16
  assert registry.card_from_hf(without(BASE, 'num_key_value_heads')).kv_heads == 4
  for name in ('head_dim', 'num_key_value_heads'):
    with pytest.raises(config.Error, match=f'lacks {name}'):
      registry.card_from_hf(without(QWEN3, name))


@pytest.mark.parametrize(
  'source, said',
  [
    ({**QWEN3, 'use_sliding_window': True}, 'use_sliding_window=True'),
    ({**QWEN3, 'layer_types': ['full_attention', 'sliding_attention']}, "'sliding_attention'"),
    ({**BASE, 'hidden_act': 'relu'}, "hidden_act='relu'"),
    ({**BASE, 'hidden_act': 'gelu'}, "hidden_act='gelu'"),  # the exact one
    ({**BASE, 'quantization_config': {'quant_method': 'fp8'}}, "quantization_config={'quant_method': 'fp8'}"),
    ({**BASE, 'sliding_window': 4096}, 'sliding_window=4096'),
    ({**BASE, 'rope_interleaved': True}, 'rope_interleaved=True'),
    ({**BASE, 'num_hidden_layers': '2'}, "num_hidden_layers='2'"),
    ({**BASE, 'rms_norm_eps': 'tiny'}, "rms_norm_eps='tiny'"),
    ({**BASE, 'num_key_value_heads': 3}, 'kv_heads=3'),
    ({**BASE, 'num_attention_heads': 0}, 'num_attention_heads=0 is not positive'),
    ({**BASE, 'head_dim': '16'}, "head_dim='16' is not a number"),
    ({**BASE, 'hidden_act': ['silu']}, "hidden_act=['silu'] is not a word"),
    ({**BASE, 'attention_bias': 'false'}, "attention_bias='false' is not true or false"),
    ({**BASE, 'model_type': ['llama']}, "model_type=['llama'] is not supported"),
    ({**BASE, 'model_type': 'lama'}, "model_type='lama' is not supported; did you mean 'llama'"),
    ({**BASE, 'architectures': ['LlamaForSequenceClassification']}, 'LlamaForSequenceClassification'),
    ({**BASE, 'architectures': 1}, 'architectures=1 is not supported'),
    ({**BASE, 'architectures': [['LlamaForCausalLM']]}, "architectures=[['LlamaForCausalLM']] is not supported"),
    ({**BASE, 'text_config': [BASE]}, 'is not an object'),
    ({**BASE, 'tie_word_embeddings': 'false'}, "tie_word_embeddings='false' is not true or false"),
    ({**BASE, 'text_config': {'tie_word_embeddings': 1}}, 'tie_word_embeddings=1 is not true or false'),
    ({**BASE, 'rope_theta': float('inf')}, 'rope_theta=inf is not finite'),
    ({**BASE, 'rope_theta': float('nan')}, 'rope_theta=nan is not finite'),
    ({**QWEN3, 'layer_types': 2}, 'layer_types=2 is not a list'),
    (without(BASE, 'model_type'), 'lacks model_type'),
  ],
)
def test_what_is_not_supported_is_named(source, said):
  with pytest.raises(config.Error) as error:
    registry.card_from_hf(source)
  assert said in str(error.value)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize(
  'name, change, said',
  [
    ('llama4-17b-16e', {'layer_types': 4}, 'layer_types=4 is not a list'),
    ('llama4-17b-16e', {'layer_types': {'0': 'full_attention'}}, "layer_types={'0': 'full_attention'} is not a list"),
    ('llama4-17b-16e', {'layer_types': ['chunked_attention']}, 'layer_types[1]=None does not go with no_rope_layers'),
    ('llama4-17b-16e', {'moe_layers': 'all'}, "moe_layers='all' is not a list"),
    ('llama4-17b-16e', {'no_rope_layers': 4}, 'no_rope_layers=4 is not a list'),
    ('qwen3-next-80b-a3b', {'layer_types': 1}, 'layer_types=1 is not a list'),
    ('qwen3-next-80b-a3b', {'partial_rotary_factor': 'quarter'}, "partial_rotary_factor='quarter' is not a number"),
    (
      'qwen3-next-80b-a3b',
      {'rope_parameters': {'rope_theta': 1e7, 'partial_rotary_factor': [0.25]}},
      'partial_rotary_factor=[0.25] is not a number',
    ),
    ('qwen3-30b-a3b', {'mlp_only_layers': 3}, 'mlp_only_layers=3 is not a list'),
    ('qwen3-30b-a3b', {'mlp_only_layers': [0, 48]}, 'dense_layers=(0, 48) (mlp_only_layers): 48 is none of 48 layers'),
    ('qwen3-30b-a3b', {'mlp_only_layers': [-1]}, 'dense_layers=(-1,) (mlp_only_layers): -1 is none of 48 layers'),
    ('qwen3-30b-a3b', {'mlp_only_layers': [True]}, 'dense_layers=(True,) (mlp_only_layers): True is none of 48 layers'),
    ('gpt-oss-20b', {'layer_types': 'full_attention'}, "layer_types='full_attention' is not a list"),
  ],
)
def test_fields_of_another_type_are_named(name, change, said):
  with pytest.raises(config.Error) as error:
    registry.card_from_hf(registry.card(name).hf_config() | change)
  assert said in str(error.value)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('name', ['qwen3-next-80b-a3b', 'qwen3.5-27b', 'qwen3.5-35b-a3b'])
@pytest.mark.parametrize('share, elements', [(0.3, '76.8'), (0.01, '2.56'), (3 / 256, '3'), (2.0, '512')])
def test_a_share_of_a_head_that_cannot_turn_is_named(name, share, elements):
  source = registry.card(name).hf_config()
  source['rope_parameters']['partial_rotary_factor'] = source['partial_rotary_factor'] = share
  with pytest.raises(config.Error) as error:
    registry.card_from_hf(source)
  assert f'rotary={share} (partial_rotary_factor) of head_dim=256 is {elements} elements' in str(error.value)


def test_an_empty_list_of_llama4_says_nothing_or_no_layer():
  """As transformers reads them: without no_rope_layers the interval counts; without moe_layers no layer has experts."""
  source = registry.card('llama4-17b-16e').hf_config()
  assert registry.card_from_hf(source | {'no_rope_layers': []}).whole_every == 4
  bare = registry.card_from_hf(source | {'moe_layers': []})
  assert {type(spec.ffn) for spec in bare.blocks()} == {mlp.Spec}


def test_a_run_may_choose_how_experts_of_llama4_are_trained():
  """As of every card.Mixture: 0.01 * top_k / layers is a layer's coefficient."""
  plain = registry.card('llama4-17b-16e')
  assert plain.blocks()[0].ffn.router.balance == router.Balance(pytest.approx(0.001 / 48))
  other = registry.card_from_hf(plain.hf_config() | {'router_aux_loss_coef': 0.5})
  assert other.balance_loss == other.hf_config()['router_aux_loss_coef'] == 0.5
  ffn = dataclasses.replace(plain, dispatch='capacity', capacity=2.0, balance_loss=0.01).blocks()[0].ffn
  assert (ffn.dispatch, ffn.capacity, ffn.router.balance.loss) == ('capacity', 2.0, pytest.approx(0.01 / 48))


def test_qwen3_ignores_a_window_that_is_switched_off():
  assert registry.card_from_hf({**QWEN3, 'use_sliding_window': False, 'sliding_window': 4096}).head_dim == 24


def test_a_llama_that_was_trained_in_parts_is_the_same_model():
  """pretraining_tp says how products were cut; old exports of Llama 2 hold 2 or more, and no number depends on it."""
  assert registry.card_from_hf({**BASE, 'pretraining_tp': 2}) == registry.card_from_hf(BASE)
  with pytest.raises(config.Error, match=r"pretraining_tp='2' is not a number"):
    registry.card_from_hf({**BASE, 'pretraining_tp': '2'})


@pytest.mark.parametrize(
  'name, field, value',
  [
    ('qwen3-0.6b', 'mlp_bias', True),
    ('qwen2.5-0.5b', 'attention_bias', True),
    ('mistral-7b', 'mlp_bias', True),
    ('mistral-7b', 'attention_bias', True),
    ('gemma3-1b', 'attention_cap', 50.0),
    ('olmo3-7b', 'mlp_bias', True),
  ],
)
def test_what_an_export_would_lose_is_refused(name, field, value):
  """The family's config.json cannot say it."""
  changed = registry.card(name)
  changed.check()
  setattr(changed, field, value)
  with pytest.raises(config.Error, match=f'{field}={value} is nothing that a {type(changed).__name__} has'):
    changed.check()


def test_the_tie_flag_is_found_at_the_top_and_nested():
  """A13: a wrapper's export keeps it in text_config."""
  assert not registry.card_from_hf(BASE).tied
  assert not registry.card_from_hf(without(BASE, 'tie_word_embeddings')).tied
  assert registry.card_from_hf({**BASE, 'tie_word_embeddings': True}).tied
  nested = {**without(BASE, 'tie_word_embeddings'), 'text_config': {'tie_word_embeddings': True}}
  assert registry.card_from_hf(nested).tied


def test_biases_and_yarn_survive_the_way_to_config_json_and_back():
  yarn = {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 256, 'beta_fast': 16.0}
  source = {**BASE, 'attention_bias': True, 'mlp_bias': True, 'rope_scaling': yarn, 'torch_dtype': 'bfloat16'}
  there = registry.card_from_hf(source)
  assert there.attention_bias and there.mlp_bias and there.dtype == 'bfloat16'
  assert there.scaling == rope.Yarn(factor=4.0, trained=256, beta_fast=16.0)
  assert registry.card_from_hf(there.hf_config()) == there


def test_rope_fields_write_both_forms():
  fields = config_json.rope_fields(10000.0, rope.Linear(2.0), 4096)
  assert fields['rope_scaling'] == {'rope_type': 'linear', 'factor': 2.0}
  assert fields['rope_parameters'] == {'rope_theta': 10000.0, 'rope_type': 'linear', 'factor': 2.0}
  assert fields['rope_theta'] == 10000.0
