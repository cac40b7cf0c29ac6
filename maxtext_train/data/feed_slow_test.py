"""Two processes that each feed half of a batch, with data that ends earlier in one than in the other."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import textwrap

import pytest

from maxtext_train.data import pipeline

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = """
  import json, sys
  import jax
  jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
  from maxtext_models import tokenizer
  from maxtext_train.data import config, feed, pipeline

  mesh = jax.make_mesh((jax.device_count(),), ('rows',))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('rows'))
  process, processes = feed.reader(sharding, 4)
  settings = config.Config(source='jsonl', paths=('.',), holdout=0.0, at_end='stop', shuffle=False)
  words = tokenizer.load('byte')
  loader = pipeline.build(settings, batch=4, length=16, tokenizer=words, process=process, processes=processes)
  total = jax.jit(lambda batch: batch['weights'].sum())
  with feed.Feed(loader, lambda local: feed.put(local, sharding, 4)) as batches:
    weights = [float(total(batch)) for batch in batches]
    print(json.dumps([process, weights, batches.state(), loader.report()['batches']]))
"""


def test_processes_end_together_and_nothing_is_left_out(tmp_path):
  """D9, D11: the process whose records end first gives padding until the other has ended; every target counts once."""
  texts = ['x' * (200 if i % 4 == 3 else i % 7 + 2) for i in range(41)]  # row 3, of process 1, is long
  (tmp_path / 'a.jsonl').write_text('\n'.join(json.dumps({'text': text}) for text in texts))
  (tmp_path / 'program.py').write_text(textwrap.dedent(PROGRAM))
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  environment = os.environ | {'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path]), 'JAX_PLATFORMS': 'cpu'}
  runs = [
    subprocess.Popen(
      [sys.executable, 'program.py', address, str(i)], cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE
    )
    for i in range(2)
  ]
  (first, weights, one, short), (second, others, two, long) = [
    json.loads(r.communicate(timeout=240)[0].splitlines()[-1]) for r in runs
  ]
  assert (first, second) == (0, 1)
  assert weights == others and all(w > 0 for w in weights)
  assert sum(weights) == sum(len(text) + 1 for text in texts)  # begin, text, end; the begin token is no target
  assert short < long == len(weights)
  assert pipeline.merge([one, two])['batches'] == len(weights)
