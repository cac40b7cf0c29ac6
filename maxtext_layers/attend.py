"""Softmax attention, one function an implementation; `KERNELS` says what each can do and where it runs.

q [B, N, T, H], k [B, K, S, H], v [B, K, S, W] -> [B, N, T, W], heads before time, as a matrix product wants them; W
is H but for latent attention. Every implementation takes its mask from mask.visible; the twin that they are tested
against is in attend_test.py. Reading order: `KERNELS`, `chunked` (and `xla`, which is chunked in one piece), `cached`
(decode), `splash`, `cudnn`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_layers import config
from maxtext_layers import mask
from maxtext_layers import sharding

LANES = 128  # of a TPU's vector unit: the smallest block of the kernel


@config.spec
class Shape:
  """What a head computes, beside its mask: scores are scale * q.k, then cap * tanh(scores / cap)."""

  scale: float
  window: int | None = None
  cap: float | None = None


def chunked(q, k, v, shape: Shape, segments=None, sinks=None, block: int | None = None) -> jax.Array:
  """Query blocks of `block` rows, each against the keys that it can see: half the work of a square, no loop.

  Args:
    q: [B, N, T, H].
    k: [B, K, T, H].
    v: [B, K, T, W].
    shape: scale, window and cap.
    segments: [B, T] or [1, T], 0 padding; None: one document a row. Of a numpy array, keys of segments that ended
      before a block are not even read.
    sinks: [N], a logit a head that takes part in the softmax and has no value (arXiv 2309.17453).
    block: None: as `block_rows` says.
  """
  b, n, t, h = q.shape
  groups = k.shape[1]
  q = (q * jnp.asarray(shape.scale, q.dtype)).reshape(b, groups, n // groups, t, h)
  block = block or block_rows(t)
  out = []
  for low in range(0, t, block):
    high = min(low + block, t)
    first = 0 if shape.window is None else max(0, low - shape.window + 1)
    if isinstance(segments, np.ndarray):
      first = max(first, min(int(np.argmax(row == s)) for row in segments for s in np.unique(row[low:high])))
    inside = (None, None) if segments is None else (segments[:, low:high], segments[:, first:high])
    seen = mask.visible(np.arange(low, high), np.arange(first, high), shape.window, *inside)
    seen = seen if segments is None else seen[:, None, None]
    out.append(softmax_average(q[..., low:high, :], k[:, :, first:high], v[:, :, first:high], seen, shape.cap, sinks))
  return (out[0] if len(out) == 1 else jnp.concatenate(out, 3)).reshape(b, n, t, v.shape[-1])


def block_rows(length: int) -> int:
  """Queries that are worked on at once: a quarter of a row, but 64 at least and 256 at most."""
  return min(max(-(-length // 4), 64), 256)


def xla(q, k, v, shape: Shape, segments=None, sinks=None) -> jax.Array:
  """All pairs at once."""
  return chunked(q, k, v, shape, segments, sinks, block=q.shape[2])


def cached(q, k, v, shape: Shape, slots, first, sinks=None, chunk: int | None = None) -> jax.Array:
  """q [B, N, T, H] that stand at slots [B, T] (or [1, T]) against memories k [B, K, S, H] and v [B, K, S, W].

  first [B] (or [1]) is the row's first slot that holds a token; what lies before is padding on the left. Slots after a
  query's own are not written yet, or not meant for it. `chunk`: a query sees its own chunk of so many slots from there.
  q and k may be tuples of as many arrays, see `among`.
  """
  return among(q, k, v, shape, written(slots, first, v.shape[2], shape.window, chunk), sinks)


def written(slots, first, count: int, window: int | None = None, chunk: int | None = None):
  """bool [B or 1, T, S]: which of `count` slots of a memory a query sees; arguments as of `cached`."""
  keys = np.arange(count)[None]
  ids = [a >= 0 if chunk is None else mask.chunks(a, chunk) for a in (slots - first[:, None], keys - first[:, None])]
  return mask.visible(slots, keys, window, *ids)


def among(q, k, v, shape: Shape, seen, sinks=None):
  """q [B, N, T, H] against those of k [B, K, S, H] and v [B, K, S, W] that are seen, bool [B or 1, T, S].

  q and k may be tuples of as many arrays: parts of a head whose memories lie apart, and whose products are added.
  """
  many_q, many_k = (x if isinstance(x, tuple) else (x,) for x in (q, k))
  b, n, t, _ = many_q[0].shape
  groups = v.shape[1]
  grouped = tuple((x * jnp.asarray(shape.scale, x.dtype)).reshape(b, groups, n // groups, t, -1) for x in many_q)
  return softmax_average(grouped, many_k, v, seen[:, None, None], shape.cap, sinks).reshape(b, n, t, v.shape[-1])


def softmax_average(q, k, v, seen, cap, sinks):
  """q [B, K, G, T, H] scaled, k [B, K, S, H] (or tuples of parts), v [B, K, S, W], seen [.., T, S] -> [B, K, G, T, W].

  The softmax is float32.
  """
  parts = zip(q, k, strict=True) if isinstance(q, tuple) else [(q, k)]
  scores = sum(jnp.einsum('BKGTH,BKSH->BKGTS', a, b, preferred_element_type=jnp.float32) for a, b in parts)
  if cap is not None:
    scores = cap * jnp.tanh(scores / cap)
  scores = jnp.where(seen, scores, -1e30)  # finite: a row of padding has a gradient too
  if sinks is None:
    weights = jax.nn.softmax(scores, -1)
  else:
    sinks = sinks.astype(jnp.float32).reshape(*scores.shape[1:3], 1, 1)
    top = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), sinks))
    raised = jnp.exp(scores - top)
    weights = raised / (raised.sum(-1, keepdims=True) + jnp.exp(sinks - top))
  return jnp.einsum('BKGTS,BKSH->BKGTH', weights.astype(v.dtype), v)


def splash(q, k, v, shape: Shape, segments=None, sinks=None, interpret: bool = False) -> jax.Array:
  """The TPU kernel of jax.experimental.pallas; opaque to the partitioner, so it runs under shard_map."""
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel  # only a TPU needs it
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

  assert sinks is None
  length = q.shape[2]
  block = math.gcd(length, 512)
  assert block >= LANES, 'attention.resolve was not told the length'
  seen = masks.CausalMask((length, length))
  if shape.window is not None:
    seen = masks.LocalMask((length, length), (shape.window - 1, 0), 0)
  sizes = kernel.BlockSizes(
    **{
      f'block_{name}': block for name in ('q', 'kv', 'kv_compute', 'q_dkv', 'kv_dkv', 'kv_dkv_compute', 'q_dq', 'kv_dq')
    }
  )

  def local(q, k, v, segments):
    run = kernel.make_splash_mha_single_device(
      masks.MultiHeadMask([seen] * q.shape[1]), block_sizes=sizes, attn_logits_soft_cap=shape.cap, interpret=interpret
    )
    ids = None if segments is None else kernel.SegmentIds(segments, segments)
    return jax.vmap(run)(q * jnp.asarray(shape.scale, q.dtype), k, v, ids)

  if segments is not None:
    segments = jnp.broadcast_to(segments, (q.shape[0], length))
  if not sharding.active():
    return local(q, k, v, segments)
  spec = lambda x, *words: sharding.activation(x.shape, *words)
  wide, narrow = spec(q, 'batch', 'heads', None, None), spec(k, 'batch', 'kv_heads', None, None)
  if wide[1] != narrow[1]:  # the mesh cuts the queries' heads further than it can cut k and v: a device takes its own
    here = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), wide).shard_shape(q.shape)[1]
    ways = q.shape[1] // here
    k, v = (jnp.repeat(x, math.lcm(ways, x.shape[1]) // x.shape[1], 1) for x in (k, v))
    narrow = wide
  rows = None if segments is None else spec(segments, 'batch', None)
  return jax.shard_map(local, in_specs=(wide, narrow, narrow, rows), out_specs=wide, check_vma=False)(q, k, v, segments)


def cudnn(q, k, v, shape: Shape, segments=None, sinks=None) -> jax.Array:
  """cuDNN's fused attention on an NVIDIA GPU, for bfloat16 and float16."""
  assert segments is None and sinks is None and shape.cap is None
  window = None if shape.window is None else (shape.window - 1, 0)
  q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
  y = jax.nn.dot_product_attention(
    q, k, v, scale=shape.scale, is_causal=True, local_window_size=window, implementation='cudnn'
  )
  return y.swapaxes(1, 2)


@config.spec
class Kernel:
  """An implementation, the platforms that it runs on, and what it can do there.

  features: of 'segments window cap sinks values'; values: that heads of v have another size than those of q and k.
  multiple: of which a row's number of tokens must be one.
  dtypes: that q, k and v may have; empty: any.
  """

  run: object
  platforms: frozenset[str]
  features: frozenset[str]
  multiple: int = 1
  dtypes: frozenset[str] = frozenset()

  def lacks(self, needs, length: int | None = None, dtype=None) -> list[str]:
    """What is needed and not there, in words; a length or dtype of None is not known and not asked for."""
    lacking = sorted(needs - self.features)
    if length is not None and length % self.multiple:
      lacking.append(f'rows of {length} tokens (only multiples of {self.multiple})')
    if dtype is not None and self.dtypes and str(jnp.dtype(dtype)) not in self.dtypes:
      lacking.append(f'{jnp.dtype(dtype)} (only {" and ".join(sorted(self.dtypes))})')
    return lacking


def _kernel(run, platforms, features, **limits):
  return Kernel(run, frozenset(platforms.split()), frozenset(features.split()), **limits)


# In order of preference, as 'auto' takes them; it passes over cudnn (attention.resolve).
KERNELS = {
  'splash': _kernel(splash, 'tpu', 'segments window cap', multiple=LANES),
  'cudnn': _kernel(cudnn, 'gpu cuda', 'window', dtypes=frozenset({'bfloat16', 'float16'})),
  'chunked': _kernel(chunked, 'cpu gpu cuda rocm tpu', 'segments window cap sinks values'),
  'xla': _kernel(xla, 'cpu gpu cuda rocm tpu', 'segments window cap sinks values'),
}
