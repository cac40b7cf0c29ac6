"""A dense layer beside experts against its equation in float64, with every number drawn at random."""

import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from maxtext_layers import beside
from maxtext_layers import block
from maxtext_layers import mlp
from maxtext_layers import moe
from maxtext_layers import norm
from maxtext_layers import router

B, T, D, E, K = 2, 7, 12, 5, 2
SPEC = beside.Spec(
  mlp.Spec(20, 'gelu'), moe.Spec(router.Spec(E, K, normalize=True), 8, activation='gelu'), norm.Spec(1e-3)
)


def gelu(a):
  return 0.5 * a * (1 + np.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))


def test_the_equation():
  rng = np.random.default_rng(0)
  graph, state = nnx.split(SPEC.build(D, nnx.Rngs(0)))
  draw = lambda a: jnp.asarray(rng.standard_normal(a.shape, np.float32) * 0.5 + (a.ndim == 1))
  layer = nnx.merge(graph, jax.tree.map(draw, state))
  of = lambda variable: np.asarray(variable[...], np.float64)
  rms = lambda a, module: a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-3) * of(module.w)
  x = rng.standard_normal((B, T, D))

  d = layer.dense
  h = rms(x, layer.dense_norm)
  expected = rms((gelu(h @ of(d.gate.w)) * (h @ of(d.up.w))) @ of(d.down.w), layer.dense_out)
  logits = rms(x, layer.router_norm) / math.sqrt(D) @ of(layer.router.w)
  h, e = rms(x, layer.experts_norm), layer.experts
  routed = np.zeros((B, T, D))
  for b in range(B):
    for t in range(T):
      chosen = np.argsort(-logits[b, t])[:K]
      raised = np.exp(logits[b, t, chosen])
      for weight, i in zip(raised / raised.sum(), chosen):
        hidden = gelu(h[b, t] @ of(e.gate)[i]) * (h[b, t] @ of(e.up)[i])
        routed[b, t] += weight * of(layer.expert_scale)[i] * (hidden @ of(e.down)[i])
  expected = expected + rms(routed, layer.experts_out)
  got, _ = layer(jnp.asarray(x, jnp.float32), block.Context())
  np.testing.assert_allclose(got, expected, atol=1e-4)


def test_padding_is_finite_and_changes_nothing():
  """C15: tokens that go to no expert have finite outputs and gradients, and leave the others as they are."""
  layer = SPEC.build(D, nnx.Rngs(0))
  x = jnp.asarray(np.random.default_rng(1).standard_normal((B, T, D), np.float32))
  segments = jnp.asarray([[1] * 5 + [0] * 2, [0] * 7])
  graph, state = nnx.split(layer)

  def loss(state, x, segments):
    y = nnx.merge(graph, state)(x, block.Context(segments=segments))[0]
    return (y**2).sum(), y

  (_, y), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(state, x, segments)
  assert jnp.isfinite(y).all() and all(jnp.isfinite(g).all() for g in jax.tree.leaves(grads))
  np.testing.assert_allclose(y[0, :5], loss(state, x[:1, :5], None)[1][0], atol=1e-5)
