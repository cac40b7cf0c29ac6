import math

import jax
import pytest

from maxtext_layers import config
from maxtext_train import schedule

N = 10


def trace(updates, indices=None, **settings):
  rate = jax.jit(schedule.build(schedule.Config(**settings), updates))
  return [float(rate(k)) for k in (range(updates) if indices is None else indices)]


def cosine(k, n, warmup, peak, final):
  """What HF calls cosine with a minimum, counted from one."""
  u = k + 1
  if u < warmup:
    return peak * u / warmup
  return peak * (final + (1 - final) * (1 + math.cos(math.pi * (u - warmup) / (n - warmup))) / 2)


def linear(k, n, warmup, peak, final):
  u = k + 1
  return peak * u / warmup if u < warmup else peak * (1 - (1 - final) * (u - warmup) / (n - warmup))


@pytest.mark.parametrize('kind, twin', [('cosine', cosine), ('linear', linear)])
@pytest.mark.parametrize('warmup', [0, 1, 4, N - 1])
def test_closed_forms(kind, twin, warmup):
  got = trace(N, kind=schedule.Kind(kind), peak=2e-3, warmup=warmup, final=0.1)
  assert got == pytest.approx([twin(k, N, warmup, 2e-3, 0.1) for k in range(N)], rel=1e-6)


def test_wsd():
  """Warm-up over 2, stable, then a line from the peak at u = 7 to a tenth of it at u = 10."""
  got = trace(N, kind=schedule.Kind.WSD, peak=1.0, warmup=2, final=0.1, decay=0.3)
  assert got == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.7, 0.4, 0.1])


def test_constant():
  assert trace(4, kind=schedule.Kind.CONSTANT, peak=1.0, warmup=2, final=0.1) == pytest.approx([0.5, 1, 1, 1])
  assert trace(3, kind=schedule.Kind.CONSTANT, peak=1.0, warmup=0) == [1, 1, 1]


@pytest.mark.parametrize('kind', ['cosine', 'linear', 'wsd'])
@pytest.mark.parametrize('updates', [1, 2, 7, 1000, 100_000])
def test_last_update_has_the_final_fraction(kind, updates):
  """E21: the horizon is the real number of updates: the last rate is final x peak, and the one before is not yet."""
  last = trace(updates, [updates - 1], kind=schedule.Kind(kind), peak=3e-4, warmup=0, final=0.25, decay=1.0)
  assert last == pytest.approx([0.25 * 3e-4], rel=1e-5)
  if updates > 2:
    before = trace(
      updates,
      [updates - 1 - max(updates // 100, 1)],
      kind=schedule.Kind(kind),
      peak=3e-4,
      warmup=0,
      final=0.25,
      decay=1.0,
    )
    assert before[0] > last[0]


@pytest.mark.parametrize('kind', ['cosine', 'linear', 'wsd', 'constant'])
@pytest.mark.parametrize('stop', [3, 5, N - 1])
def test_two_processes_see_the_trace_of_one(kind, stop):
  """E17, E18, E19: the rate is a function of the update index alone: a resume, at the end of the warm-up (3), in the
  middle or before the last update, and a resume of that, continue the trace; nothing is saved, nothing can lag."""
  settings = {'kind': schedule.Kind(kind), 'peak': 1e-3, 'warmup': 3}
  whole = trace(N, **settings)
  parts = trace(N, range(stop), **settings)
  for again in range(3):  # three resumes that make no progress but the last
    parts = parts[:stop] + trace(N, range(stop, N if again == 2 else stop), **settings)
  assert parts == whole


def test_default_warmup_is_a_fiftieth():
  assert schedule.warmup_updates(schedule.Config(), 500) == 10
  assert trace(500, [9], peak=1.0)[0] == pytest.approx(1.0)
  assert trace(500, [4], peak=1.0)[0] == pytest.approx(0.5)


@pytest.mark.parametrize(
  'settings, words',
  [
    ({'warmup': 11}, 'warmup=11 do not fit a run of 10 updates'),
    ({'kind': schedule.Kind.WSD, 'warmup': 6, 'decay': 0.5}, 'warmup=6 and a decay over 5 do not fit'),
  ],
)
def test_horizon_too_short(settings, words):
  with pytest.raises(config.Error, match=words):
    schedule.build(schedule.Config(**settings), N)


@pytest.mark.parametrize(
  'settings', [{'peak': -1.0}, {'peak': math.nan}, {'final': 1.5}, {'decay': -0.1}, {'warmup': -1}]
)
def test_check_names_the_field(settings):
  with pytest.raises(config.Error, match=f'{next(iter(settings))}='):
    schedule.Config(**settings).check()
