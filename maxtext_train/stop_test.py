import os
import signal
import subprocess
import sys
import time

import pytest

from maxtext_train import stop


def test_the_loop_sees_the_signal():
  watcher = stop.Stop(limit=600)
  before = signal.getsignal(signal.SIGTERM)
  with watcher.watching():
    assert not watcher.requested
    os.kill(os.getpid(), signal.SIGTERM)
    deadline = time.monotonic() + 30
    while not watcher.requested and time.monotonic() < deadline:
      time.sleep(0.01)
    assert watcher.requested
    watcher.acknowledge()
  assert signal.getsignal(signal.SIGTERM) == before


_BUSY = """
import hashlib, sys, time
from maxtext_train import stop
watcher = stop.Stop(stop.OnSigterm(sys.argv[1]), grace=0.2, limit=float(sys.argv[2]))
with watcher.watching():
  if sys.argv[3] == 'whole':
    watcher.offer('step 7', lambda: print('saved', flush=True), lambda: False)
  if sys.argv[3] == 'broken':
    watcher.offer('step 7', lambda: 1 / 0, lambda: False)
  if sys.argv[3] == 'stuck':  # a save that takes too long, by the watcher
    watcher.offer('step 7', lambda: time.sleep(600), lambda: False)
  if sys.argv[3] in ('cut', 'listed'):  # a save that takes too long, at a step boundary
    watcher.offer('step 7', None, lambda: sys.argv[3] == 'listed')
    watcher.acknowledge()
  print('ready', flush=True)
  hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)  # C code: no Python signal handler can run
"""


@pytest.mark.parametrize(
  ('mode', 'limit', 'state', 'out', 'errors'),
  [
    ('save', 60, 'whole', 'saved\n', 'SIGTERM: step 7 is saved\n'),
    ('save', 60, 'broken', '', 'SIGTERM: step 7 could not be saved: division by zero\n'),
    ('save', 1, 'donated', '', 'SIGTERM: no step finished within 1 s; earlier checkpoints are whole\n'),
    ('save', 1, 'stuck', '', 'SIGTERM: step 7 could not be saved within 1 s; earlier checkpoints are whole\n'),
    ('save', 1, 'cut', '', 'SIGTERM: step 7 could not be saved within 1 s; earlier checkpoints are whole\n'),
    ('save', 1, 'listed', '', 'SIGTERM: step 7 is saved\n'),
    ('exit', 60, 'whole', '', 'SIGTERM: left without saving\n'),
  ],
)
def test_the_watcher_acts_while_the_main_thread_cannot(mode, limit, state, out, errors):
  """E12, E13: a state that is whole is saved, one that is donated is not touched; what is said is true; code 143."""
  process = subprocess.Popen(
    [sys.executable, '-c', _BUSY, mode, str(limit), state], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    env={**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, sys.path))},
  )  # fmt: skip
  assert process.stdout.readline() == 'ready\n'
  process.send_signal(signal.SIGTERM)
  found = process.communicate(timeout=60)
  assert found == (out, errors) and process.returncode == 143
