"""What a user can get wrong about a run: one line that names it, exit code 2, before training, and nothing harmed."""

import contextlib
import io
import os
import pathlib
import re
import subprocess
import sys

from absl import flags
import numpy as np
import pytest

from maxtext_layers import config
from maxtext_models import program
from maxtext_train import pretrain
from maxtext_train import report
from tests import tiny_run

TINY = f'--config={tiny_run.ROOT / "tests" / "tiny_run.py"}'


def run(folder, *arguments):
  """The program's own way through flags, config and main, in this process. -> (code, stdout, stderr)."""
  out, errors = io.StringIO(), io.StringIO()
  before = pathlib.Path.cwd()
  os.chdir(folder)
  try:
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as end:
      program.run(pretrain.main, argv=['pretrain', *arguments], config='quickstart', resolve=pretrain.resolve)
  finally:
    os.chdir(before)
    for name in ('workdir', 'explain'):
      flags.FLAGS[name].unparse()
  return end.value.code, out.getvalue(), errors.getvalue()


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('bad')
  tiny_run.corpus(path)
  (path / 'empty').mkdir()
  (path / 'hollow').mkdir()
  (path / 'hollow' / 'a.txt').write_text('')
  (path / 'bad.jsonl').write_text('{"text": "fine"}\n{"text": \n')
  (path / 'file').write_text('x')
  (path / 'other').mkdir()
  (path / 'other' / 'thesis.tex').write_text('x')
  (path / 'broken.py').write_text('def get_config(:\n')
  (path / 'hollow.py').write_text('')
  (path / 'needs.py').write_text('def get_config(model):\n  return model\n')
  (path / 'raises.py').write_text('def get_config():\n  return None.steps\n')
  return path


CASES = [
  # J1: a name that does not exist, at any depth, in the file's name, the model's name or a flag
  ('--config.stepz=3', "stepz.*did you mean .*steps"),
  ('--config.schedule.pek=3', "schedule.pek.*did you mean .*peak"),
  ('--config.model.layer=3', "layer.*did you mean .*layers"),
  ('--config=quickstrat', "quickstrat.*did you mean 'quickstart'"),
  ('--config=pretrain:qwen3-06b', "unknown model 'qwen3-06b'.*did you mean"),
  ('--wrokdir=x', 'wrokdir'),
  ('--steps=3', r'unknown flag --steps; the setting is --config\.steps'),
  ('--explain=maybe', r"--explain=maybe|Non-boolean argument to boolean flag maybe"),
  ('--config=quickstart:qwen3-0.6b', r"--config=quickstart:qwen3-0.6b: get_config takes no 'qwen3-0.6b'"),
  ('--config=pretrain', 'nothing to train; --config=pretrain:MODEL'),
  ('--config=hollow.py', r'hollow\.py: the file has no function get_config'),
  ('--config=needs.py', r'needs\.py: get_config needs an argument'),
  ('--config=broken.py', 'broken.py:1: invalid syntax'),
  ('--config=raises.py', "raises.py: .*'NoneType' object has no attribute 'steps'"),
  # a value of the wrong type or out of range
  ('--config.steps=ten', 'steps.*ten'),
  ('--config.steps=0', 'steps=0 is not positive'),
  ('--config.dropout=1.5', 'dropout=1.5 lies outside'),
  ('--config=quickstart --config.data.source=random', "sample='def ', but data.source=random has no text"),
  ('--config.name=../evil', r"name='\.\./evil' is no name of a folder; --workdir takes a path"),
  ('--config.name=', "name='' is no name of a folder"),
  ('--config.sample=', 'sample is empty'),
  ('--config.dtype=float8', 'dtype.*float8'),
  ('--config.remat=som', "remat 'som'"),
  ('--config.kernel=splash', "kernel 'splash' does not run on cpu; what works here: auto, chunked"),  # J10
  ('--config.kernel=chunkd', "kernel 'chunkd' is unknown; did you mean 'chunked'"),
  ('--config.platform=nowhere', "platform='nowhere'"),
  ('--config.checkpoint.keep=0', 'checkpoint: keep=0'),
  ('--config.length=65', 'length=65 exceeds model.context=64'),
  ('--config.schedule.warmup=11', 'warmup=11 do not fit a run of 10 updates'),
  ('--config.model.kv_heads=3', 'model.*kv_heads=3'),
  ('--config.optimizer.no_decay=nrom', "no_decay: 'nrom' matches no parameter; did you mean 'norm'"),
  # the batch and the mesh
  ('--config.batch=5', 'batch=5 is not divisible by accumulate=2'),
  ('--config.mesh.fsdp=3', 'mesh.*3'),
  ('--config.mesh.preset=fdsp', "preset='fdsp'.*did you mean 'fsdp'"),
  ('--config.mesh.data=-1 --config.mesh.fsdp=-1', 'more than one size is -1'),
  ('--config.mesh.preset=tensor --config.mesh.tensor=2', 'config.mesh: mesh .* tensor=2 does not fit 1 devices'),
  # data
  ('--config.data.paths=nowhere', 'paths: nowhere does not exist'),
  ('--config.data.paths=empty', 'paths: empty holds no file'),
  ('--config.data.paths=hollow', 'hollow.*all empty'),
  ('--config.data.tokenizer=nowhere', 'nowhere'),
  ('--config.model.vocab=200', "tokenizer='byte' has 259 ids, model.vocab=200 holds fewer"),
  ('--config.data.holdout=0', 'holdout=0 leaves nothing to evaluate on'),
  # directories
  ('--workdir=file', 'workdir=file is a file'),
  ('--workdir=other', 'workdir=other is not empty and no run directory: it holds thesis.tex'),
  ('--config.init_from=nowhere', 'nowhere is not a directory'),
  ('--config.init_from=other', 'other is no checkpoint'),
  ('--config.model=none', 'config.model is none and config.init_from is none'),
]  # fmt: skip


@pytest.mark.parametrize(('arguments', 'text'), CASES, ids=[case[0] for case in CASES])
def test_one_line_names_it_and_nothing_is_trained(folder, arguments, text):
  first = [] if '--config=' in arguments else [TINY]
  first += [] if 'paths' in arguments or not first else [f'--config.data.paths={folder / "corpus"}']  # tuples add up
  code, out, errors = run(folder, *first, *arguments.split(), '--config.cache=none')
  assert code == 2, (out, errors)
  assert errors.count('\n') == 1 and re.search(text, errors), errors
  assert 'Traceback' not in errors and 'step 1' not in out
  assert not (folder / 'runs').exists() or not list((folder / 'runs').glob('*/metrics.jsonl'))


def test_another_process_trains_there(folder):
  """Two processes in one run directory would take turns in destroying it."""
  settings = tiny_run.settings(folder)
  code = 'import fcntl, sys; f = open(sys.argv[1], "a+"); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()'
  (folder / 'busy').mkdir()
  with subprocess.Popen(
    [sys.executable, '-c', code, str(folder / 'busy' / 'lock')], stdin=subprocess.PIPE, stdout=subprocess.PIPE
  ) as other:
    other.stdout.readline()
    with pytest.raises(config.Error, match='busy: another process is training this run'):
      pretrain.train(settings, folder / 'busy')
    other.stdin.close()


def test_a_loss_that_is_not_finite_ends_the_run(folder, monkeypatch):
  """E16: NaN at step 3: one line, the batch kept elsewhere; the newest checkpoint is step 2 and resumes."""
  settings = tiny_run.settings(folder, checkpoint__every=1, evaluate__every=0, steps=5)
  from maxtext_train import assembly

  place, calls = assembly.Assembly.place, []

  def poisoned(self, batch):
    calls.append(1)
    if len(calls) == 3:
      batch = {**batch, 'weights': np.full_like(batch['weights'], np.nan)}
    return place(self, batch)

  monkeypatch.setattr(assembly.Assembly, 'place', poisoned)
  with pytest.raises(config.Failure, match=r'step 3: loss is nan, gradient norm is nan; the batch is in .*step_3'):
    pretrain.train(settings, folder / 'nan')
  monkeypatch.undo()
  assert sorted(p.name for p in (folder / 'nan' / 'checkpoints').iterdir()) == ['1', '2']
  kept = np.load(folder / 'nan' / 'diagnostics' / 'step_3' / 'batch.npz')
  assert np.isnan(kept['weights']).all() and kept['tokens'].shape == (4, 32)
  with contextlib.redirect_stdout(io.StringIO()) as out:
    assert pretrain.train(settings, folder / 'nan') == 0
  assert 'resumed: step 2, ' in out.getvalue()
  assert [row['step'] for row in report.read(folder / 'nan' / 'metrics.jsonl')] == [1, 2, 3, 4, 5]


def test_an_error_in_the_step_is_reported_as_itself(folder, monkeypatch):
  """E11: a RuntimeError is neither a preemption nor a failure of the user's."""
  from maxtext_train import step

  monkeypatch.setattr(step.Step, '__call__', lambda *_: (_ for _ in ()).throw(RuntimeError('out of memory')))
  with pytest.raises(RuntimeError, match='out of memory'):
    pretrain.train(tiny_run.settings(folder), folder / 'oom')
