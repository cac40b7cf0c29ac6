"""Llama 4: mistakes that its references miss by 100 times the tolerance, and decoding across the borders of chunks."""

import dataclasses

import numpy as np
import pytest

from maxtext_layers import attention
from maxtext_layers import config
from maxtext_layers import plan
from maxtext_models import registry
from maxtext_models.families import llama4
from tests import wrong
from tests.golden import golden

SCOUT, MAVERICK = 'llama4_scout', 'llama4_maverick'


@pytest.fixture(name='loaded', scope='module')
def _loaded(tmp_path_factory):
  return wrong.loader(tmp_path_factory.mktemp('golden'))


def mixer(**changes):
  """A mistake in attention, wherever these fields are not None."""
  return lambda spec: wrong.replaced(spec, 'mixer', **changes)


def windowed(spec):
  """A window in the place of a chunk."""
  return dataclasses.replace(spec, mixer=dataclasses.replace(spec.mixer, chunk=None, window=spec.mixer.chunk))


MISTAKES = {
  'a chunk one longer': (SCOUT, mixer(chunk=81)),
  'a chunk one shorter': (MAVERICK, mixer(chunk=59)),
  'a window for a chunk': (SCOUT, windowed),
  'rotation of halves': (SCOUT, lambda spec: wrong.replaced(spec, 'mixer.rope', pairs='halves')),
  'rotation without its stretch': (SCOUT, lambda spec: wrong.replaced(spec, 'mixer.rope', scaling=None)),
  'no temperature': (SCOUT, mixer(temperature=None)),
  'a temperature that steps late': (MAVERICK, mixer(temperature=attention.Temperature(51, 0.4))),
  'weights on outputs of experts': (SCOUT, lambda spec: wrong.replaced(spec, 'ffn', weigh='output')),
  'weights by softmax': (MAVERICK, lambda spec: wrong.replaced(spec, 'ffn.router', score='softmax')),
}


@pytest.mark.parametrize('name', MISTAKES)
def test_a_mistake_is_seen(loaded, monkeypatch, name):
  """A4, A12: the same weights under a spec that is wrong in one place."""
  case, change = MISTAKES[name]
  assert wrong.other_blocks(monkeypatch, case, *loaded(case), change).max() > wrong.SEEN


@pytest.mark.parametrize('case', [SCOUT, MAVERICK])
def test_decoding_across_a_border_of_chunks(loaded, case):
  """A prompt that ends shortly before a border, then steps of one token over it."""
  card, model = loaded(case)
  reference, border = golden.reference(case), 2 * card.chunk
  got = wrong.decoded(model, reference.tokens[:, : border + 5], border - 3)
  assert np.abs(got - reference.logits[:, : border + 5]).max() <= wrong.TOLERANCE


def test_plans():
  """Four layers are a period, with experts in all or in every second one."""
  for name in llama4.CARDS:
    assert [(len(s.specs), s.count) for s in plan.plan(registry.card(name).blocks())] == [(4, 12)]


def test_lists_of_layers():
  """What no period makes is refused; what was published in April 2025 says the same as what transformers 5 writes."""
  fields = registry.card('llama4-17b-16e').hf_config()
  with pytest.raises(config.Error, match=r'moe_layers=\[0, 3\] is not supported'):
    llama4.from_hf(fields | {'moe_layers': [0, 3]})
  with pytest.raises(config.Error, match=r"layer_types\[0\]='full_attention' does not go with no_rope_layers"):
    llama4.from_hf(fields | {'layer_types': ['full_attention', *fields['layer_types'][1:]]})
  with pytest.raises(config.Error, match=r'layer_types\[47\]=None does not go'):
    llama4.from_hf(fields | {'layer_types': fields['layer_types'][:-1]})
  old = {k: v for k, v in fields.items() if k not in ('moe_layers', 'layer_types')} | {'no_rope_layers': []}
  assert llama4.from_hf(old | {'attn_temperature_tuning': 4}).hf_config() == fields
  assert llama4.from_hf(old | {'attention_chunk_size': None}).chunk is None
