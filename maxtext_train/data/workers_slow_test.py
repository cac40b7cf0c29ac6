"""How worker processes end: with the program, whatever ends it, and without a word of their own."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = """
  import os, signal, sys, time
  import jax
  from maxtext_models import tokenizer
  from maxtext_train.data import config, feed, pipeline

  if __name__ == '__main__':
    terminated = []
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs this may ignore it
    signal.signal(signal.SIGTERM, lambda *_: terminated.append(1))
    settings = config.Config(workers=2)
    loader = pipeline.build(settings, batch=8, length=128, tokenizer=tokenizer.load('byte'))
    sharding = jax.sharding.NamedSharding(jax.make_mesh((1,), ('rows',)), jax.sharding.PartitionSpec('rows'))
    batches = feed.Feed(loader, lambda local: feed.put(local, sharding, 8))
    print('starting', flush=True)
    next(batches)
    print('started', flush=True)
    exec(sys.argv[1])
"""


def _start(tmp_path, then):
  (tmp_path / 'program.py').write_text(textwrap.dedent(PROGRAM))
  environment = os.environ | {'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path]), 'JAX_PLATFORMS': 'cpu'}
  return subprocess.Popen(
    [sys.executable, 'program.py', then], cwd=tmp_path, env=environment, text=True, start_new_session=True,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
  )  # fmt: skip


def _wait_for(process, word):
  for line in process.stdout:
    if line.strip() == word:
      return
  raise AssertionError(f'{word} never came: {process.stderr.read()}')


def _ended(process):
  """(Exit code, the rest of the output, errors). Lines that came together with one waited for are still in stdout."""
  out, errors = process.stdout.read(), process.stderr.read()  # communicate() would pass over what is buffered
  return process.wait(timeout=60), out, errors


def _group(process):
  """Processes of the program's session that are still there."""
  found = subprocess.run(['ps', '-o', 'pid=,stat=', '-s', str(process.pid)], capture_output=True, text=True).stdout
  return [line for line in found.splitlines() if not line.split()[1].startswith('Z')]


def _gone(process, seconds=20):
  deadline = time.monotonic() + seconds
  while _group(process):
    assert time.monotonic() < deadline, _group(process)
    time.sleep(0.1)


@pytest.mark.parametrize(('then', 'code'), [('pass', 0), ('raise SystemExit(3)', 3), ('batches.close()', 0)])
def test_a_program_that_ends_takes_its_workers_along(tmp_path, then, code):
  process = _start(tmp_path, then)
  _wait_for(process, 'started')
  start = time.monotonic()
  assert _ended(process) == (code, '', '')
  assert time.monotonic() - start < 20
  _gone(process)


def test_a_termination_of_the_group_is_for_the_program_alone(tmp_path):
  """Workers, also those that are still starting, go on: the program may want to finish its step and save."""
  process = _start(tmp_path, "[next(batches) for _ in range(40)]; print('terminated', len(terminated))")
  _wait_for(process, 'starting')
  time.sleep(1.0)
  os.killpg(process.pid, signal.SIGTERM)
  _wait_for(process, 'started')
  assert _ended(process) == (0, 'terminated 1\n', '')
  _gone(process)


def test_an_interrupt_of_the_group_shows_one_traceback(tmp_path):
  process = _start(tmp_path, 'time.sleep(60)')
  _wait_for(process, 'started')
  os.killpg(process.pid, signal.SIGINT)
  _, _, errors = _ended(process)
  assert errors.count('Traceback') == 1 and errors.strip().endswith('KeyboardInterrupt')
  _gone(process)


def test_a_killed_worker_ends_the_run_in_one_line(tmp_path):
  kill = 'import multiprocessing; [os.kill(p.pid, 9) for p in multiprocessing.active_children()]; [0 for _ in batches]'
  process = _start(tmp_path, kill)
  code, _, errors = _ended(process)
  assert code == 1
  assert 'config.Failure: a data worker died: ' in errors and 'exit code -9' in errors
  _gone(process)


def test_workers_of_a_killed_program_end(tmp_path):
  process = _start(tmp_path, 'time.sleep(60)')
  _wait_for(process, 'started')
  assert len(_group(process)) >= 3
  process.kill()
  process.communicate(timeout=60)
  _gone(process)
