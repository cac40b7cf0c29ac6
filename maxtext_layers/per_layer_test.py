"""Per-layer inputs against their equations in float64, from the docstrings of transformers' modules."""

import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from maxtext_layers import norm
from maxtext_layers import per_layer

RNG = np.random.default_rng(0)
B, T, D, L, P, V = 2, 3, 8, 4, 5, 11


def randomised(module):
  graph, state = nnx.split(module)
  draw = lambda a: jnp.asarray(RNG.standard_normal(a.shape, np.float32) * 0.5 + (a.ndim == 1))
  return nnx.merge(graph, jax.tree.map(draw, state))


def rms(a, weight, eps):
  return a / np.sqrt((a * a).mean(-1, keepdims=True) + eps) * weight


def test_inputs_of_all_layers():
  """(norm(x W / sqrt(D)) + sqrt(P) E[id]) / sqrt(2), layers first; the table's columns are layer by layer."""
  maker = randomised(per_layer.Inputs(V, L, P, norm.Spec(1e-3)).build(D, nnx.Rngs(0)))
  ids, x = RNG.integers(0, V, (B, T)), RNG.standard_normal((B, T, D))
  table, project, weight = (np.asarray(w[...], np.float64) for w in (maker.embed.w, maker.project.w, maker.norm.w))
  assert table.shape == (V, L * P) and project.shape == (D, L, P)
  got = maker(jnp.asarray(ids), jnp.asarray(x, jnp.float32))
  assert got.shape == (L, B, T, P)
  for layer in range(L):
    seen = rms(x @ project[:, layer] / math.sqrt(D), weight, 1e-3)
    looked = math.sqrt(P) * table[ids][..., layer * P : (layer + 1) * P]
    np.testing.assert_allclose(got[layer], (seen + looked) / math.sqrt(2), atol=1e-5)


def test_what_a_layer_adds():
  """norm(W2 (gelu(W1 x) * p)), with the tanh form of gelu (arXiv 1606.08415)."""
  mixed = randomised(per_layer.Spec(P, norm.Spec(1e-3)).build(D, nnx.Rngs(0)))
  x, given = RNG.standard_normal((B, T, D)), RNG.standard_normal((B, T, P))
  gate, out, weight = (np.asarray(w[...], np.float64) for w in (mixed.gate.w, mixed.out.w, mixed.norm.w))
  h = x @ gate
  h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
  got = mixed(jnp.asarray(x, jnp.float32), jnp.asarray(given, jnp.float32))
  np.testing.assert_allclose(got, rms((h * given) @ out, weight, 1e-3), atol=1e-5)
