"""kill -9 at any moment of a save."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from maxtext_models import checkpoint as models
from maxtext_models import orbax_files
from maxtext_train import checkpoint
from tests import tiny_run

pytestmark = pytest.mark.slow

# Saves step after step as fast as it can; every number of step n is n, so a mixture of two steps shows.
_SAVER = """
import sys
import jax.numpy as jnp
from maxtext_train import checkpoint
store = checkpoint.Checkpoints(sys.argv[1], keep=2)
store.tidy()
step = store.newest() or 0
while True:
  step += 1
  tree = {f'leaf{i}': jnp.full((64, 1024), float(step)) for i in range(8)}
  store.save(step, {'weights': tree, 'optimizer': tree}, {'train.json': '{"step": %d}' % step})
  print(step, flush=True)
"""


def content(path):
  """The step that every number of a checkpoint says it belongs to; an assertion if they differ."""
  told = models.committed(path)
  found = {json.loads((path / 'train.json').read_text())['step'], told['step']}
  for item, leaves in told['leaves'].items():
    for name in leaves:
      value = orbax_files.Reader(path / item)(name)
      assert value.shape == (64, 1024)
      found |= set(np.unique(value).tolist())
  assert len(found) == 1
  return found.pop()


def test_killed_at_twenty_random_moments_of_a_save(tmp_path):
  """E7: the newest listed checkpoint is a complete one, whenever the process dies; the next process goes on from it."""
  draw, folder, newest = random.Random(7), tmp_path / 'checkpoints', 0
  path = os.pathsep.join([str(tiny_run.ROOT), *filter(None, sys.path)])
  for _ in range(20):
    process = subprocess.Popen(
      [sys.executable, '-c', _SAVER, str(folder)], stdout=subprocess.PIPE,
      env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': path},
    )  # fmt: skip
    for _ in range(draw.randint(1, 3)):
      process.stdout.readline()
    time.sleep(draw.uniform(0, 0.2))  # a save takes about as long
    process.send_signal(signal.SIGKILL)
    process.communicate()
    store = checkpoint.Checkpoints(folder)
    assert all(content(store.path(step)) == step for step in store.steps())
    found = store.newest() or 0
    assert found >= newest  # nothing that was complete is lost
    newest = found
  assert newest > 10
  store.tidy()
  assert sorted(p.name for p in folder.iterdir()) == sorted(map(str, store.steps()))
