"""Rows of tokens, packed from the records of one stream each, with the stream's cursor behind them.

A cursor is all that a stream knows: which record comes next, the offset in it, and what was counted so far. Reading
order: the columns of a cursor, `Rows` (which records, in which order), `_Iterator` (packs them).
"""

from collections.abc import Callable
from typing import Any

import grain
import numpy as np

from maxtext_layers import config
from maxtext_train.data import packing
from maxtext_train.data import sources

BROKEN = 'broken'

# columns of a cursor
RECORD, OFFSET, TOKENS, TRUNCATED, DROPPED = 0, 1, 2, 3, 4
REASONS = (BROKEN, packing.EMPTY, packing.NO_TARGET)
WHY = {
  BROKEN: 'cannot be read',
  packing.EMPTY: 'have fewer than two tokens',
  packing.NO_TARGET: 'have no token to train on (within the length of a row)',
}
WIDTH = DROPPED + len(REASONS)

# value -> ids int32 [n], weights of the ids as targets float32 [n] or None for 1
Encode = Callable[[sources.Record], tuple[np.ndarray, np.ndarray | None]]


class Rows(grain.IterDataset):
  """Parts of batches from records, with `cursor` int64 [b, WIDTH] behind them. Ended streams give padding."""

  def __init__(
      self, *, source: sources.Source, members: np.ndarray, encode: Encode, batch: int, length: int,
      shuffle: int | None, epochs: int | None, whole: bool, sample: bool, skip: bool, slots: slice,
  ):  # fmt: skip
    """See pipeline.build. `members`: record numbers of this split; `slots`: the rows of the batch to be made here."""
    super().__init__()
    self.source, self.members, self.encode, self.batch, self.length = source, members, encode, batch, length
    self.shuffle, self.epochs, self.whole, self.sample, self.skip = shuffle, epochs, whole, sample, skip
    self.slots = slots
    self.cursor = np.zeros((slots.stop - slots.start, WIDTH), np.int64)
    self.cursor[:, RECORD] = np.arange(batch)[slots]
    order: grain.MapDataset = grain.MapDataset.range(len(members))
    self.order = order if shuffle is None else order.shuffle(seed=shuffle)

  def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
    """Keeps the streams of one worker; called by grain in the worker."""
    del sequential_slice
    self.cursor = self.cursor[sl]

  def __iter__(self) -> grain.DatasetIterator:
    return _Iterator(self)

  def name(self, index: int) -> str:
    """Where record `index` of the order lies."""
    return self.source.name(int(self.members[self.order[index]]))

  def read(self, index: int) -> tuple[np.ndarray, np.ndarray | None, str | None, bool]:
    """Record `index` of the order, tokenized; see packing.prepare."""
    try:
      record = self.source[int(self.members[self.order[index]])]
      try:
        ids, weights = self.encode(record)
      except config.Error as error:  # text that is no Unicode, a chat without an answer
        raise sources.BadRecord(f'{record.name}: {error}') from None
    except sources.BadRecord:
      if not self.skip:
        raise
      return np.zeros(0, np.int32), None, BROKEN, False
    return packing.prepare(ids, weights, cut=self.length if self.whole else None, sample=self.sample)

  def exhausted(self, cursor: np.ndarray) -> bool:
    """Whether nothing that can be trained on comes after `cursor`, which is a row a stream."""
    if self.epochs is None:
      return False
    end = self.epochs * len(self.members)
    for record, offset, *_ in cursor:
      if offset:  # in the middle of one
        return False
      if any(self.read(index)[1] is not None for index in range(record, end, self.batch)):
        return False
    return True

  def probe(self) -> None:
    """Raises config.Error if no record at all can be trained on, before training."""
    counts = dict.fromkeys(REASONS, 0)
    for index in range(len(self.members)):
      _, weights, why, _ = self.read(index)
      if weights is not None:
        return
      counts[str(why)] += 1
    found = '; '.join(f'{n} {WHY[why]}' for why, n in counts.items() if n)
    raise config.Error(f'none of the {len(self.members)} records can be trained on: {found}')


class _Iterator(grain.DatasetIterator):
  """Packs row after row; holds the document that each stream is in."""

  def __init__(self, rows: Rows):
    super().__init__()
    self._rows = rows
    self._cursor = rows.cursor.copy()
    self._open: list[tuple[np.ndarray, np.ndarray] | None] = [None] * len(self._cursor)
    self._cut = [False] * len(self._cursor)

  def __next__(self) -> packing.Batch:
    batch = packing.empty(len(self._cursor), self._rows.length)
    for row in range(len(self._cursor)):
      self._fill(batch, row)
    return {**batch, 'cursor': self._cursor.copy()}

  def _fill(self, batch: packing.Batch, row: int) -> None:
    cursor, at, segment = self._cursor[row], 0, 0
    while at < self._rows.length and (document := self._document(row)):
      segment += 1
      taken = packing.put(batch, row, at, *document, int(cursor[OFFSET]), segment)
      at += taken
      cursor[TOKENS] += taken
      cursor[OFFSET] += taken
      if packing.finished(document[0], int(cursor[OFFSET])):
        cursor[TRUNCATED] += self._cut[row]
        self._next(row)
      if self._rows.whole:
        return

  def _document(self, row: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The document that a stream is in, or None behind the last one."""
    rows, cursor = self._rows, self._cursor[row]
    if self._open[row] is None:
      end = None if rows.epochs is None else rows.epochs * len(rows.members)
      for _ in range(len(rows.members)):  # a stream that finds nothing to train on gives padding, and tries again
        if end is not None and cursor[RECORD] >= end:
          return None
        ids, weights, why, self._cut[row] = rows.read(int(cursor[RECORD]))
        if weights is not None:
          self._open[row] = (ids, weights)
          break
        cursor[DROPPED + REASONS.index(str(why))] += 1
        self._next(row)
    return self._open[row]

  def _next(self, row: int) -> None:
    self._cursor[row, RECORD] += self._rows.batch
    self._cursor[row, OFFSET] = 0
    self._open[row] = None

  def get_state(self) -> dict[str, Any]:
    return {'cursor': self._cursor.copy()}

  def set_state(self, state: dict[str, Any]) -> None:
    self._cursor = np.array(state['cursor'], np.int64)
    self._open = [None] * len(self._cursor)
