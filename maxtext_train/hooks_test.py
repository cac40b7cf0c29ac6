import io
import json

import pytest

from maxtext_train import evaluate
from maxtext_train import hooks
from maxtext_train import loop


class State:
  params = 'params'


def now(step, rows=(), last=False, stopping=False):
  found = [loop.Row(r, {'step': r, 'loss': 2.0, 'tokens_per_second': 1234.5, 'step_seconds': 1.0}) for r in rows]
  return loop.Now(step, State, found, None, 0, last, stopping)


class Screen(io.StringIO):
  def isatty(self):
    return True


def test_plain_lines_where_nobody_rewrites_them():
  out = io.StringIO()
  log = hooks.Log(5, 12, out)
  for step in range(1, 13):
    log(now(step, [step]))
  log.close()
  lines = out.getvalue().splitlines()
  assert [line.split('  ')[0] for line in lines] == ['step 1/12', 'step 5/12', 'step 10/12', 'step 12/12']
  assert lines[0] == 'step 1/12  loss 2.000  1,234 tokens/s' and lines[-1].endswith('  0:00 left')


def test_the_speed_shown_is_that_since_the_last_line():
  """Steps of 100 tokens in 1 s and in 3 s: 200 tokens in 4 s are 50 a second."""
  out = io.StringIO()
  log = hooks.Log(2, 9, out)
  for step in range(1, 6):
    seconds = 1.0 if step % 2 else 3.0
    row = {'step': step, 'loss': 2.0, 'tokens_per_second': 100 / seconds, 'step_seconds': seconds}
    log(loop.Now(step, State, [loop.Row(step, row)], None, 0, False, False))
  speeds = [line.split('  ')[2] for line in out.getvalue().splitlines()]
  assert speeds == ['100 tokens/s', '33 tokens/s', '50 tokens/s']


def test_one_line_rewritten_on_a_terminal():
  out = Screen()
  log = hooks.Log(5, 3, out)
  for step in range(1, 4):
    log(now(step, [step]))
  log.say('saved')
  log.close()
  text = out.getvalue()
  assert text.count('\r') == 4 and text.count('\n') == 1 and text.endswith('saved\n')


def test_evaluation_is_due_at_its_steps_and_once_at_the_end(tmp_path):
  """eval.jsonl: step, eval_loss, eval_tokens; none when the run must stop, none twice."""
  said, asked = [], []
  measure = lambda params: asked.append(params) or evaluate.Result(1.5, 60.0)
  hook = hooks.Evaluate(tmp_path, 2, measure, said.append, set())
  for step in range(1, 5):
    assert hook.due(step) == (step % 2 == 0)
    hook(now(step))
  hook(now(4, last=True))
  hook(now(5, stopping=True))
  hook(now(5, last=True))
  hook.close()
  rows = [json.loads(line) for line in (tmp_path / 'eval.jsonl').read_text().splitlines()]
  assert rows == [{'step': s, 'eval_loss': 1.5, 'eval_tokens': 60.0} for s in (2, 4, 5)]
  assert asked == ['params'] * 3 and said[0] == 'step 2  held-out loss 1.5000 nats a token over 60 tokens'


def test_an_evaluation_that_is_given_up_leaves_no_line(tmp_path):
  hook = hooks.Evaluate(tmp_path, 2, lambda _: None, print, set())
  hook(now(2))
  hook.close()
  assert (tmp_path / 'eval.jsonl').read_text() == ''


def test_a_resumed_run_evaluates_what_its_checkpoint_owes(tmp_path):
  """An evaluation that was given up, or cut, is made up for from the checkpoint; one that is there is not repeated."""
  asked = []
  measure = lambda params: asked.append(params) or evaluate.Result(1.5, 60.0)
  for start, done, expected in ((0, set(), 0), (3, {2}, 0), (4, {2}, 1), (4, {2, 4}, 0)):
    asked.clear()
    hook = hooks.Evaluate(tmp_path, 2, measure, lambda _: None, set(done))
    hook.catch_up(start, 'params')
    assert len(asked) == expected, start
    if start == 4:
      hook(now(4, last=True))
      assert len(asked) == expected
    hook.close()


def test_a_save_at_its_steps_and_before_leaving():
  saved, checked = [], []
  hook = hooks.Save(2, lambda now, wait: saved.append((now.step, wait)), lambda: checked.append(1))
  for step in range(1, 6):
    hook(now(step))
  hook(now(5, stopping=True))
  assert saved == [(2, False), (4, False), (5, True)] and len(checked) == 6


def test_a_resumed_run_drops_what_it_will_write_again(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
  hooks.truncate(path, 2)
  assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
  hooks.truncate(tmp_path / 'absent', 2)
  assert not (tmp_path / 'absent').exists()


@pytest.mark.parametrize(('seconds', 'text'), [(0.4, '0:00'), (59.6, '1:00'), (3599, '59:59'), (3723, '1:02:03')])
def test_durations(seconds, text):
  assert hooks.duration(seconds) == text
