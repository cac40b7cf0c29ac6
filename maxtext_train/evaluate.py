"""Held-out loss: sums over tokens, one division at the end.

The loss core is that of training, so weights, segments and padding mean the same. The result does not depend on how
many rows stand in a batch, and evaluating touches neither the training data nor a random key.
"""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

from flax import nnx
import jax

from maxtext_layers import config


@config.config
class Config:
  """Every `every` steps, and at the end, over `batches` batches of the held-out split; `every` 0 does not evaluate."""

  every: int = 0
  batches: int = 8

  def check(self) -> None:
    """Raises config.Error naming the field."""
    if self.every < 0:
      raise config.Error(f'every={self.every} is negative')
    if self.batches < 1:
      raise config.Error(f'batches={self.batches} is not positive')


class Result(NamedTuple):
  """Of one evaluation."""

  loss: float | None  # mean nats a token of weight 1; None where nothing had weight
  tokens: float  # the weight it was divided by


def compiled(graph: Any, loss: Callable[..., Any], shardings: Any) -> Callable[[Any, Any], Any]:
  """`(params, batch) -> (total, weight)`, float32 scalars."""

  def sums(params, batch):
    out = loss(nnx.merge(graph, params), batch, None)
    return out.aux.get('lm_loss', out.total), out.weight

  return jax.jit(sums, in_shardings=(shardings, None))


def evaluate(sums: Callable[[Any, Any], Any], params: Any, batches: Any, go_on: Callable[[], bool]) -> Result | None:
  """The mean over all of `batches`, or None if `go_on()` said no on the way."""
  totals = []
  for batch in batches:
    if not go_on():
      return None
    totals.append(sums(params, batch))
    if len(totals) > 1:
      jax.block_until_ready(totals[-2])  # one ahead, so that `go_on` is asked often
  totals = jax.device_get(totals)
  total, weight = sum(float(t) for t, _ in totals), sum(float(w) for _, w in totals)
  return Result(total / weight if weight else None, weight)
