"""Latent attention to the keys that an indexer picks (DeepSeek Sparse Attention, report of DeepSeek-V3.2-Exp, part 1).

A small indexer (see indexer.py) scores every key that a query may see, and the query attends to the best of them. The
choice has no gradient: the indexer learns from what attention does with the keys, by a loss of its own, and what it
reads is cut off from the rest of the model, which learns from the loss of tokens only. Training has stages: `dense`,
in which queries attend to every key still and the loss is over all of them, and `sparse`, in which both are over those
chosen.

Reading order: `Spec`, `Sparse`, `Indexer`, `attended`.
"""

import dataclasses

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from maxtext_layers import attend
from maxtext_layers import attention
from maxtext_layers import cache
from maxtext_layers import config
from maxtext_layers import dropout
from maxtext_layers import indexer
from maxtext_layers import linear
from maxtext_layers import mask
from maxtext_layers import mla
from maxtext_layers import norm
from maxtext_layers import rope


@config.spec
class Spec:
  """Latent attention with an indexer, which turns positions as the latent's rotary part does, but by halves."""

  latent: mla.Spec  # with a q_rank: the indexer's queries come out of that latent
  index: indexer.Spec

  @property
  def rope(self) -> rope.Spec:
    """That of the latent attention."""
    return self.latent.rope

  def build(self, d_model: int, rngs: nnx.Rngs) -> 'Sparse':
    """The module."""
    return Sparse(self, d_model, rngs=rngs)

  def cache(self, count: int, batch: int, length: int, dtype) -> tuple[jax.Array, ...]:
    """Memory of `count` layers: that of the latent attention, and the indexer's keys [count, batch, 1, length, I]."""
    keys = cache.zeros(count, batch, 1, length, self.index.head_dim, dtype=dtype)
    return (*self.latent.cache(count, batch, length, dtype), *keys)

  def needs(self) -> frozenset[str]:
    """What the latent attention needs; a kernel is used for rows so short that every key is chosen."""
    return self.latent.needs()

  def flops(self, length: int) -> int:
    """Forward operations of one row beyond the linear maps: all pairs for the indexer, those chosen for the heads."""
    if self.index.takes_all(length) and not self.index.loss:
      return self.latent.flops(length)
    chosen = length if self.index.takes_all(length) else self.index.top_k
    doubled = chosen * chosen + 2 * chosen * (length - chosen)  # twice the number of pairs
    heads = self.latent.heads * (self.latent.head_dim + self.latent.value_dim)
    return heads * doubled + self.index.flops(length * length)


class Sparse(mla.Latent):
  """The parameters of mla.Latent, and those of `indexer`."""

  def __init__(self, spec: Spec, d_model: int, *, rngs: nnx.Rngs):
    if spec.latent.q_rank is None:
      raise config.Error('q_rank=None: an indexer needs the latent of queries')
    super().__init__(spec.latent, d_model, rngs=rngs)
    self.index = spec.index
    self.indexer = Indexer(spec.index, d_model, spec.latent.q_rank, rngs=rngs)

  def __call__(self, x: jax.Array, context, view: cache.View | None = None):
    """x [B, T, D] -> (y [B, T, D], view, aux); aux has indexer_loss if the spec wants one and nothing is cached."""
    length = x.shape[1]
    q_latent, q, k = self.projections(x, context)
    found = self.indexer(x, q_latent, context.tables[self.spec.rope])
    if view is not None:
      view = view.write((*k, found[1][:, None]), context.start)
    aux = {}
    if view is not None and not attention.fresh(context, length):
      y = self._chosen(q, found, context, view)
    else:
      segments = attention.documents(context)
      learns = self.index.loss > 0 and view is None
      if self.index.takes_all(length) and not learns:
        y = attend.KERNELS[context.kernel].run(*self.heads(q, k), self.shape(), segments)
      else:
        rule = self.index if learns else dataclasses.replace(self.index, loss=0.0)
        y, losses = attended(*self.heads(q, k), self.shape().scale, found, rule, segments)
        if learns:
          aux = {'indexer_loss': self.index.loss * _mean(losses, segments)}
    y = dropout.apply(checkpoint_name(y, 'attention'), context.dropout, context.rate, 'attention')
    return self.o(y), view, aux

  def _chosen(self, q, found, context, view):
    """Of a call that reads memory: [B, N, T, value_dim], the heads absorbed."""
    latents, k_rope, keys = view.read()
    slots, first = attention.places(context, q[0].shape[2])
    seen = attend.written(slots, first, latents.shape[2])
    ranks = indexer.scores(found[0], keys[:, 0], found[2])
    top_k = self.index.top_k
    if self.index.takes_all(ranks.shape[2]):
      chosen = seen
    elif ranks.shape[1] == 1:  # one token: what is not chosen is not even read
      which, chosen = indexer.best(ranks, seen, top_k)
      latents, k_rope = (jnp.take_along_axis(a, which[:, None, :, None], 2) for a in (latents, k_rope))
      chosen = chosen[:, None]
    else:
      chosen = indexer.select(ranks, seen, top_k)
    return self._absorbed(q, latents, k_rope, chosen)


class Indexer(nnx.Module):
  """Parameters q [Q, J, I], k [D, I], k_norm.w, k_norm.b [I] and weights [D, J]."""

  def __init__(self, spec: indexer.Spec, d_model: int, q_rank: int, *, rngs: nnx.Rngs):
    j, i = spec.heads, spec.head_dim
    self.spec = spec
    self.q = linear.Linear('BTQ,QJI->BJTI', (q_rank, j, i), ('rank', 'heads', 'head_dim'), rngs=rngs)
    self.k = linear.Linear('BTD,DI->BTI', (d_model, i), ('embed', 'head_dim'), rngs=rngs)
    self.k_norm = norm.LayerNorm(norm.Layer(1e-6), i, 'head_dim')
    self.weights = linear.Linear('BTD,DJ->BTJ', (d_model, j), ('embed', 'heads'), rngs=rngs)

  def __call__(self, x: jax.Array, q_latent: jax.Array, table) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x [B, T, D], latent of queries [B, T, Q] -> (q [B, J, T, I], k [B, T, I], w float32 [B, T, J])."""
    x, q_latent = jax.lax.stop_gradient((x, q_latent))
    q = rope.rotate(self.q(q_latent), table)
    k = rope.rotate(self.k_norm(self.k(x))[:, None], table)[:, 0]
    return q, k, self.weights(x).astype(jnp.float32) * self.spec.scale


def attended(q, k, v, scale: float, found, index: indexer.Spec, segments=None, block: int | None = None):
  """Attention to what `index` chooses, in blocks of queries, so that there is no square of all heads.

  Args:
    q: [B, N, T, H]; k alike.
    k: see q.
    v: [B, N, T, W].
    scale: of the scores.
    found: what Indexer returns.
    index: with a loss, the divergence is computed.
    segments: [B, T], 0 padding; None: one document a row.
    block: rows of queries; None: as attend.block_rows says.

  Returns:
    ([B, N, T, W], the divergence of every token, float32 [B, T], or None).
  """
  length = q.shape[2]
  block = block or attend.block_rows(length)
  q = q * jnp.asarray(scale, q.dtype)
  out, losses = [], []
  for low in range(0, length, block):
    high = min(low + block, length)
    inside = (None, None) if segments is None else (segments[:, low:high], segments[:, :high])
    seen = mask.visible(np.arange(low, high), np.arange(high), None, *inside)
    if index.loss or not index.takes_all(high):
      ranks = indexer.scores(found[0][:, :, low:high], found[1][:, :high], found[2][:, low:high])
    chosen = seen if index.takes_all(high) else indexer.select(ranks, seen, index.top_k)
    products = jnp.einsum('BNTH,BNSH->BNTS', q[:, :, low:high], k[:, :, :high], preferred_element_type=jnp.float32)
    over = chosen[:, None] if chosen.ndim == 3 else chosen
    weights = jax.nn.softmax(jnp.where(over, products, -1e30), -1)
    out.append(jnp.einsum('BNTS,BNSW->BNTW', weights.astype(v.dtype), v[:, :, :high]))
    if index.loss:
      losses.append(indexer.divergence(ranks, weights.sum(1), chosen))
  join = lambda parts, axis: parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)
  return join(out, 2), join(losses, 1) if losses else None


def _mean(losses, segments):
  """Of the tokens that are no padding."""
  if segments is None:
    return losses.mean()
  real = segments > 0
  return jnp.where(real, losses, 0).sum() / jnp.maximum(real.sum(), 1)
