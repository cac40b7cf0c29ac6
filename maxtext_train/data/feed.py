"""From local batches to global arrays on devices, `DEPTH` batches ahead of the step that takes them.

A thread reads, packs and copies to the devices while a step runs. Each batch keeps the place in the data behind it, so
`state()` is exact for the batches handed out, whatever the thread has read ahead.
"""

from typing import Any

import grain
import jax
from jax.experimental import multihost_utils
import numpy as np

from maxtext_layers import config
from maxtext_train.data import packing
from maxtext_train.data import pipeline

DEPTH = 2


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
  """Iterates over batches of jax.Arrays [B, T] for the training step. Close it, or use it as a context."""

  def __init__(self, loader: Any, sharding: jax.sharding.Sharding, *, batch: int):
    """Takes over the loader, and closes it.

    Args:
      loader: a pipeline.Loader, or a pipeline.HeldOut.
      sharding: of an array [B, T]; every array of the batch has it.
      batch: rows of the global batch, B.
    """
    self.loader, self._put = loader, lambda local: put(local, sharding, batch)
    self._position: Any = loader.position() if isinstance(loader, pipeline.Loader) else None
    ahead = grain.experimental.ThreadPrefetchIterDataset(_Ahead(loader, self._put), prefetch_buffer_size=DEPTH)
    self._iterators = pipeline.closing(self, ahead.__iter__())
    self._iterators[0].start_prefetch()  # the first batches are read while the step compiles
    self._shared_end = isinstance(loader, pipeline.Loader) and loader.finite and jax.process_count() > 1

  def __iter__(self) -> 'Feed':
    return self

  def __next__(self) -> dict[str, jax.Array]:
    batch = next(self._iterators[0], None) if self._iterators else None
    if self._shared_end:  # the data of one process may end before another's: they all go on until the last one's has
      ended = multihost_utils.process_allgather(
        np.array([batch is None, 0 if batch is None else batch['tokens'].shape[1]])
      )
      if not ended[:, 0].all() and batch is None:
        rows = self.loader.slots.stop - self.loader.slots.start
        batches, cursor = self._position
        self._position = batches + 1, cursor
        return self._put(packing.empty(rows, int(ended[:, 1].max())))
    if batch is None:
      raise StopIteration
    self._position = self._iterators[0].get_state()['position']
    return batch

  def state(self) -> dict[str, Any]:
    """See pipeline.Loader.state."""
    return self.loader.state(self._position)

  def report(self) -> dict[str, Any]:
    """See pipeline.Loader.report."""
    return self.loader.report(self._position)

  def close(self) -> None:
    """Ends the thread and the loader's workers."""
    pipeline.close(self._iterators)
    if isinstance(self.loader, pipeline.Loader):
      self.loader.close()

  def __enter__(self) -> 'Feed':
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


def put(local: packing.Batch, sharding: jax.sharding.Sharding, batch: int) -> dict[str, jax.Array]:
  """Local rows [b, T] of each process -> global arrays [B, T]."""
  return {
    name: jax.make_array_from_process_local_data(sharding, value, (batch, *value.shape[1:]))
    for name, value in local.items()
  }


class _Ahead(grain.IterDataset):
  """What the thread runs through: global batches, with the loader's position as state."""

  def __init__(self, loader: Any, put_batch: Any):
    super().__init__()
    self.loader, self.put = loader, put_batch

  def __iter__(self) -> grain.DatasetIterator:
    return _AheadIterator(self.loader, self.put)


class _AheadIterator(grain.DatasetIterator):
  def __init__(self, loader: Any, put_batch: Any):
    super().__init__()
    self._loader, self._put, self._batches = loader, put_batch, iter(loader)

  def __next__(self) -> dict[str, jax.Array]:
    return self._put(next(self._batches))

  def get_state(self) -> dict[str, Any]:
    return {'position': self._loader.position() if isinstance(self._loader, pipeline.Loader) else None}

  def set_state(self, state: dict[str, Any]) -> None:
    raise NotImplementedError('build the loader with a state instead')
