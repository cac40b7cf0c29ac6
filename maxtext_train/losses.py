"""What a loss is: a sum, what to divide it by, and more sums to report.

Nothing here divides. The step adds totals, weights and gradients over micro-batches and devices and divides once, so
accumulation, packing and sharding give the same number. A loss is a function (model, batch, key) -> Loss; `key` is the
dropout key of this micro-batch or None.
"""

import enum
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxtext_layers import auxiliary
from maxtext_layers import config
from maxtext_layers import head


class Loss(NamedTuple):
  """Float32 sums over the tokens of a micro-batch."""

  total: jax.Array  # float32 scalar: what is differentiated, summed
  weight: jax.Array  # float32 scalar: what the step divides it by
  aux: dict[str, jax.Array]  # name -> float32 scalar: reported, divided by `weight` as well
  # path of a selection bias among the parameters -> float32 [L, E], the tokens that each expert of its layers got
  loads: dict[str, jax.Array] = {}  # noqa: RUF012 (never written to)


class Chunk(enum.StrEnum):
  """Along which axis the cross-entropy is cut, so that [B, T, V] never exists."""

  AUTO = 'auto'
  TOKENS = 'tokens'  # loss and gradients in one pass, three matmuls: the fastest on one device
  VOCABULARY = 'vocabulary'  # recomputed in the backward pass, four matmuls; a sharded vocabulary stays sharded


@config.config
class Config:
  """How the cross-entropy is computed, and what is added to it."""

  chunk: Chunk = Chunk.AUTO
  chunks: int | None = None  # none: see `pieces`
  z_loss: float = 0.0  # × logsumexp²; arXiv 2204.02311, section 5, uses 1e-4

  def check(self) -> None:
    """Raises config.Error naming the field and its value."""
    if self.chunks is not None and self.chunks < 1:
      raise config.Error(f'chunks={self.chunks} is not positive')
    if self.z_loss < 0.0:
      raise config.Error(f'z_loss={self.z_loss} is negative')


def resolve(chunk: Chunk, devices: int) -> Chunk:
  """What AUTO means on a mesh of so many devices."""
  if chunk != Chunk.AUTO:
    return Chunk(chunk)
  return Chunk.TOKENS if devices == 1 else Chunk.VOCABULARY


TOKENS_A_CHUNK = 256  # enough rows for a matrix product at full speed, even on a CPU


def pieces(settings: Config, chunk: Chunk, tokens: int) -> int:
  """Into how many parts the axis is cut, for a micro-batch of so many tokens: few are fast, many small.

  By default a chunk is TOKENS_A_CHUNK tokens, or a sixteenth of the vocabulary: both stay below a quarter of
  [B, T, V] in float32 at 4096 tokens.
  """
  if settings.chunks is not None:
    return settings.chunks
  return -(-tokens // TOKENS_A_CHUNK) if chunk == Chunk.TOKENS else 16


def next_token(
    model: Any, batch: Any, key: jax.Array | None = None, *, chunk: Chunk, chunks: int = 16, z_loss: float = 0.0,
    kernel: str = 'auto', rate: float = 0.0,
) -> Loss:  # fmt: skip
  """Weighted next-token cross-entropy in nats; `lm_loss` in aux has neither z-loss nor auxiliary terms.

  Args:
    model: a decoder.Decoder.
    batch: `tokens`, `targets` int32 [B, T], `weights` float32 [B, T], and `positions`, `segments` int32 [B, T] or None.
      A weight of 0 selects a token out: not even a NaN gets through.
    key: dropout key, or None.
    chunk: resolved, see `resolve`.
    chunks: into how many parts the axis is cut.
    z_loss: coefficient of logsumexp².
    kernel: a resolved attention kernel.
    rate: dropout rate.

  What the model returns as auxiliary terms (a router's balance, already scaled; a mean over this micro-batch) is
  weighted with the tokens of the micro-batch and so averaged over micro-batches.
  """
  x, _, terms = model.hidden(
      batch['tokens'], positions=batch.get('positions'), segments=batch.get('segments'), kernel=kernel, dropout=key,
      rate=rate,
  )  # fmt: skip
  weights = batch['weights'].astype(jnp.float32)
  weight = weights.sum()
  how: dict[str, Any] = {'chunks': chunks, 'z_loss': z_loss, 'cap': model.cap}
  if chunk == Chunk.TOKENS:
    total, nll = head.cross_entropy_sum(x, model.output(), batch['targets'], weights, **how)
  else:
    losses, nll = head.cross_entropy_parts(x, model.output(), batch['targets'], **how)
    total, nll = weigh(losses, weights), weigh(nll, weights)
  loads = terms.pop(auxiliary.LOADS, {})
  for value in terms.values():
    total = total + value * weight
  aux = {'lm_loss': nll, **{name: value * weight for name, value in terms.items()}}
  return Loss(total, weight, jax.tree.map(jax.lax.stop_gradient, aux), loads)


def weigh(losses: jax.Array, weights: jax.Array) -> jax.Array:
  """The sum of weights × losses in which a weight of 0 hides whatever the loss is, in both directions."""
  return jnp.where(weights != 0, losses, 0.0).astype(jnp.float32).ravel() @ weights.ravel()
