"""What a family's rows say of each parameter: in which tensors of the files it is, and how to get it in and out.

A row (ours, theirs, 'theirs axes -> our axes') is read left to right to load and right to left to save; an axis called
v is the vocabulary. {l} is the layer. With {e} in theirs, our parameter has an axis of experts before those of the
pattern, and the files have a tensor for each. Where the files hold several parameters in one tensor, ours is a tuple of
names, and either the first axis on our side of the pattern counts them, '(two f) d -> two d f', or there is a pattern
for each, in which + says where, in an axis of theirs, what lies side by side begins: '(g + h) d -> d g h'.

Reading order: `of`, `Source`.
"""

import math
import re
from typing import NamedTuple

import einops
import numpy as np

from maxtext_models import layout


def of(card, leaves, segments):
  """name -> Source for the leaves of a state under a plan, with {l} written out.

  Raises:
    AssertionError: a row names no parameter, or the reverse; that is a mistake of the family's.
  """
  slots, result = layout.slots(leaves, segments), {}

  def shape(name, pattern, experts):
    slot = slots[name]
    sizes = leaves[slot.path].get_value().shape[(slot.repeat is not None) + experts :]
    names = pattern.split('->')[1].split()
    names = names[len(names) - len(sizes) :]
    return tuple(card.vocab if axis == 'v' else size for axis, size in zip(names, sizes, strict=True))

  for ours, theirs, pattern in card.rows():
    names, patterns = ((one,) if isinstance(one, str) else tuple(one) for one in (ours, pattern))
    experts, hits = '{e}' in theirs, {}
    for l in range(card.layers) if '{l}' in theirs else [0]:
      together = tuple(name.format(l=l) for name in names)
      if together[0] not in slots:
        continue
      of = patterns * len(names) if len(patterns) == 1 else patterns
      shapes = tuple(shape(name, one, experts) for name, one in zip(together, of, strict=True))
      slot = slots[together[0]]
      count = leaves[slot.path].get_value().shape[slot.repeat is not None] if experts else None
      where = theirs.replace('{l}', str(l))
      hits |= {name: Source(where, patterns, together, i, shapes, count) for i, name in enumerate(together)}
    if not hits:
      raise AssertionError(f'row {ours} names no parameter')
    result |= hits
  if unfilled := slots.keys() - result.keys():
    raise AssertionError(f'no row names {sorted(unfilled)[:10]}')
  return result


class Source(NamedTuple):
  """Where one parameter of one layer is in the files.

  theirs: the tensor; with {e} left in it, one for each of `experts`.
  patterns: one for all of `together`, or one for each of them.
  together: our names of all parameters that are in that tensor, and which of them this is.
  shapes: theirs in one layer, without experts and without the padding of the vocabulary.
  """

  theirs: str
  patterns: tuple[str, ...]
  together: tuple[str, ...]
  part: int
  shapes: tuple[tuple[int, ...], ...]
  experts: int | None

  @property
  def ours(self) -> str:
    """The parameter's name."""
    return self.together[self.part]

  def tensors(self) -> list[str]:
    """Names of the tensors."""
    return [self.theirs] if self.experts is None else [self.theirs.format(e=e) for e in range(self.experts)]

  def their_shape(self) -> tuple[int, ...]:
    """Of one tensor."""
    sizes = []
    for axis, names in enumerate(_axes(self.patterns[0])):
      if '+' in names:
        widths = self._widths(axis)
        sizes.append(widths[0][0] * sum(inner for _, inner in widths))
      else:
        sizes.append(math.prod(self._sizes(0)[name] for name in names))
    return tuple(sizes)

  def take(self, tensor: np.ndarray) -> np.ndarray:
    """The parameter, from one tensor."""
    if len(self.patterns) == 1:
      read = einops.rearrange(tensor, self.patterns[0], **self._sizes(0))
      return read if len(self.together) == 1 else read[self.part]
    axis = self._axis()
    widths = self._widths(axis)
    outer, inner = widths[self.part]
    first = sum(width for _, width in widths[: self.part])
    shape = tensor.shape
    tensor = tensor.reshape(*shape[:axis], outer, -1, *shape[axis + 1 :])
    tensor = tensor[(slice(None),) * (axis + 1) + (slice(first, first + inner),)]
    tensor = tensor.reshape(*shape[:axis], outer * inner, *shape[axis + 1 :])
    return einops.rearrange(tensor, self._pattern(self.part), **self._sizes(self.part))

  def join(self, values: list[np.ndarray]) -> np.ndarray:
    """One tensor, from the parameters that are in it; the inverse of `take`."""
    values = [value[tuple(map(slice, shape))] for value, shape in zip(values, self.shapes, strict=True)]
    back = lambda pattern: '->'.join(reversed(pattern.split('->')))
    if len(self.patterns) == 1:
      value = values[0] if len(values) == 1 else np.stack(values)
      return einops.rearrange(value, back(self.patterns[0]), **self._sizes(0))
    axis = self._axis()
    parts = []
    for i, (value, (outer, inner)) in enumerate(zip(values, self._widths(axis), strict=True)):
      value = einops.rearrange(value, back(self._pattern(i)), **self._sizes(i))
      parts.append(value.reshape(*value.shape[:axis], outer, inner, *value.shape[axis + 1 :]))
    return np.concatenate(parts, axis + 1).reshape(self.their_shape())

  def _sizes(self, i):
    """axis -> size, in the pattern of part i."""
    stacked = len(self.together) > len(self.patterns)
    names = self.patterns[0 if stacked else i].split('->')[1].split()
    return dict(zip(names, ((len(self.together),) if stacked else ()) + self.shapes[i], strict=True))

  def _pattern(self, i):
    return self.patterns[i].replace('+', '')

  def _axis(self):
    """The axis in which parts lie side by side."""
    return next(axis for axis, names in enumerate(_axes(self.patterns[0])) if '+' in names)

  def _widths(self, axis):
    """(size of what is outside, size of what lies side by side) of `axis`, for each part."""
    widths = []
    for i, pattern in enumerate(self.patterns):
      names, sizes = _axes(pattern)[axis], self._sizes(i)
      plus = names.index('+')
      widths.append(tuple(math.prod(sizes[name] for name in some) for some in (names[:plus], names[plus + 1 :])))
    return widths


def _axes(pattern):
  """The names in each axis of their side."""
  return [(many or one).split() for many, one in re.findall(r'\(([^)]*)\)|(\S+)', pattern.split('->')[0])]
