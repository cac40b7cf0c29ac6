"""Documents → rows of T tokens, with document isolation decided by lengths, never by the value of a token.

Reading order: `pack` (what it means, by example), `prepare` (what a document must be), `put` (one run of a document).

- A document that does not fit goes on in the next row as a segment of its own, with positions from 0: attention does
  not reach back over the edge of a row, so it is a new beginning. No target is lost: the last token of the row has the
  first token of the next row as its target.
- The last token of a document has weight 0, for its target would be the first token of another document.
- Padding is segment 0 with weight 0.
"""

from collections.abc import Iterable

import numpy as np

Batch = dict[str, np.ndarray]  # tokens, targets, positions, segments int32 [b, T]; weights float32 [b, T]

# why a document is dropped
EMPTY, NO_TARGET = 'empty', 'no_target'


def pack(documents: Iterable[list[int]], length: int) -> Batch:
  """Packs documents into as many rows as they need.

  >>> bos, a, b = 256, 1, 2
  >>> rows = pack([[bos, a, a, a], [bos, b, b]], 7)
  >>> for name, row in rows.items():
  ...   print(f'{name:9}', *row[0])
  tokens    256 1 1 1 256 2 2
  targets   1 1 1 256 2 2 0
  positions 0 1 2 3 0 1 2
  segments  1 1 1 1 2 2 2
  weights   1.0 1.0 1.0 0.0 1.0 1.0 0.0

  A long document goes on in the next row:

  >>> rows = pack([[1, 2, 3, 4, 5, 6], [7, 8]], 4)
  >>> rows['tokens'].tolist(), rows['targets'].tolist()
  ([[1, 2, 3, 4], [5, 6, 7, 8]], [[2, 3, 4, 5], [6, 7, 8, 0]])
  >>> rows['positions'].tolist(), rows['segments'].tolist()
  ([[0, 1, 2, 3], [0, 1, 0, 1]], [[1, 1, 1, 1], [1, 1, 2, 2]])
  """
  rows = [empty(1, length)]
  at = segment = 0
  for document in documents:
    ids, weights, _, _ = prepare(np.asarray(document, np.int32), None)
    start = 0
    while weights is not None and not finished(ids, start):
      if at == length:
        rows.append(empty(1, length))
        at = segment = 0
      segment += 1
      taken = put(rows[-1], 0, at, ids, weights, start, segment)
      at, start = at + taken, start + taken
  return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def empty(rows: int, length: int) -> Batch:
  """Rows of padding."""
  batch: Batch = {name: np.zeros((rows, length), np.int32) for name in ('tokens', 'targets', 'positions', 'segments')}
  return {**batch, 'weights': np.zeros((rows, length), np.float32)}


def prepare(
    ids: np.ndarray, weights: np.ndarray | None, *, cut: int | None = None, sample: bool = False,
) -> tuple[np.ndarray, np.ndarray | None, str | None, bool]:  # fmt: skip
  """Makes a document ready to be put.

  Args:
    ids: int32 [n].
    weights: float32 [n], of each token as a target (the first is never one), or None for 1.
    cut: length of a row, where a document must fit into one.
    sample: whether every document weighs 1.

  Returns:
    ids [n]; the weight of the target of each token but the last, float32 [n - 1], or None if the document is dropped;
    why it is dropped; whether it was cut.

  >>> ids = np.arange(8, dtype=np.int32)
  >>> prepare(ids, None, cut=4, sample=True)[1:]
  (array([0.25, 0.25, 0.25, 0.25], dtype=float32), None, True)
  >>> prepare(ids, np.array([0, 0, 0, 0, 0, 0, 1, 1]), cut=4)[1:]  # the prompt alone is longer than the row
  (None, 'no_target', True)
  """
  if len(ids) < 2:
    return ids, None, EMPTY, False
  kept = len(ids) if cut is None else min(len(ids), cut + 1)
  shortened = kept < len(ids)
  ids = ids[:kept]
  targets: np.ndarray
  if weights is None:
    targets = np.ones(kept - 1, np.float32)
  else:
    targets = np.asarray(weights[1:kept], np.float32)
  total = float(np.sum(targets, dtype=np.float64))
  if total <= 0.0:
    return ids, None, NO_TARGET, shortened
  return ids, targets / np.float32(total) if sample else targets, None, shortened


def finished(ids: np.ndarray, start: int) -> bool:
  """Whether nothing of a document is left to put: its last token alone has no target, so it begins no row."""
  return start >= len(ids) - 1


def put(batch: Batch, row: int, at: int, ids: np.ndarray, weights: np.ndarray, start: int, segment: int) -> int:
  """Puts ids[start:] into a row from slot `at` on, as far as they fit, and returns how many."""
  tokens, targets = batch['tokens'][row], batch['targets'][row]
  taken = min(len(tokens) - at, len(ids) - start)
  end, follow = at + taken, min(taken, len(ids) - 1 - start)
  if at:
    targets[at - 1] = ids[start]  # of weight 0
  tokens[at:end] = ids[start : start + taken]
  targets[at : at + follow] = ids[start + 1 : start + 1 + follow]
  batch['weights'][row, at : at + follow] = weights[start : start + follow]
  batch['positions'][row, at:end] = np.arange(taken, dtype=np.int32)
  batch['segments'][row, at:end] = segment
  return taken
