"""What tests of layers share: parameters that are not at their first values, and rows that are decoded in pieces."""

import functools
import itertools
import zlib

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from maxtext_layers import block

# A program that runs once need not be fast: LLVM's passes are most of the time that it takes to compile.
quick = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})


def randomised(build, seed=1, scale=0.5):
  """What build() makes, every parameter random; vectors, which are norms' for the most part, around 1.

  Its first values are never drawn: compiling the draws of a stack takes longer than what is then tested.
  """
  graph, state = nnx.split(nnx.eval_shape(build))
  leaves, tree = jax.tree.flatten(state)
  rng = np.random.default_rng(seed)
  leaves = [jnp.asarray(rng.standard_normal(a.shape) * scale + (a.ndim == 1), jnp.float32) for a in leaves]
  return nnx.merge(graph, jax.tree.unflatten(tree, leaves))


def alike(build, scale=0.15):
  """A stack of build(), random as `randomised`; a layer's values are the same under every plan."""
  model = nnx.eval_shape(build)
  graph, state = nnx.split(model)
  flat = nnx.to_flat_state(state)
  for path, leaf in flat:
    _, segment, _, position, *rest = path
    rows = []
    for repeat in range(leaf.shape[0]):
      seed = f'{model.plan[segment].layer(repeat, position)} {rest}'
      noise = np.random.default_rng(zlib.crc32(seed.encode())).standard_normal(leaf.shape[1:])
      rows.append(noise * scale + (leaf.ndim < 3))
    leaf.set_value(jnp.asarray(np.stack(rows), jnp.float32))
  return nnx.merge(graph, nnx.from_flat_state(flat))


@quick
def run(model, x, caches=None, start=0, positions=None):
  """A stack on x [B, T, D] -> (y, caches)."""
  return model(x, block.Context(positions, start=start), caches)[:2]


@functools.partial(quick, static_argnames='length')
def prefill(model, x, length, positions=None):
  """The same with new memory for `length` tokens, at the number 0, which a layer sees and takes for a fresh start."""
  return model(x, block.Context(positions), model.caches(x.shape[0], length))[:2]


def whole(model, x):
  """y of x [B, T, D] without memory."""
  return run(model, x)[0]


def decoded(model, x, *borders, length=None):
  """y of x [B, T, D]: a call up to each border, then a token at a time."""
  y, caches = prefill(model, x[:, : borders[0]], length or x.shape[1])
  parts = [y]
  for begin, end in itertools.pairwise([*borders, *range(borders[-1] + 1, x.shape[1] + 1)]):
    y, caches = run(model, x[:, begin:end], caches, jnp.int32(begin))
    parts.append(y)
  return jnp.concatenate(parts, 1)


def ragged(model, x, lengths, steps, side='left'):
  """y of the first two rows of x: prompts of two lengths, the shorter padded as negative positions say, then `steps`.

  -> one array [length + steps, D] a row.
  """
  long, short = lengths
  junk = jnp.full((long - short, x.shape[-1]), 50.0)
  if side == 'left':
    begin, second, places = long - short, jnp.concatenate([junk, x[1, :short]]), [*range(short - long, short)]
  else:
    begin, second, places = 0, jnp.concatenate([x[1, :short], junk]), [*range(short), *[-1] * (long - short)]
  rows = jnp.stack([x[0, :long], second])
  y, caches = prefill(model, rows, x.shape[1], jnp.asarray([[*range(long)], places]))
  out = [[y[0]], [y[1, begin : begin + short]]]
  for i in range(steps):
    step = jnp.stack([x[0, long + i], x[1, short + i]])[:, None]
    now = jnp.asarray(lengths) + i
    y, caches = run(model, step, caches, now[0] if side == 'left' else now, now[:, None])
    for row in (0, 1):
      out[row].append(y[row])
  return [jnp.concatenate(parts) for parts in out]
