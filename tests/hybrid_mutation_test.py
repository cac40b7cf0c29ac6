"""Mistakes in models of delta nets and gated attention, made on purpose: the references miss them by 100 tolerances."""

import dataclasses
import functools

from flax import nnx
import jax
import numpy as np
import pytest

from maxtext_layers import attention
from maxtext_layers import delta
from maxtext_layers import norm
from maxtext_models import checkpoint
from maxtext_models import decoder
from maxtext_models import hf
from tests.golden import golden

SEEN = 100 * 1e-4


@pytest.fixture(name='folder', scope='module')
def _folder(tmp_path_factory):
  """case -> its Hugging Face directory, made once."""
  parent = tmp_path_factory.mktemp('golden')
  return functools.cache(lambda case: golden.directory(case, parent))


def distance(case, model):
  """The largest difference of a logit; compiled anew each time, because tests change functions below it."""
  reference = golden.reference(case)
  graph, state = nnx.split(model)
  forward = jax.jit(lambda state, tokens: (m := nnx.merge(graph, state)).logits(m.hidden(tokens)[0]))
  return np.abs(forward(state, reference.tokens[:1]) - reference.logits[:1]).max()


def other_blocks(folder, monkeypatch, case, change):
  """The distance of a model of which every block spec went through `change`, with those weights that it still has."""
  card, model = checkpoint.load(folder(case))
  wrong = [change(spec) for spec in card.blocks()]
  assert wrong != card.blocks()
  monkeypatch.setattr(type(card), 'blocks', lambda self: wrong)
  graph, state = nnx.split(decoder.abstract(card))
  flat = dict(nnx.to_flat_state(nnx.state(model)))
  kept = [(path, flat[path]) for path, _ in nnx.to_flat_state(state)]
  return distance(case, nnx.merge(graph, nnx.from_flat_state(kept)))


def edited(folder, case, edit):
  """The distance of a model whose Hugging Face tensors went through `edit`."""
  card, files = hf.read(folder(case))
  tensors = {name: files.get(name) for name in files.headers}
  edit(tensors)
  files.get = tensors.__getitem__
  model = decoder.abstract(card)
  graph, state = nnx.split(model)
  return distance(case, nnx.merge(graph, hf.fill(card, state, model.stack.plan, files)))


def mixer(kind, **changes):
  """Other mixers of a kind; `rope__theta` is the theta of its rope."""

  def change(spec):
    if not isinstance(spec.mixer, kind):
      return spec
    deep = {name: value for name, value in changes.items() if '__' not in name}
    for name, value in changes.items():
      if '__' in name:
        outer, inner = name.split('__')
        deep[outer] = dataclasses.replace(getattr(spec.mixer, outer), **{inner: value})
    return dataclasses.replace(spec, mixer=dataclasses.replace(spec.mixer, **deep))

  return change


def ffn(**changes):
  return lambda spec: dataclasses.replace(spec, ffn=dataclasses.replace(spec.ffn, **changes))


BLOCKS = {  # what is wrong: (case, change of its blocks)
  'attention without its gate': ('qwen3_next', mixer(attention.Spec, gate=False)),
  'norms of queries and keys without 1 +': ('qwen3_next', mixer(attention.Spec, qk_norm=norm.Spec(1e-6))),
  'half of a head turns': ('qwen3_next', mixer(attention.Spec, rope__rotary=8)),
  'the shared expert without its gate': ('qwen3_next', ffn(shared_gate=False)),
}


@pytest.mark.parametrize('name', BLOCKS)
def test_a_wrong_block_is_seen(folder, monkeypatch, name):
  assert other_blocks(folder, monkeypatch, *BLOCKS[name]) > SEEN


def swapped(name, *borders):
  """Swaps two stretches of rows of equal length in each of so many groups: (groups, first, second, length)."""
  groups, first, second, length = borders

  def edit(tensors):
    x = tensors[name].copy()
    grouped = x.reshape(groups, -1, *x.shape[1:])
    a, b = (slice(begin, begin + length) for begin in (first, second))
    grouped[:, a], grouped[:, b] = grouped[:, b].copy(), grouped[:, a].copy()
    tensors[name] = grouped.reshape(x.shape)

  return edit


LAYER = 'model.layers.0.linear_attn.'
EDITS = {  # what is wrong: (case, edit of its tensors); 2 key heads of 8, 3 values heads of 10 for each
  'q and k of a delta net': ('qwen3_next', swapped(LAYER + 'in_proj_qkvz.weight', 2, 0, 8, 8)),
  'v and its gate': ('qwen3_next', swapped(LAYER + 'in_proj_qkvz.weight', 2, 16, 46, 30)),
  'beta and decay': ('qwen3_next', swapped(LAYER + 'in_proj_ba.weight', 2, 0, 3, 3)),
  'query and gate of attention': ('qwen3_next', swapped('model.layers.2.self_attn.q_proj.weight', 4, 0, 16, 16)),
}


@pytest.mark.parametrize('name', EDITS)
def test_swapped_tensors_are_seen(folder, name):
  assert edited(folder, *EDITS[name]) > SEEN


@pytest.mark.parametrize('part', ['_unit', 'weights'])
def test_a_wrong_delta_net_is_seen(folder, monkeypatch, part):
  """Queries and keys of any length; a router whose weights sum to 1 where those of the reference do not."""
  card, model = checkpoint.load(folder('qwen3_next_raw'))
  if part == '_unit':
    monkeypatch.setattr(delta, '_unit', lambda x: x)
  else:
    card.normalize = True
  graph, _ = nnx.split(decoder.abstract(card))
  assert distance('qwen3_next_raw', nnx.merge(graph, nnx.state(model))) > SEEN
