"""What training changes, born where it will live.

`State` is a pytree: parameters (an nnx.State, so that every leaf keeps its axis words), the optimizer's moments, and
the number of batches seen. optax maps over parameters, hence moments carry the same words and need no table of their
own. No array exists before `create`: shapes, paths and shardings are read from the abstract state.
"""

from collections.abc import Callable
import functools
from typing import Any
from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import optax

from maxtext_layers import sharding


class State(NamedTuple):
  """The training state; `step` is all that the learning rate, the data order and dropout depend on."""

  params: Any  # nnx.State
  optimizer: Any  # moments, float32
  step: jax.Array  # int32 scalar: batches seen = index of the next update


class Plan(NamedTuple):
  """All that is known of a state before it exists."""

  graph: Any  # nnx.GraphDef; nnx.merge(graph, params) is the model
  optimizer: optax.GradientTransformationExtraArgs
  build: Callable[[], Any]  # makes the model with its first values
  abstract: State  # ShapeDtypeStructs with shardings
  shardings: State


def plan(
  build: Callable[[], Any],
  optimizer: Callable[[Any], optax.GradientTransformationExtraArgs],
  mesh: jax.sharding.Mesh,
  rules: sharding.Rules,
) -> Plan:
  """Everything about the state but its arrays.

  Args:
    build: () -> nnx.Module, e.g. `lambda: decoder.Decoder(card, rngs=nnx.Rngs(seed))`.
    optimizer: abstract parameters -> transformation, e.g. `functools.partial(optimizer.build, config)`.
    mesh: where the state lives; one device is a mesh too.
    rules: axis word -> mesh axes.

  Raises:
    config.Error: a weight too large for that is left whole on every device; it is named.
  """
  graph, params = nnx.split(nnx.eval_shape(build))
  transform = optimizer(params)
  abstract = jax.eval_shape(functools.partial(_fresh, transform), params)
  shardings = sharding.shardings_of(abstract, mesh, rules)
  attach = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
  return Plan(graph, transform, build, jax.tree.map(attach, abstract, shardings), shardings)


def create(plan: Plan, params: Any = None) -> State:
  """The state at step 0, from `params` (an nnx.State of the plan's shapes, e.g. loaded weights) or freshly drawn.

  Runs under one jit whose outputs are sharded, so no device ever holds more than its share. Call it inside
  `sharding.use(mesh, rules)`.
  """
  if params is not None:
    return jax.jit(functools.partial(_fresh, plan.optimizer), out_shardings=plan.shardings)(params)
  fresh = lambda: _fresh(plan.optimizer, nnx.state(plan.build()))
  # runs once: on a CPU, compiling it well takes longer than running it
  quick = {'xla_backend_optimization_level': 1} if jax.default_backend() == 'cpu' else None
  return jax.jit(fresh, out_shardings=plan.shardings, compiler_options=quick)()


def _fresh(optimizer: optax.GradientTransformationExtraArgs, params: Any) -> State:
  return State(params, optimizer.init(params), jnp.zeros((), jnp.int32))
