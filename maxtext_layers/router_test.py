"""Routers against a twin in float64 that goes token by token, and losses against closed forms."""

import dataclasses
import itertools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import block
from maxtext_layers import config
from maxtext_layers import router

B, T, D, E = 2, 12, 5, 12
X = np.random.default_rng(0).standard_normal((B, T, D)).astype(np.float32)
PLAIN = router.Spec(E, 3)
SPECS = {
  'softmax': PLAIN,
  'softmax of the chosen': dataclasses.replace(PLAIN, normalize=True),
  'logit bias': dataclasses.replace(PLAIN, normalize=True, bias=True),
  'one, sigmoid': router.Spec(E, 1, score='sigmoid'),
  'groups by their best': dataclasses.replace(PLAIN, groups=4, top_groups=2, scale=16.0),
  'groups by their two best': router.Spec(
    E, 4, score='sigmoid', normalize=True, scale=2.5, groups=3, top_groups=2, group_score='top2', correction=True
  ),
  'square root of softplus': router.Spec(E, 3, score='sqrt_softplus', normalize=True, scale=1.5, correction=True),
}


def build(spec, seed=0):
  """A router with everything drawn away from its first value."""
  module = router.Router(spec, D, rngs=nnx.Rngs(seed))
  rng = np.random.default_rng(seed + 1)
  for name in ('b', 'correction'):
    if (value := getattr(module, name)) is not None:
      value[...] = jnp.asarray(rng.standard_normal(E), jnp.float32)
  return module


def twin(spec, module, x):
  """(experts, weights) of one token, from the definitions."""
  of = lambda p: np.asarray(p[...], np.float64)
  logits = x.astype(np.float64) @ of(module.w) + (of(module.b) if spec.bias else 0.0)
  if spec.score == 'softmax':
    scores = np.exp(logits) / np.exp(logits).sum()
  elif spec.score == 'sigmoid':
    scores = 1 / (1 + np.exp(-logits))
  else:
    scores = np.sqrt(np.log(1 + np.exp(logits)))
  ranks = scores + (of(module.correction) if spec.correction else 0.0)
  size = spec.experts // spec.groups
  groups = [list(range(g * size, (g + 1) * size)) for g in range(spec.groups)]
  worth = {'max': lambda g: max(ranks[g]), 'top2': lambda g: sum(sorted(ranks[g])[-2:])}[spec.group_score]
  allowed = [e for g in sorted(groups, key=worth)[-spec.top_groups :] for e in g]
  chosen = sorted(allowed, key=lambda e: -ranks[e])[: spec.top_k]
  weights = scores[chosen] / (scores[chosen].sum() if spec.normalize else 1.0)
  return chosen, spec.scale * weights


@pytest.mark.parametrize('name', SPECS)
def test_choice_and_weights(name):
  spec, module = SPECS[name], build(SPECS[name])
  got = module(jnp.asarray(X), block.Context())
  for b, t in itertools.product(range(B), range(T)):
    chosen, weights = twin(spec, module, X[b, t])
    assert got.experts[b, t].tolist() == chosen
    np.testing.assert_allclose(got.weights[b, t], weights, rtol=2e-5)


def test_a_correction_counts_in_the_choice_only():
  """Not in the weights; and no gradient reaches it, while one reaches w."""
  spec = SPECS['square root of softplus']
  graph, state = nnx.split(build(spec))
  loss = lambda state: (nnx.merge(graph, state)(jnp.asarray(X), block.Context()).weights ** 2).sum()
  grads = jax.grad(loss)(state)
  assert not np.any(grads['correction'][...]) and np.any(grads['w'][...])
  assert state['correction'].get_metadata('fixed') and not state['w'].get_metadata('fixed', False)


@pytest.mark.parametrize('score', router.SCORES)
def test_tiny_scores_still_make_weights(score):
  """F5: scores of 1e-25 and less: weights that sum to 1, a balance loss of 1 or more, gradients that are numbers."""
  spec = router.Spec(4, 2, score=score, normalize=True, balance=router.Balance(1.0))
  module = router.Router(spec, 1, rngs=nnx.Rngs(0))
  x = jnp.asarray([[[1.0], [0.9]]])
  for low in (-58.0, -90.0, -300.0):
    module.w[...] = jnp.asarray([[low, low - 1, low - 2, low - 3]])
    graph, state = nnx.split(module)

    def loss(state, graph=graph):
      out = nnx.merge(graph, state)(x, block.Context())
      return out.aux['balance_loss'] + out.weights[..., 0].sum(), out

    grads, out = jax.grad(loss, has_aux=True)(state)
    grads = grads['w'][...]
    assert np.isfinite(grads).all() and np.any(grads)
    np.testing.assert_allclose(out.weights.sum(-1), 1, rtol=1e-6)
    assert 1 <= out.aux['balance_loss'] <= 4


def test_experts_by_token_id():
  """Looked up, weighed by scores; ids are in the order of the table."""
  spec = router.Spec(E, 2, score='sqrt_softplus', normalize=True, table=7)
  module = build(spec)
  table = np.random.default_rng(3).permuted(np.tile(np.arange(E), (7, 1)), axis=1)[:, :2]
  module.table[...] = jnp.asarray(table)
  tokens = np.random.default_rng(4).integers(0, 7, (B, T))
  got = module(jnp.asarray(X), block.Context(tokens=jnp.asarray(tokens)))
  np.testing.assert_array_equal(got.experts, table[tokens])
  scores = np.sqrt(np.log1p(np.exp(X.astype(np.float64) @ np.asarray(module.w[...], np.float64))))
  scores = np.take_along_axis(scores, table[tokens], -1)
  np.testing.assert_allclose(got.weights, scores / scores.sum(-1, keepdims=True), rtol=2e-5)
  with pytest.raises(ValueError, match='needs the token ids'):
    module(jnp.asarray(X), block.Context())


def losses(spec, logits, segments=None):
  """aux of a router whose logits are given: [B, T, E] of a one-hot x."""
  logits = np.asarray(logits, np.float32)
  b, t, e = logits.shape
  module = router.Router(spec, b * t, rngs=nnx.Rngs(0))
  module.w[...] = jnp.asarray(logits.reshape(b * t, e))
  x = jnp.eye(b * t).reshape(b, t, b * t)
  return module(x, block.Context(segments=None if segments is None else jnp.asarray(segments))).aux


BALANCED = router.Balance(1.0, z_loss=1.0)


def test_balance_loss_of_known_loads():
  """F1: equal loads give 1, one expert that gets all gives E; adding a number to all logits changes nothing."""
  spec = router.Spec(4, 1, balance=BALANCED)
  equal = 40.0 * np.eye(4)[None]
  np.testing.assert_allclose(losses(spec, equal)['balance_loss'], 1.0, rtol=1e-6)
  one = np.tile([40.0, 0, 0, 0], (1, 4, 1))
  np.testing.assert_allclose(losses(spec, one)['balance_loss'], 4.0, rtol=1e-6)
  uneven = np.random.default_rng(0).standard_normal((2, 5, 4))
  a, b = losses(spec, uneven)['balance_loss'], losses(spec, uneven + 3.0)['balance_loss']
  np.testing.assert_allclose(a, b, rtol=1e-6)
  assert abs(a - 1) > 1e-2


def test_balance_loss_by_hand():
  """F8: two tokens, three experts, two choices each: shares (.5 .3 .2) and (.1 .3 .6), loads 1 2 1 of 4."""
  logits = np.log([[[0.5, 0.3, 0.2], [0.1, 0.3, 0.6]]])
  f, p = [1 / 4, 2 / 4, 1 / 4], [0.3, 0.3, 0.4]
  aux = losses(router.Spec(3, 2, balance=BALANCED), logits)
  np.testing.assert_allclose(aux['balance_loss'], 3 * np.dot(f, p), rtol=1e-6)
  np.testing.assert_allclose(aux['router_z_loss'], 0.0, atol=1e-10)  # these logits are logarithms of shares
  aux = losses(router.Spec(3, 2, balance=router.Balance(0.5, z_loss=0.1)), logits + 2.0)
  np.testing.assert_allclose(aux['balance_loss'], 0.5 * 3 * np.dot(f, p), rtol=1e-6)
  np.testing.assert_allclose(aux['router_z_loss'], 0.1 * 2.0**2, rtol=1e-6)


def test_sigmoid_shares_are_normalised():
  """arXiv 2412.19437, equation 19: a token's sigmoids divided by their sum."""
  logits = np.random.default_rng(1).standard_normal((2, 3, 4))
  s = 1 / (1 + np.exp(-logits))
  p = (s / s.sum(-1, keepdims=True)).mean((0, 1))
  f = np.bincount(np.argsort(-logits, -1)[..., :2].ravel(), minlength=4) / (2 * 6)
  aux = losses(router.Spec(4, 2, score='sigmoid', balance=BALANCED), logits)
  np.testing.assert_allclose(aux['balance_loss'], 4 * np.dot(f, p), rtol=1e-5)


def test_padding_is_in_no_load_and_no_loss():
  """Rows with and without padding give what their real tokens give alone."""
  rng = np.random.default_rng(2)
  logits, segments = rng.standard_normal((2, 4, 4)), np.array([[1, 1, 2, 0], [0, 0, 0, 0]])
  spec = router.Spec(4, 2, correction=True, balance=BALANCED)
  padded, alone = losses(spec, logits, segments), losses(spec, logits[:1, :3])
  for name in ('balance_loss', 'router_z_loss'):
    np.testing.assert_allclose(padded[name], alone[name], rtol=1e-6)
  np.testing.assert_array_equal(padded['loads']['correction'], alone['loads']['correction'])
  assert padded['loads']['correction'].sum() == 2 * 3
  nothing = losses(spec, logits, np.zeros((2, 4)))
  assert [float(nothing[name]) for name in ('balance_loss', 'router_z_loss')] == [0, 0]
  got = build(PLAIN)(jnp.asarray(X[:, :4]), block.Context(segments=jnp.asarray(segments)))
  assert (np.asarray(got.experts)[segments == 0] == E).all() and (np.asarray(got.experts)[segments > 0] < E).all()
  assert not np.asarray(got.weights)[segments == 0].any()


def test_scope_of_a_sequence():
  """F9: the mean of the losses of each row by itself; a row of padding is none."""
  logits = np.random.default_rng(3).standard_normal((3, 6, 4))
  segments = np.ones((3, 6), int)
  segments[1, 4:] = 0
  segments[2] = 0
  spec = router.Spec(4, 2, balance=router.Balance(1.0, scope='sequence'))
  micro = dataclasses.replace(spec, balance=router.Balance(1.0))
  rows = [losses(micro, logits[:1])['balance_loss'], losses(micro, logits[1:2, :4])['balance_loss']]
  np.testing.assert_allclose(losses(spec, logits, segments)['balance_loss'], np.mean(rows), rtol=1e-6)
  assert abs(losses(micro, logits, segments)['balance_loss'] - np.mean(rows)) > 1e-3


def test_the_gradient_of_a_balance_loss_reaches_the_router():
  """F3: it is there, doubles with the coefficient, and is 0 without."""

  def gradient(coefficient):
    spec = router.Spec(E, 2, balance=router.Balance(coefficient))
    graph, state = nnx.split(build(spec))
    total = lambda state: sum(nnx.merge(graph, state)(jnp.asarray(X), block.Context()).aux.values(), jnp.zeros(()))
    return np.asarray(jax.grad(total)(state)['w'][...])

  assert np.any(gradient(0.01))
  np.testing.assert_allclose(gradient(0.02), 2 * gradient(0.01), rtol=1e-6)
  assert not np.any(gradient(0.0))


@pytest.mark.parametrize(
  'wrong, words',
  [
    (dict(score='softmin'), "score 'softmin'"),
    (dict(top_k=13), 'top_k=13'),
    (dict(groups=5), 'groups=5'),
    (dict(groups=0), 'groups=0'),
    (dict(groups=12, top_groups=6, group_score='top2'), 'groups=12 of experts=12 hold one each'),
    (dict(groups=12, top_groups=2), 'top_k=3 is more than'),
    (dict(group_score='mean'), "group_score 'mean'"),
  ],
)
def test_specs_that_make_no_sense(wrong, words):
  with pytest.raises(config.Error, match=words):
    dataclasses.replace(PLAIN, **wrong)
