"""Dropout whose noise depends on the step, the micro-batch, the layer and the site, and on nothing else.

The key of a step is folded from the run's key (`step_key`), the stack folds in the layer index, a block the site: the
same elements are dropped whether the layers are scanned or unrolled and before or after a run is resumed. Reading
order: `step_key`, `layer_key`, `apply`.
"""

import jax
import jax.numpy as jnp

SITES = ('embedding', 'attention', 'mixer', 'ffn', 'given')


def step_key(key: jax.Array, step: jax.Array | int, micro: jax.Array | int = 0) -> jax.Array:
  """The key of micro-batch `micro` of training step `step`."""
  return jax.random.fold_in(jax.random.fold_in(key, step), micro)


def layer_key(key: jax.Array | None, layer: jax.Array | int) -> jax.Array | None:
  """The key of a layer; layer -1 is what lies before the first."""
  return None if key is None else jax.random.fold_in(key, jnp.uint32(layer + 1))


def apply(x: jax.Array, key: jax.Array | None, rate: float, site: str) -> jax.Array:
  """Zeros each element with probability `rate` and scales the others by 1 / (1 - rate); without a key, x itself."""
  if key is None or rate == 0.0:
    return x
  keep = jax.random.bernoulli(jax.random.fold_in(key, SITES.index(site)), 1.0 - rate, x.shape)
  return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))
