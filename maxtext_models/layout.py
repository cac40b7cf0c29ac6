"""Where a parameter lives: the one place that knows how names, layers and scan plans hang together.

A model keeps the layers of a segment of its plan stacked in one array. Everything that crosses a border (Hugging Face
files, checkpoints, another scan plan) speaks of parameters by layer: `layers.3.mixer.q` is the weight,
`layers.3.mixer.q.b` a bias; outside of the stack `embed`, `norm`, `head`.

>>> from maxtext_layers import plan
>>> two = plan.plan(['d', 'm', 'm'])
>>> path = ('stack', 'segments', '1', 'blocks', '0', 'mixer', 'q', 'w')
>>> for name, slot in slots([('embed', 'w'), path], two).items():
...   print(name, slot.path == path, slot.repeat)
embed False None
layers.1.mixer.q True 0
layers.2.mixer.q True 1
"""

from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np


class Slot(NamedTuple):
  """A parameter's array, by its path in the model, and its index on that array's `layers` axis (None: it has none)."""

  path: tuple[str, ...]
  repeat: int | None


def leaves(state) -> dict[tuple[str, ...], nnx.Variable]:
  """path -> variable for every parameter of a state; list indices become strings."""
  return {tuple(map(str, path)): v for path, v in nnx.to_flat_state(state)}


def slots(paths, segments) -> dict[str, Slot]:
  """name -> slot for the leaves at `paths` under a plan; `segments` need `start`, `count` and `specs`."""
  result = {}
  for path in paths:
    if path[0] != 'stack':
      result[_name(path)] = Slot(path, None)
      continue
    _, _, index, _, position, *inner = path
    segment = segments[int(index)]
    for repeat in range(segment.count):
      layer = segment.start + repeat * len(segment.specs) + int(position)
      result[_name(('layers', str(layer), *inner))] = Slot(path, repeat)
  return result


def names_of(path, segments) -> list[str]:
  """The names that one leaf holds, in the order of its `layers` axis."""
  return list(slots([path], segments))


def place(leaf, read):
  """An array like `leaf` (shape, dtype and, if it has one, sharding); `read(index) -> numpy` gives any part of it.

  With a sharding only the parts that this process's devices hold are read.
  """
  sharding = getattr(leaf, 'sharding', None)
  if sharding is None or isinstance(leaf, jax.core.Tracer):
    whole = read((slice(None),) * len(leaf.shape))
    return jnp.asarray(np.asarray(whole, leaf.dtype))
  return jax.make_array_from_callback(leaf.shape, sharding, lambda index: np.asarray(read(index), leaf.dtype))


def _name(path):
  return '.'.join(path[:-1] if path[-1] == 'w' else path)
