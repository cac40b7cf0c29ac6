"""Attention to a window of tokens and to everything before in compressed form (report of DeepSeek-V4, section 2.3).

One head of keys serves all heads of queries, and its keys are its values too. Beside the tokens in its window a query
sees entries: one for each closed stretch of `ratio` tokens of its document, a softmax-weighted mean of these tokens, a
weight an element. With `overlap` an entry draws on the stretch before its own as well, by projections of their own, and
with an `index` a query sees only the `top_k` entries that an indexer (indexer.py) picks, whose keys are entries, too.
Values have been turned with their positions, so the result is turned back by the query's. Heads leave through two
projections, the first of which is a group's own.

Stretches are counted from the start of a document, so that packed rows and padding change nothing. While decoding, the
window, the entries and the tokens of the last stretches are remembered: that does not grow by a token but by an entry.

Reading order: `Compress`, `Spec`, `Compressed` (`_whole`, `_cached`), `Indexer`, `Pool`, `Frame`.
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
from maxtext_layers import norm
from maxtext_layers import param
from maxtext_layers import rope
from maxtext_layers import sharding


@config.spec
class Compress:
  """How what lies behind is compressed."""

  ratio: int  # tokens an entry
  overlap: bool = False
  index: indexer.Spec | None = None  # None: all entries are seen

  def __post_init__(self):
    config.whole(self, 'ratio')

  @property
  def series(self) -> int:
    """Projections of a token: one for its own stretch's entry, and with overlap one before it for the next one's."""
    return 2 if self.overlap else 1


@config.spec
class Spec:
  """What a compressed attention layer is."""

  heads: int
  head_dim: int
  q_rank: int  # of the latent that queries come out of
  groups: int  # of heads, on the way out
  o_rank: int  # what a group of heads is brought down to
  rope: rope.Spec  # its head_dim is the size of the rotary part, the last elements of a head; neighbours turn together
  window: int  # a query sees its own and the window - 1 tokens before it
  norm: norm.Spec
  compress: Compress | None = None  # None: the window is all there is

  def __post_init__(self):
    config.whole(self, 'heads', 'head_dim', 'q_rank', 'groups', 'o_rank', 'window')
    if self.heads % self.groups:
      raise config.Error(f'heads={self.heads} is no multiple of groups={self.groups}')
    if self.rope.head_dim % 2 or self.rope.head_dim > self.head_dim:
      raise config.Error(f'rope.head_dim={self.rope.head_dim} is odd, or larger than head_dim={self.head_dim}')

  def build(self, d_model: int, rngs: nnx.Rngs) -> 'Compressed':
    """The module."""
    return Compressed(self, d_model, rngs=rngs)

  def cache(self, count: int, batch: int, length: int, dtype) -> tuple[jax.Array, ...]:
    """Memory of `count` layers: the window [count, batch, window, H], and what each `Pool` needs.

    Padding beside a prompt must be said by negative positions: a token taken in cannot be taken back.
    """
    zeros = lambda *shape: sharding.shard(
      jnp.zeros((count, batch, *shape), dtype), 'layers', 'batch', *[None] * len(shape)
    )
    memory = [zeros(self.window, self.head_dim)]
    for size in self.pooled():
      slots = length // self.compress.ratio + 2  # a call of T tokens writes one entry more than it closes, at most
      tail = (self.compress.ratio * self.compress.series, self.compress.series, size)
      memory += [zeros(1, slots, size), zeros(*tail), zeros(*tail)]
    return tuple(memory)

  def pooled(self) -> list[int]:
    """The sizes of what is compressed: heads, and the indexer's keys."""
    if self.compress is None:
      return []
    return [self.head_dim] + ([self.compress.index.head_dim] if self.compress.index else [])

  def needs(self) -> frozenset[str]:
    """Nothing of a kernel."""
    return frozenset()

  def flops(self, length: int) -> int:
    """Forward operations of one row beyond the linear maps: 4 an element, for scores and for values."""
    near = min(self.window, length)
    doubled = near * near + 2 * near * (length - near)  # twice the number of pairs
    if self.compress is None:
      return 2 * self.heads * self.head_dim * doubled
    pairs, index = length * length // self.compress.ratio, self.compress.index
    if index and length > index.top_k * self.compress.ratio:
      few = index.top_k * self.compress.ratio  # tokens that the entries picked stand for
      return 2 * self.heads * self.head_dim * (
        doubled + (few * few + 2 * few * (length - few)) // self.compress.ratio
      ) + index.flops(pairs)
    return 2 * self.heads * self.head_dim * (doubled + pairs)


class Compressed(nnx.Module):
  """Parameters q_down [D, Q], q_norm [Q], q_up [Q, N, H], kv [D, H], kv_norm [H], sinks [N], o_down [G, N / G, H, R],
  o_up [G, R, D]; by the spec also `pool` and `indexer`.
  """  # fmt: skip

  maps = ('o_down',)

  def __init__(self, spec: Spec, d_model: int, *, rngs: nnx.Rngs):
    d, n, h, g = d_model, spec.heads, spec.head_dim, spec.groups
    if spec.compress and spec.compress.index and spec.compress.index.loss:
      raise config.Error(f'loss={spec.compress.index.loss}: an indexer of entries is not taught here')
    self.spec = spec
    self.q_down = linear.Linear('BTD,DQ->BTQ', (d, spec.q_rank), ('embed', 'rank'), rngs=rngs)
    self.q_norm = norm.Norm(spec.norm, spec.q_rank, 'rank')
    self.head_norm = norm.Norm(dataclasses.replace(spec.norm, weight=False), h, 'head_dim')
    self.q_up = linear.Linear('BTQ,QNH->BNTH', (spec.q_rank, n, h), ('rank', 'heads', 'head_dim'), rngs=rngs)
    self.kv = linear.Linear('BTD,DH->BTH', (d, h), ('embed', 'head_dim'), rngs=rngs)
    self.kv_norm = norm.Norm(spec.norm, h, 'head_dim')
    self.sinks = param.constant((n,), ('heads',), value=0.0)
    sigma = (n // g * h) ** -0.5
    words = ('heads', None, 'head_dim', 'rank')
    self.o_down = param.normal((g, n // g, h, spec.o_rank), words, sigma=sigma, rngs=rngs)
    self.o_up = linear.Linear('BTGR,GRD->BTD', (g, spec.o_rank, d), ('heads', 'rank', 'embed'), rngs=rngs)
    self.pool = Pool(spec, h, d, rngs=rngs) if spec.compress else None
    self.indexer = Indexer(spec, d, rngs=rngs) if spec.compress and spec.compress.index else None

  def __call__(self, x: jax.Array, context, view: cache.View | None = None):
    """x [B, T, D] -> (y [B, T, D], view, aux)."""
    spec, table = self.spec, context.tables[self.spec.rope]
    q_latent = self.q_norm(self.q_down(x))
    q = self.head_norm(self.q_up(q_latent))
    q = checkpoint_name(_turn(sharding.shard(q, 'batch', 'heads', 'seq', 'head_dim'), table), 'qkv')
    kv = checkpoint_name(_turn(self.kv_norm(self.kv(x))[:, None], table)[:, 0], 'qkv')
    asked = self.indexer.ask(x, q_latent, table) if self.indexer else None
    pools = [pool for pool in (self.pool, self.indexer and self.indexer.pool) if pool]
    raw = [pool.project(x) for pool in pools]
    if view is not None and not attention.fresh(context, x.shape[1]):
      y, view = self._cached(q, kv, asked, pools, raw, context, view)
    else:
      y, view = self._whole(q, kv, asked, pools, raw, context, view)
    y = dropout.apply(checkpoint_name(y, 'attention'), context.dropout, context.rate, 'attention')
    y = _turn(y, table, back=True)
    y = y.reshape(y.shape[0], spec.groups, -1, *y.shape[2:])
    return self.o_up(jnp.einsum('BGNTH,GNHR->BTGR', y, self.o_down[...].astype(y.dtype))), view, {}

  def _whole(self, q, kv, asked, pools, raw, context, view):
    """Rows that begin here: blocks of queries, each against its window and the entries that are closed by then."""
    spec, length, end = self.spec, q.shape[2], q.shape[2]
    segments = attention.documents(context)
    if view is not None and context.positions is not None:
      real = context.positions >= 0
      end = jnp.argmax(real, 1) + real.sum(1)
    frame = Frame.whole(context, length, spec.compress.ratio, view is not None) if pools else None
    entries = [pool.entries(*of, frame) for pool, of in zip(pools, raw)]
    block, out = attend.block_rows(length), []
    for low in range(0, length, block):
      high = min(low + block, length)
      first = max(0, low - spec.window + 1)
      inside = (None, None) if segments is None else (segments[:, low:high], segments[:, first:high])
      seen = [mask.visible(np.arange(low, high), np.arange(first, high), spec.window, *inside)]
      keys = [kv[:, first:high]]
      if pools and (count := high // spec.compress.ratio):
        closed = frame.seen[:, low:high, :count]
        seen.append(self._picked(asked, entries, closed, slice(low, high)))
        keys.append(entries[0][:, :count])
      out.append(_average(q[:, :, low:high], keys, seen, self.sinks[...]))
    if view is not None:
      view = _store(view, 0, cache.last(kv, end, spec.window))
      for i, (of, made) in enumerate(zip(raw, entries)):
        view = _write(view, 1 + 3 * i, made, 0)
        view = _keep(view, 2 + 3 * i, of, end)
    return out[0] if len(out) == 1 else jnp.concatenate(out, 2), view

  def _cached(self, q, kv, asked, pools, raw, context, view):
    """Rows that go on: all queries at once against what is remembered and what is new."""
    spec, length = self.spec, q.shape[2]
    past = jnp.reshape(context.start, (-1, 1)) if context.positions is None else context.positions[:, :1]
    now = past + np.arange(length)  # [B or 1, T], counted within the document
    before = past + np.arange(-spec.window, 0)
    places = jnp.concatenate([before, now], 1)
    keys = [jnp.concatenate([view.read()[0].astype(kv.dtype), kv], 1)]
    seen = [mask.visible(now, places, spec.window, now >= 0, places >= 0)]
    view = _store(view, 0, cache.last(keys[0], keys[0].shape[1], spec.window))
    for i, (pool, of) in enumerate(zip(pools, raw)):
      tails = view.read()[2 + 3 * i : 4 + 3 * i]
      of = [jnp.concatenate([tail.astype(new.dtype), new], 1) for tail, new in zip(tails, of)]
      frame = Frame.after(past, length, spec.compress.ratio, tails[0].shape[1])
      slot = past // spec.compress.ratio
      view = _write(view, 1 + 3 * i, pool.entries(*of, frame), slot[0, 0] if len(slot) == 1 else slot[:, 0])
      view = _keep(view, 2 + 3 * i, of, of[0].shape[1])
    if pools:
      entries = [view.read()[1 + 3 * i][:, 0].astype(kv.dtype) for i in range(len(pools))]
      closed = np.arange(entries[0].shape[1]) < ((now + 1) // spec.compress.ratio)[..., None]
      index = spec.compress.index
      if index and length == 1 and entries[0].shape[1] > index.top_k:  # what is not picked is not even read
        which, picked = indexer.best(indexer.scores(asked[0], entries[1], asked[1]), closed, index.top_k)
        keys.append(jnp.take_along_axis(entries[0], which[..., None], 1))
        seen.append(picked[:, None])
      else:
        keys.append(entries[0])
        seen.append(self._picked(asked, entries, closed, slice(None)))
    return _average(q, keys, seen, self.sinks[...]), view

  def _picked(self, asked, entries, seen, queries):
    """seen bool [B or 1, T, E] of some queries, but no more of it than the index allows."""
    if asked is None or seen.shape[-1] <= self.spec.compress.index.top_k:
      return seen
    q, w = asked
    ranks = indexer.scores(q[:, :, queries], entries[1][:, : seen.shape[-1]], w[:, queries])
    return indexer.select(ranks, seen, self.spec.compress.index.top_k)


class Indexer(nnx.Module):
  """Parameters q [Q, J, I], weights [D, J] and `pool`."""

  def __init__(self, spec: Spec, d_model: int, *, rngs: nnx.Rngs):
    self.spec = spec.compress.index
    j, i = self.spec.heads, self.spec.head_dim
    self.q = linear.Linear('BTQ,QJI->BJTI', (spec.q_rank, j, i), ('rank', 'heads', 'head_dim'), rngs=rngs)
    self.weights = linear.Linear('BTD,DJ->BTJ', (d_model, j), ('embed', 'heads'), rngs=rngs)
    self.pool = Pool(spec, i, d_model, rngs=rngs)

  def ask(self, x: jax.Array, q_latent: jax.Array, table) -> tuple[jax.Array, jax.Array]:
    """x [B, T, D], latent of queries [B, T, Q] -> (q [B, J, T, I], w float32 [B, T, J]) of indexer.scores."""
    return _turn(self.q(q_latent), table), self.weights(x).astype(jnp.float32) * self.spec.scale


class Pool(nnx.Module):
  """Parameters kv, gate [D, C, H], b [ratio, C, H] and norm [H]; of C series, the last is for a token's own stretch."""

  def __init__(self, spec: Spec, size: int, d_model: int, *, rngs: nnx.Rngs):
    ratio, series = spec.compress.ratio, spec.compress.series
    words = ('embed', None, 'head_dim')
    self.rope, self.ratio = spec.rope, ratio
    self.kv = linear.Linear('BTD,DCH->BTCH', (d_model, series, size), words, rngs=rngs)
    self.gate = linear.Linear('BTD,DCH->BTCH', (d_model, series, size), words, rngs=rngs)
    self.b = param.constant((ratio, series, size), (None, None, 'head_dim'), value=0.0)
    self.norm = norm.Norm(spec.norm, size, 'head_dim')

  def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [B, T, D] -> (what is averaged, the logits of its weights), [B, T, C, H] each."""
    return self.kv(x), self.gate(x)

  def entries(self, kv: jax.Array, gate: jax.Array, frame: 'Frame') -> jax.Array:
    """Tokens [B, P, C, H] -> entries [B, E, H], turned with the positions of their first tokens."""
    own = lambda a: _stretches(a[:, :, -1], frame, self.ratio)
    values, logits = own(kv), own(gate).astype(jnp.float32) + self.b[:, -1]  # [B, E, ratio, H]
    if kv.shape[2] == 2:
      other = lambda a: _stretches(a[:, :, 0], frame, self.ratio, back=self.ratio)
      before = jnp.where(frame.opens[..., None, None], -1e30, other(gate).astype(jnp.float32) + self.b[:, 0])
      values, logits = jnp.concatenate([other(kv), values], 2), jnp.concatenate([before, logits], 2)
    mean = (jax.nn.softmax(logits, 2).astype(kv.dtype) * values).sum(2)
    return _turn(self.norm(mean)[:, None], rope.table(self.rope, frame.positions))[:, 0]


@dataclasses.dataclass(slots=True, frozen=True)
class Frame:
  """Where the stretches of a call lie among the tokens at hand, [B or 1, E] each.

  first: the first token of each; None: 0, ratio, 2 * ratio and so on.
  opens: bool, whether no stretch of its document comes before.
  positions: of its first token.
  seen: bool [B or 1, T, E], which stretches are closed for each query; None where the caller knows better.
  """

  first: jax.Array | None
  opens: jax.Array | np.ndarray
  positions: jax.Array | np.ndarray
  seen: jax.Array | np.ndarray | None = None

  @staticmethod
  def whole(context, length: int, ratio: int, cached: bool) -> 'Frame':
    """Of rows that begin here, with documents in them or padding beside one."""
    number, place = np.arange(length // ratio)[None], np.arange(length)
    positions = context.positions
    if cached and positions is not None:
      seen = number[:, None] < ((positions + 1) // ratio)[..., None]
      return Frame(jnp.argmax(positions >= 0, 1)[:, None] + number * ratio, number == 0, number * ratio, seen)
    if context.segments is None:
      first = number * ratio
      seen = first[:, None] + ratio - 1 <= place[:, None]
      return Frame(None, number == 0, first if positions is None else positions[:, first[0]], seen)
    segments = context.segments
    new = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    inside = place - jax.lax.cummax(jnp.where(new, place, 0), 1)
    closes = (inside + 1) % ratio == 0
    ends = jnp.argsort(~closes, 1, stable=True)[:, : length // ratio]  # those that close, in order, then any
    of = lambda a, at=ends: jnp.take_along_axis(a, jnp.maximum(at, 0), 1)
    seen = of(closes)[:, None] & (ends[:, None] <= place[:, None]) & (of(segments)[:, None] == segments[..., None])
    first = ends - ratio + 1
    positions = jnp.broadcast_to(place, segments.shape) if positions is None else positions
    return Frame(first, of(inside) < ratio, of(positions, first), seen)

  @staticmethod
  def after(past: jax.Array, length: int, ratio: int, tail: int) -> 'Frame':
    """Of `length` tokens of which `past` [B or 1, 1] have come before, `tail` of them at hand: all that may close."""
    number = past // ratio + np.arange((length + ratio - 2) // ratio + 1)
    return Frame(number * ratio - past + tail, number == 0, number * ratio)


def _stretches(a, frame, ratio, back=0):
  """a [B, P, H] -> [B, E, ratio, H], the stretches that begin `back` before those of the frame."""
  if frame.first is None:
    a = jnp.pad(a, ((0, 0), (back, 0), (0, 0)))[:, : frame.positions.shape[1] * ratio]
  else:
    index = frame.first[..., None] - back + np.arange(ratio)
    index = jnp.clip(index, 0, a.shape[1] - 1).reshape(frame.first.shape[0], -1, 1)
    a = jnp.take_along_axis(a, jnp.broadcast_to(index, (a.shape[0], *index.shape[1:])), 1)
  return a.reshape(a.shape[0], -1, ratio, a.shape[-1])


def _turn(x, table, back=False):
  """x [B, N, T, H], whose last elements turn with their neighbours, or turn back."""
  rotary = 2 * table[0].shape[-1]
  still, y = x[..., : x.shape[-1] - rotary], x[..., x.shape[-1] - rotary :].astype(jnp.float32)
  y = jnp.stack(rope.turn(y[..., ::2], y[..., 1::2], table, back), -1).reshape(y.shape)
  return jnp.concatenate([still, y.astype(x.dtype)], -1)


def _average(q, keys, seen, sinks):
  """q [B, N, T, H] against keys [B, S, H], lists of which with who sees whom [.., T, S] are laid end to end."""
  keys = jnp.concatenate(keys, 1)
  shape = (keys.shape[0], q.shape[2])
  seen = jnp.concatenate([jnp.broadcast_to(a, (*shape, a.shape[-1])) for a in seen], -1)
  q, keys = (q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype))[:, None], keys[:, None]
  return attend.softmax_average(q, keys, keys, seen[:, None, None], None, sinks)[:, 0]


def _store(view, i, value):
  """Array i of the memory is `value` from now on."""
  put = cache.View(view.memory[i : i + 1], view.layer).replace((value,)).memory
  return cache.View(view.memory[:i] + put + view.memory[i + 1 :], view.layer)


def _keep(view, i, tokens, end):
  """The tails of a pool: arrays i and i + 1."""
  for j, a in enumerate(tokens):
    view = _store(view, i + j, cache.last(a, end, view.memory[i + j].shape[2]))
  return view


def _write(view, i, entries, slot):
  """Entries [B, E, H] from a slot of array i on."""
  if not entries.shape[1]:
    return view
  put = cache.View(view.memory[i : i + 1], view.layer).write((entries[:, None],), slot).memory
  return cache.View(view.memory[:i] + put + view.memory[i + 1 :], view.layer)
