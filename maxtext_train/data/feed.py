"""From local batches to global arrays on devices, `DEPTH` batches ahead of the step that takes them.

A thread reads, packs and copies to the devices while a step runs (and while it compiles). Each batch keeps the place in
the data behind it, so `position()` is that of the batches handed out, whatever the thread has read ahead.
"""

from collections.abc import Callable
from typing import Any

import grain
import jax
from jax.experimental import multihost_utils
import numpy as np

from maxtext_layers import config
from maxtext_train.data import packing
from maxtext_train.data import pipeline
from maxtext_train.data import worker

DEPTH = 2

Place = Callable[[packing.Batch], dict[str, jax.Array]]  # local rows [b, T] -> global arrays [B, T]


def reader(sharding: jax.sharding.Sharding, batch: int) -> tuple[int, int]:
  """(process, processes) for pipeline.build: which part of the batch this process's devices hold, and of how many.

  Processes that hold the same rows (a mesh axis that does not shard the batch crosses them) are the same reader.

  Args:
    sharding: of an array [B, T].
    batch: B.
  """
  rows: dict[int, set[tuple[int, int]]] = {}
  for device, index in sharding.devices_indices_map((batch, 1)).items():
    start, stop, _ = index[0].indices(batch)
    rows.setdefault(device.process_index, set()).add((start, stop))
  spans = {process: (min(s for s, _ in parts), max(e for _, e in parts)) for process, parts in rows.items()}
  parts = sorted(set(spans.values()))
  share = batch // len(parts)
  if parts != [(i * share, (i + 1) * share) for i in range(len(parts))]:
    raise config.Error(f'mesh: the batch of {batch} rows does not lie in equal runs over processes: {parts}')
  return parts.index(spans[jax.process_index()]), len(parts)


class Feed:
  """Iterates over batches of jax.Arrays [B, T] for the training step. Close it, or use it as a context.

  `tokens` is the number of real tokens, padding not counted, in this process's rows of the last batch.
  """

  def __init__(self, loader: pipeline.Loader, place: Place):
    """Takes over the loader, and closes it.

    Args:
      loader: of this process's rows.
      place: puts a local batch on the devices; called in the thread.
    """
    self.loader, self.place, self.tokens = loader, place, 0
    self._position = loader.position()
    ahead = grain.experimental.ThreadPrefetchIterDataset(_Ahead(loader, place), prefetch_buffer_size=DEPTH)
    self._iterators = worker.closing(self, ahead.__iter__())
    self._iterators[0].start_prefetch()
    self._together = loader.finite and jax.process_count() > 1

  def __iter__(self) -> 'Feed':
    return self

  def __next__(self) -> dict[str, jax.Array]:
    batch, self.tokens = (next(self._iterators[0], None) if self._iterators else None) or (None, 0)
    if self._together:  # the data of one process may end before another's: they all go on until the last one's has
      ended = multihost_utils.process_allgather(np.array([batch is None]))
      if batch is None and not ended.all():
        batches, cursor = self._position
        self._position = batches + 1, cursor
        return self.place(packing.empty(self.loader.slots.stop - self.loader.slots.start, self.loader.rows.length))
    if batch is None:
      raise StopIteration
    self._position = self._iterators[0].get_state()['position']
    return batch

  def position(self) -> tuple[int, np.ndarray]:
    """See pipeline.Loader.position."""
    return self._position

  def state(self, position: tuple[int, np.ndarray] | None = None) -> dict[str, Any]:
    """See pipeline.Loader.state."""
    return self.loader.state(position or self._position)

  def report(self, position: tuple[int, np.ndarray] | None = None) -> dict[str, Any]:
    """See pipeline.Loader.report."""
    return self.loader.report(position or self._position)

  def close(self) -> None:
    """Ends the thread and the loader's workers."""
    worker.close(self._iterators)
    self.loader.close()

  def __enter__(self) -> 'Feed':
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


def put(local: packing.Batch, sharding: jax.sharding.Sharding, batch: int) -> dict[str, jax.Array]:
  """Local rows [b, T] of each process -> global arrays [B, T], all sharded alike."""
  return {
    name: jax.make_array_from_process_local_data(sharding, value, (batch, *value.shape[1:]))
    for name, value in local.items()
  }


class _Ahead(grain.IterDataset):
  """What the thread runs through: global batches, with the loader's position as state."""

  def __init__(self, loader: pipeline.Loader, place: Place):
    super().__init__()
    self.loader, self.place = loader, place

  def __iter__(self) -> grain.DatasetIterator:
    return _AheadIterator(self.loader, self.place)


class _AheadIterator(grain.DatasetIterator):
  def __init__(self, loader: pipeline.Loader, place: Place):
    super().__init__()
    self._loader, self._place = loader, place

  def __next__(self) -> tuple[dict[str, jax.Array], int]:
    local = next(self._loader)
    tokens = int(np.count_nonzero(local['segments'])) if 'segments' in local else local['tokens'].size
    return self._place(local), tokens

  def get_state(self) -> dict[str, Any]:
    return {'position': self._loader.position()}

  def set_state(self, state: dict[str, Any]) -> None:
    # of grain's interface, and never called: a place in the data is given to pipeline.build, before the thread
    raise NotImplementedError('build the loader with a state instead')
