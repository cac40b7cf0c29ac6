"""Mistakes that were made somewhere, made here on purpose: the references must miss them by 100 times the tolerance."""

import jax.numpy as jnp
import pytest

from maxtext_layers import norm
from maxtext_layers import rope
from maxtext_models import checkpoint
from tests import wrong


@pytest.fixture(name='folder', scope='module')
def _folder(tmp_path_factory):
  return wrong.folders(tmp_path_factory.mktemp('golden'))


def test_interleaved_rope_pairing_is_seen(folder, monkeypatch):
  """A12: the first token is right, then nonsense."""

  def rotate(x, table, pairs):
    del pairs
    cos, sin = table
    a, b = x[..., 0::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)

  monkeypatch.setattr(rope, 'rotate', rotate)
  d = wrong.distance('llama', checkpoint.load(folder('llama'))[1], wrong.changed)
  assert d[:, 0].max() <= wrong.TOLERANCE
  assert d[:, 4:].max() > wrong.SEEN


@pytest.mark.parametrize(
  'case, scaling',
  [
    ('llama3_factor8', rope.Llama3(factor=32.0, low=1.0, high=4.0, trained=128)),
    ('llama3_factor8', None),
    ('llama3_factor32', rope.Llama3(factor=8.0, low=1.0, high=4.0, trained=64)),
    ('llama3_factor8', rope.Llama3(factor=8.0, low=1.0, high=2.0, trained=128)),
    ('llama_linear', rope.Linear(2.0)),
    ('llama_yarn', rope.Yarn(factor=4.0, trained=64, attention=1.0)),
    ('llama_yarn', rope.Yarn(factor=2.0, trained=64)),
  ],
)
def test_another_rope_scaling_is_seen(folder, case, scaling):
  """A12: factor, bands and temperature."""
  assert wrong.other_card(folder, case, scaling=scaling).max() > wrong.SEEN


def test_another_rope_base_is_seen_far_out(folder):
  """A10: the base that is assumed where it is missing."""
  assert wrong.other_card(folder, 'llama_tied', theta=10000.0)[:, 1000:].max() > wrong.SEEN


def test_norm_after_rotation_is_seen(folder, monkeypatch):
  """A7: the norm of queries and keys comes before the rotation."""
  waiting, normed, rotate = [], norm.Norm.__call__, rope.rotate

  def later(self, x):
    if x.ndim == 3:
      return normed(self, x)
    waiting.append(self)
    return x

  monkeypatch.setattr(norm.Norm, '__call__', later)
  monkeypatch.setattr(rope, 'rotate', lambda *given: normed(waiting.pop(0), rotate(*given)))
  assert wrong.distance('qwen3', checkpoint.load(folder('qwen3'))[1], wrong.changed).max() > wrong.SEEN
  assert not waiting


def swap(first, second, rows=None):
  """Of two kinds of tensor in layer 0."""
  return wrong.swap(*(f'model.layers.0.{name}.weight' for name in (first, second)), rows)


@pytest.mark.parametrize(
  'case, edit',
  [
    ('llama', swap('self_attn.q_proj', 'self_attn.k_proj', rows=32)),
    ('qwen3', swap('self_attn.q_proj', 'self_attn.k_proj', rows=48)),
    ('qwen3', swap('self_attn.q_norm', 'self_attn.k_norm')),
    ('llama', swap('self_attn.k_proj', 'self_attn.v_proj')),
    ('llama', swap('mlp.gate_proj', 'mlp.up_proj')),
    ('llama', swap('input_layernorm', 'post_attention_layernorm')),
  ],
)
def test_swapped_tensors_are_seen(folder, case, edit):
  assert wrong.edited(folder, case, edit).max() > wrong.SEEN


@pytest.mark.parametrize('name', ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj'])
def test_a_dropped_bias_is_seen(folder, name):
  """A8: in one layer. A key's bias moves all scores of a query alike but for the rotation, which is enough."""
  part = 'mlp' if name in ('gate_proj', 'up_proj', 'down_proj') else 'self_attn'
  assert (
    wrong.edited(folder, 'llama_bias', lambda t: t[f'model.layers.0.{part}.{name}.bias'].fill(0)).max() > wrong.SEEN
  )
