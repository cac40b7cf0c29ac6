"""The indexer of sparse attention and its loss against the report's equations (twins/indexer.py)."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import block
from maxtext_layers import indexer
from maxtext_layers import mla
from maxtext_layers import rope
from maxtext_layers import sparse
from tests import layer_cases
from tests.twins import indexer as twin

TOLERANCE = 2e-5  # sums of tens of numbers of size 1 in float32
B, T, N, H, W, J, I, TOP_K = 2, 37, 3, 6, 5, 4, 8, 9
SCALE = 0.7
RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((B, N, T, size)) for size in (H, H, W))
FOUND = RNG.standard_normal((B, J, T, I)), RNG.standard_normal((B, T, I)), RNG.standard_normal((B, T, J))
CAUSAL = np.tri(T, dtype=bool)
STAGES = ['dense', 'sparse']


def single(*arrays):
  return [jnp.asarray(a, jnp.float32) for a in arrays]


def spec(stage, loss=1.0):
  return indexer.Spec(J, I, TOP_K, loss=loss, stage=stage)


def theirs(stage, row, seen=CAUSAL, top_k=TOP_K):
  """([N, T, W], KL [T], (I, weights, S_t)) of a row."""
  q, k, w = FOUND[0][row].swapaxes(0, 1), FOUND[1][row], FOUND[2][row]
  index = twin.scores(q, k, w)
  over = seen if stage == 'dense' else twin.chosen(index, top_k, seen)
  y, weights = twin.attention(Q[row], K[row], V[row], SCALE, over)
  return y, twin.divergence(index, weights, over), (index, weights, over)


@pytest.fixture(name='ours', scope='module', params=STAGES)
def _ours(request):
  """(stage, y, KL [B, T], its gradient of w [B, T, J]) in blocks of queries that do not divide the row."""
  stage = request.param

  @jax.jit
  def loss(w):
    y, kl = sparse.attended(*single(Q, K, V), SCALE, (*single(*FOUND[:2]), w), spec(stage), block=16)
    return kl.sum(), (y, kl)

  (_, (y, kl)), slope = jax.value_and_grad(loss, has_aux=True)(*single(FOUND[2]))
  return stage, np.asarray(y), np.asarray(kl), np.asarray(slope)


def test_scores_equal_equation_1():
  expected = np.stack([twin.scores(FOUND[0][b].swapaxes(0, 1), FOUND[1][b], FOUND[2][b]) for b in range(B)])
  np.testing.assert_allclose(indexer.scores(*single(*FOUND)), expected, atol=TOLERANCE, rtol=TOLERANCE)
  unrectified = np.einsum('btj,bjti,bsi->bts', FOUND[2], FOUND[0], FOUND[1])
  assert np.abs(unrectified - expected).max() > 100 * TOLERANCE


def test_attention_is_over_what_equation_2_chooses(ours):
  stage, y, _, _ = ours
  for row in range(B):
    np.testing.assert_allclose(y[row], theirs(stage, row)[0], atol=TOLERANCE, rtol=TOLERANCE)
  if stage == 'sparse':
    assert np.abs(y[0] - theirs('sparse', 0, top_k=TOP_K + 1)[0]).max() > 100 * TOLERANCE


def test_loss_equals_equations_3_and_4(ours):
  stage, _, kl, _ = ours
  for row in range(B):
    np.testing.assert_allclose(kl[row], theirs(stage, row)[1], atol=TOLERANCE, rtol=TOLERANCE)
  index, weights, over = theirs(stage, 0)[2]
  assert kl[0].mean() > 0.1
  backwards = [twin.softmax(np.where(over, index, -np.inf))]  # KL(q || p)
  p = np.where(over, np.log(weights.sum(0) + 1e-300), -np.inf)
  assert np.abs(twin.divergence(p, np.array(backwards), over) - kl[0]).max() > 100 * TOLERANCE
  first_head = twin.divergence(index, weights[:1], over)  # not summed over heads
  assert np.abs(first_head - kl[0]).max() > 100 * TOLERANCE
  other = theirs({'dense': 'sparse', 'sparse': 'dense'}[stage], 0)[1]
  assert np.abs(other - kl[0]).max() > 100 * TOLERANCE


def test_gradient_of_the_loss(ours):
  stage, _, _, slope = ours
  for row in range(B):
    q, k = FOUND[0][row].swapaxes(0, 1), FOUND[1][row]
    expected = twin.gradient_of_weights(*theirs(stage, row)[2], q, k)
    np.testing.assert_allclose(slope[row], expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize('stage', STAGES)
def test_packed_documents_are_apart(stage):
  border = 15
  segments = np.where(np.arange(T) < border, 1, 2)
  seen = CAUSAL & (segments[:, None] == segments)
  attended = jax.jit(lambda q, k, v, *found: sparse.attended(
    q, k, v, SCALE, found, spec(stage), jnp.asarray(segments[None].repeat(B, 0), jnp.int32)
  ))  # fmt: skip
  y, kl = attended(*single(Q, K, V), *single(*FOUND))
  expected = theirs(stage, 1, seen)
  np.testing.assert_allclose(y[1], expected[0], atol=TOLERANCE, rtol=TOLERANCE)
  np.testing.assert_allclose(kl[1], expected[1], atol=TOLERANCE, rtol=TOLERANCE)


LATENT = mla.Spec(heads=N, kv_rank=12, nope_dim=6, value_dim=W, rope=rope.Spec(8, 100.0), q_rank=10)
ROWS = RNG.standard_normal((B, 14, 9))
TABLES = {LATENT.rope: rope.table(LATENT.rope, np.arange(14)[None])}


@pytest.fixture(name='module', scope='module', params=STAGES)
def _module(request):
  """(stage, layer): the coefficient is 0.3."""
  made = indexer.Spec(J, I, 5, loss=0.3, stage=request.param)
  return request.param, layer_cases.randomised(lambda: sparse.Spec(LATENT, made).build(9, nnx.Rngs(0)), scale=0.3)


def test_a_layer_returns_the_mean_over_tokens(module):
  """The report sums over t; a mean does not change with the length of rows, and the coefficient is ours to choose."""
  stage, layer = module
  segments = np.ones((B, 14), np.int32)
  segments[1, 10:] = 0  # padding

  @jax.jit
  def parts(x):
    context = block.Context(tables=TABLES, segments=jnp.asarray(segments))
    latent, q, k = layer.projections(x, context)
    return layer.heads(q, k), layer.indexer(x, latent, TABLES[LATENT.rope]), layer(x, context)[2]['indexer_loss']

  (q, k, v), (qi, ki, w), loss = jax.tree.map(lambda a: np.asarray(a, np.float64), parts(*single(ROWS)))
  terms = []
  for row in range(B):
    index = twin.scores(qi[row].swapaxes(0, 1), ki[row], w[row])
    seen = np.tri(14, dtype=bool) & (segments[row][:, None] == segments[row])
    over = seen if stage == 'dense' else twin.chosen(index, 5, seen)
    _, weights = twin.attention(q[row], k[row], v[row], LATENT.head_dim**-0.5, over)
    terms.append(twin.divergence(index, weights, over)[segments[row] > 0])
  np.testing.assert_allclose(loss, 0.3 * np.concatenate(terms).mean(), rtol=TOLERANCE)


def test_two_losses_reach_two_sets_of_parameters(module):
  """Section 2.1.1: "The training signal of the indexer is from only L^I", its input is detached."""
  graph, state = nnx.split(module[1])

  @jax.jit
  def slopes(state, x):
    def losses(state, x):
      y, _, aux = nnx.merge(graph, state)(x, block.Context(tables=TABLES))
      return aux['indexer_loss'], jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape)))

    _, back = jax.vjp(losses, state, x)
    return back((1.0, 0.0)), back((0.0, 1.0))

  (of_index, x_of_index), (of_tokens, _) = slopes(state, *single(ROWS))
  assert not np.any(x_of_index)
  for path, slope in nnx.to_flat_state(of_index):
    assert bool(np.any(slope.get_value())) == (path[0] == 'indexer'), path
  for path, slope in nnx.to_flat_state(of_tokens):
    assert bool(np.any(slope.get_value())) == (path[0] != 'indexer'), path
