"""Residual streams against twins written from the two papers' equations, and as a part of a stack."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import attention
from maxtext_layers import block
from maxtext_layers import config
from maxtext_layers import hyper
from maxtext_layers import mlp
from maxtext_layers import norm
from maxtext_layers import rope
from maxtext_layers import stack
from tests import layer_cases

S, D = 3, 5
FREE, MANIFOLD = hyper.Free(S), hyper.Manifold(S, iterations=4, eps=1e-3, norm_eps=1e-2)
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((2, 4, S, D)), RNG.standard_normal((2, 4, D))


def weights(module):
  return {str(path[0]): np.asarray(v.get_value(), np.float64) for path, v in nnx.to_flat_state(nnx.state(module))}


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def free_twin(w, h):
  """arXiv 2409.19606, one token: H [S, D] -> (A_m' H, B, A_r' H); the norm is an RMS norm."""
  normed = h / np.sqrt((h * h).mean(-1, keepdims=True) + 1e-6)
  s_alpha, s_beta = w['scale']
  a_m = s_alpha * np.tanh(normed @ w['project'][:, :1]) + w['b_read'][:, None]
  beta = s_beta * np.tanh(normed @ w['project'][:, 1:2]).T + w['b_share'][None]
  a_r = s_alpha * np.tanh(normed @ w['project'][:, 2:]) + w['b_mix']
  return (a_m.T @ h)[0], beta, a_r.T @ h


def manifold_twin(w, h):
  """arXiv 2512.24880, equations 7 to 9, one token, with eps as in the code released with a model that has it."""
  flat = h.reshape(-1)
  normed = flat / np.sqrt((flat * flat).mean() + 1e-2)
  y = normed @ w['project'].reshape(S * D, -1)
  read, share, mix = y[:S], y[S : 2 * S], y[2 * S :]
  (a, b, c), bias = w['scale'], w['b']
  read = sigmoid(a * read + bias[:S]) + 1e-3
  share = 2 * sigmoid(b * share + bias[S : 2 * S])
  m = np.exp(c * mix + bias[2 * S :]).reshape(S, S)
  for t in range(4):
    m = m / m.sum(1, keepdims=True) + 1e-3 if t == 0 else m / (m.sum(1, keepdims=True) + 1e-3)
    m = m / (m.sum(0, keepdims=True) + 1e-3)
  return read @ h, share[None], m.T @ h


@pytest.mark.parametrize('spec, twin', [(FREE, free_twin), (MANIFOLD, manifold_twin)], ids=['free', 'manifold'])
def test_connection_equals_the_equations(spec, twin):
  module = layer_cases.randomised(lambda: spec.build(D, nnx.Rngs(0)))

  @layer_cases.quick
  def run(x, y):
    h, add = module(x)
    return h, add(y)

  h, x = run(jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32))
  w = weights(module)
  for at in np.ndindex(2, 4):
    read, share, kept = twin(w, X[at])
    np.testing.assert_allclose(h[at], read, atol=1e-5)
    np.testing.assert_allclose(x[at], share.T @ Y[at][None] + kept, atol=1e-5)


def test_collapse_reads_like_a_layer():
  module = layer_cases.randomised(lambda: MANIFOLD.collapse(D, nnx.Rngs(0)))
  w = weights(module)
  got = module(jnp.asarray(X, jnp.float32))
  for at in np.ndindex(2, 4):
    flat = X[at].reshape(-1)
    y = flat / np.sqrt((flat * flat).mean() + 1e-2) @ w['project'].reshape(S * D, S)
    np.testing.assert_allclose(got[at], (sigmoid(w['scale'] * y + w['b']) + 1e-3) @ X[at], atol=1e-5)
  np.testing.assert_allclose(FREE.collapse(D, nnx.Rngs(0))(X), X.sum(2))


def test_sinkhorn_is_doubly_stochastic():
  """Rows and columns sum to 1, whatever the size of the logits; a permutation stays one."""
  x = jnp.asarray(RNG.standard_normal((7, 4, 4)), jnp.float32)
  m = hyper.sinkhorn(x, 30)
  np.testing.assert_allclose(m.sum(-1), 1, atol=1e-4)
  np.testing.assert_allclose(m.sum(-2), 1, atol=1e-6)
  assert np.isfinite(hyper.sinkhorn(100 * x, 20, 1e-6)).all()
  swap = np.eye(4)[[1, 0, 3, 2]]
  np.testing.assert_allclose(hyper.sinkhorn(jnp.asarray(50 * swap), 20), swap, atol=1e-6)


MIXER = attention.Spec(2, 1, 4, rope.Spec(4, 100.0))


def build(streams, scan=True, layers=4):
  spec = block.Spec(MIXER, mlp.Spec(9), norm.Spec(), streams)
  return stack.Stack([spec] * layers, 6, rngs=nnx.Rngs(0), scan=scan)


INPUT = jnp.asarray(RNG.standard_normal((2, 9, 6)), jnp.float32)


@layer_cases.quick
def run(model, x, caches=None, start=0):
  return model(x, block.Context(start=start), caches)[:2]


def test_free_connections_begin_as_plain_residual_paths():
  """The paper: each stream is the plain path, so their sum is a multiple of it."""
  plain, _ = run(build(None), INPUT)
  streams, _ = run(build(hyper.Free(S)), INPUT)
  np.testing.assert_allclose(streams.sum(2), S * plain, rtol=1e-4, atol=1e-4)


def test_manifold_connections_begin_close_to_plain_residual_paths():
  """Without its maps: streams are equal, half of each is read (which the norm does not see), and all is shared out."""
  plain, _ = run(build(None), INPUT)
  streams, _ = run(build(hyper.Manifold(2, scale=0.0)), INPUT)
  np.testing.assert_allclose(streams, np.repeat(plain[:, :, None], 2, 2), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize('spec', [FREE, MANIFOLD], ids=['free', 'manifold'])
def test_scanned_equals_unrolled_and_decode_equals_the_whole(spec):
  scanned = layer_cases.randomised(lambda: build(spec))
  whole, _ = run(scanned, INPUT)
  assert whole.shape == (2, 9, S, 6)
  single = build(spec, scan=False)
  layers = nnx.state(scanned.segments[0].blocks[0])
  for i, segment in enumerate(single.segments):
    nnx.update(segment.blocks[0], jax.tree.map(lambda a, i=i: a[i : i + 1], layers))
  np.testing.assert_allclose(run(single, INPUT)[0], whole, atol=1e-4)
  np.testing.assert_allclose(layer_cases.decoded(scanned, INPUT, 5), whole, atol=1e-4)


def test_a_token_mixes_its_own_streams_only():
  """B6: nothing crosses from token to token, so packed rows are the mixers' affair alone."""
  module = layer_cases.randomised(lambda: MANIFOLD.build(D, nnx.Rngs(0)))
  x = jnp.asarray(X, jnp.float32)
  h, add = module(x)
  h2, add2 = module(x.at[:, 2].add(1.0))
  same = np.array([0, 1, 3])
  np.testing.assert_array_equal(h[:, same], h2[:, same])
  y = jnp.asarray(Y, jnp.float32)
  np.testing.assert_array_equal(add(y)[:, same], add2(y)[:, same])


def test_blocks_of_a_model_have_the_same_streams():
  specs = [block.Spec(MIXER, mlp.Spec(9), norm.Spec(), streams) for streams in (FREE, MANIFOLD)]
  with pytest.raises(config.Error, match='residual streams'):
    stack.Stack(specs, 6, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
  'kind, changes, said',
  [
    (hyper.Free, {'streams': 0}, 'streams=0 is not a positive whole number'),
    (hyper.Free, {'streams': 2, 'eps': -1e-6}, 'eps=-1e-06 is not a number from 0 on'),
    (hyper.Manifold, {'streams': True}, 'streams=True is not a positive whole number'),
    (hyper.Manifold, {'iterations': 0}, 'iterations=0 is not a positive whole number'),
    (hyper.Manifold, {'norm_eps': float('nan')}, 'norm_eps=nan is not a number from 0 on'),
  ],
)
def test_impossible_numbers_are_named(kind, changes, said):
  with pytest.raises(config.Error, match=said):
    kind(**changes)
