"""Gated delta net: against the equations of the paper in float64, packed rows, padding, decoding, gradients."""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import attention
from maxtext_layers import block
from maxtext_layers import config
from maxtext_layers import delta
from maxtext_layers import mlp
from maxtext_layers import norm
from maxtext_layers import rope
from maxtext_layers import stack
from tests import layer_cases

G, R, H, W, D = 2, 3, 6, 10, 16
SPEC = delta.Spec(G, G * R, H, W, norm.Spec(1e-6))
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((2, 150, D), np.float32))  # two chunks and a bit


@pytest.fixture(name='layer', scope='module')
def _layer():
  return layer_cases.randomised(lambda: delta.DeltaNet(SPEC, D, rngs=nnx.Rngs(0)))


def apply(layer, x, segments=None):
  return layer(x, block.Context(segments=segments))[0]


_apply = layer_cases.quick(apply)


def run(layer, x, segments=None):
  return np.asarray(_apply(layer, x, segments))


def recurrence(q, k, v, alpha, beta):
  """Equation 10 of arXiv 2412.06464 for one head: q, k [T, H], v [T, W], alpha, beta [T] -> o [T, W], S [W, H]."""
  s, out = np.zeros((v.shape[1], k.shape[1])), []
  for t in range(len(q)):
    s = s @ (alpha[t] * (np.eye(k.shape[1]) - beta[t] * np.outer(k[t], k[t]))) + beta[t] * np.outer(v[t], k[t])
    out.append(s @ q[t])
  return np.array(out), s


def twin(layer, x):
  """The layer for one row x [T, D], in float64 and a loop a head. Convolution, norms and gates: figure 1, section 3.4;
  alpha as in Mamba 2 (arXiv 2405.21060), exp(-exp(a_log) softplus(. + dt_bias))."""
  p = {name: np.asarray(v.get_value(), np.float64) for (name, *_), v in nnx.to_flat_state(nnx.state(layer))}
  x = np.asarray(x, np.float64)
  silu = lambda a: a / (1 + np.exp(-a))
  sigmoid = lambda a: 1 / (1 + np.exp(-a))

  def conv(a, w):
    return silu(np.array([sum(w[:, 3 - i] * a[t - i] for i in range(4) if t >= i) for t in range(len(a))]))

  y = np.zeros((len(x), D))
  for g in range(G):
    q, k = (conv(x @ p[n][:, g], p[f'conv_{n}'][g]) for n in 'qk')
    q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    for r in range(R):
      v = conv(x @ p['v'][:, g, r], p['conv_v'][g, r])
      alpha = np.exp(-np.exp(p['a_log'][g, r]) * np.log1p(np.exp(x @ p['decay'][:, g, r] + p['dt_bias'][g, r])))
      o, _ = recurrence(q * H**-0.5, k, v, alpha, sigmoid(x @ p['beta'][:, g, r]))
      o = o / np.sqrt((o * o).mean(-1, keepdims=True) + 1e-6) * p['norm']
      y += o * silu(x @ p['gate'][:, g, r]) @ p['o'][g, r]
  return y


def test_the_layer_equals_the_equations(layer):
  """Chunks and all, at every position."""
  got = run(layer, X)
  for row in (0, 1):
    expected = twin(layer, X[row])
    assert expected.std() > 0.5
    np.testing.assert_allclose(got[row], expected, atol=5e-4)  # the norm raises what is small


def inputs(length, seed=0, rows=2):
  """q, k, v, decay, beta of `chunked`, keys of length 1."""
  rng = np.random.default_rng(seed)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
  unit = lambda a: a / jnp.linalg.norm(a, axis=-1, keepdims=True)
  q, k, v = unit(draw(rows, G, length, H)), unit(draw(rows, G, length, H)), draw(rows, G, R, length, W)
  return q, k, v, -jnp.exp(draw(rows, G, R, length) - 2), jax.nn.sigmoid(draw(rows, G, R, length))


def stepwise(q, k, v, decay, beta, state):
  """The recurrent form over time."""
  one = lambda state, a: delta.step(*a, state)[::-1]
  state, o = jax.lax.scan(
    one, state, tuple(jnp.moveaxis(a, i, 0) for a, i in zip((q, k, v, decay, beta), (2, 2, 3, 3, 3)))
  )
  return jnp.moveaxis(o, 0, 3), state


stepped = layer_cases.quick(stepwise)
STATE = jnp.asarray(RNG.standard_normal((2, G, R, H, W), np.float32))


def test_one_step_is_the_equation():
  q, k, v, decay, beta = (np.asarray(a, np.float64) for a in inputs(40, rows=2))
  o, state = stepped(*inputs(40, rows=2), jnp.zeros((2, G, R, H, W)))
  for b, g, r in ((0, 0, 0), (1, 1, 2)):
    expected, s = recurrence(q[b, g], k[b, g], v[b, g, r], np.exp(decay[b, g, r]), beta[b, g, r])
    np.testing.assert_allclose(o[b, g, r], expected, atol=1e-5)
    np.testing.assert_allclose(state[b, g, r], s.T, atol=1e-5)


@pytest.mark.parametrize('length, chunk', [(1, 64), (5, 64), (64, 64), (65, 64), (150, 64), (150, 16), (33, 7)])
def test_chunks_equal_steps(length, chunk):
  """Lengths at and around the borders of chunks, with a state that went before."""
  got = layer_cases.quick(delta.chunked, static_argnames='chunk')(*inputs(length), STATE, chunk=chunk)
  for a, b in zip(got, stepped(*inputs(length), STATE), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize('hard', ['repeated', 'forgetful', 'keeping'])
def test_gradients_equal_those_of_the_steps(hard):
  """Also where keys repeat and beta is nearly 1, so that powers of the system would overflow; where a token forgets all
  that was (decays of -1000); and where none forgets anything."""
  q, k, v, decay, beta = inputs(150)
  if hard == 'repeated':
    k, decay, beta = jnp.broadcast_to(k[:, :, :1], k.shape), decay * 1e-3, 1 - 1e-3 * beta
  elif hard == 'forgetful':
    decay = jnp.where(jnp.arange(150) % 7 == 3, -1000.0, decay)
  else:
    decay = decay * 0
  weights = jnp.asarray(np.random.default_rng(3).standard_normal((2, G, R, 150, W), np.float32))

  def loss(form, *arguments):
    o, state = form(*arguments)
    return (o * weights).sum() + (state * STATE).sum()

  arguments = (q, k, v, decay, beta, STATE)
  ours, theirs = (
    layer_cases.quick(jax.grad(functools.partial(loss, form), range(6)))(*arguments)
    for form in (delta.chunked, stepwise)
  )
  for a, b in zip(ours, theirs, strict=True):
    assert np.isfinite(a).all()
    # a difference of two sums of decays is as wrong as they are large
    tolerance = 1e-3 if hard == 'forgetful' else 2e-4
    np.testing.assert_allclose(a, b, atol=tolerance * max(1.0, float(jnp.abs(b).max())))


DOCUMENTS = (70, 2, 1, 40, 30)  # over a border of chunks, shorter than the taps, and padding behind them
SEGMENTS = np.array([[i + 1 for i, n in enumerate(DOCUMENTS) for _ in range(n)] + [0] * 7])


def test_documents_of_a_packed_row_are_alone(layer):
  """B6, B7: each equals its own row, and bit by bit it does not depend on what the others hold, nor on padding."""
  got = run(layer, X[:1], SEGMENTS)
  assert np.isfinite(got).all()
  begin = 0
  for index, length in enumerate(DOCUMENTS, 1):
    end = begin + length
    np.testing.assert_allclose(got[:, begin:end], run(layer, X[:1, begin:end]), atol=5e-4)
    other = run(layer, jnp.where((SEGMENTS == index)[..., None], X[:1], 30 * X[1:] + 5), SEGMENTS)
    assert (other[:, begin:end] == got[:, begin:end]).all()
    begin = end
  assert np.abs(run(layer, X[:1]) - got)[:, 70:].max() > 0.1


def test_gradients_of_packed_rows_stay_in_their_document(layer):
  """Finite everywhere, and nothing of a document's loss reaches another or padding."""
  grad = layer_cases.quick(jax.grad(lambda x, keep: (apply(layer, x, SEGMENTS) * keep[..., None]).sum()))
  for index in (1, 2, 4):
    g = np.asarray(grad(X[:1], jnp.asarray(SEGMENTS == index, jnp.float32)))
    assert np.isfinite(g).all() and (g[SEGMENTS != index] == 0).all() and np.abs(g[SEGMENTS == index]).min() > 0


def test_gradients_of_the_layer_are_finite_where_rows_are_padding(layer):
  g = layer_cases.quick(jax.grad(lambda layer: (apply(layer, X, np.zeros((2, 150), np.int32)) ** 2).sum()))(layer)
  assert all(np.isfinite(a).all() for a in jax.tree.leaves(g))


def test_bfloat16_keeps_the_state_in_float32(layer):
  low, high = (run(layer, X.astype(dtype)).astype(np.float32) for dtype in (jnp.bfloat16, jnp.float32))
  assert 0 < np.abs(low - high).mean() < 0.03 * high.std()
  *lines, state = SPEC.cache(3, 2, 100, jnp.bfloat16)
  assert [a.dtype for a in (*lines, state)] == [jnp.bfloat16] * 3 + [jnp.float32]
  assert [a.shape for a in (*lines, state)] == [
    (3, 2, G, 3, H), (3, 2, G, 3, H), (3, 2, G, R, 3, W), (3, 2, G, R, H, W)
  ]  # fmt: skip


def test_first_values():
  """Decays of fresh heads differ: rates between 1 and 16, step sizes between 0.001 and 0.1."""
  fresh = delta.DeltaNet(delta.Spec(20, 40, H, W, norm.Spec()), D, rngs=nnx.Rngs(0))
  rate, dt = np.exp(fresh.a_log[...]), np.log1p(np.exp(fresh.dt_bias[...]))
  assert 1 <= rate.min() < 3 < 14 < rate.max() <= 16
  assert 0.00099 <= dt.min() < 0.003 < 0.05 < dt.max() <= 0.101


def test_flops_by_hand():
  """A token and head: k reads H x W, the correction writes it, q reads it; a multiplication and an addition each."""
  assert SPEC.flops(7) == 7 * (G * R) * 3 * 2 * H * W


ATTENTION = attention.Spec(4, 2, 8, rope.Spec(8, 10000.0))


@pytest.fixture(name='model', scope='module')
def _model():
  """Two periods of a delta net and an attention layer."""
  blocks = [block.Spec(mixer, mlp.Spec(24), norm.Spec()) for mixer in (SPEC, ATTENTION)]
  return layer_cases.randomised(lambda: stack.Stack(blocks * 2, D, rngs=nnx.Rngs(0), scan=True))


forward = layer_cases.quick(
  lambda model, x, caches=None, start=0, positions=None: model(x, block.Context(positions, start=start), caches)[:2]
)
prefill = layer_cases.quick(lambda model, x, caches, positions=None: model(x, block.Context(positions), caches)[:2])


def test_the_plan_is_one_segment(model):
  assert [(len(s.specs), s.count) for s in model.plan] == [(2, 2)]


def test_decoding_equals_the_full_forward(model):
  """A prefill of 70 tokens, a second piece of 3, then one at a time; and a model that is not scanned says the same."""
  x = X[:, :80]
  np.testing.assert_allclose(layer_cases.decoded(model, x, 70, 73), layer_cases.whole(model, x), atol=5e-4)


def test_a_row_that_begins_forgets_what_the_memory_held(model):
  """At start 0, known or traced; one row may begin while the other goes on."""
  dirty = jax.tree.map(lambda a: a + 1, model.caches(2, 80))
  fresh, _ = prefill(model, X[:, :5], model.caches(2, 80))
  np.testing.assert_array_equal(prefill(model, X[:, :5], dirty)[0], fresh)
  _, caches = prefill(model, X[:, :5], dirty)
  y, _ = forward(model, X[:, 5:6], caches, jnp.asarray([5, 0]))
  np.testing.assert_allclose(y[0, 0], forward(model, X[:, :6])[0][0, 5], atol=5e-4)
  np.testing.assert_allclose(y[1, 0], forward(model, X[:, 5:6])[0][1, 0], atol=5e-4)


@pytest.mark.parametrize('side', ['left', 'right'])
def test_ragged_prompts(model, side):
  """B3: prompts of 70 and 66 tokens in one batch, the second padded by 4 with negative positions: each decodes as if
  alone, in what follows, too."""
  for row, y in enumerate(layer_cases.ragged(model, X[:, :80], (70, 66), 4, side)):
    np.testing.assert_allclose(y, layer_cases.whole(model, X[:, :80])[row, : len(y)], atol=5e-4)


@pytest.mark.parametrize(
  'changes, said',
  [
    ({'value_heads': G * R + 1}, f'value_heads={G * R + 1} is no multiple of key_heads={G}'),
    ({'key_heads': 0}, 'key_heads=0 is not a positive whole number'),
    ({'taps': 0}, 'taps=0 is not a positive whole number'),
    ({'key_dim': 2.0}, 'key_dim=2[.]0 is not a positive whole number'),
  ],
)
def test_impossible_numbers_are_named(changes, said):
  with pytest.raises(config.Error, match=said):
    dataclasses.replace(SPEC, **changes)
