"""AdamW (arXiv 1711.05101) as parts of optax, and the list of what decays.

An optimizer here maps gradients to a *direction*. The learning rate, the global clip and the decision to skip a step
are the step's, because each is one scalar for all leaves; so no scheduler state exists, and another optimizer is
another function with the signature of `build`.

A transformation gets the keyword `applied` (bool scalar) and leaves its moments as they are where it is False. Done
inside, before the direction is taken from them, this is free; a select around a finished update needs old and new
moments at once and costs a copy of the state, twice the time of the update. `guarded` does it for transformations that
know nothing of it.

Reading order: `Config`, `build`, `decayed`, `matches`.
"""

import fnmatch
import math
import re
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import optax

from maxtext_layers import config

# a bias is the leaf `b` of a linear map; the last four are gates and scalars: a delta net's, those of attention, and of
# hyper-connections
DEFAULT = ('norm', 'b', 'embed', 'a_log', 'dt_bias', 'sinks', 'scale')


@config.config
class Config:
  """`no_decay` are patterns on parameter paths, see `matches`; () decays everything."""

  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.1
  no_decay: tuple[str, ...] = DEFAULT
  clip: float | None = 1.0  # global norm; None does not clip
  only: tuple[str, ...] = ()  # patterns of what is trained, all else stays as it is; (): everything is trained
  balance_rate: float = 0.001  # how far a router's selection bias moves in an update (arXiv 2408.15664); 0: not at all

  def check(self) -> None:
    """Raises config.Error naming the field and its value."""
    for name in ('b1', 'b2'):
      if not 0.0 <= getattr(self, name) < 1.0:
        raise config.Error(f'{name}={getattr(self, name)} lies outside 0 … 1')
    if self.eps <= 0.0:
      raise config.Error(f'eps={self.eps} is not positive')
    if self.weight_decay < 0.0:
      raise config.Error(f'weight_decay={self.weight_decay} is negative')
    if self.clip is not None and self.clip <= 0.0:
      raise config.Error(f'clip={self.clip} is not positive; none switches clipping off')
    if self.balance_rate < 0.0:
      raise config.Error(f'balance_rate={self.balance_rate} is negative')


def build(settings: Config, params: Any) -> optax.GradientTransformationExtraArgs:
  """The transformation (gradients, moments, params) -> (direction, moments); a step subtracts rate × direction.

  Moments are float32 whatever the parameters are. `params` may be abstract: only paths and shapes are read.

  Raises:
    config.Error: a pattern of `no_decay` or `only` matches no parameter.
  """
  trained(params, settings.only)
  parts = [adam(settings.b1, settings.b2, settings.eps)]
  if settings.weight_decay:
    parts.append(_decay(settings.weight_decay, mask(settings, params)))
  return optax.chain(*parts)


def decayed(settings: Config, params: Any) -> tuple[list[str], list[str]]:
  """(paths that decay, paths that do not), for a reader."""
  names, flags = paths(params), jax.tree.leaves(mask(settings, params))
  return ([n for n, flag in zip(names, flags, strict=True) if flag],
          [n for n, flag in zip(names, flags, strict=True) if not flag])  # fmt: skip


def mask(settings: Config, params: Any) -> Any:
  """A tree like `params` of bools: whether a leaf decays. By path, never by rank: a scanned norm is a matrix.

  What is not trained does not decay.
  """
  names = paths(params)
  if not settings.weight_decay:
    return jax.tree.map(lambda _: False, params)
  for pattern in settings.no_decay:
    # a model without biases is no mistake of the user's; a pattern of his own that does nothing is one
    if pattern not in DEFAULT and not any(matches(pattern, name) for name in names):
      words = {word for name in names for word in name.split('.')}
      raise config.Error(f'no_decay: {pattern!r} matches no parameter{config.nearest(pattern, words)}')
  moved = jax.tree.leaves(trained(params, settings.only))
  decays = lambda name: not any(matches(pattern, name) for pattern in settings.no_decay)
  flags = [decays(name) and moves for name, moves in zip(names, moved, strict=True)]
  return jax.tree.unflatten(jax.tree.structure(params), flags)


def trained(params: Any, only: tuple[str, ...] = ()) -> Any:
  """A tree like `params` of bools: whether a gradient moves a leaf.

  None moves what belongs to a model as it is (param.fixed, param.numbers), nor what no pattern of `only` names, if
  there are any. A selection bias that `only` does not name is not moved by loads either.

  Raises:
    config.Error: a pattern matches no parameter.
  """
  names = paths(params)
  for pattern in only:
    if not any(matches(pattern, name) for name in names):
      words = {word for name in names for word in name.split('.')}
      raise config.Error(f'only: {pattern!r} matches no parameter{config.nearest(pattern, words)}')
  fixed = [isinstance(p, nnx.Variable) and p.get_metadata('fixed', False) for p in _variables(params)]
  flags = [named(only, name) and not still for name, still in zip(names, fixed, strict=True)]
  return jax.tree.unflatten(jax.tree.structure(params), flags)


def named(only: tuple[str, ...], path: str) -> bool:
  """Whether a path is among those that are trained."""
  return not only or any(matches(pattern, path) for pattern in only)


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


def _variables(params):
  """What `paths` names, with its metadata where it has some."""
  return jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def adam(b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
  """gradient -> mean / (sqrt(mean square) + eps), bias-corrected (arXiv 1412.6980); all of it float32."""

  def init(params):
    zeros = lambda: jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zeros(), zeros())

  def update(grads, moments, params=None, *, applied=True, **_):
    count = jnp.where(applied, moments.count + 1, moments.count)
    average = lambda decay, new, old: jnp.where(applied, decay * old + (1.0 - decay) * new, old)
    mu = jax.tree.map(lambda m, g: average(b1, g.astype(jnp.float32), m), moments.mu, grads)
    nu = jax.tree.map(lambda v, g: average(b2, jnp.square(g.astype(jnp.float32)), v), moments.nu, grads)
    mu_left, nu_left = _correction(b1, count), _correction(b2, count)
    direction = jax.tree.map(lambda m, v: (m / mu_left) / (jnp.sqrt(v / nu_left) + eps), mu, nu)
    return direction, optax.ScaleByAdamState(count, mu, nu)

  return optax.GradientTransformationExtraArgs(init, update)


def _correction(decay: float, count: jax.Array) -> jax.Array:
  """1 - decay ** count, without cancellation at the first steps."""
  return -jnp.expm1(count.astype(jnp.float32) * (math.log(decay) if decay else -math.inf))


def guarded(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """Any optax transformation, made to understand `applied`."""

  def update(grads, moments, params=None, *, applied=True, **_):
    direction, new = inner.update(grads, moments, params)
    return direction, jax.tree.map(lambda n, o: jnp.where(applied, n.astype(o.dtype), o), new, moments)

  return optax.GradientTransformationExtraArgs(inner.init, update)


def _decay(rate: float, flags: Any) -> optax.GradientTransformation:
  """Adds rate × parameter where the flag is set, in float32 (optax's takes the dtype of the parameters)."""

  def update(directions, state, params):
    add = lambda d, p, flag: d + rate * p.astype(jnp.float32) if flag else d
    return jax.tree.map(add, directions, params, flags), state

  return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def global_norm(tree: Any) -> jax.Array:
  """The Euclidean norm over all leaves, float32."""
  squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
  return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))
