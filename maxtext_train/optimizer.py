"""AdamW (arXiv 1711.05101) as parts of optax, and the list of what decays.

An optimizer here maps gradients to a *direction*; the learning rate, the global clip and the decision to skip a step are
the step's, because they need one scalar for all leaves. So no scheduler state exists, and another optimizer is another
function with the signature of `build`.

Reading order: `Config`, `build`, `decayed`.
"""

from collections.abc import Iterable
import fnmatch
import re
from typing import Any

import jax
import jax.numpy as jnp
from maxtext_layers import config
import optax

DEFAULT = ('norm', 'bias', 'embed')


@config.config
class Config:
  """`no_decay` are patterns on parameter paths, see `matches`; () decays everything."""

  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.1
  no_decay: tuple[str, ...] = DEFAULT
  clip: float | None = 1.0  # global norm; None does not clip

  def check(self) -> None:
    for name in ('b1', 'b2'):
      if not 0.0 <= getattr(self, name) < 1.0:
        raise config.Error(f'{name}={getattr(self, name)} lies outside 0 … 1')
    if self.eps <= 0.0:
      raise config.Error(f'eps={self.eps} is not positive')
    if self.weight_decay < 0.0:
      raise config.Error(f'weight_decay={self.weight_decay} is negative')
    if self.clip is not None and self.clip <= 0.0:
      raise config.Error(f'clip={self.clip} is not positive; none switches clipping off')


def build(settings: Config, params: Any) -> optax.GradientTransformation:
  """The transformation (gradients, moments, params) -> (direction, moments); a step subtracts rate × direction.

  Moments are float32 whatever the parameters are. `params` may be abstract: only paths and shapes are read.

  Raises:
    config.Error: a pattern of `no_decay` matches no parameter.
  """
  parts = [_float32(optax.scale_by_adam(settings.b1, settings.b2, settings.eps))]
  if settings.weight_decay:
    parts.append(_decay(settings.weight_decay, mask(settings, params)))
  return optax.chain(*parts)


def decayed(settings: Config, params: Any) -> tuple[list[str], list[str]]:
  """(paths that decay, paths that do not), for a reader."""
  names, flags = paths(params), jax.tree.leaves(mask(settings, params))
  return ([n for n, flag in zip(names, flags, strict=True) if flag],
          [n for n, flag in zip(names, flags, strict=True) if not flag])  # fmt: skip


def mask(settings: Config, params: Any) -> Any:
  """A tree like `params` of bools: whether a leaf decays. Decided by path, never by rank: a scanned norm is a matrix."""
  names = paths(params)
  if not settings.weight_decay:
    return jax.tree.map(lambda _: False, params)
  for pattern in settings.no_decay:
    # a model without biases is no mistake of the user's; a pattern of his own that does nothing is one
    if pattern not in DEFAULT and not any(matches(pattern, name) for name in names):
      words = {word for name in names for word in name.split('.')}
      raise config.Error(f'no_decay: {pattern!r} matches no parameter{config.nearest(pattern, words)}')
  flags = [not any(matches(pattern, name) for pattern in settings.no_decay) for name in names]
  return jax.tree.unflatten(jax.tree.structure(params), flags)


def matches(pattern: str, path: str) -> bool:
  """Whether a pattern (shell wildcards) is the path, a run of whole words of it, or a part of a word set off by `_`.

  >>> [
  ...   matches(p, 'stack.segments.0.blocks.0.mixer_norm.w')
  ...   for p in ('norm', 'mixer_norm', 'stack.*.w', 'or', 'blocks.0')
  ... ]
  [True, True, True, False, True]
  """
  if fnmatch.fnmatchcase(path, pattern) or f'.{pattern}.' in f'.{path}.':
    return True
  return any(fnmatch.fnmatchcase(word, pattern) for word in re.split(r'[._]', path) + path.split('.'))


def paths(params: Any) -> list[str]:
  """Dotted paths of the leaves, in the order of `jax.tree.leaves`."""
  keys = [path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
  return [jax.tree_util.keystr(key, simple=True, separator='.').removesuffix('.value') for key in keys]


def _float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
  """`inner` with float32 state and arithmetic; optax takes the dtype of the second moment from the parameters."""
  cast = lambda tree: None if tree is None else jax.tree.map(lambda a: a.astype(jnp.float32), tree)
  return optax.GradientTransformation(
    lambda params: inner.init(cast(params)), lambda grads, moments, params=None: inner.update(cast(grads), moments)
  )


def _decay(rate: float, flags: Any) -> optax.GradientTransformation:
  """Adds rate × parameter where the flag is set, in float32 (optax's takes the dtype of the parameters)."""

  def update(directions, state, params):
    add = lambda d, p, flag: d + rate * p.astype(jnp.float32) if flag else d
    return jax.tree.map(add, directions, params, flags), state

  return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def global_norm(tree: Any) -> jax.Array:
  """The Euclidean norm over all leaves, float32."""
  return jnp.sqrt(sum(squares(jax.tree.leaves(tree)), jnp.zeros((), jnp.float32)))


def squares(leaves: Iterable[jax.Array]) -> list[jax.Array]:
  return [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in leaves]
