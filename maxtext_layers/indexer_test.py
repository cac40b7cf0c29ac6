"""The parts of an indexer against the equations of the report."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import config
from maxtext_layers import indexer

RNG = np.random.default_rng(0)


def test_scores_are_equation_1():
  q, k, w = RNG.standard_normal((1, 2, 3, 4)), RNG.standard_normal((1, 5, 4)), RNG.standard_normal((1, 3, 2))
  expected = [[sum(w[0, t, j] * max(q[0, j, t] @ k[0, s], 0) for j in (0, 1)) for s in range(5)] for t in range(3)]
  np.testing.assert_allclose(indexer.scores(*(jnp.asarray(a, jnp.float32) for a in (q, k, w)))[0], expected, atol=1e-5)


def test_select_takes_so_many_and_of_equals_the_first():
  ranks = jnp.asarray([[3.0, 1.0, 1.0, 1.0, 2.0, 9.0], [0.0, 0.0, 0.0, 0.0, 0.0, 9.0], [5.0, -1.0, 4.0, 0.0, 0.0, 9.0]])
  seen = np.array([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]], bool)
  chosen = indexer.select(ranks, seen, 3).astype(int)
  assert chosen.tolist() == [[1, 1, 0, 0, 1, 0], [1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0]]
  assert indexer.select(ranks, seen, 6).tolist() == seen.tolist()


def test_divergence_and_its_gradient():
  """KL(p || q) by hand; its gradient by the ranks is softmax - p, and nothing reaches attention."""
  ranks, weights = jnp.asarray([[[1.0, 2.0, 0.5]]]), jnp.asarray([[[1.5, 0.5, 7.0]]])
  chosen = np.array([[[True, True, False]]])
  p, q = np.array([0.75, 0.25]), np.exp([1.0, 2.0]) / np.exp([1.0, 2.0]).sum()
  weights = jnp.where(chosen, weights, 0)
  np.testing.assert_allclose(indexer.divergence(ranks, weights, chosen), [[(p * np.log(p / q)).sum()]], rtol=1e-6)
  by_ranks, by_weights = jax.grad(lambda *a: indexer.divergence(*a, chosen).sum(), (0, 1))(ranks, weights)
  np.testing.assert_allclose(by_ranks[0, 0], [*(q - p), 0], atol=1e-6)
  assert not by_weights.any()


def test_what_cannot_be_is_said():
  with pytest.raises(config.Error, match='stage'):
    indexer.Spec(2, 8, 5, stage='warm')
  with pytest.raises(config.Error, match='top_k=0'):
    indexer.Spec(2, 8, 0)
