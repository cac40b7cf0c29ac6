"""SIGTERM in every phase of a run: out in time, with the last finished step on disk, and exact when resumed."""

import re
import signal
import time

import pytest

from maxtext_train import checkpoint
from maxtext_train import report
from tests import tiny_run

pytestmark = pytest.mark.slow

_LIMIT = 30  # seconds from the signal to the end of the process
_CLOCK = ('step_seconds', 'tokens_per_second')

# What makes a phase long enough to be hit: a program that trains as always, but sleeps in one place. `hold(name)` says
# that the phase has begun. A compilation is held in C, as a real one is: no Python signal handler can run meanwhile.
_HELD = """
import hashlib, sys, time
from maxtext_train import pretrain
phase = sys.argv.pop(1)

def hold(rounds):
  print('HOLD', flush=True)
  hashlib.pbkdf2_hmac('sha256', b'', b'', rounds)  # in C, without Python's lock; a million rounds: 0.5 s

def main(settings):
  from maxtext_train import assembly, checkpoint, evaluate, step
  if phase == 'compile':
    lower = assembly.Assembly.compile
    def compile(self):
      hold(2**31 - 1)
      return lower(self)
    assembly.Assembly.compile = compile
  if phase == 'step':
    call, count = step.Step.__call__, []
    def slow(self, state, batch):
      count.append(1)
      if len(count) == 4:
        hold(5_000_000)
      return call(self, state, batch)
    step.Step.__call__ = slow
  if phase == 'evaluation':
    evaluate.evaluate = lambda *_: hold(2**31 - 1)
  if phase == 'save':
    commit = checkpoint.Checkpoints._commit
    def slow(self, *args):
      hold(5_000_000)
      return commit(self, *args)
    checkpoint.Checkpoints._commit = slow
  return pretrain.main(settings)

from maxtext_models import program
program.run(main, config='quickstart', resolve=pretrain.resolve)
"""


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  """A folder whose compilation cache is warm, and the losses of a run that nobody interrupted."""
  path = tmp_path_factory.mktemp('sigterm')
  (path / 'held.py').write_text(_HELD)
  tiny_run.start(path, workdir='straight')
  return path


def stop(base, phase, workdir, *arguments):
  """Starts a run that is held in `phase`, sends SIGTERM there. -> (exit code, seconds, stdout, stderr)."""
  process = tiny_run.start(base, *arguments, workdir=workdir, wait=False, program=[str(base / 'held.py'), phase])
  for line in process.stdout:
    if line.strip() == 'HOLD':
      break
  time.sleep(0.3)
  since = time.monotonic()
  process.send_signal(signal.SIGTERM)
  out, errors = process.communicate(timeout=120)
  return process.returncode, time.monotonic() - since, out, errors


def losses(folder):
  return [{k: v for k, v in row.items() if k not in _CLOCK} for row in report.read(folder / 'metrics.jsonl')]


@pytest.mark.parametrize(('phase', 'step'), [('compile', 0), ('step', 4), ('evaluation', 4), ('save', 5)])
def test_the_last_finished_step_is_saved_and_resumed_exactly(base, phase, step):
  """E12, E13: in a compilation, a step, an evaluation and a save."""
  code, seconds, _, errors = stop(base, phase, phase)
  assert code == 143 and seconds < _LIMIT, (code, seconds, errors)
  assert re.search('^SIGTERM: ', errors, re.MULTILINE) and 'Traceback' not in errors, errors
  found = checkpoint.Checkpoints(base / phase / 'checkpoints').newest()
  assert found is not None and found >= step
  if phase != 'save':
    assert found == step
  assert len(losses(base / phase)) == found
  out, _ = tiny_run.start(base, workdir=phase)
  assert f'resumed: step {found}, ' in out or (found == 10 and 'is complete: step 10' in out)
  assert losses(base / phase) == losses(base / 'straight')


def test_exit_leaves_without_saving(base):
  """E13: on_sigterm=exit ends fast and writes nothing."""
  code, seconds, _, errors = stop(base, 'step', 'exit', '--config.checkpoint.on_sigterm=exit')
  assert code == 143 and seconds < 10 and 'without saving' in errors
  assert checkpoint.Checkpoints(base / 'exit' / 'checkpoints').steps() == []
