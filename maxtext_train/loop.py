"""The loop: `for step: batch; step; hooks`.

The host runs one step ahead of what it reads: step k is dispatched before the metrics of step k - 1 are fetched, so the
device never waits for the host, and yet the time of a step is measured to its completion. Where a hook must know that a
step is finished and sound (an evaluation, a save), the loop reads that step too before it calls the hooks.

Reading order: `run`, `Row` (a finished step), `Now` (what a hook sees), `_Reader`.
"""

import collections
import dataclasses
import math
import threading
import time
from typing import Any
from typing import Protocol

import jax
import numpy as np

from maxtext_layers import config
from maxtext_train import stop as stops


@dataclasses.dataclass(slots=True, frozen=True)
class Row:
  """A finished step. `step` counts updates, from 1; `values` are a line of metrics.jsonl."""

  step: int
  values: dict[str, Any]


@dataclasses.dataclass(slots=True, frozen=True)
class Data:
  """Where the data stands after a batch."""

  loader: Any
  position: Any

  def state(self) -> dict[str, Any]:
    """Of the iterator, JSON."""
    return self.loader.state(self.position)

  def report(self) -> dict[str, Any]:
    """Records consumed, the next one, the epoch, what was dropped."""
    return self.loader.report(self.position)


@dataclasses.dataclass(slots=True, frozen=True)
class Now:
  """What a hook sees after step `step` was dispatched."""

  step: int
  state: Any  # of that step; whole until the hook returns
  rows: list[Row]  # the steps that finished since the last call
  data: Data
  tokens: int  # trained on so far, padding not counted
  last: bool  # the run ends here
  stopping: bool  # SIGTERM came: what is to be kept must be kept now


class Hook(Protocol):
  """What is called after every step."""

  def due(self, step: int) -> bool:
    """Whether `step` must be finished, and its loss known to be finite, before the hook is called."""
    ...

  def __call__(self, now: Now) -> None: ...

  def close(self) -> None:
    """After the last step, however the run ended."""
    ...


def run(step, state, batches, hooks, stop, *, start, steps, data, tokens, describe, record, dump, offer):
  """Trains from update `start` to update `steps`. -> (state, updates done).

  Where the loop ends, the hooks are called once more: also if there was no step left to do.

  Args:
    step: `(state, batch) -> (state, metrics)`, compiled; donates the state.
    batches: yields (global batch, real tokens in it, Data after it); may end early.
    hooks: called in order after every step, and once more at the end, with `last` or `stopping` set.
    stop: a `stop.Stop`.
    data: the `Data` at `start`.
    tokens: trained on before.
    describe: `(step, metrics on the host, seconds, tokens of the step, tokens so far, Data) -> dict` for a Row.
    record: `(Row)`: writes it down; in the order of steps, by whichever thread finishes it.
    dump: `(step, batch, metrics) -> path`: keeps what is needed to look into a step whose loss is not finite.
    offer: `(step, state, flush, Data, tokens)`: tells `stop` how to save this state, after `flush()`, which waits for
      the step and records it, or raises what is wrong with it.

  Raises:
    stop.Stopped: SIGTERM came; the hooks had their turn.
    config.Failure: a loss is not finite.
  """
  reader, done = _Reader(describe, record, dump), start
  while done < steps and not stop.requested:
    asked = time.monotonic()
    if (item := next(batches, None)) is None:
      break
    batch, count, data = item
    stop.take()
    state, metrics = step(state, batch)
    done, tokens = done + 1, tokens + count
    reader.push(done, metrics, batch, count, tokens, data, asked)
    offer(done, state, lambda: reader.take(keep=0), data, tokens)
    rows = reader.take(keep=0 if any(hook.due(done) for hook in hooks) else 1)
    for hook in hooks:
      hook(Now(done, state, rows, data, tokens, last=False, stopping=False))
  if stopping := stop.requested:
    stop.acknowledge()
  rows = reader.take(keep=0)
  for hook in hooks:
    hook(Now(done, state, rows, data, tokens, last=not stopping, stopping=stopping))
  if stop.requested:  # be it during the evaluation at the end: that is still to be done
    raise stops.Stopped
  return state, done


class _Reader:
  """Metrics on their way to the host, oldest first. The watcher of SIGTERM may take the last ones."""

  def __init__(self, describe, record, dump):
    self.waiting = collections.deque()
    self._describe, self._record, self._dump = describe, record, dump
    self._lock = threading.Lock()
    self._finished = 0.0  # when the newest finished step ended

  def push(self, step, metrics, batch, count, tokens, data, asked):
    self.waiting.append((step, metrics, batch, count, tokens, data, asked))

  def take(self, keep):
    """Waits for all but the newest `keep` steps, and records them. -> their Rows."""
    rows = []
    with self._lock:
      while len(self.waiting) > keep:
        rows.append(self._finish(*self.waiting[0]))
        self.waiting.popleft()  # now, so that a step that is not sound stays one for whoever asks again
    return rows

  def _finish(self, step, metrics, batch, count, tokens, data, asked):
    metrics = {name: _number(value) for name, value in jax.device_get(metrics).items()}  # waits for the step
    # in a full pipeline a step begins when its predecessor ends, else when its batch was asked for
    begun, self._finished = max(self._finished, asked), time.monotonic()
    if not sound(metrics):
      where = self._dump(step, batch, metrics)
      raise config.Failure(
        f'step {step}: loss is {metrics["loss"]}, gradient norm is {metrics["grad_norm"]}; the batch is in {where}'
      )
    row = Row(step, self._describe(step, metrics, self._finished - begun, count, tokens, data))
    self._record(row)
    return row


def sound(metrics: dict[str, Any]) -> bool:
  """Whether loss and gradient of a step are finite. A batch without weight has no loss and is sound."""
  return metrics['weight'] == 0 or (math.isfinite(metrics['loss']) and math.isfinite(metrics['grad_norm']))


def _number(value):
  value = np.asarray(value)
  return value.item() if value.ndim == 0 else value.tolist()
