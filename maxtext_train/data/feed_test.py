"""Global batches on devices, and the place in the data that goes with them."""

import json
import time

import jax
import numpy as np
import pytest

from maxtext_layers import config
from maxtext_train.data import config as data_config
from maxtext_train.data import feed
from maxtext_train.data import pipeline


class _Words:
  """A tokenizer that is nothing but an interface."""

  vocab, bos_id, eos_id = 300, None, None

  def encode(self, text, bos, eos):
    del bos, eos
    return list(text.encode())


@pytest.fixture
def build(tmp_path):
  lines = [json.dumps({'text': f'{i}' * (i % 9 + 2)}) for i in range(40)]
  (tmp_path / 'a.jsonl').write_text('\n'.join(lines))

  def build(state=None, **change):
    settings = data_config.Config(source='jsonl', paths=(f'{tmp_path}/a.jsonl',), **change)
    return pipeline.build(settings, batch=4, length=8, tokenizer=_Words(), state=state)

  return build


@pytest.fixture(scope='module')
def place(sharding):
  return lambda local: feed.put(local, sharding, 4)


@pytest.fixture(scope='module')
def sharding():
  return jax.sharding.NamedSharding(jax.make_mesh((1,), ('rows',)), jax.sharding.PartitionSpec('rows'))


def test_batches_are_the_loaders_on_devices(build, place, sharding):
  with feed.Feed(build(at_end='stop'), place) as batches:
    seen, tokens = [], []
    for batch in batches:
      seen.append(batch)
      tokens.append(batches.tokens)
  expected = list(build(at_end='stop'))
  assert len(seen) == len(expected) > 5
  assert tokens == [(b['segments'] > 0).sum() for b in expected]
  for got, want in zip(seen, expected):
    assert got.keys() == want.keys()
    for name in want:
      assert isinstance(got[name], jax.Array) and got[name].sharding == sharding
      np.testing.assert_array_equal(got[name], want[name])


def test_the_state_is_that_of_the_batches_handed_out(build, place):
  """D7: however far the thread has read ahead."""
  whole = [b['tokens'].tolist() for b in build(at_end='stop')]
  for k in range(5):
    with feed.Feed(build(at_end='stop'), place) as batches:
      for _ in range(k):
        next(batches)
      deadline = time.monotonic() + 10
      while batches.loader.report()['batches'] < k + 2:  # until it has read ahead
        assert time.monotonic() < deadline
        time.sleep(0.01)
      state, report = batches.state(), batches.report()
    assert report['batches'] == state['batches'] == k
    assert [b['tokens'].tolist() for b in build(state, at_end='stop')] == whole[k:]


def test_an_error_of_the_thread_reaches_the_step(build, place, tmp_path):
  loader = build()
  (tmp_path / 'a.jsonl').write_text('x' * (tmp_path / 'a.jsonl').stat().st_size)
  with feed.Feed(loader, place) as batches, pytest.raises(config.Error, match=r'a\.jsonl:\d+: not JSON'):
    for _ in range(40):
      next(batches)


def test_a_closed_feed_ends(build, place):
  batches = feed.Feed(build(), place)
  next(batches)
  batches.close()
  batches.close()
  assert list(batches) == []


class _Device:
  def __init__(self, process):
    self.process_index = process


class _Sharding:
  """Devices of several processes, as a sharding of [B, T] describes them."""

  def __init__(self, *spans):
    self.spans = spans

  def devices_indices_map(self, shape):
    del shape
    return {_Device(p): (slice(start, stop), slice(None)) for p, start, stop in self.spans}


def test_reader_is_the_part_that_a_process_holds(sharding, monkeypatch):
  assert feed.reader(sharding, 4) == (0, 1)
  two = _Sharding((0, 0, 2), (0, 2, 4), (1, 4, 6), (1, 6, 8))
  replicated = _Sharding((0, 0, 4), (1, 4, 8), (2, 0, 4), (3, 4, 8))  # processes 0 and 2 hold the same rows
  whole = _Sharding((0, None, None), (1, None, None))
  for process, expected in enumerate([((0, 2), (0, 2), (0, 1)), ((1, 2), (1, 2), (0, 1))]):
    monkeypatch.setattr(jax, 'process_index', lambda process=process: process)
    assert tuple(feed.reader(s, 8) for s in (two, replicated, whole)) == expected
  with pytest.raises(config.Error, match='does not lie in equal runs'):
    feed.reader(_Sharding((0, 0, 2), (0, 6, 8), (1, 2, 6)), 8)
