"""Mistakes in models of delta nets and gated attention, made on purpose: the references miss them by 100 tolerances."""

import dataclasses

import numpy as np
import pytest

from maxtext_layers import attention
from maxtext_layers import delta
from maxtext_layers import norm
from maxtext_models import checkpoint
from tests import wrong


@pytest.fixture(name='folder', scope='module')
def _folder(tmp_path_factory):
  return wrong.folders(tmp_path_factory.mktemp('golden'))


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
  'norms of queries and keys without 1 +': ('qwen3_next', mixer(attention.Spec, qk_norm=norm.Spec(1e-6))),
  'norms without 1 +': ('qwen3_5_moe', lambda spec: dataclasses.replace(spec, norm=norm.Spec(1e-6))),
  'the norm of a delta net with 1 +': ('qwen3_5_moe', mixer(delta.Spec, norm=norm.Spec(1e-6, offset=1.0))),
  'dense: attention without its gate': ('qwen3_5', mixer(attention.Spec, gate=False)),
  'dense: all of a head turns': ('qwen3_5', mixer(attention.Spec, rope__rotary=None)),
  'dense: another base': ('qwen3_5', mixer(attention.Spec, rope__theta=1000000.0)),
  'the shared expert without its gate': ('qwen3_next', ffn(shared_gate=False)),
}


@pytest.mark.parametrize('name', BLOCKS)
def test_a_wrong_block_is_seen(folder, monkeypatch, name):
  case, change = BLOCKS[name]
  assert wrong.other_blocks(monkeypatch, case, *checkpoint.load(folder(case)), change).max() > wrong.SEEN


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


def flipped(name):
  """The taps of a convolution in reverse."""

  def edit(tensors):
    tensors[name] = np.ascontiguousarray(tensors[name][..., ::-1])

  return edit


LAYER = 'model.layers.0.linear_attn.'
EDITS = {  # what is wrong: (case, edit of its tensors); 2 key heads of 8, 3 values heads of 10 for each
  'q and k of a delta net': ('qwen3_next', swapped(LAYER + 'in_proj_qkvz.weight', 2, 0, 8, 8)),
  'v and its gate': ('qwen3_next', swapped(LAYER + 'in_proj_qkvz.weight', 2, 16, 46, 30)),
  'beta and decay': ('qwen3_next', swapped(LAYER + 'in_proj_ba.weight', 2, 0, 3, 3)),
  'q and k, split': ('qwen3_5', swapped(LAYER + 'in_proj_qkv.weight', 1, 0, 16, 16)),
  'value heads in another order': ('qwen3_5', swapped(LAYER + 'in_proj_z.weight', 1, 10, 20, 10)),
  'taps in reverse': ('qwen3_5', flipped(LAYER + 'conv1d.weight')),
  'convolutions of q and k': ('qwen3_5_moe', swapped(LAYER + 'conv1d.weight', 1, 0, 16, 16)),
  'query and gate of attention': ('qwen3_next', swapped('model.layers.2.self_attn.q_proj.weight', 4, 0, 16, 16)),
}


@pytest.mark.parametrize('name', EDITS)
def test_swapped_tensors_are_seen(folder, name):
  assert wrong.edited(folder, *EDITS[name]).max() > wrong.SEEN


@pytest.mark.parametrize('part', ['_unit', 'weights'])
def test_a_wrong_delta_net_is_seen(folder, monkeypatch, part):
  """Queries and keys of any length; a router whose weights sum to 1 where those of the reference do not."""
  changes = {}
  if part == '_unit':
    monkeypatch.setattr(delta, '_unit', lambda x: x)
  else:
    changes['normalize'] = True
  assert wrong.other_card(folder, 'qwen3_next_raw', **changes).max() > wrong.SEEN
