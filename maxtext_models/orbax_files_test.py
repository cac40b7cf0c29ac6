"""Arrays on disk: written in pieces, of layers or not, and read whole or in part."""

import doctest
import json

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from maxtext_layers import config
from maxtext_models import orbax_files

RNG = np.random.default_rng(0)
VALUES = {
  ('a', 'w'): RNG.standard_normal((3, 5, 7)).astype(np.float32),
  ('b', '0', 'x'): RNG.standard_normal((6, 4)).astype(ml_dtypes.bfloat16),
  ('c',): np.zeros((2, 3), np.float32),
}


def test_doctests():
  assert doctest.testmod(orbax_files).failed == 0


@pytest.fixture(name='written')
def _written(tmp_path, monkeypatch):
  """In pieces of 24 bytes, of which two may be on their way; the first and third have an axis of layers."""
  monkeypatch.setattr(orbax_files, 'PIECE', 24)
  monkeypatch.setattr(orbax_files, 'FLIGHT', 48)
  orbax_files.write(tmp_path, ((key, v.shape, v.dtype, key != ('b', '0', 'x'), v) for key, v in VALUES.items()))
  return tmp_path


def test_what_is_written_is_read(written):
  reader = orbax_files.Reader(written)
  for key, value in VALUES.items():
    got = reader('.'.join(key))
    assert got.dtype == value.dtype and got.tobytes() == value.tobytes()
  np.testing.assert_array_equal(reader('a.w', (slice(1, 2), slice(2, 5))), VALUES['a', 'w'][1:2, 2:5])
  assert [reader.rows(key) for key in ('a.w', 'b.0.x', 'c')] == [1, 3, 1]


def test_orbax_reads_it(written):
  """E10: without being told what is there."""
  tree = ocp.PyTreeCheckpointer().restore(written)
  assert tree.keys() == {'a', 'b', 'c'}
  for got, value in ((tree['a']['w'], VALUES['a', 'w']), (tree['b']['0']['x'], VALUES['b', '0', 'x']), (tree['c'], 0)):
    np.testing.assert_array_equal(got, value)


def test_a_layer_is_asked_for_when_its_turn_has_come(tmp_path):
  """One is in memory at a time, beside what is on its way."""
  asked = []

  class Rows:
    def __getitem__(self, layer):
      asked.append(layer)
      return np.full((2,), layer, np.float32)

  orbax_files.write(tmp_path, [(('x',), (4, 2), np.float32, True, Rows())])
  assert asked == [0, 1, 2, 3]
  np.testing.assert_array_equal(orbax_files.Reader(tmp_path)('x')[:, 1], [0, 1, 2, 3])


def test_what_is_not_there_is_one_line(written):
  for key, said in (('d', 'has no readable array d'), ('a', 'has no readable array a')):
    with pytest.raises(config.Error, match=said) as error:
      orbax_files.Reader(written)(key)
    assert '\n' not in str(error.value)
  assert json.loads((written / '_METADATA').read_text())['use_ocdbt']
