"""What a step logs: one flat record, and the file of JSON lines it is appended to.

Reading order: `record`, `Writer`.
"""

from collections.abc import Mapping
import json
import math
import os
from typing import Any

import jax

from maxtext_layers import config
from maxtext_train import flops as operations


def record(
  step: int,
  metrics: Mapping[str, Any],
  *,
  seconds: float,
  tokens: int,
  tokens_seen: int,
  epoch: float | None,
  flops: float,
  peak: float | None,
  devices: int,
) -> dict[str, Any]:
  """`step loss lm_loss grad_norm learning_rate step_seconds tokens_per_second mfu tokens_seen epoch`, in this order.

  `skipped` follows where the step was, then what else the loss reports. Numbers are floats or None, never NaN: a loss
  over no token is None, as is whatever is not finite.

  Args:
    step: updates done, counting this one.
    metrics: of `step.train_step`. Arrays are fetched, which waits for the step.
    seconds: the time of the step.
    tokens: in this step.
    tokens_seen: by the run, counting this step.
    epoch: where the data stands.
    flops: of this step.
    peak: FLOP/s of a device or None.
    devices: how many.
  """
  values = {name: float(value) for name, value in jax.device_get(dict(metrics)).items()}
  empty = values.pop('weight', 1.0) == 0
  skipped = values.pop('skipped', 0.0)
  loss, lm_loss = values.pop('loss'), values.pop('lm_loss', math.nan)
  norm, rate = values.pop('grad_norm'), values.pop('learning_rate')
  out: dict[str, Any] = {
    'step': step,
    'loss': None if empty else finite(loss),
    'lm_loss': None if empty else finite(lm_loss),
    'grad_norm': finite(norm),
    'learning_rate': rate,
    'step_seconds': seconds,
    'tokens_per_second': tokens / seconds if seconds > 0 else None,
    'mfu': operations.mfu(flops, seconds, peak, devices),
    'tokens_seen': tokens_seen,
    'epoch': epoch,
  }
  if skipped:
    out['skipped'] = int(skipped)
  return out | {name: None if empty else finite(value) for name, value in values.items()}


def finite(value: float) -> float | None:
  """JSON knows no NaN and no infinity."""
  return value if math.isfinite(value) else None


class Writer:
  """Appends records to a file, a line of JSON each, whole on disk after every line."""

  def __init__(self, path: str | os.PathLike[str]):
    self._path, self._file = path, open(path, 'a', encoding='utf-8')

  def add(self, values: Mapping[str, Any]) -> None:
    """Raises config.Failure naming the file if it cannot be written, ValueError for what JSON does not know."""
    line = json.dumps(values, allow_nan=False)
    try:
      self._file.write(line + '\n')
      self._file.flush()
    except OSError as error:
      raise config.Failure(f'{self._path}: {error.strerror}') from error

  def close(self) -> None:
    """Idempotent; a failure to write is reported by `add`, which flushes."""
    self._file.close()
