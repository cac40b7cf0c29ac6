"""Conditional memory: tables looked up by the last few tokens (Engram, arXiv 2601.07372).

The last n ids, for n = 2, 3, .., are hashed by several heads, each into a table of its own. The rows found are laid end
to end and give a key and a value; how well the key fits what the model thinks at this place decides how much of the
value is let in, and a short causal convolution over time smooths it:

  e = rows,  k = key e,  v = value e,  gate = sigmoid(rms(x) . rms(k) / sqrt(D))       (section 2.3 of the paper)
  u = gate v,  y = u + silu(conv(rms(u)))

With several residual streams (hyper.py) each has its own key, norms and convolution; tables and value are shared. The
layer stands in a block of its own, in front of the block whose input it is added to: block.Spec(engram.Spec(..), None,
residual.Spec(None)). Ids are first mapped to canonical ones, which do not tell apart what differs by case, accents or
blanks; before a document there stands the id `pad`. Neither hash nor convolution reaches into another document.

Reading order: `Spec`, `Hash`, `Engram`, `rows_of`; then `canonical` and `hashes`, with which a spec is made.
"""

from collections.abc import Sequence
import re
import unicodedata

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from maxtext_layers import attention
from maxtext_layers import cache
from maxtext_layers import config
from maxtext_layers import linear
from maxtext_layers import norm
from maxtext_layers import param
from maxtext_layers import sharding

MULTIPLE = 256  # to which the rows of all tables together are rounded up, so that a mesh can cut them
IDS, ROWS = 2**20, 2**24  # below which canonical ids and tables must stay for `rows_of`


@config.spec
class Hash:
  """How ids become rows. See `hashes`."""

  factors: tuple[int, ...]  # odd, below 2 ** 63 / ids; of the latest id, the one before, ..
  primes: tuple[tuple[int, ...], ...]  # for n = 2, 3, ..: the size of the table of each head

  @property
  def tables(self) -> tuple[int, ...]:
    """The sizes of all tables, in the order of their rows."""
    return tuple(prime for of_n in self.primes for prime in of_n)


@config.spec
class Spec:
  """What a conditional memory is."""

  hash: Hash
  d_model: int  # of the model that it is in
  head_dim: int  # numbers a row
  pad: int  # the canonical id that stands before a document
  canonical: tuple[int, ...] | None = None  # by id; None: ids as they are
  streams: int | None = None  # residual streams; None: there is only one, and it has no axis
  taps: int = 4  # of the convolution; len(hash.factors) tokens lie from one to the next
  eps: float = 1e-6  # of the norms
  bias: tuple[str, ...] = ()  # which of key, value have one; the released code has both
  root: bool = False  # the gate's logit is replaced by its root with its sign, as in the released code

  @property
  def rope(self) -> None:
    """No positions."""
    return None

  @property
  def reach(self) -> int:
    """How many tokens back the convolution sees."""
    return (self.taps - 1) * len(self.hash.factors)

  def build(self, d_model: int, rngs: nnx.Rngs) -> 'Engram':
    """The module."""
    return Engram(self, d_model, rngs=rngs)

  def cache(self, count: int, batch: int, length: int, dtype) -> tuple[jax.Array, ...]:
    """Memory of `count` layers: the last ids, int32, and what the convolution read last; `length` does not matter.

    Padding beside a prompt must be said by negative positions: a token taken in cannot be taken back.
    """
    del length
    zeros = lambda dtype, *shape: jnp.zeros((count, batch, *shape), dtype)
    ids = zeros(jnp.int32, len(self.hash.factors) - 1)
    read = sharding.shard(
      zeros(dtype, self.reach, self.streams or 1, self.d_model), 'layers', 'batch', None, None, 'embed'
    )
    return ids, read

  def needs(self) -> frozenset[str]:
    """Nothing of a kernel."""
    return frozenset()

  def flops(self, length: int) -> int:
    """Forward operations of one row beyond the linear maps: the convolution's, and the gate's product."""
    return 2 * (self.taps + 1) * (self.streams or 1) * self.d_model * length


class Engram(nnx.Module):
  """Parameters embed [rows, H], key [E, S, D], value [E, D], q_norm, k_norm, v_norm [S, D] and conv [taps, S, D]."""

  def __init__(self, spec: Spec, d_model: int, *, rngs: nnx.Rngs):
    if d_model != spec.d_model:
      raise config.Error(f'd_model={spec.d_model} of a memory in a model of {d_model}')
    s, d, e = spec.streams or 1, d_model, len(spec.hash.tables) * spec.head_dim
    self.spec = spec
    rows = -(-sum(spec.hash.tables) // MULTIPLE) * MULTIPLE
    self.embed = param.normal((rows, spec.head_dim), ('vocab', 'embed'), sigma=0.02, rngs=rngs)
    self.key = linear.Linear('BTE,ESD->BTSD', (e, s, d), (None, None, 'embed'), bias='key' in spec.bias, rngs=rngs)
    self.value = linear.Linear('BTE,ED->BTD', (e, d), (None, 'embed'), bias='value' in spec.bias, rngs=rngs)
    self.q_norm, self.k_norm, self.v_norm = (param.constant((s, d), (None, 'embed'), value=1.0) for _ in range(3))
    # at first the convolution says nothing
    self.conv = param.constant((spec.taps, s, d), (None, None, 'embed'), value=0.0)

  def __call__(self, x: jax.Array, context, view: cache.View | None = None):
    """x [B, T, D], or [B, T, S, D] with streams, -> (y of the same shape, view, aux)."""
    spec, (b, t) = self.spec, x.shape[:2]
    if context.tokens is None:
      raise ValueError('a conditional memory needs the ids of tokens')
    streams = x.reshape(b, t, -1, spec.d_model)
    before, real, past = self._before(context, view, b, t)
    ids = context.tokens if spec.canonical is None else jnp.asarray(np.array(spec.canonical, np.int32))[context.tokens]
    ids = ids if real is None else jnp.where(real, ids, spec.pad)
    known = jnp.concatenate([before[0], ids], 1)  # [B, n - 1 + T]
    longest = len(spec.hash.factors)
    grams = jnp.stack([known[:, longest - 1 - k :][:, :t] for k in range(longest)], -1)  # the latest first
    grams = jnp.where(self._joined(context.segments, t, np.arange(longest)), grams, spec.pad)
    table = sharding.shard(self.embed[...].astype(x.dtype), 'vocab', None)
    e = table[rows_of(grams, spec.hash)].reshape(b, t, -1)
    logit = (_normed(streams, self.q_norm, spec.eps) * _normed(self.key(e), self.k_norm, spec.eps)).sum(-1)
    logit = logit * spec.d_model**-0.5
    if spec.root:
      logit = jnp.sign(logit) * jnp.sqrt(jnp.maximum(jnp.abs(logit), 1e-6))
    u = (jax.nn.sigmoid(logit)[..., None] * self.value(e)[:, :, None]).astype(x.dtype)  # [B, T, S, D]
    c = _normed(u, self.v_norm, spec.eps).astype(x.dtype)
    c = c if real is None else jnp.where(real[..., None, None], c, 0)
    read = jnp.concatenate([before[1].astype(x.dtype), c], 1)  # [B, reach + T, S, D]
    steps = np.arange(spec.taps - 1, -1, -1) * longest
    joined = self._joined(context.segments, t, steps)
    y = 0
    for i, back in enumerate(steps):
      tap = read[:, spec.reach - back :][:, :t]
      y = y + jnp.where(joined[..., i, None, None], tap, 0) * self.conv[i].astype(x.dtype)
    if view is not None:
      end = longest - 1 + t if real is None else longest - 1 + past
      view = view.replace(
        (cache.last(known, end, longest - 1), cache.last(read, end + spec.reach - (longest - 1), spec.reach))
      )
    return (u + jax.nn.silu(y)).reshape(x.shape), view, {}

  def _before(self, context, view, b, t):
    """((ids, what was read) before this call, which tokens are no padding or None, [B] where the last of them ends)."""
    spec = self.spec
    ids, read = (a[0] for a in spec.cache(1, b, 0, jnp.float32))
    nothing = (jnp.full_like(ids, spec.pad), read)
    if view is None:
      return nothing, None, None
    if attention.fresh(context, t):
      if context.positions is None:
        return nothing, None, None
      real = context.positions >= 0
      return nothing, real, jnp.argmax(real, 1) + real.sum(1)
    ids, read = view.read()
    past = jnp.reshape(context.start, (-1, 1)) if context.positions is None else context.positions[:, :1]
    there = lambda size: past + np.arange(-size, 0) >= 0
    ids = jnp.where(there(ids.shape[1]), ids, spec.pad)
    return (ids, jnp.where(there(read.shape[1])[..., None, None], read, 0)), None, None

  def _joined(self, segments, t, steps):
    """bool [B or 1, T, steps]: whether so many tokens back the same document goes on."""
    if segments is None:
      return np.ones((1, t, len(steps)), bool)
    back = lambda k: jnp.pad(segments, ((0, 0), (k, 0)), constant_values=-1)[:, :t] == segments
    return jnp.stack([back(int(k)) for k in steps], -1)


def rows_of(grams: jax.Array, hash: Hash) -> jax.Array:
  """Ids [.., n], the latest first, -> rows int32 [.., tables].

  Row of a head: (id_0 f_0 xor id_1 f_1 xor ..) mod its prime, behind the tables before its own. The products have 63
  bits; they are kept in two halves of 32, so that nothing hangs on whether 64-bit integers are switched on.
  """
  ids = grams.astype(jnp.uint32)
  high, low = _times(ids[..., 0], hash.factors[0])
  offset, rows = 0, []
  for k, primes in enumerate(hash.primes, 1):
    more = _times(ids[..., k], hash.factors[k])
    high, low = high ^ more[0], low ^ more[1]
    for prime in primes:
      rows.append(_modulo(high, low, prime).astype(jnp.int32) + offset)
      offset += prime
  return jnp.stack(rows, -1)


def canonical(texts: Sequence[str], pieces: Sequence[str]) -> tuple[int, ...]:
  r"""What each id says (and its piece, where that is no text of its own) -> canonical ids, numbered as they appear.

  Compatible characters, accents, case, and kinds and lengths of blanks are one (NFKC, NFD, no marks, lower case).

  >>> canonical([' The', 'the', 'thé', ' ', '\n', '\N{REPLACEMENT CHARACTER}'], ['?'] * 5 + ['<0xC3>'])
  (0, 0, 0, 1, 1, 2)
  """
  numbers: dict[str, int] = {}
  return tuple(
    numbers.setdefault(piece if '\N{REPLACEMENT CHARACTER}' in text else _folded(text) or text, len(numbers))
    for text, piece in zip(texts, pieces, strict=True)
  )


def hashes(layers: Sequence[int], rows: Sequence[int], heads: int, ids: int, seed: int = 0) -> dict[int, Hash]:
  """The hashes of the released code.

  Args:
    layers: that have a memory, in order.
    rows: of a table for n-grams of 2, 3, .. ids, at least: each head takes the next prime that nobody has.
    heads: of each n.
    ids: how many canonical ids there are.
    seed: of the factors.

  Raises:
    config.Error: for more than IDS ids, or tables that reach ROWS.
  """
  if ids > IDS or max(rows) > ROWS // 2:
    raise config.Error(f'ids={ids}, rows={tuple(rows)}: only up to {IDS} ids and {ROWS // 2} rows')
  taken, found = set[int](), {}
  for layer in layers:
    half = max(1, np.iinfo(np.int64).max // ids // 2)
    drawn = np.random.default_rng(seed + 10007 * layer).integers(0, half, len(rows) + 1, np.int64)
    primes = []
    for least in rows:
      of_n = []
      for _ in range(heads):
        least = next(p for p in range(least, ROWS) if p not in taken and _is_prime(p))
        taken.add(least)
        of_n.append(least)
      primes.append(tuple(of_n))
    found[layer] = Hash(tuple(int(a) * 2 + 1 for a in drawn), tuple(primes))
  return found


def _normed(x, weight, eps):
  """x / rms(x) * weight [S, D], float32."""
  return x.astype(jnp.float32) * norm.inverse(x, eps) * weight[...].astype(jnp.float32)


def _times(ids, factor):
  """ids uint32 below 2 ** 20 times a factor below 2 ** 63 -> (high, low) 32 bits of the product."""
  high = low = jnp.zeros_like(ids)
  for shift in range(0, 64, 12):
    part = ids * np.uint32(factor >> shift & 0xFFF)
    if shift < 32:
      added = part << shift
      low = low + added
      high = high + (part >> (32 - shift) if shift else 0) + (low < added)
    else:
      high = high + (part << (shift - 32))
  return high, low


def _modulo(high, low, prime):
  """(high, low) mod a prime below 2 ** 24, a byte at a time."""
  rest = jnp.zeros_like(high)
  for word in (high, low):
    for shift in (24, 16, 8, 0):
      rest = (rest << 8 | (word >> shift & 0xFF)) % np.uint32(prime)
  return rest


def _folded(text):
  text = unicodedata.normalize('NFD', unicodedata.normalize('NFKC', text))
  text = ''.join(c for c in text if unicodedata.category(c) != 'Mn').lower()
  text = re.sub('[ \t\r\n]+', ' ', text)
  return text if text == ' ' else text.strip()


def _is_prime(number):
  return number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))
