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

from collections.abc import Callable
import dataclasses
import itertools
import math
import mmap
from typing import Any
from typing import NamedTuple

from flax import nnx
import jax
from jax.experimental import multihost_utils
import numpy as np


class Slot(NamedTuple):
  """A parameter's array, by its path in the model, and its index on that array's `layers` axis (None: it has none)."""

  path: tuple[str, ...]
  repeat: int | None


@dataclasses.dataclass(frozen=True)
class Lazy:
  """A parameter that is on disk: it takes the place of the array in a state, for what reads one layer after the other.

  `rows()` gives what can be indexed by `Slot.repeat`, or with `...` where that is None, and reads as it is indexed.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  rows: Callable[[], Any]

  @property
  def nbytes(self) -> int:
    """That the array would take."""
    return math.prod(self.shape) * self.dtype.itemsize


class Rows:
  """Makes `read(index)` what `Lazy.rows` gives."""

  def __init__(self, read):
    self._read = read

  def __getitem__(self, index):
    return self._read(index)


def rows(value) -> Any:
  """What `Lazy.rows` gives, of a parameter that is an array or on disk. An array is gathered from all processes."""
  if isinstance(value, Lazy):
    return value.rows()
  if getattr(value, 'is_fully_addressable', True):
    return np.asarray(value)
  return np.asarray(multihost_utils.process_allgather(value, tiled=True))


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
    return jax.device_put(np.asarray(whole, leaf.dtype))
  return jax.make_array_from_callback(leaf.shape, sharding, lambda index: np.asarray(read(index), leaf.dtype))


def empty(shape, dtype) -> np.ndarray:
  """An array to be filled, which `place` need not copy for a CPU: its memory begins where jax wants it.

  What is large is mapped here, because NumPy asks for huge pages for it, and to find these can take seconds.
  """
  size = math.prod(shape) * np.dtype(dtype).itemsize
  if size >= _LARGE:
    return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)
  memory = np.empty(size + _ALIGNMENT, np.uint8)
  begin = -memory.ctypes.data % _ALIGNMENT
  return memory[begin : begin + size].view(dtype).reshape(shape)


def copy(into: np.ndarray, source: np.ndarray):
  """into[...] = source, several times as fast where axes change places: what lies together is read together.

  The last axis of `into` is cut into tiles; the others, but source's innermost, are taken entry by entry.
  """
  inner = min(range(source.ndim), key=lambda axis: source.strides[axis], default=0)
  if source.nbytes < _SMALL or source.ndim < 2 or inner == source.ndim - 1:
    into[...] = source
    return
  others = [axis for axis in range(source.ndim - 1) if axis != inner]
  for at in itertools.product(*(range(source.shape[axis]) for axis in others)):
    index: list[Any] = [slice(None)] * source.ndim
    for axis, i in zip(others, at):
      index[axis] = i
    for begin in range(0, source.shape[-1], _TILE):
      index[-1] = slice(begin, begin + _TILE)
      into[tuple(index)] = source[tuple(index)]


_ALIGNMENT = 64  # bytes
_LARGE = 1 << 22  # bytes, from which on NumPy does so
_SMALL = 1 << 16  # bytes; of less, all of it is in the cache
_TILE = 64  # entries


def _name(path):
  return '.'.join(path[:-1] if path[-1] == 'w' else path)
