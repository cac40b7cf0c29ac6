import time

import jax
import jax.numpy as jnp
import pytest

from maxtext_layers import config
from maxtext_train import loop
from maxtext_train import stop as stops


class Hook:
  """Remembers what it saw."""

  def __init__(self, every=0, action=None):
    self.every, self.action, self.seen = every, action, []

  def due(self, step):
    return bool(self.every) and step % self.every == 0

  def __call__(self, now):
    self.seen.append((now.step, [row.step for row in now.rows], now.last, now.stopping))
    if self.action:
      self.action(now)

  def close(self):
    pass


def run(hooks, steps=4, start=0, stop=None, batches=100, loss=lambda step: 1.0, wait=0.0, step_time=0.0):
  def step(state, batch):
    time.sleep(step_time)
    return state + 1, {'loss': jnp.float32(loss(int(state) + 1)), 'grad_norm': jnp.float32(1), 'weight': jnp.float32(1)}

  def feed():
    for i in range(batches):
      time.sleep(wait)
      yield {'b': i}, 8, loop.Data(None, i)

  offered, recorded = [], []
  out = loop.run(
    step, start, feed(), hooks, stop or stops.Stop(), start=start, steps=steps, data=None, tokens=8 * start,
    describe=lambda step, metrics, seconds, count, tokens, data: {'s': seconds, 'tokens': tokens, 'count': count},
    record=lambda row: recorded.append(row.step), dump=lambda step, batch, metrics: f'{step}:{batch["b"]}',
    offer=lambda step, *_: offered.append(step),
  )  # fmt: skip
  assert recorded == list(range(start + 1, out[1] + 1))
  return out, offered


def test_metrics_come_one_step_late_and_none_is_lost():
  hook = Hook()
  (state, done), offered = run([hook])
  assert (state, done) == (4, 4) and offered == [1, 2, 3, 4]
  assert hook.seen == [
    (1, [], False, False), (2, [1], False, False), (3, [2], False, False), (4, [3], False, False),
    (4, [4], True, False),
  ]  # fmt: skip


def test_a_step_that_a_hook_must_know_is_read_before_the_hooks():
  hook, other = Hook(every=2), Hook()
  run([other, hook], start=1, steps=4)
  assert other.seen == hook.seen
  assert hook.seen == [(2, [2], False, False), (3, [], False, False), (4, [3, 4], False, False), (4, [], True, False)]


def test_tokens_go_on_where_a_run_is_resumed():
  found = []
  run([Hook(action=lambda now: found.extend((row.step, row.values['tokens']) for row in now.rows))], start=2, steps=4)
  assert found == [(3, 24), (4, 32)]


def test_time_of_a_step_counts_waiting_for_data():
  rows = []
  run([Hook(every=1, action=lambda now: rows.extend(now.rows))], steps=3, wait=0.05, step_time=0.02)
  assert all(row.values['s'] >= 0.07 for row in rows) and len(rows) == 3


def test_a_loss_that_is_not_finite_stops_before_a_hook_can_save():
  """E16: the step is read before the hook that is due; a hook that is not due learns of it one step later."""
  for every, calls in ((1, [1, 2]), (0, [1, 2, 3])):
    hook = Hook(every=every)
    with pytest.raises(config.Failure, match=r'step 3: loss is nan, gradient norm is 1\.0; the batch is in 3:2'):
      run([hook], loss=lambda step: float('nan') if step == 3 else 1.0)
    assert [step for step, *_ in hook.seen] == calls


def test_a_batch_without_weight_has_no_loss_and_is_sound():
  """B16: NaN as the loss of nothing is not a failure; a weight that is NaN itself is one."""
  nan = float('nan')
  assert loop.sound({'loss': nan, 'grad_norm': 0.0, 'weight': 0.0})
  assert not loop.sound({'loss': nan, 'grad_norm': 0.0, 'weight': 2.0})
  assert not loop.sound({'loss': nan, 'grad_norm': 0.0, 'weight': nan})
  assert not loop.sound({'loss': 1.0, 'grad_norm': float('inf'), 'weight': 2.0})


def test_data_that_ends_ends_the_loop():
  """D9: the last step there was is the last one, and the hooks are told."""
  hook = Hook()
  (state, done), _ = run([hook], steps=10, batches=3)
  assert (state, done) == (3, 3) and hook.seen[-1] == (3, [3], True, False)


def test_a_request_to_stop_is_answered_at_the_next_boundary():
  """E12: the hooks see the finished step once more, with `stopping`; the run does not end as if it were complete."""
  stop = stops.Stop()
  hook = Hook(action=lambda now: now.step == 2 and stop._requested.set())
  with pytest.raises(stops.Stopped):
    run([hook], stop=stop)
  assert hook.seen[-2:] == [(2, [1], False, False), (2, [2], False, True)]


def test_a_step_is_recorded_once_whoever_finishes_it():
  """E12: the watcher, which saves while the main thread waits for data, records the step that it saves; and one that is
  not sound is refused as often as it is asked for."""
  recorded = []

  def run(loss, then):
    def step(state, batch):
      return state + 1, {'loss': loss(state + 1), 'grad_norm': 1.0, 'weight': 1.0}

    def offer(step, state, flush, data, tokens):
      if step == 2:
        then(flush)

    return loop.run(
      step, 0, iter([({}, 1, None)] * 3), [], stops.Stop(), start=0, steps=3, data=None, tokens=0,
      describe=lambda *_: {}, record=lambda row: recorded.append(row.step), dump=lambda *_: 'here', offer=offer,
    )  # fmt: skip

  run(lambda step: 1.0, lambda flush: flush() and flush())
  assert recorded == [1, 2, 3]

  def refused(flush):
    for _ in range(2):
      with pytest.raises(config.Failure, match='step 2: loss is nan'):
        flush()

  with pytest.raises(config.Failure, match='step 2: loss is nan'):
    run(lambda step: float('nan') if step == 2 else 1.0, refused)
  assert recorded == [1, 2, 3, 1]


def test_a_request_during_the_last_evaluation_is_no_end():
  """E12: whoever resumes has it still to do."""
  stop = stops.Stop()
  hook = Hook(action=lambda now: now.last and stop._requested.set())
  with pytest.raises(stops.Stopped):
    run([hook], stop=stop)
  assert hook.seen[-1] == (4, [4], True, False)


def test_a_request_before_the_first_step():
  stop, hook = stops.Stop(), Hook()
  stop._requested.set()
  with pytest.raises(stops.Stopped):
    run([hook], stop=stop, start=5, steps=9)
  assert hook.seen == [(5, [], False, True)]


def test_the_host_runs_ahead_of_the_device():
  """Step k is dispatched before the metrics of step k - 1 are read."""
  order = []

  class Late:
    def __init__(self, step):
      self.step = step

    def __array__(self, *_, **__):
      order.append(f'read {self.step}')
      return jax.numpy.float32(1).__array__()

  def step(state, batch):
    order.append(f'dispatch {state + 1}')
    return state + 1, {'loss': Late(state + 1), 'grad_norm': 1.0, 'weight': 1.0}

  loop.run(
    step, 0, iter([({}, 1, None)] * 3), [Hook()], stops.Stop(), start=0, steps=3, data=None, tokens=0,
    describe=lambda *_: {}, record=lambda _: None, dump=None, offer=lambda *_: None,
  )  # fmt: skip
  assert order == ['dispatch 1', 'dispatch 2', 'read 1', 'dispatch 3', 'read 2', 'read 3']
