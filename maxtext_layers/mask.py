"""Who sees whom: the one function that attention masks come from.

A query sees the keys at its own position and before it, at most `window` of them, in its own segment. Segment 0 is
padding: padding sees only padding, hence no row of a mask is empty and a softmax over it stays finite.

>>> visible(np.arange(4), np.arange(4), window=2).astype(int)
array([[1, 0, 0, 0],
       [1, 1, 0, 0],
       [0, 1, 1, 0],
       [0, 0, 1, 1]])
>>> two_documents_and_padding = np.array([1, 1, 2, 0])
>>> visible(np.arange(4), np.arange(4), None, two_documents_and_padding, two_documents_and_padding).astype(int)
array([[1, 0, 0, 0],
       [1, 1, 0, 0],
       [0, 0, 1, 0],
       [0, 0, 0, 1]])

`chunks` cuts documents into pieces that do not see each other, which is attention in chunks.
"""

import jax
import jax.numpy as jnp
import numpy as np

type Array = jax.Array | np.ndarray


def visible(
  queries: Array,
  keys: Array,
  window: int | None = None,
  query_segments: Array | None = None,
  key_segments: Array | None = None,
) -> Array:
  """Places in the row of queries [..., T] and keys [..., S], and their segments, -> bool [..., T, S].

  Places are indices into the row, not rotary positions: in a packed row these start again with every document, and
  causality with isolated segments is the same in both. Query i of a row sees exactly min(i + 1, window) keys. Given
  numpy arrays the mask is a numpy array, a constant of the program.
  """
  distance = queries[..., :, None] - keys[..., None, :]
  seen = distance >= 0
  if window is not None:
    seen = seen & (distance < window)
  if query_segments is not None and key_segments is not None:
    seen = seen & (query_segments[..., :, None] == key_segments[..., None, :])
  return seen


def chunks(positions: Array, chunk: int, segments: Array | None = None) -> Array:
  """Segments cut every `chunk` positions: a query sees the keys of its own chunk.

  A chunk is counted from the start of its document, wherever that stands in a packed row, so that a document means the
  same alone and packed.

  Args:
    positions: [B, T] or [1, T], counted within a document; negative ones are padding.
    chunk: positions a chunk.
    segments: [B, T], each document in one piece, 0 padding; None: one document a row.

  Returns:
    Ids int32 [B, T], for `visible`: 0 padding, equal within a chunk of a document. Of numpy arrays a numpy array.

  >>> chunks(np.array([[-1, 0, 1, 2, 3, 4]]), 2)
  array([[0, 1, 1, 2, 2, 3]], dtype=int32)
  >>> two_documents = np.array([[1, 1, 1, 2, 2, 2]])
  >>> chunks(np.array([[0, 1, 2, 0, 1, 2]]), 2, two_documents)
  array([[1, 1, 2, 3, 3, 4]], dtype=int32)
  """
  numbers = positions // chunk
  if segments is None:
    return (numbers + 1).astype(np.int32) * (positions >= 0)
  xp = np if isinstance(positions, np.ndarray) and isinstance(segments, np.ndarray) else jnp
  new = (segments[:, 1:] != segments[:, :-1]) | (numbers[:, 1:] != numbers[:, :-1])
  ids = 1 + xp.pad(xp.cumsum(new, 1, dtype=np.int32), ((0, 0), (1, 0)))
  return ids * (segments > 0)
