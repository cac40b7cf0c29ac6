"""The learning rate as a pure function of the update index: nothing to save, nothing to restore.

Update k of n (k = 0 … n-1) uses u = k + 1. The warm-up is the line from 0 to the peak that reaches it at u = warmup,
so the first update already moves. What follows ends at u = n with `final` × peak, exactly, where n is the real number
of updates of the run.

| kind | after the warm-up, with p = (u - warmup) / (n - warmup) |
|---|---|
| constant | peak |
| linear | peak × (1 - (1 - final) p) |
| cosine | peak × (final + (1 - final) (1 + cos π p) / 2), arXiv 1608.03983 |
| wsd | peak, then a line to final × peak over the last `decay` × n updates, arXiv 2404.06395 |
"""

from collections.abc import Callable
import enum
import math

import jax
import jax.numpy as jnp

from maxtext_layers import config

Schedule = Callable[[jax.Array], jax.Array]


class Kind(enum.StrEnum):
  """The shape after the warm-up; see the table above."""

  CONSTANT = 'constant'
  LINEAR = 'linear'
  COSINE = 'cosine'
  WSD = 'wsd'


@config.config
class Config:
  """Of a run whose number of updates is known elsewhere."""

  kind: Kind = Kind.COSINE
  peak: float = 3e-4
  warmup: int | None = None  # updates; None is a fiftieth of the run
  final: float = 0.1  # the last learning rate as a fraction of the peak; `constant` stays at the peak
  decay: float = 0.2  # wsd: the fraction of the run that decays

  def check(self) -> None:
    """Raises config.Error naming the field and its value."""
    if not (self.peak >= 0.0 and math.isfinite(self.peak)):
      raise config.Error(f'peak={self.peak} is no learning rate')
    if self.warmup is not None and self.warmup < 0:
      raise config.Error(f'warmup={self.warmup} is negative')
    for name in ('final', 'decay'):
      if not 0.0 <= getattr(self, name) <= 1.0:
        raise config.Error(f'{name}={getattr(self, name)} lies outside 0 … 1')


def build(settings: Config, updates: int) -> Schedule:
  """The function from the update index (int32 scalar) to a learning rate (float32 scalar) for a run of `updates`.

  Raises:
    config.Error: the warm-up, or warm-up and decay together, are longer than the run.
  """
  warmup, decay = warmup_updates(settings, updates), 0
  if settings.kind == Kind.WSD:
    decay = round(settings.decay * updates)
  if warmup + decay > updates:
    words = f'warmup={warmup}' + (f' and a decay over {decay}' if decay else '')
    raise config.Error(f'schedule: {words} do not fit a run of {updates} updates')
  start = updates - decay if settings.kind == Kind.WSD else warmup

  def schedule(index):
    u = jnp.asarray(index, jnp.float32) + 1.0
    p = jnp.clip((u - start) / max(updates - start, 1), 0.0, 1.0)
    if settings.kind == Kind.CONSTANT:
      factor = jnp.ones_like(p)
    elif settings.kind == Kind.COSINE:
      factor = settings.final + (1.0 - settings.final) * 0.5 * (1.0 + jnp.cos(jnp.pi * p))
    else:
      factor = 1.0 - (1.0 - settings.final) * p
    return (settings.peak * jnp.where(u < warmup, u / max(warmup, 1), factor)).astype(jnp.float32)

  return schedule


def warmup_updates(settings: Config, updates: int) -> int:
  """The resolved length of the warm-up."""
  return updates // 50 if settings.warmup is None else settings.warmup
