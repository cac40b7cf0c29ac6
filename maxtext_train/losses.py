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

from maxtext_layers import ahead as layers
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
  ahead: float = 0.3  # × loss of multi-token prediction, if the model has it; arXiv 2412.19437, 4.2, ends with 0.1

  def check(self) -> None:
    """Raises config.Error naming the field and its value."""
    if self.chunks is not None and self.chunks < 1:
      raise config.Error(f'chunks={self.chunks} is not positive')
    for name in ('z_loss', 'ahead'):
      if (value := getattr(self, name)) < 0.0:
        raise config.Error(f'{name}={value} is negative')


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
    kernel: str = 'auto', rate: float = 0.0, ahead: float = 0.0,
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
    ahead: what the mean loss of the modules of multi-token prediction is multiplied with (equation 25 of arXiv
      2412.19437); 0 leaves them out. `mtp_loss` in aux is that mean. As in the paper each is divided by the weight of
      all tokens, though the last ones have nothing further ahead.

  What the model returns as auxiliary terms (a router's balance, already scaled; a mean over this micro-batch) is
  weighted with the tokens of the micro-batch and so averaged over micro-batches.
  """
  where = {'positions': batch.get('positions'), 'segments': batch.get('segments')}
  x, _, terms = model.hidden(batch['tokens'], **where, kernel=kernel, dropout=key, rate=rate)
  weights = batch['weights'].astype(jnp.float32)
  weight = weights.sum()
  how: dict[str, Any] = {'chunk': chunk, 'chunks': chunks, 'z_loss': z_loss}
  total, nll = _sums(model, x, batch['targets'], weights, **how)
  aux, loads = {'lm_loss': nll}, terms.pop(auxiliary.LOADS, {})
  if ahead and len(model.ahead):
    made, more = model.further(batch['tokens'], x, **where, kernel=kernel, dropout=key, rate=rate)
    parts = [_sums(model, x, *_targets_ahead(batch, weights, k), **how) for k, x in enumerate(made, 1)]
    total = total + ahead / len(made) * sum(part for part, _ in parts)
    aux['mtp_loss'] = sum(nll for _, nll in parts) / len(made)
    loads |= more.pop(auxiliary.LOADS, {})
    terms = auxiliary.joined({'': terms, 'ahead': more})
  for value in terms.values():
    total = total + value * weight
  aux |= {name: value * weight for name, value in terms.items()}
  return Loss(total, weight, jax.tree.map(jax.lax.stop_gradient, aux), loads)


def _sums(model, x, targets, weights, *, chunk, **how):
  """(weighted sum of losses, the same without z-loss)."""
  how['cap'] = model.cap
  if chunk == Chunk.TOKENS:
    return head.cross_entropy_sum(x, model.output(), targets, weights, **how)
  losses, nll = head.cross_entropy_parts(x, model.output(), targets, **how)
  return weigh(losses, weights), weigh(nll, weights)


def _targets_ahead(batch, weights, k):
  """(targets, weights) of module k: those of the token k further on, where that is in the same document."""
  weights = layers.shifted(weights, k)
  if batch.get('segments') is not None:
    weights = jnp.where(batch['segments'] == layers.shifted(batch['segments'], k), weights, 0.0)
  return layers.shifted(batch['targets'], k), weights


def weigh(losses: jax.Array, weights: jax.Array) -> jax.Array:
  """The sum of weights × losses in which a weight of 0 hides whatever the loss is, in both directions."""
  return jnp.where(weights != 0, losses, 0.0).astype(jnp.float32).ravel() @ weights.ravel()
