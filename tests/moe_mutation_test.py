"""Mistakes in models with experts, made on purpose: the references must miss them by 100 times the tolerance."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import moe
from maxtext_layers import router
from tests import wrong


@pytest.fixture(name='folder', scope='module')
def _folder(tmp_path_factory):
  return wrong.folders(tmp_path_factory.mktemp('golden'))


@pytest.mark.parametrize('change', [1, -1])
def test_a_window_that_is_one_off_is_seen(folder, change):
  assert wrong.other_card(folder, 'mixtral_window', window=30 + change).max() > wrong.SEEN
  assert wrong.other_card(folder, 'gpt_oss', window=50 + change).max() > wrong.SEEN


def test_weights_that_are_not_normalised_are_seen_and_the_other_way(folder):
  assert wrong.other_card(folder, 'qwen3_moe', normalize=False).max() > wrong.SEEN
  assert wrong.other_card(folder, 'qwen3_moe_plain', normalize=True).max() > wrong.SEEN


@pytest.mark.parametrize('case, fewer', [('mixtral', 1), ('qwen3_moe', 2), ('gpt_oss', 2)])
def test_fewer_experts_are_seen(folder, case, fewer):
  assert wrong.other_card(folder, case, top_k=fewer).max() > wrong.SEEN


def test_another_score_is_seen(folder, monkeypatch):
  """The same choice, other weights."""
  monkeypatch.setattr(router, 'log_scores', lambda logits, score: -jnp.log1p(jnp.exp(-logits)))
  assert wrong.other_card(folder, 'mixtral').max() > wrong.SEEN


def test_a_weight_on_the_wrong_side_is_seen(folder, monkeypatch):
  """On the input of an expert, where it belongs on the output."""
  grouped = moe._grouped
  monkeypatch.setattr(moe, '_grouped', lambda spec, *args: grouped(_Input(spec), *args))
  assert wrong.other_card(folder, 'mixtral').max() > wrong.SEEN


class _Input:
  """A spec that weighs inputs."""

  weigh = 'input'

  def __init__(self, spec):
    self._spec = spec

  def __getattr__(self, name):
    return getattr(self._spec, name)


@pytest.mark.parametrize('changes', [dict(limit=1.6), dict(alpha=1.6)])
def test_another_bound_or_slope_of_the_gate_is_seen(folder, changes):
  assert wrong.other_card(folder, 'gpt_oss', **changes).max() > wrong.SEEN


MLP = 'model.layers.1.mlp.'


def halves(tensors):
  """Gate and up as halves of the last axis instead of by turns."""
  name = MLP + 'experts.gate_up_proj'
  x = tensors[name]
  tensors[name] = np.concatenate([x[..., ::2], x[..., 1::2]], -1)


def zero(name):
  return lambda tensors: tensors.__setitem__(name, np.zeros_like(tensors[name]))


def experts_of(case):
  """The prefix of the experts' tensors in layer 0 of a case."""
  return 'model.layers.0.block_sparse_moe.experts.' if case == 'mixtral' else 'model.layers.0.mlp.experts.'


@pytest.mark.parametrize(
  'case, edit',
  [
    ('gpt_oss', halves),
    ('gpt_oss', zero(MLP + 'router.bias')),
    ('gpt_oss', zero(MLP + 'experts.gate_up_proj_bias')),
    ('gpt_oss', zero(MLP + 'experts.down_proj_bias')),
    ('gpt_oss', zero('model.layers.1.self_attn.sinks')),
    ('mixtral', wrong.swap(experts_of('mixtral') + '2.w1.weight', experts_of('mixtral') + '2.w3.weight')),
    ('mixtral', wrong.swap(experts_of('mixtral') + '0.w2.weight', experts_of('mixtral') + '1.w2.weight')),
    ('qwen3_moe', wrong.swap(experts_of('qwen3') + '1.gate_proj.weight', experts_of('qwen3') + '4.gate_proj.weight')),
    ('qwen3_moe', wrong.swap('model.layers.0.self_attn.q_norm.weight', 'model.layers.0.self_attn.k_norm.weight')),
  ],
)
def test_tensors_in_the_wrong_place_are_seen(folder, case, edit):
  assert wrong.edited(folder, case, edit).max() > wrong.SEEN
