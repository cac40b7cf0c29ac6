import jax
import numpy as np
import pytest

from maxtext_layers import mask


@pytest.mark.parametrize('window', [1, 2, 5, 16, 99])
def test_a_query_sees_exactly_min_of_place_and_window(window):
  """A4: row i has exactly min(i + 1, W) visible keys, the last of them its own."""
  seen = mask.visible(np.arange(16), np.arange(16), window)
  assert seen.sum(-1).tolist() == [min(i + 1, window) for i in range(16)]
  assert all(seen[i, i] and not seen[i, i + 1 :].any() for i in range(16))


def test_documents_and_padding():
  """B2, C15: documents and padding do not see each other; no row is empty, not even one of padding."""
  segments = np.array([[1, 1, 2, 2, 2, 0], [0, 0, 0, 0, 0, 0]])
  seen = mask.visible(np.arange(6), np.arange(6), None, segments, segments)
  assert seen[0].astype(int).tolist() == [
    [1, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0],
    [0, 0, 1, 0, 0, 0],
    [0, 0, 1, 1, 0, 0],
    [0, 0, 1, 1, 1, 0],
    [0, 0, 0, 0, 0, 1],
  ]
  assert (seen.sum(-1) > 0).all()


@pytest.mark.parametrize('chunk', [1, 3, 4, 99])
def test_chunks_by_their_definition(chunk):
  """Query i sees key j <= i of its document if both lie in the same `chunk` positions of it; padding sees padding."""
  lengths, padding = [(5, 8), (13,), (1, 1, 9)], [3, 3, 5]
  segments = np.array([[d + 1 for d, n in enumerate(r) for _ in range(n)] + [0] * p for r, p in zip(lengths, padding)])
  places = np.array([[i for n in r for i in range(n)] + [0] * p for r, p in zip(lengths, padding)])
  ids = mask.chunks(places, chunk, segments)
  seen = mask.visible(np.arange(16), np.arange(16), None, ids, ids)
  for row in range(3):
    for i in range(16):
      for j in range(16):
        alike = segments[row, i] == segments[row, j] and places[row, i] // chunk == places[row, j] // chunk
        real = segments[row, i] > 0 and segments[row, j] > 0
        assert seen[row, i, j] == (j <= i and (alike if real else segments[row, i] == segments[row, j]))
  jitted = jax.jit(mask.chunks, static_argnums=1)(places, chunk, segments)
  np.testing.assert_array_equal(jitted, ids)


def test_chunks_of_one_document_are_constants():
  """Positions alone: the same ids as with one segment, and numpy, so that a kernel may leave blocks out."""
  places = np.arange(10)[None]
  ids = mask.chunks(places, 4)
  assert isinstance(ids, np.ndarray) and ids.tolist() == [[1, 1, 1, 1, 2, 2, 2, 2, 3, 3]]
  np.testing.assert_array_equal(ids, mask.chunks(places, 4, np.ones((1, 10), int)))


def test_of_numpy_places_it_is_a_constant():
  assert isinstance(mask.visible(np.arange(3), np.arange(3), 2), np.ndarray)
