"""Rows by hand: what each slot holds, and that no document sees, or is trained on, another."""

import doctest

import numpy as np

from maxtext_train.data import packing


def _rows(documents, length, **options):
  """Each (ids, weights) through prepare and put, as the pipeline does."""
  row, at = packing.empty(1, length), 0
  for segment, (ids, weights) in enumerate(documents, 1):
    ids, targets, why, _ = packing.prepare(np.array(ids, np.int32), weights, **options)
    assert why is None
    at += packing.put(row, 0, at, ids, targets, 0, segment)
  return {name: value[0].tolist() for name, value in row.items()}


def test_doctests():
  assert doctest.testmod(packing).failed == 0


def test_boundary_vectors():
  """B10: [bos a a a bos b b]: the last token of A has weight 0 for B's first token as target; positions restart."""
  row = {name: value[0].tolist() for name, value in packing.pack([[9, 1, 1, 1], [9, 2, 2]], 7).items()}
  assert row['tokens'] == [9, 1, 1, 1, 9, 2, 2]
  assert row['targets'][:6] == [1, 1, 1, 9, 2, 2]
  assert row['weights'] == [1, 1, 1, 0, 1, 1, 0]
  assert row['positions'] == [0, 1, 2, 3, 0, 1, 2]
  assert row['segments'] == [1, 1, 1, 1, 2, 2, 2]


def test_isolation_without_any_special_token():
  """B11: boundaries come from lengths: documents of one repeated token, without begin or end token, are still apart."""
  row = packing.pack([[5, 5, 5], [5, 5], [5, 5, 5, 5]], 10)
  assert row['segments'][0].tolist() == [1, 1, 1, 2, 2, 3, 3, 3, 3, 0]
  assert row['positions'][0].tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 0]
  assert row['weights'][0].tolist() == [1, 1, 0, 1, 0, 1, 1, 1, 0, 0]


def test_five_packed_samples_hold_their_own_targets_and_positions():
  """B6: a packed sample has the tokens, targets, weights and positions that it has alone."""
  samples = [list(range(10 * i, 10 * i + n)) for i, n in enumerate((3, 7, 2, 5, 4), 1)]
  packed = packing.pack(samples, 21)
  for i, sample in enumerate(samples, 1):
    alone = packing.pack([sample], len(sample))
    own = packed['segments'][0] == i
    for name in ('tokens', 'weights', 'positions'):
      assert packed[name][0][own].tolist() == alone[name][0].tolist()
    trained = own & (packed['weights'][0] > 0)
    assert packed['targets'][0][trained].tolist() == sample[1:]


def test_a_target_is_lost_neither_at_a_row_edge_nor_at_the_end():
  """Every token but the first of a document is a target exactly once, whatever the length of a row."""
  documents = [list(range(100 * i, 100 * i + n)) for i, n in enumerate((1, 2, 3, 17, 8, 9, 30, 2), 1)]
  expected = sorted(t for d in documents for t in d[1:])
  for length in range(1, 24):
    rows = packing.pack(documents, length)
    assert sorted(rows['targets'][rows['weights'] > 0].tolist()) == expected
    assert (rows['weights'][rows['segments'] == 0] == 0).all()


def test_padding_has_no_weight():
  """B13: one document a row, padded: the sum of weights is the number of real targets."""
  row = _rows([([1, 2, 3, 4, 5], None)], 8, cut=8)
  assert sum(row['weights']) == 4
  assert row['segments'] == [1] * 5 + [0] * 3


def test_weight_by_sample():
  """B12: by token, a packed row's loss is the mean over tokens; by sample 1/2 (1/7 Σ + 1/2 Σ) for 7 and 2 targets."""
  documents, losses = [(list(range(8)), None), (list(range(3)), None)], np.arange(1.0, 12.0)
  first, second = losses[:7].sum(), losses[8:10].sum()
  token, sample = (np.array(_rows(documents, 11, sample=s)['weights']) for s in (False, True))
  assert np.isclose((token * losses).sum() / token.sum(), (first + second) / 9)
  assert np.isclose((sample * losses).sum() / sample.sum(), (first / 7 + second / 2) / 2)


def test_a_document_split_over_rows_still_weighs_one():
  ids, weights, _, _ = packing.prepare(np.arange(9, dtype=np.int32), None, sample=True)
  total, start = 0.0, 0
  while not packing.finished(ids, start):
    row = packing.empty(1, 3)
    start += packing.put(row, 0, 0, ids, weights, start, 1)
    total += row['weights'].sum()
  assert np.isclose(total, 1.0)


def test_what_is_dropped_and_why():
  """B14: a prompt longer than the row leaves no target: dropped, with its reason; so is what has no second token."""
  weights = np.array([0, 0, 0, 0, 1, 1])
  assert packing.prepare(np.arange(6), weights, cut=3)[1:] == (None, 'no_target', True)
  assert packing.prepare(np.arange(6), weights, cut=4)[1].tolist() == [0, 0, 0, 1]
  assert packing.prepare(np.arange(1), None)[1:] == (None, 'empty', False)
