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
"""

import jax
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
