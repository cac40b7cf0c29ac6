"""Rows of random tokens: no record, no packing, no tokenizer. For measuring speed, and for tests of what stands behind.

`synthetic` draws one batch and hands it out again and again; `random` draws each row from (seed, row, step). Both leave
positions and segments out: a model without them takes its fastest path.
"""

from typing import Any

import grain
import numpy as np


class Rows(grain.IterDataset):
  """Parts of batches: tokens, targets int32 [b, T], weights float32 [b, T], cursor int64 [b, 1] (steps handed out)."""

  def __init__(self, *, vocab: int, batch: int, length: int, seed: int, fixed: bool, cursor: np.ndarray, slots: slice):
    super().__init__()
    self.vocab, self.batch, self.length, self.seed, self.fixed = vocab, batch, length, seed, fixed
    self.cursor, self.slots = cursor, slots

  def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
    """Keeps the rows of one worker; called by grain in the worker."""
    del sequential_slice
    self.slots = slice(self.slots.start + sl.start * self.slots.step, self.slots.stop, self.slots.step * sl.step)
    self.cursor = self.cursor[sl]

  def __iter__(self) -> grain.DatasetIterator:
    return _Iterator(self)


class _Iterator(grain.DatasetIterator):
  def __init__(self, rows: Rows):
    super().__init__()
    self._rows, self._cursor = rows, rows.cursor.copy()
    if rows.fixed:
      draw = np.random.default_rng(rows.seed)
      self._fixed = draw.integers(0, rows.vocab, (rows.batch, rows.length + 1), dtype=np.int32)[rows.slots]

  def __next__(self) -> dict[str, np.ndarray]:
    rows = self._rows
    drawn = self._fixed if rows.fixed else self._draw()
    tokens, targets = np.ascontiguousarray(drawn[:, :-1]), np.ascontiguousarray(drawn[:, 1:])
    self._cursor += 1
    weights: np.ndarray = np.ones((len(drawn), rows.length), np.float32)
    return {'tokens': tokens, 'targets': targets, 'weights': weights, 'cursor': self._cursor.copy()}

  def _draw(self) -> np.ndarray:
    rows = self._rows
    slots = range(rows.batch)[rows.slots]
    draws = [np.random.default_rng((rows.seed, slot, int(step))) for slot, (step,) in zip(slots, self._cursor)]
    return np.stack([draw.integers(0, rows.vocab, rows.length + 1, dtype=np.int32) for draw in draws])

  def get_state(self) -> dict[str, Any]:
    return {'cursor': self._cursor.copy()}

  def set_state(self, state: dict[str, Any]) -> None:
    self._cursor = np.array(state['cursor'], np.int64)
