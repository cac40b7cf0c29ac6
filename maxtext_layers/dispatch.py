"""Tokens to experts and back: from a list of choices to rows that lie together by expert.

A choice is one of the K experts of a token. A `Plan` says in which row of a buffer each choice stands and which choice
each row holds, so that both directions, forwards and backwards, are look-ups: nothing is scattered. The buffer is cut
into blocks of rows of one expert, and `product` multiplies each block with that expert's matrix.

Three ways to place rows. `sorted_plan` in blocks: every expert's rows fill whole blocks, which is what a CPU wants
(jax.lax.ragged_dot does there about E times the work). `sorted_plan` with block=1 on other platforms: no filling, one
ragged product. Neither drops a token, whatever the loads are. `capacity_plan`: a fixed number of rows for each expert
and row of the batch; what does not fit goes nowhere (arXiv 2006.16668).

Reading order: `Plan`, `sorted_plan`, `capacity_plan`; `spread`, `product`, `collect`.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 128  # rows; below it a CPU's matrix product loses speed, above it the filling costs more than it brings


@dataclasses.dataclass(slots=True, frozen=True)
class Plan:
  """Places of N tokens with K choices each in a buffer of P blocks with Q rows.

  slots: int32 [N, K], the row of each choice; P * Q: nowhere.
  sources: int32 [P * Q], the choice (token * K + k) in each row; N * K: an empty row.
  experts: int32 [P], whose block it is, ascending; None: block i is that of expert i.
  sizes: int32 [E], rows of each expert, for a ragged product; None: a product of blocks.
  """

  slots: jax.Array
  sources: jax.Array
  experts: jax.Array | None
  sizes: jax.Array | None
  blocks: int  # P


def block_size(choices: int, experts: int, platform: str) -> int:
  """Rows of a block: a power of two near the mean load, BLOCK at most; 1 where ragged products are fast.

  >>> [block_size(n, 8, 'cpu') for n in (1, 16, 100, 4096)], block_size(4096, 8, 'tpu')
  ([1, 2, 8, 128], 1)
  """
  if platform != 'cpu':
    return 1
  return min(BLOCK, 1 << (max(choices // experts, 1).bit_length() - 1))


def sorted_plan(chosen: jax.Array, experts: int, block: int, ragged: bool) -> Plan:
  """Every choice has a row; the rows of an expert lie together, in the order of the tokens.

  Args:
    chosen: int32 [N, K], E for nowhere.
    experts: E.
    block: rows of a block, each expert's last filled up with empty rows.
    ragged: multiply with one ragged product; block is 1.
  """
  flat = chosen.reshape(-1)
  order, starts, counts = _sorted(flat, experts)
  filled = -(-counts // block) * block
  ends = jnp.cumsum(filled)
  first = ends - filled
  blocks = max((flat.size + min(experts, flat.size) * (block - 1)) // block, 1)  # enough for the worst of loads
  rows = np.arange(blocks * block, dtype=np.int32)
  owner = jnp.searchsorted(ends, rows[::block], side='right').astype(jnp.int32)  # E behind the last
  owner = jnp.minimum(owner, experts - 1)
  expert = jnp.repeat(owner, block, total_repeat_length=rows.size)
  inside = rows - first[expert]
  taken = order[jnp.minimum(starts[expert] + inside, flat.size - 1)]
  sources = jnp.where(inside < counts[expert], taken, flat.size).astype(jnp.int32)
  place = jnp.arange(flat.size, dtype=jnp.int32) + (first - starts)[jnp.minimum(flat[order], experts - 1)]
  place = jnp.where(flat[order] < experts, place, rows.size)
  slots = jnp.zeros(flat.shape, jnp.int32).at[order].set(place.astype(jnp.int32), unique_indices=True)
  return Plan(slots.reshape(chosen.shape), sources, owner, filled if ragged else None, blocks)


def capacity_plan(chosen: jax.Array, experts: int, capacity: float) -> Plan:
  """Room for ceil(capacity * T * K / E) choices an expert and row of the batch, never more than T.

  All first choices of a row come before all second ones, each in the order of the tokens; what comes too late is
  dropped: no expert sees it.

  Args:
    chosen: int32 [B, T, K], E for nowhere; a token's choices are different experts.
    experts: E.
    capacity: times the room that equal loads would need.
  """
  b, t, k = chosen.shape
  room = min(max(math.ceil(capacity * t * k / experts), 1), t)

  def ranks(flat):
    order, starts, _ = _sorted(flat, experts)
    rank = jnp.arange(flat.size, dtype=jnp.int32) - starts[jnp.minimum(flat[order], experts - 1)]
    return jnp.zeros(flat.shape, jnp.int32).at[order].set(rank, unique_indices=True)

  rank = jax.vmap(ranks)(chosen.swapaxes(1, 2).reshape(b, k * t)).reshape(b, k, t).swapaxes(1, 2)
  slots = (chosen * b + np.arange(b, dtype=np.int32)[:, None, None]) * room + rank
  rows = experts * b * room
  slots = jnp.where((chosen < experts) & (rank < room), slots, rows).reshape(b * t, k)
  choices = np.arange(b * t * k, dtype=np.int32)
  sources = jnp.full(rows, choices.size, jnp.int32).at[slots.reshape(-1)].set(choices, mode='drop')
  return Plan(slots, sources, None, None, experts)


def _sorted(flat, experts):
  """Indices that sort `flat` (values up to E); where each expert starts in that order, and how many it has."""
  order = jnp.argsort(flat, stable=True).astype(jnp.int32)
  bounds = jnp.searchsorted(flat[order], np.arange(experts + 1, dtype=np.int32)).astype(jnp.int32)
  return order, bounds[:-1], bounds[1:] - bounds[:-1]


def spread(x: jax.Array, plan: Plan) -> jax.Array:
  """Tokens x [N, D] -> blocks of rows [P, Q, D]; empty rows are 0."""
  return _spread(x, plan.slots, plan.sources).reshape(plan.blocks, -1, x.shape[1])


def spread_choices(values: jax.Array, plan: Plan) -> jax.Array:
  """A number a choice [N, K] -> [P, Q, 1]; 0 in empty rows."""
  return _move(values.reshape(-1, 1), plan.sources, plan.slots).reshape(plan.blocks, -1, 1)


def collect(rows: jax.Array, plan: Plan) -> jax.Array:
  """Blocks of rows [P, Q, D] -> [N, K, D]; 0 where a choice went nowhere."""
  y = _move(rows.reshape(-1, rows.shape[-1]), plan.slots, plan.sources)
  return y.reshape(*plan.slots.shape, rows.shape[-1])


@jax.custom_vjp
def _spread(x, slots, sources):
  return _rows(x, sources // slots.shape[1])


def _spread_back(slots, dy):
  return _rows(dy, slots).sum(1), None, None


_spread.defvjp(lambda x, slots, sources: (_spread(x, slots, sources), slots), _spread_back)


@jax.custom_vjp
def _move(x, there, back):
  """x[there], where `back` holds the inverse."""
  return _rows(x, there.reshape(-1))


_move.defvjp(
  lambda x, there, back: (_move(x, there, back), back), lambda back, dy: (_rows(dy, back.reshape(-1)), None, None)
)


def _rows(x, index):
  """x[index], 0 for an index beyond x."""
  return jnp.take(x, index, axis=0, mode='fill', fill_value=0)


def product(x: jax.Array, w: jax.Array, plan: Plan) -> jax.Array:
  """Blocks x [P, Q, D] times the matrices w [E, D, F] of their experts -> [P, Q, F], in x's dtype."""
  w = w.astype(x.dtype)
  if plan.experts is None:
    return x @ w
  if plan.sizes is None:
    return x @ w[plan.experts]
  return jax.lax.ragged_dot(x.reshape(-1, x.shape[-1]), w, plan.sizes).reshape(*x.shape[:-1], w.shape[-1])


def bias(b: jax.Array, plan: Plan, dtype) -> jax.Array:
  """Biases b [E, F] for `product`: [P, 1, F]."""
  b = b.astype(dtype)
  return (b if plan.experts is None else b[plan.experts])[:, None]
