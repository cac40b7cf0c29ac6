"""Residual streams against their papers' equations (twins/hyper.py)."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import hyper
from tests import layer_cases
from tests.twins import hyper as twin

TOLERANCE = 1e-5  # numbers of size 1 in float32
B, T, S, D = 2, 4, 3, 7
EPS = 1e-6
X = np.random.default_rng(0).standard_normal((B, T, S, D))
F = np.random.default_rng(1).standard_normal((D, D))
MANIFOLD = hyper.Manifold(S, iterations=2, eps=0.0, norm_eps=EPS)  # so few that it is seen which sums come last


def ours(module, x=X):
  """x' [B, T, S, D] of a connection, around the layer tanh(x F)."""

  @jax.jit
  def stepped(x):
    h, add = module(x)
    return add(jnp.tanh(h @ jnp.asarray(F, jnp.float32)))

  return np.asarray(stepped(jnp.asarray(x, jnp.float32)))


def theirs(maps):
  """The same of the twin; `maps` makes the three mappings of a token's streams."""
  steps = [twin.step(x, maps(x), lambda h: np.tanh(h @ F)) for x in X.reshape(-1, S, D)]
  return np.reshape(steps, X.shape)


def weights(module):
  return {path[0]: np.asarray(leaf.get_value(), np.float64) for path, leaf in nnx.to_flat_state(nnx.state(module))}


def manifold_maps(module, t_max=2):
  """The mappings with the module's parameters in the paper's shapes; mix [s, r] is H_res [r, s]."""
  w = weights(module)
  phi, b = w['project'].reshape(S * D, -1), w['b']
  parts = lambda a: {'pre': a[..., :S], 'post': a[..., S : 2 * S], 'res': a[..., 2 * S :].reshape(-1, S, S)}
  phi, b = parts(phi), parts(b)
  phi['res'], b['res'] = phi['res'].swapaxes(1, 2), b['res'][0].T
  alpha = dict(zip(['pre', 'post', 'res'], w['scale']))
  return lambda x: twin.manifold(x, phi, alpha, b, t_max, EPS)


@pytest.fixture(name='manifold', scope='module')
def _manifold():
  return layer_cases.randomised(lambda: MANIFOLD.build(D, nnx.Rngs(0)))


@pytest.fixture(name='free', scope='module')
def _free():
  return layer_cases.randomised(lambda: hyper.Free(S, eps=EPS).build(D, nnx.Rngs(0)))


def test_manifold_equals_equations_7_to_9(manifold):
  np.testing.assert_allclose(ours(manifold), theirs(manifold_maps(manifold)), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
  'wrong',
  [
    lambda pre, post, res: (pre, post / 2, res),  # H_post without its 2
    lambda pre, post, res: (pre, post, res.T),
    lambda pre, post, res: (pre, post, res / res.sum(0)),  # columns last
    lambda pre, post, res: (pre / pre.sum(), post, res),
  ],
  ids=['post', 'transposed', 'columns', 'softmax'],
)
def test_manifold_with_a_mistake_is_far_away(manifold, wrong):
  maps = manifold_maps(manifold)
  assert np.abs(ours(manifold) - theirs(lambda x: wrong(*maps(x)))).max() > 100 * TOLERANCE


def test_norm_of_each_stream_by_itself_is_far_away(manifold):
  maps = manifold_maps(manifold)
  assert np.abs(ours(manifold) - theirs(lambda x: maps(twin.rms(x, EPS)))).max() > 100 * TOLERANCE


def test_epsilon_of_released_models_is_small():
  """The paper's equations have none. It is seen where sums that are divided by come near it."""
  module = layer_cases.randomised(lambda: hyper.Manifold(S, norm_eps=EPS).build(D, nnx.Rngs(0)), scale=0.2)
  maps = manifold_maps(module, t_max=20)
  np.testing.assert_allclose(ours(module), theirs(maps), atol=1e-4, rtol=1e-4)


def test_twenty_iterations_are_doubly_stochastic():
  """Equation 6: H_res 1 = 1, 1^T H_res = 1^T, H_res >= 0."""
  mix = np.asarray(
    hyper.sinkhorn(jnp.asarray(2 * np.random.default_rng(2).standard_normal((9, 4, 4)), jnp.float32), 20)
  )
  np.testing.assert_allclose(mix.sum(-1), 1, atol=1e-3)
  np.testing.assert_allclose(mix.sum(-2), 1, atol=TOLERANCE)  # those divided last
  assert mix.min() >= 0


def test_one_stream_is_the_identity_mapping():
  """Section 4.1: with n = 1 the condition degenerates to the scalar 1."""
  assert np.asarray(hyper.sinkhorn(jnp.full((5, 1, 1), 7.0), 3)).tolist() == [[[1.0]]] * 5


def free_maps(module):
  w = weights(module)
  split = {'m': w['project'][:, 0], 'beta': w['project'][:, 1], 'r': w['project'][:, 2:]}
  static = {'m': w['b_read'], 'beta': w['b_share'], 'r': w['b_mix']}
  s = {'alpha': w['scale'][0], 'beta': w['scale'][1]}
  return lambda x: twin.free(x, split, s, static, EPS)


def test_free_equals_equations_10_to_13(free):
  np.testing.assert_allclose(ours(free), theirs(free_maps(free)), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
  'wrong',
  [lambda pre, post, res: (pre, post, res.T), lambda pre, post, res: (post, pre, res)],
  ids=['transposed', 'swapped'],
)
def test_free_with_a_mistake_is_far_away(free, wrong):
  maps = free_maps(free)
  assert np.abs(ours(free) - theirs(lambda x: wrong(*maps(x)))).max() > 100 * TOLERANCE


def test_free_begins_as_a_plain_residual_path():
  """Section 2.2, equation 14: B = 1, A_r = 1, A_m a unit vector, dynamic parts 0. Which stream is read is free here."""
  module = hyper.Free(S).build(D, nnx.Rngs(3))
  h, add = module(jnp.asarray(X, jnp.float32))
  which = [s for s in range(S) if np.allclose(h, X[:, :, s], atol=TOLERANCE)]
  assert len(which) == 1
  y = np.random.default_rng(4).standard_normal((B, T, D))
  np.testing.assert_allclose(add(jnp.asarray(y, jnp.float32)), X + y[:, :, None], atol=TOLERANCE)
