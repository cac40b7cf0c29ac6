"""Arrays in a directory that Orbax wrote, read with TensorStore: whole, or slices of them.

Nothing here depends on what a release of Orbax returns, and the devices of the writer do not matter.
"""

import os

import numpy as np

from maxtext_layers import config


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


def _first_line(error):
  return str(error).splitlines()[0][:200]
