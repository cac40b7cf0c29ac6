"""Residual paths of several streams: hyper-connections, free (arXiv 2409.19606) or on a manifold (arXiv 2512.24880).

x [B, T, S, D] holds S streams, which begin as copies of the embedding. A layer f reads one mixture of them, and what it
says is shared out to all, which are mixed with each other:

  h = sum_s read[s] x[s]          x'[r] = sum_s mix[s, r] x[s] + share[r] f(h)

`read` [S], `share` [S] and `mix` [S, S] belong to the token: a learned constant, plus a learned map of what the streams
hold. How they are kept within bounds is what the two specs differ in. A plain residual path is one stream with ones.

Reading order: `Free`, `Manifold`, then their modules, `sinkhorn`. A spec has `streams`; `build(d_model, rngs)`, whose
module maps x to (h, add) with add(f(h)) = x'; `collapse(d_model, rngs)`, which makes one stream of all at the end.
"""

from collections.abc import Callable
import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from maxtext_layers import config
from maxtext_layers import linear
from maxtext_layers import norm
from maxtext_layers import param

type Connected = tuple[jax.Array, Callable[[jax.Array], jax.Array]]


@config.spec
class Free:
  """Each number is a constant plus `scale` times a tanh (arXiv 2409.19606, the dynamic form); streams are summed up."""

  streams: int
  scale: float = 0.01  # at first
  eps: float = 1e-6  # of the norm of each stream, which has no weight: the map that follows could hold it

  def __post_init__(self):
    config.whole(self, 'streams')
    _finite(self, 'scale', 'eps')

  def build(self, d_model: int, rngs: nnx.Rngs) -> 'FreeConnection':
    """The module of one layer."""
    return FreeConnection(self, d_model, rngs=rngs)

  def collapse(self, d_model: int, rngs: nnx.Rngs) -> 'Total':
    """The sum."""
    del d_model, rngs
    return Total()


@config.spec
class Manifold:
  """`read` in (0, 1), `share` in (0, 2), rows and columns of `mix` sum to 1 (arXiv 2512.24880, equations 7 to 9)."""

  streams: int = 4
  iterations: int = 20  # of Sinkhorn and Knopp
  scale: float = 0.01  # of the maps, at first
  eps: float = 1e-6  # added to `read`, to the exponentials and to every sum that they are divided by
  norm_eps: float = 1e-6

  def __post_init__(self):
    config.whole(self, 'streams', 'iterations')
    _finite(self, 'scale', 'eps', 'norm_eps')

  def build(self, d_model: int, rngs: nnx.Rngs) -> 'ManifoldConnection':
    """The module of one layer."""
    return ManifoldConnection(self, d_model, rngs=rngs)

  def collapse(self, d_model: int, rngs: nnx.Rngs) -> 'Collapse':
    """A mixture that depends on the token, as a layer would read it."""
    return Collapse(self, d_model, rngs=rngs)


def widen(x: jax.Array, streams: int) -> jax.Array:
  """[B, T, D] -> [B, T, S, D], copies."""
  return jnp.broadcast_to(x[:, :, None], (*x.shape[:2], streams, x.shape[2]))


class FreeConnection(nnx.Module):
  """Parameters project [D, 2 + S] (read, share, mix), b_read, b_share [S], b_mix [S, S], scale [2].

  Begins as plain residual paths: every stream stays, gets all that the layer says, and one of them is read. Which one
  is drawn and not counted off by layers, so that it does not depend on how layers are scanned.
  """

  maps = ('project',)

  def __init__(self, spec: Free, d_model: int, *, rngs: nnx.Rngs):
    s = spec.streams
    self.spec = spec
    one = jax.nn.one_hot(jax.random.randint(rngs.params(), (), 0, s), s)
    self.project = param.constant((d_model, 2 + s), ('embed', None), value=0.0)
    self.b_read = param.given(one, (None,))
    self.b_share = param.constant((s,), (None,), value=1.0)
    self.b_mix = param.given(jnp.eye(s), (None, None))
    self.scale = param.constant((2,), (None,), value=spec.scale)  # of read and mix, and of share

  def __call__(self, x: jax.Array) -> Connected:
    """x [B, T, S, D] -> (h [B, T, D], add)."""
    y = x.astype(jnp.float32) * norm.inverse(x, self.spec.eps)
    bent = jnp.tanh(linear.einsum('BTSD,DM->BTSM', y, self.project[...]))
    of_streams, of_layer = self.scale[...]
    read = self.b_read[...] + of_streams * bent[..., 0]
    share = self.b_share[...] + of_layer * bent[..., 1]
    return _connect(x, read, share, self.b_mix[...] + of_streams * bent[..., 2:])


class ManifoldConnection(nnx.Module):
  """Parameters project [S, D, M], b [M] and scale [3], M = S + S + S * S: of read, share and mix, in this order."""

  def __init__(self, spec: Manifold, d_model: int, *, rngs: nnx.Rngs):
    s = spec.streams
    size = (2 + s) * s
    self.spec = spec
    self.project = linear.Linear('BTSD,SDM->BTM', (s, d_model, size), (None, 'embed', None), rngs=rngs)
    self.b = param.constant((size,), (None,), value=0.0)
    self.scale = param.constant((3,), (None,), value=spec.scale)

  def __call__(self, x: jax.Array) -> Connected:
    """x [B, T, S, D] -> (h [B, T, D], add)."""
    spec, s = self.spec, self.spec.streams
    scale = jnp.repeat(self.scale[...], np.array([s, s, s * s]), total_repeat_length=(2 + s) * s)
    y = _mapped(x, self.project, spec.norm_eps) * scale + self.b[...]
    read, share, mix = jnp.split(y, [s, 2 * s], -1)
    mix = sinkhorn(mix.reshape(*mix.shape[:-1], s, s), spec.iterations, spec.eps)
    return _connect(x, jax.nn.sigmoid(read) + spec.eps, 2 * jax.nn.sigmoid(share), mix)


class Total(nnx.Module):
  """[B, T, S, D] -> [B, T, D], the sum of the streams."""

  def __call__(self, x: jax.Array) -> jax.Array:
    """x [B, T, S, D] -> [B, T, D]."""
    return x.sum(2)


class Collapse(nnx.Module):
  """Parameters project [S, D, S], b [S] and scale [1]: [B, T, S, D] -> [B, T, D], what a layer would read."""

  def __init__(self, spec: Manifold, d_model: int, *, rngs: nnx.Rngs):
    s = spec.streams
    self.spec = spec
    self.project = linear.Linear('BTSD,SDM->BTM', (s, d_model, s), (None, 'embed', None), rngs=rngs)
    self.b = param.constant((s,), (None,), value=0.0)
    self.scale = param.constant((1,), (None,), value=spec.scale)

  def __call__(self, x: jax.Array) -> jax.Array:
    """x [B, T, S, D] -> [B, T, D]."""
    y = _mapped(x, self.project, self.spec.norm_eps) * self.scale[...] + self.b[...]
    return _read(x, jax.nn.sigmoid(y) + self.spec.eps)


def sinkhorn(x: jax.Array, iterations: int, eps: float = 0.0) -> jax.Array:
  """x [.., S, S] -> exp(x) with rows and columns divided by their sums in turn, `iterations` times, columns last.

  The first division of rows is a softmax, so that no exponential overflows; with eps no sum that is divided by is 0.
  """
  x = jax.nn.softmax(x, -1) + eps
  x = x / (x.sum(-2, keepdims=True) + eps)
  for _ in range(iterations - 1):
    x = x / (x.sum(-1, keepdims=True) + eps)
    x = x / (x.sum(-2, keepdims=True) + eps)
  return x


def _finite(spec, *names):
  """config.Error unless these fields are numbers from 0 on."""
  for name in names:
    if not 0 <= (value := getattr(spec, name)) < math.inf:
      raise config.Error(f'{name}={value!r} is not a number from 0 on')


def _mapped(x, maps, eps):
  """The maps of all streams of a token as one normed vector, float32 [B, T, M]; the norm comes after the product."""
  return maps(x.astype(jnp.float32)) * norm.inverse(x, eps, (2, 3))[..., 0]


def _read(x, read):
  return jnp.einsum('BTSD,BTS->BTD', x, read.astype(x.dtype), preferred_element_type=jnp.float32).astype(x.dtype)


def _connect(x, read, share, mix) -> Connected:
  def add(y):
    kept = jnp.einsum('BTSD,BTSR->BTRD', x, mix.astype(x.dtype), preferred_element_type=jnp.float32)
    return (kept + share[..., None] * y[:, :, None].astype(jnp.float32)).astype(x.dtype)

  return _read(x, read), add
