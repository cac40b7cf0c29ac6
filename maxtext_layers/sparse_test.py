"""The layer against a twin written from the report's equations; its two losses kept apart; decode and packed rows."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import block
from maxtext_layers import config
from maxtext_layers import indexer
from maxtext_layers import mla
from maxtext_layers import mlp
from maxtext_layers import norm
from maxtext_layers import rope
from maxtext_layers import sparse
from maxtext_layers import stack
from tests import layer_cases

EPS = 1e-6
LATENT = mla.Spec(
  heads=3, kv_rank=10, nope_dim=6, value_dim=5, rope=rope.Spec(4, 100.0), q_rank=7, latent_norm=norm.Spec(EPS)
)
SPEC = sparse.Spec(LATENT, indexer.Spec(heads=2, head_dim=8, top_k=5, loss=0.5))
WARM = dataclasses.replace(SPEC, index=dataclasses.replace(SPEC.index, stage='dense'))
D, T = 12, 70  # more tokens than a block of queries
RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, T, D))


@pytest.fixture(name='layer', scope='module')
def _layer():
  return layer_cases.randomised(lambda: sparse.Sparse(SPEC, D, rngs=nnx.Rngs(0)))


def of_stage(layer, spec):
  """The same parameters under another spec."""
  other = nnx.eval_shape(lambda: sparse.Sparse(spec, D, rngs=nnx.Rngs(0)))
  nnx.update(other, nnx.state(layer))
  return other


def apply(layer, x, positions=None, segments=None):
  places = np.arange(x.shape[1])[None] if positions is None else positions
  tables = {LATENT.rope: rope.table(LATENT.rope, places)}
  y, _, aux = layer(x, block.Context(positions, segments, tables=tables, kernel='xla'))
  return y, aux


_apply = layer_cases.quick(apply)


def call(layer, x, positions=None, segments=None):
  return _apply(layer, jnp.asarray(x, jnp.float32), positions, segments)


def turned(x, positions):
  """x [.., T, H], of which the first 4 elements turn, i with i + 2."""
  angle = positions[:, None] * 100.0 ** (-np.arange(2) / 2)
  a, b = x[..., :2], x[..., 2:4]
  cos, sin = np.cos(angle), np.sin(angle)
  return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 4:]], -1)


def twin(layer, x, stage):
  """One row [T, D] in float64, a query at a time -> (y [T, D], divergence [T], chosen [T] sets)."""
  w = {
    '.'.join(map(str, path[:-1])): np.asarray(v.get_value(), np.float64)
    for path, v in nnx.to_flat_state(nnx.state(layer))
  }
  w['indexer.k_norm.b'] = np.asarray(layer.indexer.k_norm.b[...], np.float64)
  w['indexer.k_norm'] = np.asarray(layer.indexer.k_norm.w[...], np.float64)
  rms = lambda a, weight: a / np.sqrt((a * a).mean(-1, keepdims=True) + EPS) * weight
  places = np.arange(len(x))
  c_q = rms(x @ w['q_down'], w['q_norm'])
  q = np.einsum('TR,RNH->NTH', c_q, w['q_up'])
  q = np.concatenate([q[..., :6], turned(q[..., 6:], places)], -1)
  down = x @ w['kv_down']
  c, k_rope = rms(down[:, :10], w['kv_norm']), turned(down[:, 10:], places)
  up = np.einsum('TR,RNH->NTH', c, w['kv_up'])
  k = np.concatenate([up[..., :6], np.broadcast_to(k_rope, (3, *k_rope.shape))], -1)
  v = up[..., 6:]
  q_i = turned(np.einsum('TR,RJI->JTI', c_q, w['indexer.q']), places)
  k_i = x @ w['indexer.k']
  k_i = k_i - k_i.mean(-1, keepdims=True)
  k_i = k_i / np.sqrt((k_i * k_i).mean(-1, keepdims=True) + EPS) * w['indexer.k_norm'] + w['indexer.k_norm.b']
  k_i = turned(k_i, places)
  w_i = x @ w['indexer.weights'] * 2**-0.5 * 8**-0.5  # of the heads and of their size, as released
  y, losses, sets = np.zeros((len(x), D)), np.zeros(len(x)), []
  for t in places:
    index = np.array([sum(w_i[t, j] * max(q_i[j, t] @ k_i[s], 0) for j in range(2)) for s in range(t + 1)])  # (1)
    chosen = np.sort(np.argsort(-index, kind='stable')[:5])  # (2)
    seen = np.arange(t + 1) if stage == 'dense' else chosen
    raised = np.exp(np.einsum('NH,NSH->NS', q[:, t], k[:, seen]) * 10**-0.5)
    p = raised / raised.sum(-1, keepdims=True)
    y[t] = np.einsum('NS,NSH,NHD->D', p, v[:, seen], w['o'])
    target = p.sum(0) / p.sum()
    log_q = index[seen] - np.log(np.exp(index[seen]).sum())
    losses[t] = (target * (np.log(target) - log_q)).sum()  # (3), (4)
    sets.append(set(chosen))
  return y, losses, sets


@pytest.mark.parametrize('stage', ['sparse', 'dense'])
def test_layer_equals_the_equations(layer, stage):
  """Equations 1 to 4 of the report: output, and the mean divergence times its factor."""
  y, aux = call(of_stage(layer, SPEC if stage == 'sparse' else WARM), X)
  expected = [twin(layer, x, stage) for x in X]
  np.testing.assert_allclose(y, np.stack([e[0] for e in expected]), atol=2e-5)
  np.testing.assert_allclose(aux['indexer_loss'], 0.5 * np.mean([e[1] for e in expected]), rtol=1e-5)


@pytest.mark.parametrize('spec', [SPEC, WARM], ids=['sparse', 'dense'])
def test_the_two_losses_reach_parameters_of_their_own(layer, spec):
  """The report: the indexer learns from the divergence only, the model from the loss of tokens only."""
  graph, state = nnx.split(of_stage(layer, spec))
  x = jnp.asarray(X[:1, :12], jnp.float32)

  def losses(state, x):
    y, aux = apply(nnx.merge(graph, state), x)
    return (y**2).sum(), aux['indexer_loss']

  pull = layer_cases.quick(lambda s, x, by: jax.vjp(losses, s, x)[1](by))
  by_tokens, _ = pull(state, x, (jnp.float32(1), jnp.float32(0)))
  by_index, by_x = pull(state, x, (jnp.float32(0), jnp.float32(1)))
  assert not by_x.any()
  for path, _ in nnx.to_flat_state(state):
    of_tokens, of_index = (np.abs(dict(nnx.to_flat_state(g))[path].get_value()).max() for g in (by_tokens, by_index))
    assert (of_index > 0, of_tokens > 0) == ((True, False) if path[0] == 'indexer' else (False, True)), path


def test_rows_no_longer_than_top_k_are_plain_latent_attention(layer):
  plain = nnx.eval_shape(lambda: mla.Latent(LATENT, D, rngs=nnx.Rngs(0)))
  state = {path: v for path, v in nnx.to_flat_state(nnx.state(layer)) if path[0] != 'indexer'}
  nnx.update(plain, nnx.from_flat_state(state))
  quiet = of_stage(layer, dataclasses.replace(SPEC, index=dataclasses.replace(SPEC.index, loss=0.0, top_k=9)))
  np.testing.assert_allclose(call(quiet, X[:, :9])[0], call(plain, X[:, :9])[0], atol=1e-5)
  assert call(quiet, X[:, :9])[1] == {}
  assert np.abs(call(quiet, X)[0] - call(plain, X)[0]).max() > 1e-3


@pytest.fixture(name='model', scope='module')
def _model():
  spec = block.Spec(
    dataclasses.replace(SPEC, index=dataclasses.replace(SPEC.index, loss=0.0)), mlp.Spec(9), norm.Spec()
  )
  return layer_cases.randomised(lambda: stack.Stack([spec] * 2, D, rngs=nnx.Rngs(0), scan=True))


def test_decode_equals_the_whole(model):
  """A prompt of 7 in one call, of 4 in another, then a token at a time; each query chooses 5 of up to 16 keys."""
  x = jnp.asarray(X[:, :16], jnp.float32)
  np.testing.assert_allclose(layer_cases.decoded(model, x, 7, 11), layer_cases.whole(model, x), atol=3e-5)


def test_ragged_prompts_padded_left(model):
  """B3: prompts of 9 and 6 tokens; padding is never chosen."""
  x = jnp.asarray(X[:, :16], jnp.float32)
  for row, y in enumerate(layer_cases.ragged(model, x, (9, 6), 3)):
    np.testing.assert_allclose(y, layer_cases.whole(model, x)[row, : len(y)], atol=3e-5)


def test_packed_rows_equal_rows_of_their_own(layer):
  """B6: two documents and padding in a row; the loss counts the tokens of documents only."""
  lengths = (11, 14)
  segments = jnp.asarray([[1] * 11 + [2] * 14 + [0] * 5])
  positions = jnp.asarray([[*range(11), *range(14), *[0] * 5]])
  y, aux = call(layer, X[:1, :30], segments=segments, positions=positions)
  alone = [call(layer, X[:1, :11]), call(layer, X[:1, 11:25])]
  np.testing.assert_allclose(y[:, :11], alone[0][0], atol=2e-5)
  np.testing.assert_allclose(y[:, 11:25], alone[1][0], atol=2e-5)
  expected = np.average([a['indexer_loss'] for _, a in alone], weights=lengths)
  np.testing.assert_allclose(aux['indexer_loss'], expected, rtol=1e-5)
  assert np.isfinite(y).all()


def test_what_cannot_be_is_said():
  with pytest.raises(config.Error, match='q_rank'):
    dataclasses.replace(SPEC, latent=dataclasses.replace(LATENT, q_rank=None)).build(D, nnx.Rngs(0))
