"""A run that takes seconds, for tests of runs: `--config=tests/tiny_run.py`, or `settings()` in this process.

Two layers over bytes with packing, accumulation and dropout on, as a real run has them. `corpus` writes its text.
"""

import os
import pathlib
import random
import subprocess
import sys

from maxtext_models.families import llama
from maxtext_train import evaluate
from maxtext_train import run
from maxtext_train import schedule
from maxtext_train.data import config as data

ROOT = pathlib.Path(__file__).absolute().parents[1]
_WORDS = 'the quick brown fox jumps over a lazy dog while five boxing wizards watch'.split()


def get_config():
  """The run. Its corpus lies in ./corpus."""
  return run.Pretrain(
    name='tiny',
    model=llama.Llama(
      name='tiny', layers=2, d_model=16, d_ff=32, heads=2, kv_heads=1, head_dim=8, vocab=259, context=64, tied=True
    ),
    steps=10,
    batch=4,
    length=32,
    accumulate=2,
    dropout=0.1,
    data=data.Config(source=data.Source.TEXT, paths=('corpus',), holdout=0.1),
    schedule=schedule.Config(peak=1e-2, warmup=2),
    checkpoint=run.Checkpoint(every=5, keep=None),
    evaluate=evaluate.Config(every=4, batches=2),
    log_every=1,
  )  # fmt: skip


def settings(folder, **changes):
  """The run with its corpus and its compilation cache in `folder`; `a__b=c` changes the setting a.b."""
  value = get_config()
  value.data.paths, value.cache = (corpus(folder),), str(folder / 'cache')
  for path, new in changes.items():
    *inner, last = path.split('__')
    target = value
    for name in inner:
      target = getattr(target, name)
    setattr(target, last, new)
  return value


def corpus(folder, files=30):
  """Text files of a few words to a few hundred, always the same ones. -> the folder they are in."""
  path, draw = folder / 'corpus', random.Random(5)
  if not path.exists():
    path.mkdir()
    for i in range(files):
      (path / f'{i:02}.txt').write_text(' '.join(draw.choices(_WORDS, k=draw.randint(2, 60))))
  return str(path)


def start(folder, *arguments, workdir='run', wait=True, code=0, program=('-m', 'maxtext_train.pretrain'), **environ):
  """The program in a process of its own. -> (output, errors) once it ended with `code`; wait=False: the process."""
  command = [sys.executable, *program, f'--config={ROOT / "tests" / "tiny_run.py"}']
  command += [f'--config.data.paths={corpus(folder)}', f'--config.cache={folder / "cache"}', f'--workdir={workdir}']
  path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
  process = subprocess.Popen(
    [*command, '--allocator=system', *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': path, **environ},
  )  # fmt: skip
  if not wait:
    return process
  out, errors = process.communicate(timeout=600)
  assert process.returncode == code, f'exit code {process.returncode}\n{out}\n{errors}'
  return out, errors
