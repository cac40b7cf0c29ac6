"""Gated delta net (arXiv 2412.06464): a matrix a head that a gate makes forget and a delta rule corrects.

A head remembers S [W, H], from which a key reads a value. Token t leaves, with a decay alpha and a strength beta, both
in (0, 1),

  S_t = S_{t-1} alpha_t (I - beta_t k_t k_t') + beta_t v_t k_t'        o_t = S_t q_t        (equation 10)

Queries, keys and values come out of a short causal convolution a channel, queries and keys have length 1, and the
output is normed and gated. Many tokens are worked on in chunks, by products of matrices within a chunk and one small
step a chunk (section 3.3); one token by the equation. In packed rows the matrix and the convolution begin anew with
every document.

Here S is kept transposed, [H, W]; G key heads have R value heads each, so that no key is ever repeated. Reading order:
`Spec`, `DeltaNet`, `chunked`, `step`, `convolve`.
"""

import math

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from maxtext_layers import cache
from maxtext_layers import config
from maxtext_layers import linear
from maxtext_layers import mask
from maxtext_layers import norm
from maxtext_layers import param
from maxtext_layers import sharding

CHUNK = 64  # tokens: section 3.3 and the published kernels
EPS = 1e-6  # under the square root of a key's length


@config.spec
class Spec:
  """What a gated delta net is."""

  key_heads: int
  value_heads: int  # a multiple of key_heads; neighbours share a key head
  key_dim: int
  value_dim: int
  norm: norm.Spec  # of the output, over value_dim, before its gate
  taps: int = 4  # of the convolution: a token and the taps - 1 before it

  def __post_init__(self):
    config.whole(self, 'key_heads', 'value_heads', 'key_dim', 'value_dim', 'taps')
    if self.value_heads % self.key_heads:
      raise config.Error(f'value_heads={self.value_heads} is no multiple of key_heads={self.key_heads}')

  @property
  def rope(self) -> None:
    """No positions: the decay tells how far back a token lies."""
    return None

  def build(self, d_model: int, rngs: nnx.Rngs) -> 'DeltaNet':
    """The module."""
    return DeltaNet(self, d_model, rngs=rngs)

  def cache(self, count: int, batch: int, length: int, dtype) -> tuple[jax.Array, ...]:
    """Memory of `count` layers: the last inputs of the convolutions of q, k and v, and the matrix, float32.

    Its size does not depend on `length`. Padding must be said by negative positions on either side of a prompt: a
    token taken in cannot be taken back.
    """
    del length
    g, r, past = self.key_heads, self.value_heads // self.key_heads, self.taps - 1
    narrow, wide = (g, past, self.key_dim), (g, r, past, self.value_dim)
    sizes = [(narrow, dtype), (narrow, dtype), (wide, dtype), ((g, r, self.key_dim, self.value_dim), jnp.float32)]
    words = lambda shape: ('layers', 'batch', 'kv_heads', *[None] * (len(shape) - 1))
    return tuple(sharding.shard(jnp.zeros((count, batch, *shape), kind), *words(shape)) for shape, kind in sizes)

  def needs(self) -> frozenset[str]:
    """Nothing of an attention kernel."""
    return frozenset()

  def flops(self, length: int) -> int:
    """Of one row, forward, beyond the linear maps: the matrix is read by a key, written, and read by a query."""
    return 6 * self.value_heads * self.key_dim * self.value_dim * length


class DeltaNet(nnx.Module):
  """Parameters q, k [D, G, H], v, gate [D, G, R, W], beta, decay [D, G, R], o [G, R, W, D], norm [W];

  conv_q, conv_k [G, H, C] and conv_v [G, R, W, C] for C taps, the last one for the token itself; a_log, dt_bias [G, R].
  """

  def __init__(self, spec: Spec, d_model: int, *, rngs: nnx.Rngs):
    d, g, h, w = d_model, spec.key_heads, spec.key_dim, spec.value_dim
    r = spec.value_heads // g
    self.spec = spec
    narrow, wide = ('kv_heads', 'head_dim'), ('kv_heads', None, 'head_dim')
    self.q = linear.Linear('BTD,DGH->BGTH', (d, g, h), ('embed', *narrow), rngs=rngs)
    self.k = linear.Linear('BTD,DGH->BGTH', (d, g, h), ('embed', *narrow), rngs=rngs)
    self.v = linear.Linear('BTD,DGRW->BGRTW', (d, g, r, w), ('embed', *wide), rngs=rngs)
    self.gate = linear.Linear('BTD,DGRW->BGRTW', (d, g, r, w), ('embed', *wide), rngs=rngs)
    self.beta = linear.Linear('BTD,DGR->BGRT', (d, g, r), ('embed', 'kv_heads', None), rngs=rngs)
    self.decay = linear.Linear('BTD,DGR->BGRT', (d, g, r), ('embed', 'kv_heads', None), rngs=rngs)
    self.o = linear.Linear('BGRTW,GRWD->BTD', (g, r, w, d), (*wide, 'embed'), rngs=rngs)
    self.norm = norm.Norm(spec.norm, w, 'head_dim')
    sigma = spec.taps**-0.5
    self.conv_q = param.normal((g, h, spec.taps), (*narrow, None), sigma=sigma, rngs=rngs)
    self.conv_k = param.normal((g, h, spec.taps), (*narrow, None), sigma=sigma, rngs=rngs)
    self.conv_v = param.normal((g, r, w, spec.taps), (*wide, None), sigma=sigma, rngs=rngs)
    # decays that differ from head to head, as in Mamba 2 (arXiv 2405.21060): -exp(a_log) in (-16, -1), and a softplus
    # that starts between 0.001 and 0.1
    self.a_log = param.uniform((g, r), ('kv_heads', None), low=1.0, high=16.0, into=jnp.log, rngs=rngs)
    low, high = math.log(0.001), math.log(0.1)
    self.dt_bias = param.uniform((g, r), ('kv_heads', None), low=low, high=high, into=_softplus_inverse, rngs=rngs)

  def __call__(self, x: jax.Array, context, view: cache.View | None = None):
    """x [B, T, D] -> (y [B, T, D], view, aux)."""
    lines = [self.q(x), self.k(x), self.v(x)]
    beta = jax.nn.sigmoid(self.beta(x).astype(jnp.float32))
    step_size = jax.nn.softplus(self.decay(x).astype(jnp.float32) + _wide(self.dt_bias, 1))
    decay = -jnp.exp(_wide(self.a_log, 1)) * step_size
    real = None
    if view is not None and context.positions is not None:
      real = context.positions >= 0
      lines = [jnp.where(_over(real, line.ndim), line, 0) for line in lines]
      beta, decay = (jnp.where(_over(real, beta.ndim + 1)[..., 0], a, 0) for a in (beta, decay))
    pasts, state = self._memory(x, context, view)
    weights = [w[...] for w in (self.conv_q, self.conv_k, self.conv_v)]
    q, k, v = (convolve(*of, context.segments) for of in zip(lines, weights, pasts, strict=True))
    q, k, v = (checkpoint_name(a, 'qkv') for a in (_unit(q) * self.spec.key_dim**-0.5, _unit(k), v))
    if view is not None and x.shape[1] == 1:
      y, state = step(q[..., 0, :], k[..., 0, :], v[..., 0, :], decay[..., 0], beta[..., 0], state)
      y = y[..., None, :]
    else:
      y, state = chunked(q, k, v, decay, beta, state, context.segments)
    if view is not None:
      view = view.replace((*_last(lines, pasts, real), state))
    y = checkpoint_name(self.norm(y.astype(x.dtype)), 'attention')
    y = (y * jax.nn.silu(self.gate(x).astype(jnp.float32))).astype(x.dtype)
    return self.o(sharding.shard(y, 'batch', 'kv_heads', None, 'seq', 'head_dim')), view, {}

  def _memory(self, x, context, view):
    """(inputs of the three convolutions before these, matrix); zeros for rows that begin here, whatever was there."""
    if view is None or (isinstance(context.start, int) and context.start == 0):
      return self._nothing(x)
    *pasts, state = view.read()
    begun = jnp.reshape(context.start, -1) > 0
    keep = lambda a: jnp.where(begun.reshape(-1, *[1] * (a.ndim - 1)), a, 0)
    return [keep(past) for past in pasts], keep(state)

  def _nothing(self, x):
    *pasts, state = (a[0] for a in self.spec.cache(1, x.shape[0], 0, x.dtype))
    return pasts, state


def chunked(q, k, v, decay, beta, state, segments=None, chunk: int = CHUNK) -> tuple[jax.Array, jax.Array]:
  """The recurrence over many tokens; all of it float32.

  Within a chunk the corrections depend on each other by a unit lower triangular system, which is solved for all chunks
  at once; what is left to do in order is one product with the matrix a chunk.

  Args:
    q: [B, G, T, H], scaled.
    k: [B, G, T, H].
    v: [B, G, R, T, W].
    decay: [B, G, R, T], logarithms, 0 or below.
    beta: [B, G, R, T].
    state: [B, G, R, H, W], what went before.
    segments: [B, T]; None: one document a row. With them `state` must be zeros.
    chunk: tokens.

  Returns:
    (o [B, G, R, T, W], the state after the last token).
  """
  length, chunk = q.shape[2], min(chunk, q.shape[2])
  pad, count = -length % chunk, -(-length // chunk)

  def cut(x, axis, **how):
    x = jnp.pad(x, [(0, pad if i == axis else 0) for i in range(x.ndim)], **how)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, chunk, *x.shape[axis + 1 :]), axis, 0)

  q, k, v, decay, beta = (cut(a.astype(jnp.float32), i) for a, i in ((q, 2), (k, 2), (v, 3), (decay, 3), (beta, 3)))
  places = np.arange(chunk)
  if segments is None:
    seen = mask.visible(places, places)  # [C, S]
    reads = writes = keeps = True
  else:
    segments = cut(segments, 1, mode='edge')  # [Z, B, C]
    seen = mask.visible(places, places, None, segments, segments)[:, :, None, None]  # [Z, B, 1, 1, C, S]
    before = jnp.concatenate([segments[:1, :, 0], segments[:-1, :, -1]])[..., None]
    last = segments[..., -1:]
    reads, writes, keeps = (a[:, :, None, None] for a in (segments == before, segments == last, last == before))

  # sums of logarithms from the start of the chunk, or of the document: a sum under a mask, so that documents do not
  # touch each other even by rounding
  total = jnp.where(seen, decay[..., None, :], 0).sum(-1)  # [Z, B, G, R, C]
  between = jnp.exp(jnp.where(seen, total[..., :, None] - total[..., None, :], -jnp.inf))  # [Z, B, G, R, C, S]
  since = jnp.where(reads, jnp.exp(total), 0)
  until = jnp.exp(jnp.where(writes, total[..., -1:] - total, -jnp.inf))
  whole = jnp.where(keeps, jnp.exp(total[..., -1:]), 0)[..., None]  # [Z, B, G, R, 1, 1]

  full = jax.lax.Precision.HIGHEST  # what a triangular system makes of errors grows with it
  keys = jnp.einsum('ZBGCH,ZBGSH->ZBGCS', k, k, precision=full)[:, :, :, None]
  system = beta[..., None] * keys * between  # only what is below the diagonal is read, which is taken as 1
  right = jnp.concatenate([beta[..., None] * v, (beta * since)[..., None] * k[:, :, :, None]], -1)
  solved = jax.lax.linalg.triangular_solve(system, right, left_side=True, lower=True, unit_diagonal=True)
  values, reading = jnp.split(solved, [v.shape[-1]], -1)  # [Z, B, G, R, C, W], [Z, B, G, R, C, H]

  def advance(state, inputs):
    values, reading, k, until, whole = inputs
    new = values - jnp.einsum('BGRCH,BGRHW->BGRCW', reading, state)
    after = whole * state + jnp.einsum('BGCH,BGRCW->BGRHW', k, until[..., None] * new)
    return after, (state, new)

  end, (states, new) = jax.lax.scan(advance, state, (values, reading, k, until, whole))
  scores = jnp.einsum('ZBGCH,ZBGSH->ZBGCS', q, k)[:, :, :, None] * between
  y = since[..., None] * jnp.einsum('ZBGCH,ZBGRHW->ZBGRCW', q, states)
  y = jnp.moveaxis(y + jnp.einsum('ZBGRCS,ZBGRSW->ZBGRCW', scores, new), 0, 3)  # [B, G, R, Z, C, W]
  return y.reshape(*y.shape[:3], count * chunk, -1)[..., :length, :], end


def step(q, k, v, decay, beta, state) -> tuple[jax.Array, jax.Array]:
  """One token: arguments as of `chunked`, without T. -> (o [B, G, R, W], the state after it), float32."""
  q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
  state = jnp.exp(decay)[..., None, None] * state
  new = beta[..., None] * (v - jnp.einsum('BGH,BGRHW->BGRW', k, state))
  state = state + jnp.einsum('BGH,BGRW->BGRHW', k, new)
  return jnp.einsum('BGH,BGRHW->BGRW', q, state), state


def convolve(x, w, past, segments=None) -> jax.Array:
  """silu of the sum of a channel's last taps, float32.

  Args:
    x: [B, .., T, H].
    w: [.., H, C].
    past: [B, .., C - 1, H], the inputs before x.
    segments: [B, T]: a token has no neighbours in another document; None: one document a row.
  """
  taps, length = w.shape[-1], x.shape[-2]
  line, w = jnp.concatenate([past.astype(x.dtype), x], -2).astype(jnp.float32), w.astype(jnp.float32)
  if segments is not None:
    near = jnp.pad(segments, ((0, 0), (taps - 1, 0)), mode='edge')
  y = jnp.zeros((), jnp.float32)
  for tap in range(taps):
    inputs = line[..., tap : tap + length, :]
    if segments is not None and tap < taps - 1:
      inputs = jnp.where(_over(near[:, tap : tap + length] == segments, x.ndim), inputs, 0)
    y = y + inputs * w[..., None, :, tap]
  return jax.nn.silu(y)


def _last(lines, pasts, real):
  """The inputs that the next token's convolutions need: the last ones that are no padding."""
  lines = [jnp.concatenate([past.astype(line.dtype), line], -2) for line, past in zip(lines, pasts, strict=True)]
  count = pasts[0].shape[-2]
  if real is None:
    return [line[..., line.shape[-2] - count :, :] for line in lines]
  ends = jnp.max(real * np.arange(1, real.shape[1] + 1), 1)  # [B], 0: all of it is padding
  places = ends[:, None] + np.arange(count)
  return [jnp.take_along_axis(line, _over(places, line.ndim), -2) for line in lines]


def _over(x, ndim):
  """[B, T] -> [B, 1, .., T, 1]."""
  return x.reshape(x.shape[0], *[1] * (ndim - 3), x.shape[1], 1)


def _wide(parameter, more):
  return parameter[...].astype(jnp.float32)[(..., *[None] * more)]


def _unit(x):
  """x / |x| over the last axis."""
  return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + EPS)


def _softplus_inverse(log_dt):
  dt = jnp.exp(log_dt)
  return dt + jnp.log(-jnp.expm1(-dt))
