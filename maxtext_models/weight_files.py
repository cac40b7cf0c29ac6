"""The weights in a Hugging Face directory: one or more safetensors files, read and written one tensor at a time.

Reading order: `Files`, `write`; `_weight_files` (which files are the weights).
"""

import json
import math
import os
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from maxtext_layers import config
from maxtext_models import json_file

INTEGERS = {'I64': np.dtype(np.int64), 'I32': np.dtype(np.int32)}  # of tables of whole numbers
DTYPES = {'F32': np.dtype(np.float32), 'F16': np.dtype(np.float16), 'BF16': np.dtype(jnp.bfloat16)}
PARTS = {  # of quantised tensors only
  'F8_E4M3': np.dtype(jnp.float8_e4m3fn),
  'F8_E8M0': np.dtype(jnp.float8_e8m0fnu),
  'U8': np.dtype(np.uint8),
  'I8': np.dtype(np.int8),
  'I32': np.dtype(np.int32),
  'I64': np.dtype(np.int64),
}


class Files:
  """The tensors of a directory, over one or more safetensors files. `headers` is name -> (dtype code, shape).

  With a card.Wrapper, names are those of the text model, and `towers` are the tensors that are not its.
  """

  def __init__(self, directory, wrapper=None):
    self.directory = directory
    self._files = {}  # name of a file -> {name of a tensor in it: (dtype code, shape, first byte)}
    self._where = {}  # name -> (file, name in it)
    self.headers = {}
    self.towers = []
    self.made = {}  # name -> quantised.Made
    self._parts = {}  # name -> (where, header) of what those are computed from
    for file, listed in _weight_files(directory).items():
      path = os.path.join(directory, file)
      self._files[file] = _headers(path)
      if absent := sorted(listed - self._files[file].keys()):
        raise config.Error(f'{path} has no tensor {absent[0]}, though the index says so')
      for theirs, (kind, shape, _) in self._files[file].items():
        tensor = wrapper.name(theirs) if wrapper else theirs
        if tensor is None:
          self.towers.append(theirs)
          continue
        if tensor in self._where:
          raise config.Error(f'{directory}: {tensor} is both in {self._where[tensor][0]} and in {file}')
        self._where[tensor], self.headers[tensor] = (file, theirs), (kind, shape)

  def replace(self, made):
    """Puts tensors that are computed (name -> quantised.Made) in the place of those that they are computed from."""
    for name, computed in made.items():
      self._where[name] = self._where[computed.parts[0]]
      for part in computed.parts:
        self._parts[part] = self._where[part], self.headers.pop(part)
      self.headers[name] = computed.kind, computed.shape
    self.made |= made

  def get(self, tensor) -> np.ndarray:
    """One tensor, read now."""
    if made := self.made.get(tensor):
      try:
        return made.make(*(self._stored(*self._parts[part]) for part in made.parts))
      except config.Error as error:
        raise config.Error(f'{self.path(tensor)}: {tensor}: {error}') from None
    self.dtype(tensor)
    return self._stored(self._where[tensor], self.headers[tensor])

  def _stored(self, where, header):
    """The array of a file as it lies there; where: (file, name in it).

    Read, not mapped: what is mapped counts as memory of this process for as long as the file is open.
    """
    file, theirs = where
    path = os.path.join(self.directory, file)
    kind = (DTYPES | PARTS)[header[0]]
    try:
      read = np.fromfile(path, np.uint8, math.prod(header[1]) * kind.itemsize, offset=self._files[file][theirs][2])
      return read.view(kind).reshape(header[1])
    except (KeyError, OSError, ValueError) as error:
      raise config.Error(f'{path}: {theirs} cannot be read: {error}') from None

  def equal(self, first, second) -> bool:
    """Whether two tensors hold the same numbers. Pieces of them are in memory, not all."""
    if self.made or self.headers[first] != self.headers[second]:
      return np.array_equal(self.get(first), self.get(second))
    (kind, shape), size = self.headers[first], 1 << 24
    count = math.prod(shape) * DTYPES[kind].itemsize
    places = [(os.path.join(self.directory, f), self._files[f][t][2]) for f, t in map(self._where.get, (first, second))]
    for begin in range(0, count, size):
      one, other = (np.fromfile(path, np.uint8, min(size, count - begin), offset=at + begin) for path, at in places)
      if not np.array_equal(one, other):
        return False
    return True

  def dtype(self, tensor) -> np.dtype:
    """That of a tensor; config.Error if it is none of DTYPES or INTEGERS."""
    if (kind := self.headers[tensor][0]) not in DTYPES | INTEGERS:
      path, known = self.path(tensor), ', '.join(DTYPES)
      raise config.Error(f'{path}: {tensor} has dtype {kind}, which is not supported; known: {known}')
    return (DTYPES | INTEGERS)[kind]

  def dtypes(self) -> set[str]:
    """Those of all tensors, as far as they are of DTYPES."""
    return {str(DTYPES[kind]) for kind, _ in self.headers.values() if kind in DTYPES}

  def path(self, tensor) -> str:
    """The file that a tensor is in."""
    return os.path.join(self.directory, self._where[tensor][0])

  def bytes(self) -> int:
    """Size of the weight files."""
    return sum(os.path.getsize(os.path.join(self.directory, name)) for name in self._files)

  def most(self) -> str:
    """The dtype of most numbers in the files."""
    counts: dict[str, int] = {}
    for kind, shape in self.headers.values():
      if kind not in INTEGERS:
        counts[kind] = counts.get(kind, 0) + math.prod(shape)
    return str(DTYPES.get(max(counts, key=lambda kind: counts[kind], default='F32'), 'float32'))

  def names(self) -> list[str]:
    """Names of the weight files."""
    return list(self._files)


def write(path, tensors):
  """Makes a safetensors file of the tensors {name: (dtype, shape)}; a function (name, array) that fills in one of them.

  Bytes lie as the safetensors library lays them: wide numbers first, then by name.
  """
  codes = {kind: code for code, kind in (INTEGERS | DTYPES).items()}
  order = sorted(tensors, key=lambda name: (list(codes).index(np.dtype(tensors[name][0])), name))
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  end = 0
  for name in order:
    kind, shape = np.dtype(tensors[name][0]), tensors[name][1]
    begin, end = end, end + math.prod(shape) * kind.itemsize
    header[name] = {'dtype': codes[kind], 'shape': list(shape), 'data_offsets': [begin, end]}
  text = json.dumps(header, ensure_ascii=False, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % 8)
  with open(path, 'wb') as file:
    file.write(len(text).to_bytes(8, 'little') + text)
    file.truncate(8 + len(text) + end)

  def fill(name, array):
    with open(path, 'r+b') as file:
      file.seek(8 + len(text) + header[name]['data_offsets'][0])
      array.tofile(file)

  return fill


def _headers(path):
  """{name: (dtype code, shape, first byte)} of the tensors in a safetensors file."""
  if os.path.isdir(path):
    raise config.Error(f'{path} is a folder, not a safetensors file')
  try:
    with safetensors.safe_open(path, 'np'):  # refuses what is damaged
      pass
    with open(path, 'rb') as file:
      size = int.from_bytes(file.read(8), 'little')
      header = json.loads(file.read(size))
  except FileNotFoundError:
    raise config.Error(f'{path} is missing, though the index names it') from None
  except (safetensors.SafetensorError, OSError) as error:
    raise config.Error(f'{path} is not a readable safetensors file: {error}') from None
  header.pop('__metadata__', None)
  return {n: (v['dtype'], tuple(v['shape']), 8 + size + v['data_offsets'][0]) for n, v in header.items()}


def _weight_files(directory):
  """{name of a safetensors file: names of tensors that an index says it holds}: all of the index, or the only one."""
  found = sorted(os.listdir(directory))
  whole, index = 'model.safetensors', os.path.join(directory, 'model.safetensors.index.json')
  if os.path.exists(index):
    weights = json_file.read(index).get('weight_map')
    if not isinstance(weights, dict) or not weights:
      raise config.Error(f'{index} is not an index of weights: it has no weight_map')
    for tensor, name in weights.items():
      if not isinstance(name, str) or name in ('', '.', '..') or re.search(r'[/\\\0]', name):
        raise config.Error(f'{index}: {tensor} is in {name!r}, which is not the name of a file beside it')
    names = {name: set() for name in sorted(set(weights.values()))}
    for tensor, name in weights.items():
      names[name].add(tensor)
    if whole in found and whole not in names:
      raise config.Error(f'{directory} holds both {whole} and {os.path.basename(index)}, which names other files')
    return names
  if whole in found:
    return {whole: set()}
  if several := [name for name in found if name.endswith('.safetensors')]:
    raise config.Error(f'{directory} holds {", ".join(several[:3])} but neither model.safetensors nor an index of them')
  if pickles := [name for name in found if name.endswith(('.bin', '.pt', '.pth', '.ckpt'))]:
    raise config.Error(
      f'{directory} holds weights as {pickles[0]}, a pickle, which can run any code and is not read; '
      'save them as safetensors'
    )
  raise config.Error(f'{directory} holds no safetensors')
