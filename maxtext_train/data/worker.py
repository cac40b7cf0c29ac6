"""Processes that read and tokenize: how they begin, hand over and end.

They are grain's, with three precautions: arrays travel through shared memory, of which there must be enough (`spawn`);
a signal to the process group is for the program alone (`starting`); a worker ends with its parent, even if that is
killed (`_begin`).
"""

from collections.abc import Iterator
import contextlib
import multiprocessing
from multiprocessing import connection
from multiprocessing import resource_tracker
import os
import signal
import threading
from typing import Any
import weakref

from absl import flags
import grain

from maxtext_layers import config

_AHEAD = 2  # batches a worker reads ahead
_SHARED = 4096  # bytes; larger arrays of a worker travel in shared memory, smaller ones through a pipe


def spawn(rows: grain.IterDataset, workers: int, tokens: int) -> grain.IterDataset:
  """`rows`, made by `workers` processes in turn, which start with the first one asked for (within `starting`).

  Args:
    rows: picklable, with `set_slice`: worker w makes the rows w, w + workers, …
    workers: how many, 1 or more.
    tokens: of all the parts of one batch together.

  Raises:
    config.Error: what they read ahead has no room in shared memory.
  """
  if not flags.FLAGS.is_parsed():  # grain asks a flag of its own, and none of ours
    flags.FLAGS.mark_as_parsed()
  _check_shared_memory(workers, tokens)
  shared = grain.experimental.WithOptionsIterDataset(rows, grain.experimental.DatasetOptions(min_shm_size=_SHARED))
  options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=_AHEAD)
  return shared.mp_prefetch(options, worker_init_fn=_begin)


@contextlib.contextmanager
def starting() -> Iterator[None]:
  """Workers that start in this block are out of reach of signals."""
  # Workers inherit the signal mask: an interrupt or a termination of the process group is for the program to handle,
  # which may want to finish its step. They end with it (`_begin`).
  resource_tracker.ensure_running()  # else the first worker starts it, and it lifts the mask
  before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
  try:
    yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def closing(owner: object, iterator: grain.DatasetIterator) -> list[Any]:
  """The iterator in a box, closed by `close(box)`, with its owner, or at exit: in time, before modules are gone."""
  box = [iterator]
  weakref.finalize(owner, close, box)
  return box


def close(box: list[Any]) -> None:
  """Ends threads and workers of an iterator, once."""
  while box:
    box.pop().close()


def _begin(worker: int, workers: int) -> None:
  """Runs first in a worker: it must end with its parent, even if that is killed."""
  del worker, workers
  parent = multiprocessing.parent_process()

  def watch():
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(0)

  threading.Thread(target=watch, daemon=True, name='ends-with-its-parent').start()


def _check_shared_memory(workers: int, tokens: int) -> None:
  """Raises config.Error if what workers read ahead, of `tokens` a batch, has no room: the system would kill them."""
  need = tokens * 5 * 4 * (2 * _AHEAD + 2)  # five arrays of four bytes; two queues, and one batch at each end
  if os.path.isdir('/dev/shm'):
    place = os.statvfs('/dev/shm')
    if (free := place.f_bavail * place.f_frsize) < need:
      raise config.Error(
        f'workers={workers} need {need >> 20} MiB of shared memory and /dev/shm has {free >> 20} MiB; give it more'
        ' (docker: --shm-size) or set workers=0'
      )
