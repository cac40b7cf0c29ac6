"""Multi-head latent attention (arXiv 2405.04434, section 2.1): keys and values of all heads are read off one latent.

A token leaves a latent c [R] behind, and a rotary key that all heads share. Head n's key is (up_k[n] c, rotary), its
value up_v[n] c. Without a cache, or when a call with one begins at slot 0, they are written out and any kernel does the
rest (expanded). Reading a cache they never are: q . (up_k c) = (q up_k) . c, so queries are carried over to the latent
once, and heads attend to the latents themselves, as to a key and a value that all share (absorbed).

Reading order: `Spec`, `Latent` (`projections`, `heads`, `_absorbed`).
"""

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from maxtext_layers import attend
from maxtext_layers import attention
from maxtext_layers import cache
from maxtext_layers import config
from maxtext_layers import dropout
from maxtext_layers import linear
from maxtext_layers import norm
from maxtext_layers import rope
from maxtext_layers import sharding


@config.spec
class Spec:
  """What a latent attention layer is."""

  heads: int
  kv_rank: int  # R, size of the latent
  nope_dim: int  # of a query or key head, the elements that no position turns
  value_dim: int  # of a value head
  rope: rope.Spec  # its head_dim is the size of the rotary part
  q_rank: int | None = None  # queries go through a latent of their own; None: straight from the input
  latent_norm: norm.Spec = norm.Spec()  # of both latents
  scale: float | None = None  # of the scores; None: (nope_dim + rotary) ** -0.5
  bias: tuple[str, ...] = ()  # which of q_down, kv_down, o have one

  @property
  def head_dim(self) -> int:
    """Of queries and keys."""
    return self.nope_dim + self.rope.head_dim

  def build(self, d_model: int, rngs: nnx.Rngs) -> 'Latent':
    """The module."""
    return Latent(self, d_model, rngs=rngs)

  def cache(self, count: int, batch: int, length: int, dtype) -> tuple[jax.Array, ...]:
    """Memory of `count` layers: latents [count, batch, 1, length, R] and rotary keys [.., rotary]."""
    return cache.zeros(count, batch, 1, length, self.kv_rank, self.rope.head_dim, dtype=dtype)

  def needs(self) -> frozenset[str]:
    """What a kernel must be able to do for this layer."""
    return frozenset({'values'} if self.value_dim != self.head_dim else ())

  def flops(self, length: int) -> int:
    """Forward operations of one row beyond the linear maps: 2 a pair and element, for scores and for values."""
    return self.heads * (self.head_dim + self.value_dim) * length * length  # half of the square of pairs


class Latent(nnx.Module):
  """Parameters q [D, N, H] or q_down [D, Q], q_norm [Q] and q_up [Q, N, H]; kv_down [D, R + rotary], kv_norm [R],
  kv_up [R, N, nope_dim + value_dim] (first what keys are made of, then values); o [N, value_dim, D].
  """

  def __init__(self, spec: Spec, d_model: int, *, rngs: nnx.Rngs):
    self.spec = spec
    d, n, r, q = d_model, spec.heads, spec.kv_rank, spec.q_rank
    whole, up = (d, n, spec.head_dim), (r, n, spec.nope_dim + spec.value_dim)
    lift = ('rank', 'heads', 'head_dim')
    self.q = None if q else linear.Linear('BTD,DNH->BNTH', whole, ('embed', 'heads', 'head_dim'), rngs=rngs)
    self.q_down = _down(d, q, 'q_down' in spec.bias, rngs) if q else None
    self.q_norm = norm.Norm(spec.latent_norm, q, 'rank') if q else None
    self.q_up = linear.Linear('BTR,RNH->BNTH', (q, n, spec.head_dim), lift, rngs=rngs) if q else None
    self.kv_down = _down(d, r + spec.rope.head_dim, 'kv_down' in spec.bias, rngs)
    self.kv_norm = norm.Norm(spec.latent_norm, r, 'rank')
    self.kv_up = linear.Linear('BTR,RNH->BNTH', up, lift, rngs=rngs)
    out = (n, spec.value_dim, d)
    self.o = linear.Linear('BNTH,NHD->BTD', out, ('heads', 'head_dim', 'embed'), bias='o' in spec.bias, rngs=rngs)

  def __call__(self, x: jax.Array, context, view: cache.View | None = None):
    """x [B, T, D] -> (y [B, T, D], view, aux)."""
    _, q, k = self.projections(x, context)
    if view is not None:
      view = view.write(k, context.start)
    if view is not None and not attention.fresh(context, x.shape[1]):
      latents, k_rope = view.read()
      slots, first = attention.places(context, x.shape[1])
      y = self._absorbed(q, latents, k_rope, attend.written(slots, first, latents.shape[2]))
    else:
      q, k, v = (checkpoint_name(a, 'qkv') for a in self.heads(q, k))
      y = attend.KERNELS[context.kernel].run(q, k, v, self.shape(), attention.documents(context))
    y = dropout.apply(checkpoint_name(y, 'attention'), context.dropout, context.rate, 'attention')
    return self.o(y), view, {}

  def projections(self, x: jax.Array, context):
    """x [B, T, D] -> what queries are made of, queries, and what is remembered of keys and values.

    Returns:
      The latent of queries [B, T, Q] or None; the two parts of queries [B, N, T, nope_dim] and [B, N, T, rotary]; the
      latent of keys and values [B, 1, T, R] and the shared rotary key [B, 1, T, rotary].
    """
    spec = self.spec
    q_latent = self.q_norm(self.q_down(x)) if self.q_down else None
    q = self.q(x) if self.q else self.q_up(q_latent)
    q = sharding.shard(q, 'batch', 'heads', 'seq', 'head_dim')
    q_nope, q_rope = jnp.split(q, [spec.nope_dim], -1)
    latent, k_rope = jnp.split(self.kv_down(x), [spec.kv_rank], -1)
    turn = lambda a: rope.rotate(a, context.tables[spec.rope], spec.rope.pairs)
    return q_latent, (q_nope, turn(q_rope)), (self.kv_norm(latent)[:, None], turn(k_rope[:, None]))

  def heads(self, q, k) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of `projections`, queries and keys [B, N, T, H] and values [B, N, T, value_dim] of every head, written out."""
    latent, k_rope = k
    up = sharding.shard(self.kv_up(latent[:, 0]), 'batch', 'heads', 'seq', 'head_dim')
    k_nope, v = jnp.split(up, [self.spec.nope_dim], -1)
    k_rope = jnp.broadcast_to(k_rope, (*k_nope.shape[:-1], k_rope.shape[-1]))
    return jnp.concatenate(q, -1), jnp.concatenate([k_nope, k_rope], -1), v

  def shape(self) -> attend.Shape:
    """What a head computes."""
    return attend.Shape(self.spec.scale or self.spec.head_dim**-0.5)

  def _absorbed(self, q, latents, k_rope, seen):
    """[B, N, T, value_dim] from latents [B, 1, S, R] and rotary keys [B, 1, S, rotary], of which some are seen."""
    q_nope, q_rope = q
    up_k, up_v = jnp.split(self.kv_up.w[...].astype(q_nope.dtype), [self.spec.nope_dim], -1)
    q_latent = jnp.einsum('BNTH,RNH->BNTR', q_nope, up_k)
    y = attend.among((q_latent, q_rope), (latents, k_rope), latents, self.shape(), seen)  # [B, N, T, R]
    return jnp.einsum('BNTR,RNH->BNTH', y, up_v)


def _down(d_model, rank, bias, rngs):
  return linear.Linear('BTD,DR->BTR', (d_model, rank), ('embed', 'rank'), bias=bias, rngs=rngs)
