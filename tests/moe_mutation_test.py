"""Mistakes in models with experts, made on purpose: the references must miss them by 100 times the tolerance."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import moe
from maxtext_layers import router
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
  return np.abs(forward(state, reference.tokens) - reference.logits).max()


def other_card(folder, case, **changes):
  """The distance of a model with other numbers on its card, and the weights of the case as far as it has them."""
  card, model = checkpoint.load(folder(case))
  for name, value in changes.items():
    setattr(card, name, value)
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


@pytest.mark.parametrize('change', [1, -1])
def test_a_window_that_is_one_off_is_seen(folder, change):
  assert other_card(folder, 'mixtral_window', window=30 + change) > SEEN
  assert other_card(folder, 'gpt_oss', window=50 + change) > SEEN


def test_weights_that_are_not_normalised_are_seen_and_the_other_way(folder):
  assert other_card(folder, 'qwen3_moe', normalize=False) > SEEN
  assert other_card(folder, 'qwen3_moe_plain', normalize=True) > SEEN


@pytest.mark.parametrize('case, fewer', [('mixtral', 1), ('qwen3_moe', 2), ('gpt_oss', 2)])
def test_fewer_experts_are_seen(folder, case, fewer):
  assert other_card(folder, case, top_k=fewer) > SEEN


def test_another_score_is_seen(folder, monkeypatch):
  """The same choice, other weights."""
  monkeypatch.setattr(router, 'log_scores', lambda logits, score: -jnp.log1p(jnp.exp(-logits)))
  assert other_card(folder, 'mixtral') > SEEN


def test_a_weight_on_the_wrong_side_is_seen(folder, monkeypatch):
  """On the input of an expert, where it belongs on the output."""
  grouped = moe._grouped
  monkeypatch.setattr(moe, '_grouped', lambda spec, *args: grouped(_Input(spec), *args))
  assert other_card(folder, 'mixtral') > SEEN


class _Input:
  """A spec that weighs inputs."""

  weigh = 'input'

  def __init__(self, spec):
    self._spec = spec

  def __getattr__(self, name):
    return getattr(self._spec, name)


@pytest.mark.parametrize('changes', [dict(limit=1.6), dict(alpha=1.6)])
def test_another_bound_or_slope_of_the_gate_is_seen(folder, changes):
  assert other_card(folder, 'gpt_oss', **changes) > SEEN


MLP = 'model.layers.1.mlp.'


def halves(tensors):
  """Gate and up as halves of the last axis instead of by turns."""
  name = MLP + 'experts.gate_up_proj'
  x = tensors[name]
  tensors[name] = np.concatenate([x[..., ::2], x[..., 1::2]], -1)


def zero(name):
  return lambda tensors: tensors.__setitem__(name, np.zeros_like(tensors[name]))


def swap(first, second):
  def edit(tensors):
    tensors[first], tensors[second] = tensors[second], tensors[first]

  return edit


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
    ('mixtral', swap(experts_of('mixtral') + '2.w1.weight', experts_of('mixtral') + '2.w3.weight')),
    ('mixtral', swap(experts_of('mixtral') + '0.w2.weight', experts_of('mixtral') + '1.w2.weight')),
    ('qwen3_moe', swap(experts_of('qwen3') + '1.gate_proj.weight', experts_of('qwen3') + '4.gate_proj.weight')),
    ('qwen3_moe', swap('model.layers.0.self_attn.q_norm.weight', 'model.layers.0.self_attn.k_norm.weight')),
  ],
)
def test_tensors_in_the_wrong_place_are_seen(folder, case, edit):
  assert edited(folder, case, edit) > SEEN
