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


def test_of_numpy_places_it_is_a_constant():
  assert isinstance(mask.visible(np.arange(3), np.arange(3), 2), np.ndarray)
