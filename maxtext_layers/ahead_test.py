"""Multi-token prediction against equations 21 to 23 of arXiv 2412.19437 in float64."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from maxtext_layers import ahead
from maxtext_layers import attention
from maxtext_layers import block
from maxtext_layers import mlp
from maxtext_layers import norm
from maxtext_layers import rope

D, T = 8, 6
MIXER = attention.Spec(2, 1, 4, rope.Spec(4, 10000.0))
SPEC = ahead.Spec(block.Spec(MIXER, mlp.Spec(12), norm.Spec()), norm.Spec(1e-5))


def made():
  """The module with every parameter at random, and its context."""
  graph, state = nnx.split(SPEC.build(D, nnx.Rngs(0)))
  rng = np.random.default_rng(1)
  draw = lambda a: jnp.asarray(rng.standard_normal(a.shape, np.float32) * 0.5 + (a.ndim == 1))
  module = nnx.merge(graph, jax.tree.map(draw, state))
  tables = {MIXER.rope: rope.table(MIXER.rope, np.arange(T)[None])}
  return module, block.Context(tables=tables, kernel='chunked')


def test_the_equations_of_the_paper():
  """Concatenation, projection and norms by hand; the block is the one of every layer, tested by itself."""
  module, context = made()
  rng = np.random.default_rng(2)
  hidden, embedded = (jnp.asarray(rng.standard_normal((1, T, D), np.float32)) for _ in range(2))
  w = lambda part: np.asarray(part.w[...], np.float64)
  rms = lambda part, x: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w(part)
  both = np.concatenate(
    [
      rms(module.embed_norm, np.asarray(embedded[0], np.float64)),
      rms(module.hidden_norm, np.asarray(hidden[0], np.float64)),
    ],
    -1,
  )
  inside, _, _ = module.block(jnp.asarray(both @ w(module.merge), jnp.float32)[None], context)
  y, aux = module(hidden, embedded, context)
  assert not aux
  np.testing.assert_allclose(y[0], rms(module.norm, np.asarray(inside[0], np.float64)), atol=1e-5)


def test_shifted():
  x = jnp.asarray([[1, 2, 3, 4]])
  assert ahead.shifted(x, 1).tolist() == [[2, 3, 4, 0]] and ahead.shifted(x, 3).tolist() == [[4, 0, 0, 0]]
