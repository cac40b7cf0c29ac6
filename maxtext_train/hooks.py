"""What happens after a step: record, then the hooks log, evaluate, save, profile, which `pretrain` lists in this order.

A hook is an object with `due`, `__call__` and `close`, see loop.Hook. None knows another; what two of them need is
handed to both.
"""

from collections.abc import Callable
import json
import os
import pathlib
import shutil
import sys
import time
from typing import Any

import jax

from maxtext_train import evaluate
from maxtext_train import loop
from maxtext_train import metrics

_FLUSH = 5.0  # seconds


class Record:
  """metrics.jsonl and tensorboard/: one line and one event a finished step. No hook: the loop calls it for each."""

  def __init__(self, folder: pathlib.Path):
    self._lines, self._board = metrics.Writer(folder / 'metrics.jsonl'), Board(folder / 'tensorboard')

  def __call__(self, row: loop.Row) -> None:
    self._lines.add(row.values)
    self._board.add(row.step, row.values, 'train')

  def close(self) -> None:
    self._lines.close()
    self._board.close()


class Log:
  """The line a human watches: rewritten in place on a terminal, a line every `every` steps elsewhere."""

  def __init__(self, every: int, steps: int, stream: Any = None):
    self._every, self._steps, self._stream = every, steps, stream or sys.stdout
    self._terminal, self._open = self._stream.isatty(), False
    self._begun: tuple[int, float] | None = None
    self._since = [0.0, 0.0]  # tokens and seconds since the last line

  def due(self, step: int) -> bool:
    return False

  def __call__(self, now: loop.Now) -> None:
    for row in now.rows:
      if self._begun is None:
        self._begun = (row.step, time.monotonic())
      if speed := row.values['tokens_per_second']:
        seconds = row.values['step_seconds']
        self._since = [self._since[0] + speed * seconds, self._since[1] + seconds]
      shown = self._terminal or row.step % self._every == 0 or row.step in (1, self._steps)
      text = self._line(row) if shown else ''
      if self._terminal:
        columns = shutil.get_terminal_size().columns
        self._write('\r' + text[: columns - 1].ljust(columns - 1))
        self._open = True
      elif shown:
        self._write(text + '\n')

  def say(self, text: str) -> None:
    """A line of its own, beside the one that is rewritten."""
    self._write(('\r\033[K' if self._open else '') + text + '\n')
    self._open = False

  def close(self) -> None:
    if self._open:
      self._write('\n')
      self._open = False

  def _line(self, row: loop.Row) -> str:
    loss, (tokens, seconds) = row.values['loss'], self._since
    if not self._terminal or row.step % self._every == 0:
      self._since = [0.0, 0.0]
    parts = [
      f'step {row.step}/{self._steps}',
      'no loss' if loss is None else f'loss {loss:.3f}',
      f'{tokens / seconds if seconds else 0:,.0f} tokens/s',
    ]
    assert self._begun is not None
    first, since = self._begun
    if row.step > first:  # from the wall clock, so that evaluations and saves count
      left = (time.monotonic() - since) / (row.step - first) * (self._steps - row.step)
      parts.append(f'{duration(left)} left')
    return '  '.join(parts)

  def _write(self, text: str) -> None:
    self._stream.write(text)
    self._stream.flush()


class Evaluate:
  """eval.jsonl: the held-out loss, every `every` steps and at the end. Given up when the run must stop."""

  def __init__(
    self,
    folder: pathlib.Path,
    every: int,
    measure: Callable[[Any], evaluate.Result | None],
    say: Callable[[str], None],
    done: set[int],
  ):
    """`done`: the steps whose lines are there already."""
    self._every, self._measure, self._say, self._done = every, measure, say, done
    self._lines, self._board = metrics.Writer(folder / 'eval.jsonl'), Board(folder / 'tensorboard', 'eval')

  def due(self, step: int) -> bool:
    return step % self._every == 0

  def __call__(self, now: loop.Now) -> None:
    if not now.stopping and (now.last or self.due(now.step)):
      self._evaluate(now.step, now.state.params)

  def catch_up(self, step: int, params: Any) -> None:
    """Before the first step of a resumed run: the evaluation that its checkpoint still owes."""
    if step and self.due(step):
      self._evaluate(step, params)

  def _evaluate(self, step: int, params: Any) -> None:
    if step in self._done or (result := self._measure(params)) is None:
      return
    self._done.add(step)
    self._lines.add({'step': step, 'eval_loss': result.loss, 'eval_tokens': result.tokens})
    self._board.add(step, {'loss': result.loss, 'tokens': result.tokens}, 'eval')
    loss = 'no held-out token' if result.loss is None else f'{result.loss:.4f} nats a token'
    self._say(f'step {step}  held-out loss {loss} over {result.tokens:,.0f} tokens')

  def close(self) -> None:
    self._lines.close()
    self._board.close()


class Save:
  """Checkpoints, every `every` steps, at the end, and when the run must stop."""

  def __init__(self, every: int, save: Callable[[loop.Now, bool], None], check: Callable[[], None]):
    self._every, self._save, self._check = every, save, check

  def due(self, step: int) -> bool:
    return bool(self._every) and step % self._every == 0

  def __call__(self, now: loop.Now) -> None:
    self._check()  # of the save before, in the background
    ends = now.last or now.stopping
    if ends or self.due(now.step):
      self._save(now, ends)

  def close(self) -> None:
    pass


class Profile:
  """A trace of the steps `first` to `last`, for xprof or Perfetto, in RUN/profile."""

  def __init__(self, folder: pathlib.Path, first: int, last: int, say: Callable[[str], None]):
    self._folder, self._first, self._last, self._say, self._running = folder, first, last, say, False

  def due(self, step: int) -> bool:
    return step in (self._first - 1, self._last)

  def __call__(self, now: loop.Now) -> None:
    if now.step == self._first - 1:
      self.start()
    elif self._running and (now.step >= self._last or now.last or now.stopping):
      self.close()

  def start(self) -> None:
    """Called by hand where the trace begins with the first step of the process."""
    jax.profiler.start_trace(str(self._folder))
    self._running = True

  def close(self) -> None:
    if self._running:
      self._running = False
      jax.profiler.stop_trace()
      self._say(f'profile of the steps {self._first} to {self._last}: {self._folder}')


class Board:
  """TensorBoard events. Not a `SummaryWriter`, which writes, and fails on a full disk, in a thread of its own."""

  def __init__(self, folder: pathlib.Path, name: str = 'train'):
    from tensorboardX import record_writer  # loads protobuf, half a second
    from tensorboardX.proto import event_pb2
    from tensorboardX.proto import summary_pb2

    folder.mkdir(exist_ok=True)
    self._flushed = 0.0
    self._event, self._summary = event_pb2.Event, summary_pb2.Summary
    self._writer = record_writer.RecordWriter(str(folder / f'events.out.tfevents.{time.time_ns()}.{name}'))
    self._write(self._event(wall_time=time.time(), file_version='brain.Event:2'))

  def add(self, step: int, values: dict[str, Any], prefix: str) -> None:
    """One event with all the numbers of a step."""
    numbers = {n: v for n, v in values.items() if n != 'step' and isinstance(v, (int, float))}
    found = [self._summary.Value(tag=f'{prefix}/{name}', simple_value=value) for name, value in numbers.items()]
    self._write(self._event(wall_time=time.time(), step=step, summary=self._summary(value=found)))

  def close(self) -> None:
    """Ends the file."""
    self._writer.close()

  def _write(self, event: Any) -> None:
    self._writer.write(event.SerializeToString())
    if time.monotonic() - self._flushed > _FLUSH:  # not every step: it waits for the disk
      self._writer.flush()
      self._flushed = time.monotonic()


def truncate(path: pathlib.Path, step: int) -> None:
  """Drops the lines after `step`: a resumed run writes them anew."""
  if path.exists():
    kept = [line for line in path.read_text(encoding='utf-8').splitlines() if _step(line) <= step]
    temporary = path.with_suffix('.part')
    temporary.write_text(''.join(line + '\n' for line in kept), encoding='utf-8')
    os.replace(temporary, path)


def _step(line: str) -> float:
  try:
    return json.loads(line)['step']
  except (ValueError, KeyError):
    return float('inf')  # half a line, of a process that was killed


def duration(seconds: float) -> str:
  """'1:02:03' or '2:03'."""
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02}:{seconds:02}' if hours else f'{minutes}:{seconds:02}'
