"""From settings to the parts of a run, with no array made yet and nothing compiled.

What a run resolves by itself (mesh, attention kernel, scan plan, how the loss is cut, what decays) is decided here,
once, and stands in the `Assembly` for everybody to read.
"""

import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from maxtext_layers import attention
from maxtext_layers import config
from maxtext_layers import plan as plans
from maxtext_layers import sharding
from maxtext_layers import stack
from maxtext_models import decoder
from maxtext_train import evaluate
from maxtext_train import flops
from maxtext_train import losses
from maxtext_train import optimizer
from maxtext_train import run
from maxtext_train import schedule
from maxtext_train import state
from maxtext_train import step


@dataclasses.dataclass(slots=True)
class Assembly:
  """The parts of a run."""

  card: Any
  scan: bool
  segments: Any  # the scan plan
  mesh: jax.sharding.Mesh
  rules: sharding.Rules
  kernel: str
  chunk: losses.Chunk
  chunks: int
  schedule: Any  # update index -> learning rate
  plan: state.Plan
  step: step.Step
  evaluate: Any  # (params, batch) -> (total, weight)
  batch: Any  # abstract global batch
  flops: float  # of one step
  peak: float | None  # FLOP/s of one device, None where unknown

  def in_mesh(self) -> Any:
    """Trace, compile and call within this context."""
    return sharding.use(self.mesh, self.rules)

  def compile(self) -> Any:
    """The compiled step, for its memory; calling the step afterwards does not compile again."""
    with self.in_mesh():
      return self.step.lower(self.plan.abstract, self.batch).compile()

  def place(self, batch: Any) -> Any:
    """This process's rows [b, T] as parts of the global batch [B, T]."""
    rows = _rows(self.mesh, self.rules)
    return {name: jax.make_array_from_process_local_data(rows, value) for name, value in batch.items()}


def build(settings: run.Pretrain, card: Any) -> Assembly:
  """The parts of a run of `card`.

  Raises:
    config.Error: something does not fit this machine.
  """
  if settings.accumulate > 1 and getattr(card, 'balance_scope', None) == 'batch':
    raise config.Error(
      f'config.accumulate={settings.accumulate}: config.model.balance_scope=batch needs an update in one piece; '
      "'micro' takes its means over each micro-batch"
    )
  mesh, rules = run.mesh(settings), settings.mesh.rules
  specs = [block.mixer for block in card.blocks()]
  needs: dict[str, Any] = {
    'packed': not settings.data.artificial,
    'length': settings.length,
    'dtype': str(settings.dtype),
  }
  kernel = attention.resolve(settings.kernel, jax.default_backend(), specs=specs, **needs)
  chunk = losses.resolve(settings.loss.chunk, mesh.size)
  scan = {'auto': card.layers > stack.DEEP, 'yes': True, 'no': False}[settings.scan]
  options = {'scan': scan, 'remat': settings.remat, 'dtype': jnp.dtype(str(settings.dtype))}
  chunks = losses.pieces(settings.loss, chunk, settings.batch // settings.accumulate * settings.length)
  extra = {'z_loss': settings.loss.z_loss, 'ahead': settings.loss.ahead}
  core = functools.partial(losses.next_token, chunk=chunk, chunks=chunks, kernel=kernel, **extra)
  with sharding.use(mesh, rules):
    plan = state.plan(
      lambda: decoder.Decoder(card, rngs=nnx.Rngs(settings.seed), **options),
      functools.partial(optimizer.build, settings.optimizer),
      mesh,
      rules,
    )
  rate = jax.jit(schedule.build(settings.schedule, settings.steps))  # the host asks for it, too
  return Assembly(
    card=card,
    scan=scan,
    segments=plans.plan(card.blocks(), scan),
    mesh=mesh,
    rules=rules,
    kernel=kernel,
    chunk=chunk,
    chunks=chunks,
    schedule=rate,
    plan=plan,
    step=step.Step(
      plan,
      functools.partial(core, rate=settings.dropout),
      rate,
      accumulate=settings.accumulate,
      clip=settings.optimizer.clip,
      balance_rate=settings.optimizer.balance_rate,
      only=settings.optimizer.only,
      seed=settings.seed if settings.dropout else None,
    ),
    evaluate=evaluate.compiled(plan.graph, core, plan.shardings.params),
    batch=_batch(settings, mesh, rules),
    flops=flops.step(card, settings.batch, settings.length),
    peak=flops.peak(jax.devices()[0]),
  )


def _batch(settings, mesh, rules):
  names = {'tokens': jnp.int32, 'targets': jnp.int32, 'weights': jnp.float32}
  if not settings.data.artificial:
    names |= {'positions': jnp.int32, 'segments': jnp.int32}
  shape, rows = (settings.batch, settings.length), _rows(mesh, rules)
  return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=rows) for name, dtype in names.items()}


def _rows(mesh, rules):
  axes = tuple(axis for axis in dict(rules.activations)['batch'] if mesh.shape[axis] > 1)
  return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axes or None))
