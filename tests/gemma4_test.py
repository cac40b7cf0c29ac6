"""Gemma 4: mistakes that its references miss by 100 times the tolerance, decoding, and plans that share keys."""

import dataclasses
import json

import numpy as np
import pytest
import safetensors.numpy

from maxtext_layers import config
from maxtext_layers import plan
from maxtext_layers import rope
from maxtext_models import hf
from maxtext_models import registry
from maxtext_models.families import gemma4
from tests import wrong
from tests.golden import golden

DENSE, EXPERTS, SMALL = 'gemma4', 'gemma4_experts', 'gemma4_small'


@pytest.fixture(name='loaded', scope='module')
def _loaded(tmp_path_factory):
  return wrong.loader(tmp_path_factory.mktemp('golden'))


def mixer(**changes):
  """A mistake in attention, wherever these fields are not None."""
  return lambda spec: wrong.replaced(spec, 'mixer', **changes)


def whole(spec, **changes):
  """A mistake in the rotation of layers without a window."""
  return spec if spec.mixer.window else wrong.replaced(spec, 'mixer.rope', **changes)


MISTAKES = {
  'a window one longer': (DENSE, mixer(window=51)),
  'a window one shorter': (SMALL, mixer(window=49)),
  'no norm of values': (DENSE, mixer(value_norm=None)),
  'all of a full head turns': (DENSE, lambda spec: whole(spec, scaling=rope.Proportional(1.0))),
  'no number of the block': (SMALL, lambda spec: dataclasses.replace(spec, scaled=False)),
  'weights on inputs of experts': (EXPERTS, lambda spec: wrong.replaced(spec, 'ffn.routed', weigh='input')),
  'one expert for two': (EXPERTS, lambda spec: wrong.replaced(spec, 'ffn.routed.router', top_k=1)),
}


@pytest.mark.parametrize('name', MISTAKES)
def test_a_mistake_is_seen(loaded, monkeypatch, name):
  """A4, A12: the same weights under a spec that is wrong in one place."""
  case, change = MISTAKES[name]
  assert wrong.other_blocks(monkeypatch, case, *loaded(case), change).max() > wrong.SEEN


@pytest.mark.parametrize('case', [DENSE, EXPERTS, SMALL])
def test_decoding(loaded, case):
  """A prompt of more than a window, then steps of one token; what is kept is read from the memory of its layer."""
  _, model = loaded(case)
  reference = golden.reference(case)
  got = wrong.decoded(model, reference.tokens[:, :70], 62)
  assert np.abs(got - reference.logits[:, :70]).max() <= wrong.TOLERANCE


def test_the_text_part_of_a_published_directory(tmp_path):
  """A8: other names, towers, keys and values that nothing reads: passed over, and said."""
  source = golden.directory(SMALL, tmp_path)
  fields = json.load(open(f'{source}/config.json'))
  whole = {'model_type': 'gemma4', 'architectures': ['Gemma4ForConditionalGeneration'], 'text_config': fields}
  tensors = safetensors.numpy.load_file(f'{source}/model.safetensors')
  named = {name.replace('model.', 'model.language_model.', 1): value for name, value in tensors.items()}
  towers = ('vision_tower.encoder.x', 'audio_tower.layers.0.y', 'embed_vision.z', 'embed_audio.z')
  last = 'layers.8.self_attn.k_proj.weight'
  named |= {f'model.{name}': np.ones(3, np.float32) for name in towers} | {f'model.language_model.{last}': np.ones(3)}
  (tmp_path / 'whole').mkdir()
  json.dump(whole, open(tmp_path / 'whole/config.json', 'w'))
  safetensors.numpy.save_file(named, tmp_path / 'whole/model.safetensors', metadata={'format': 'pt'})
  card, model = hf.load(tmp_path / 'whole')
  back = dict(hf.tensors(card, model))
  assert card.hf_config()['architectures'] == ['Gemma4ForCausalLM'] and back.keys() == tensors.keys()
  assert all((back[name] == tensors[name]).all() for name in tensors)
  first, second, *_ = hf.remarks(tmp_path / 'whole')
  assert all(name in first for name in towers) and last in second


def test_plans():
  """Blocks that are traced: the period, and in the small models what comes between it and that of readers."""
  plans = {
    'gemma4-31b': [(6, 10)],
    'gemma4-26b': [(6, 5)],
    'gemma4-e2b': [(5, 2), (1, 3), (1, 1), (1, 1), (5, 4)],
    'gemma4-e4b': [(6, 3), (1, 4), (1, 1), (1, 1), (6, 3)],
  }
  assert plans.keys() == gemma4.CARDS.keys()
  for name, expected in plans.items():
    made = plan.plan(registry.card(name).blocks())
    assert [(len(s.specs), s.count) for s in made] == expected
    assert sum(len(s.specs) for s in made) <= 15


def test_heads_of_full_layers():
  """In fields of their own, as published, or layer by layer, as transformers 5.24 writes them; mixtures are refused."""
  c = registry.card('gemma4-31b')
  fields = c.hf_config()
  own = {'head_dim': 512, 'num_key_value_heads': 4}
  each = {str(i): own for i, kind in enumerate(fields['layer_types']) if kind == 'full_attention'}
  written = {k: v for k, v in fields.items() if k not in ('global_head_dim', 'num_global_key_value_heads')}
  assert gemma4.from_hf(written | {'per_layer_config': each}).hf_config() == fields
  with pytest.raises(config.Error, match='per_layer_config is not supported where layers of one kind differ'):
    gemma4.from_hf(written | {'per_layer_config': each | {'5': {'head_dim': 256}}})


@pytest.mark.parametrize('changes, says', [
  ({'use_bidirectional_attention': 'all'}, "use_bidirectional_attention='all' is not supported"),
  ({'layer_types': ['full_attention'] * 34}, 'layer_types is not supported'),
  ({'enable_moe_block': True}, 'config.json lacks num_experts'),
  ({'num_kv_shared_layers': 32}, 'shared_layers=32 leaves no layer of each kind to read from'),
])  # fmt: skip
def test_what_is_refused(changes, says):
  with pytest.raises(config.Error, match=says):
    registry.card_from_hf(registry.card('gemma4-e2b').hf_config() | changes)
