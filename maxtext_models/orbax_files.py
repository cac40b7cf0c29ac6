"""Arrays in a directory as Orbax lays them, read and written with TensorStore: whole, or slices of them.

Nothing here depends on what a release of Orbax returns, and the devices of the writer do not matter. What is written
Orbax reads. It is cut into pieces along its first axes, a layer each where there is an axis of layers, so that nobody
needs a whole array in memory.

Reading order: `Reader`, `write`.
"""

import collections
from collections.abc import Iterable
import itertools
import json
import math
import os
from typing import Any

import numpy as np

from maxtext_layers import config

PIECE = 1 << 25  # bytes that are compressed together, at most
FLIGHT = 1 << 26  # bytes on their way to the disk at once


class Reader:
  """Arrays by key, whose words are joined by dots.

  Args:
    directory: that Orbax made for one item.
    zarr: version of the format of arrays, 2 or 3.
    ocdbt: whether they lie in one database; else each has a folder of its own.
  """

  def __init__(self, directory, zarr=2, ocdbt=True):
    self.directory = os.path.abspath(directory)
    self._driver = {2: 'zarr', 3: 'zarr3'}[zarr]
    self._ocdbt = ocdbt
    self._stores = {}

  def __call__(self, key: str, index=()) -> np.ndarray:
    """array[index] of the array `key`."""
    store = self._store(key)
    try:
      return store[index].read().result()
    except ValueError as error:
      raise config.Error(f'{self.directory}: array {key} cannot be read: {_first_line(error)}') from None

  def header(self, key: str) -> tuple[tuple[int, ...], np.dtype]:
    """(shape, dtype) of an array."""
    store = self._store(key)
    return tuple(store.shape), store.dtype.numpy_dtype

  def rows(self, key: str) -> int:
    """How many entries of an array's first axis are compressed together, so that who reads one reads all of them."""
    return self._store(key).chunk_layout.read_chunk.shape[0]

  def _store(self, key):
    import tensorstore

    if key not in self._stores:
      # as path, not as URL: a folder's name may hold # ? or %
      folder = {'driver': 'file', 'path': self.directory + '/'}
      alone = {'driver': 'file', 'path': os.path.join(self.directory, key) + '/'}
      base = {'driver': 'ocdbt', 'base': folder, 'path': key} if self._ocdbt else alone
      try:
        self._stores[key] = tensorstore.open({'driver': self._driver, 'kvstore': base}, open=True, read=True).result()
      except ValueError as error:
        raise config.Error(f'{self.directory} has no readable array {key}: {_first_line(error)}') from None
    return self._stores[key]


def write(directory, arrays: Iterable[tuple[tuple[str, ...], tuple[int, ...], Any, bool, Any]]):
  """Writes arrays: each (words of its key, shape, dtype, whether its first axis is of layers, rows).

  rows[i] is layer i, rows[...] all of an array without such an axis; either is asked for when its turn has come.
  """
  import tensorstore

  flying: collections.deque[tuple[Any, int]] = collections.deque()
  metadata = {}
  # the disk is asked to hold the files when all are written
  folder = {'driver': 'file', 'path': os.path.abspath(directory) + '/', 'file_io_sync': False}
  base, filled = {'driver': 'ocdbt', 'base': folder}, {'store_data_equal_to_fill_value': True}
  for words, shape, dtype, stacked, rows in arrays:
    sizes = pieces(shape, np.dtype(dtype).itemsize, stacked)
    format = {'chunks': sizes, 'compressor': {'id': 'zstd', 'level': 1}}
    spec = {'driver': 'zarr', 'kvstore': base | {'path': '.'.join(words)}, 'metadata': format, **filled}
    store = tensorstore.open(spec, create=True, dtype=dtype, shape=shape).result()
    for layer in range(shape[0]) if stacked else [...]:
      row, place = rows[layer], store[layer] if stacked else store
      for index in _grid(shape[stacked:], sizes[stacked:]):
        piece = np.ascontiguousarray(row[index])
        flying.append((place[index].write(piece, can_reference_source_data_indefinitely=True), piece.nbytes))
        while sum(size for _, size in flying) > FLIGHT:
          flying.popleft()[0].result()
      del row, piece
    metadata[str(words)] = {
      'key_metadata': [{'key': word, 'key_type': 2} for word in words],  # 2: of a dict
      'value_metadata': {'value_type': 'np.ndarray', 'skip_deserialize': False, 'write_shape': list(shape)},
    }
  for future, _ in flying:
    future.result()
  with open(os.path.join(directory, '_METADATA'), 'w', encoding='utf-8') as file:
    flags = {'use_ocdbt': True, 'use_zarr3': False, 'store_array_data_equal_to_fill_value': True}
    json.dump({'tree_metadata': metadata, **flags, 'custom_metadata': None}, file)


def pieces(shape, itemsize, stacked) -> list[int]:
  """The shape of what is compressed together: one layer, or as many of its first rows as PIECE holds.

  >>> pieces((60, 128, 32), 4, True), pieces((60, 1 << 18, 64), 2, True), pieces((1 << 20, 128), 2, False)
  ([1, 128, 32], [1, 262144, 64], [131072, 128])
  >>> pieces((2, 256, 7168, 2048), 2, True)
  [1, 1, 7168, 2048]
  """
  sizes = [1, *shape[1:]] if stacked else list(shape)
  for axis in range(stacked, len(sizes)):
    if (whole := math.prod(sizes) * itemsize) > PIECE:
      sizes[axis] = max(1, PIECE * sizes[axis] // whole)
  return sizes


def _grid(shape, sizes):
  """Index of every piece."""
  begins = (range(0, length, size) for length, size in zip(shape, sizes))
  for first in itertools.product(*begins):
    yield tuple(slice(begin, min(begin + size, length)) for begin, size, length in zip(first, sizes, shape))


def _first_line(error):
  return str(error).splitlines()[0][:200]
