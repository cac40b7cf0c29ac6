"""SIGTERM, noticed at once, whatever the main thread is doing.

A Python signal handler runs only between two bytecodes of the main thread, so a compilation of a minute hides the
signal for a minute. Here the C-level handler writes to a pipe and a thread of our own reads it. At the next step
boundary the loop saves and leaves; if no boundary comes within `grace` seconds (a compilation, an evaluation that
compiles, data that does not arrive), the thread itself saves the state last offered to it and ends the process. A state
that was donated to a running step is never offered: for that step one has to wait. After `limit` seconds the process
ends in any case. Where nothing is to be saved, the thread ends the process at once.

Reading order: `Stop.watching` (installs it), `Stop.offer` and `Stop.take` (what the loop says), `Stop._answer`.
"""

import contextlib
import enum
import multiprocessing
import os
import signal
import socket
import sys
import threading

CODE = 143  # 128 + SIGTERM


class OnSigterm(enum.StrEnum):
  """What to do with the last finished step when the process is asked to end."""

  save = 'save'
  exit = 'exit'


class Stopped(Exception):
  """The loop left at a step boundary because of SIGTERM."""


class Stop:
  """Watches for SIGTERM.

  `mode`: save the last finished step, or leave at once without. `grace`: seconds that the main thread gets to reach a
  step boundary by itself. `limit`: seconds after which the process ends, saved or not.
  """

  def __init__(self, mode=OnSigterm.save, *, grace=8.0, limit=26.0):
    self._mode, self._grace, self._limit = mode, grace, limit
    self._requested, self._taken = threading.Event(), threading.Event()
    self._lock, self._save, self._label, self._listed = threading.Lock(), None, 'nothing', lambda: False
    self._saving = False

  @property
  def requested(self):
    """Whether SIGTERM came, and what is to be saved is to be saved now."""
    return self._requested.is_set()

  def acknowledge(self):
    """The main thread has seen the request and does what is to be done; the watcher keeps to the time limit only."""
    with self._lock:
      self._saving = True
      self._taken.set()

  def offer(self, label, save, listed):
    """The state of `label` ('step 7') is whole: `save()` stores it and waits; `listed()` says whether it is stored."""
    with self._lock:
      self._label, self._save, self._listed = label, save, listed

  def take(self):
    """The state is about to be donated. Waits here, for good, while the watcher saves it."""
    with self._lock:
      self._save = None

  @contextlib.contextmanager
  def watching(self):
    """Within this block SIGTERM is ours. Only the main thread may enter it."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=self._watch, args=(reader,), name='sigterm', daemon=True)
    thread.start()
    try:
      yield self
    finally:
      signal.set_wakeup_fd(wakeup)
      signal.signal(signal.SIGTERM, handler)
      if not self.requested:
        writer.close()  # ends the thread
        thread.join()
        reader.close()

  def _watch(self, reader):
    while received := reader.recv(64):
      if signal.SIGTERM in received:
        if self._mode == OnSigterm.exit:  # a save under way is none: checkpoints are listed when they are whole
          leave('SIGTERM: left without saving')
        late = threading.Timer(self._limit, self._late)
        late.daemon = True
        late.start()
        self._requested.set()
        self._answer()
        return

  def _answer(self):
    if self._taken.wait(self._grace):
      return
    with self._lock:
      if self._taken.is_set() or self._save is None:
        return  # the loop is at a boundary, or will be when its step ends
      self._saving = True
      try:
        self._save()
        leave(f'SIGTERM: {self._label} is saved')
      except BaseException as error:  # whatever it was, the process must end and say so
        leave(f'SIGTERM: {self._label} could not be saved: {" ".join(str(error).split())}')

  def _late(self):
    """Without the lock: whoever saves may hold it."""
    text = f'no step finished within {self._limit:.0f} s'
    if self._saving:
      text = f'{self._label} could not be saved within {self._limit:.0f} s'
      with contextlib.suppress(OSError):
        if self._listed():
          leave(f'SIGTERM: {self._label} is saved')
    leave(f'SIGTERM: {text}; earlier checkpoints are whole')


def leave(message):
  """Ends the process now, with its worker processes, and without the main thread."""
  print(message, file=sys.stderr, flush=True)
  with contextlib.suppress(Exception):
    for child in multiprocessing.active_children():
      child.kill()
  os._exit(CODE)
