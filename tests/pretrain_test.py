"""One whole run, looked at from all sides, and what resuming it gives."""

import contextlib
import io
import json
import pathlib
import shutil

import jax
from jax.experimental.compilation_cache import compilation_cache
import numpy as np
import pytest

from maxtext_layers import config
from maxtext_models import checkpoint as models
from maxtext_models import orbax_files
from maxtext_train import checkpoint
from maxtext_train import loop
from maxtext_train import pretrain
from maxtext_train import report
from tests import tiny_run

NAMES = 'step loss lm_loss grad_norm learning_rate step_seconds tokens_per_second mfu tokens_seen epoch'.split()
_CLOCK = ('step_seconds', 'tokens_per_second')


def train(settings, folder):
  """In this process. -> what it printed."""
  with contextlib.redirect_stdout(io.StringIO()) as out:
    assert pretrain.train(settings, folder) == 0
  return out.getvalue()


def lines(folder):
  return [{k: v for k, v in row.items() if k not in _CLOCK} for row in report.read(folder / 'metrics.jsonl')]


def held(step):
  """Every array of a checkpoint, by item and name."""
  leaves = models.committed(step)['leaves']
  return {(item, name): orbax_files.Reader(step / item)(name) for item in leaves for name in leaves[item]}


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  return tmp_path_factory.mktemp('runs')


@pytest.fixture(scope='module')
def whole(base):
  """Ten steps in one go, two data workers."""
  out = train(tiny_run.settings(base, data__workers=2), base / 'whole')
  return base / 'whole', out


def test_the_run_directory(whole):
  """Everything that the run directory is said to hold, and what is in it."""
  folder, out = whole
  assert {p.name for p in folder.iterdir()} >= {
    'config.txt', 'manifest.json', 'metrics.jsonl', 'eval.jsonl', 'tensorboard', 'checkpoints', 'report.html',
    'tokenizer',
  }  # fmt: skip
  rows = report.read(folder / 'metrics.jsonl')
  assert [row['step'] for row in rows] == list(range(1, 11))
  assert all(list(row)[:10] == NAMES for row in rows)
  assert rows[0]['loss'] == pytest.approx(np.log(259), abs=0.5)  # nothing is known yet: a guess among 259 ids
  assert rows[-1]['loss'] < rows[0]['loss']
  assert rows[0]['learning_rate'] == pytest.approx(0.5e-2) and rows[-1]['learning_rate'] == pytest.approx(1e-3)
  assert rows[-1]['tokens_seen'] == 10 * 4 * 32 and rows[-1]['mfu'] is None
  assert rows[0]['tokens_per_second'] == pytest.approx(4 * 32 / rows[0]['step_seconds'])
  evals = report.read(folder / 'eval.jsonl')
  assert [row['step'] for row in evals] == [4, 8, 10] and list(evals[0]) == ['step', 'eval_loss', 'eval_tokens']
  assert (folder / 'config.txt').read_text() == config.dump(tiny_run.settings(folder.parent, data__workers=2))
  assert f'{folder}: step 10' in out and '--config.steps=20' in out and 'maxtext_models.generate' in out


def test_the_manifest_says_what_was_resolved(whole):
  """B8, B9: the document mask, kernel and packing in force are stored with the run; the default is isolation."""
  told = json.loads((whole[0] / 'manifest.json').read_text())
  assert told['versions']['jax'] == jax.__version__ and told['python'] and 'commit' in told
  plan = told['plan']
  assert plan['masks'] == 'causal; documents are isolated, padding is masked'
  assert plan['kernels'] == {'attention': 'chunked'} and 'isolated' in plan['data']['documents']
  assert plan['mesh'] == {'preset': 'fsdp', 'data': 1, 'fsdp': 1, 'tensor': 1}
  assert plan['allocator']['name'] and plan['memory']['temporary'] > 0
  assert 'embed.w' in plan['does_not_decay'] and any('mixer.q' in path for path in plan['decays'])


def test_a_step_of_the_run_is_a_native_checkpoint(whole):
  """Every program that takes a checkpoint takes the run; --inspect shows where it stands (D6)."""
  assert models.kind(whole[0]) == 'run' and models.kind(whole[0] / 'checkpoints' / '5') == 'native'
  card, model = models.load(whole[0])
  assert card.name == 'tiny' and model.logits(model.hidden(np.array([[65, 66]]))[0]).shape == (1, 2, 259)
  told = models.describe(whole[0])
  notes = json.loads((whole[0] / 'checkpoints' / '10' / 'train.json').read_text())
  for name in ('step', 'epoch', 'records_consumed', 'next_record', 'learning_rate'):
    assert told[name] == notes[name]
  assert notes['step'] == 10 and notes['learning_rate'] == pytest.approx(1e-3)
  assert models.tokenizer_files(whole[0]) == str(whole[0] / 'tokenizer')


def test_tensorboard_holds_the_curves(whole):
  """Read back from the event files' own records."""
  found = {}
  for file in sorted((whole[0] / 'tensorboard').iterdir()):
    for step, name, value in events(file):
      found.setdefault(name, {})[step] = value
  rows = report.read(whole[0] / 'metrics.jsonl')
  assert found['train/loss'] == pytest.approx({row['step']: row['loss'] for row in rows})
  assert found['train/learning_rate'] == pytest.approx({row['step']: row['learning_rate'] for row in rows})
  assert sorted(found['eval/loss']) == [4, 8, 10]


def events(path):
  """(step, tag, value) of an event file: records of length, checksum, protocol buffer, checksum."""
  from tensorboardX.proto import event_pb2

  raw, at = path.read_bytes(), 0
  while at < len(raw):
    size = int.from_bytes(raw[at : at + 8], 'little')
    event = event_pb2.Event.FromString(raw[at + 12 : at + 12 + size])
    for value in event.summary.value:
      yield event.step, value.tag, value.simple_value
    at += 12 + size + 4


def test_ten_steps_are_five_and_a_new_process_and_five(whole, base):
  """D5, D6, E17: bit-equal losses, rates, parameters, moments and place in the data, with packing, dropout,
  accumulation 2 and 2 data workers."""
  folder = base / 'halves'
  shutil.copytree(whole[0], folder)
  shutil.rmtree(folder / 'checkpoints' / '10')
  told = json.loads((folder / 'checkpoints' / '5' / 'train.json').read_text())
  out, _ = tiny_run.start(base, '--config.data.workers=2', workdir='halves')
  (line,) = [text for text in out.splitlines() if text.startswith('resumed: ')]
  assert line == (
    f'resumed: step 5, epoch 0, records consumed {told["records_consumed"]}, next record {told["next_record"]}, '
    f'learning rate {told["learning_rate"]:.6g}'
  )
  assert told['records_consumed'] > 0 and pathlib.Path(told['next_record']).exists()
  assert lines(folder) == lines(whole[0])
  assert report.read(folder / 'eval.jsonl') == report.read(whole[0] / 'eval.jsonl')
  one, two = held(whole[0] / 'checkpoints' / '10'), held(folder / 'checkpoints' / '10')
  assert one.keys() == two.keys() and len(one) > 20
  for name, value in one.items():
    assert value.dtype == two[name].dtype and np.array_equal(value, two[name]), name
  states = [json.loads((f / 'checkpoints' / '10' / 'data.json').read_text()) for f in (whole[0], folder)]
  assert states[0] == states[1]
  # once more: nothing is left to do, and that is said without training
  rows = (folder / 'metrics.jsonl').read_text()
  assert 'is complete: step 10' in train(tiny_run.settings(base), folder)
  assert (folder / 'metrics.jsonl').read_text() == rows


def test_a_resume_continues_the_rates_and_compiles_once(whole, base, monkeypatch):
  """E18, E19: at the end of the warm-up and at the last step, three resumes of one run: every line is that of the run
  without one. C13: a restored state is no other argument to the step. J11: what is compiled once is found again."""
  settings, folder, steps = tiny_run.settings(base, checkpoint__every=1), base / 'thrice', []
  go_on = loop.run
  monkeypatch.setattr(loop, 'run', lambda step, *args, **kwargs: (steps.append(step), go_on(step, *args, **kwargs))[1])
  train(settings, folder)
  for start in (2, 2, 9):
    for step in range(start + 1, 11):
      shutil.rmtree(folder / 'checkpoints' / str(step))
    out = train(settings, folder)
    assert f'resumed: step {start}, ' in out and '(from the cache)' in out
    assert lines(folder) == lines(whole[0])
  assert [step.compilations for step in steps] == [1] * 4


def test_the_cache_is_on_by_default(base, monkeypatch):
  """J11: where programs are kept, and that they are found there, is printed."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(base / 'home'))
  settings = tiny_run.settings(base, steps=3, evaluate__every=0, cache=tiny_run.get_config().cache)
  outputs = []
  for name in ('cold', 'warm'):
    jax.clear_caches()
    compilation_cache.reset_cache()
    outputs.append(train(settings, base / name))
    assert f'compilation cache: {base / "home" / "maxtext" / "xla"}\n' in outputs[-1]
  assert ['(from the cache)' in out for out in outputs] == [False, True]


def test_a_save_that_fails_in_the_background_ends_the_run(base, monkeypatch):
  """E3: with the original error, when the next one begins at the latest; nothing half is listed."""
  commit = checkpoint.Checkpoints._commit

  def broken(self, step, *args):
    if step == 4:
      raise RuntimeError('the writer broke')
    commit(self, step, *args)

  monkeypatch.setattr(checkpoint.Checkpoints, '_commit', broken)
  with pytest.raises(RuntimeError, match='the writer broke'):
    train(tiny_run.settings(base, checkpoint__every=2, evaluate__every=0), base / 'broken')
  assert len(lines(base / 'broken')) in (4, 5, 6)
  assert [p.name for p in (base / 'broken' / 'checkpoints').iterdir()] == ['2']


def test_resuming_under_another_config_says_what_changed(whole, base):
  """Also the one setting that is meant to change, the number of steps."""
  folder = base / 'longer'
  shutil.copytree(whole[0], folder)
  out = train(tiny_run.settings(base, data__workers=2, steps=11, optimizer__clip=0.5), folder)
  assert 'changed since step 10: steps 10 -> 11, optimizer.clip 1.0 -> 0.5\n' in out
  assert 'changed since' not in whole[1]


def test_evaluation_and_workers_change_nothing(whole, base):
  """I6: train losses are bit-equal without evaluation; D3: and without workers. A profile changes nothing either."""
  train(tiny_run.settings(base, evaluate__every=0, profile__first=2, profile__last=3), base / 'alone')
  assert [p.stat().st_size > 0 for p in (base / 'alone' / 'profile').rglob('*.xplane.pb')] == [True]
  assert lines(base / 'alone') == lines(whole[0])
  assert not (base / 'alone' / 'eval.jsonl').exists()


def test_weights_to_start_from(whole, base):
  """E15: init_from is step 0, a fresh optimizer and fresh data; with checkpoints there as well it is an error."""
  export = base / 'export'
  card, model = models.load(whole[0], scan=False)
  models.save(export, card, model)
  settings = tiny_run.settings(base, init_from=str(export), steps=2, evaluate__every=0, model=None)
  out = train(settings, base / 'started')
  assert f'weights: {export}' in out
  first = json.loads((base / 'started' / 'checkpoints' / '2' / 'train.json').read_text())
  assert first['step'] == 2 and first['tokens'] == 2 * 4 * 32
  rows = lines(base / 'started')
  assert [row['step'] for row in rows] == [1, 2] and rows[0]['learning_rate'] == pytest.approx(0.5e-2)
  assert rows[0]['loss'] < lines(whole[0])[0]['loss'] - 0.5  # it knows something already
  assert held(base / 'started' / 'checkpoints' / '2')['optimizer', 'optimizer.0.count'] == 2
  with pytest.raises(
    config.Error, match=r'started has checkpoints .newest: step 2.: a run either starts from weights or'
  ):
    pretrain.train(settings, base / 'started')
  with pytest.raises(config.Error, match='export holds exported weights, which cannot be resumed'):
    pretrain.train(tiny_run.settings(base), export)
  (base / 'bare' / 'checkpoints').mkdir(parents=True)
  shutil.copytree(whole[0] / 'checkpoints' / '5', base / 'bare' / 'checkpoints' / '5')
  (base / 'bare' / 'checkpoints' / '5' / 'train.json').unlink()
  told = json.loads((base / 'bare' / 'checkpoints' / '5' / 'commit.json').read_text())
  del told['files']['train.json']
  (base / 'bare' / 'checkpoints' / '5' / 'commit.json').write_text(json.dumps(told))
  with pytest.raises(config.Error, match='5 holds weights only and cannot be resumed'):
    pretrain.train(tiny_run.settings(base), base / 'bare')


def test_another_model_does_not_resume(whole, base):
  """E1: more layers than the checkpoint has; nothing of the run is touched."""
  settings = tiny_run.settings(base)
  settings.model.layers = 3
  before = (whole[0] / 'config.txt').read_text()
  settings.steps = 12
  with pytest.raises(config.Error, match=r'10 does not fit the model: 9 missing: layers\.2\.'):
    pretrain.train(settings, whole[0])
  assert (whole[0] / 'config.txt').read_text() == before


def test_damaged_checkpoints_are_said_and_never_overwritten(whole, base, capsys):
  """E4, E8: a checkpoint that lost a file is not used; with no other one the run does not begin anew."""
  shutil.copytree(whole[0], base / 'damaged')
  steps = sorted((base / 'damaged' / 'checkpoints').iterdir(), key=lambda p: int(p.name))
  (steps[-1] / 'commit.json').unlink()
  out = train(tiny_run.settings(base, data__workers=2), base / 'damaged')
  assert f'{steps[-1]} is incomplete or changed and is not used; going on from step {steps[-2].name}' in out
  assert lines(base / 'damaged') == lines(whole[0])
  for step in (base / 'damaged' / 'checkpoints').iterdir():
    (step / 'config.txt').write_text('changed')
  before = sorted(p for p in (base / 'damaged').rglob('*') if p.is_file())
  with pytest.raises(config.Error, match='has no whole checkpoint'):
    pretrain.train(tiny_run.settings(base, data__workers=2), base / 'damaged')
  assert sorted(p for p in (base / 'damaged').rglob('*') if p.is_file()) == before


def test_data_that_ends_ends_the_run(base):
  """D9: repeat or stop is said explicitly; a run whose data stops saves its last step, and no update has weight 0."""
  settings = tiny_run.settings(base, data__at_end='stop', data__epochs=1, steps=200)
  out = train(settings, base / 'ended')
  rows = lines(base / 'ended')
  assert 'the data ended after step' in out and 10 < len(rows) < 200
  assert all(row['loss'] is not None and 'skipped' not in row and row['epoch'] == 0 for row in rows)
  notes = json.loads((base / 'ended' / 'checkpoints' / str(len(rows)) / 'train.json').read_text())
  assert notes['next_record'] is None

  # the same where the end is a step that is saved anyway: it is complete, and started again it adds nothing
  settings.checkpoint.every, settings.sample = len(rows), 'the'
  out = train(settings, base / 'exactly')
  assert lines(base / 'exactly') == rows and out.count('--- sample after') == 1
  for folder in ('ended', 'exactly'):
    before = (base / folder / 'eval.jsonl').read_text()
    assert json.loads(before.splitlines()[-1])['step'] == len(rows)
    assert train(settings, base / folder).startswith(f'{base / folder} is complete: step {len(rows)} (its data ended)')
    assert (base / folder / 'eval.jsonl').read_text() == before

  # what ended it may change: another epoch goes on
  settings.data.epochs = 2
  assert f'resumed: step {len(rows)}, ' in train(settings, base / 'exactly')
  assert lines(base / 'exactly')[: len(rows)] == rows and lines(base / 'exactly')[-1]['epoch'] == 1


def test_an_evaluation_that_was_cut_is_made_up_for(whole, base):
  """E12: neither the one at a step that is saved, nor the one at the end, is missing after a resume."""
  folder, expected = base / 'owing', report.read(whole[0] / 'eval.jsonl')
  settings = tiny_run.settings(base, checkpoint__every=4)
  train(settings, folder)
  assert report.read(folder / 'eval.jsonl') == expected
  text = (folder / 'eval.jsonl').read_text().splitlines(keepends=True)
  (folder / 'eval.jsonl').write_text(''.join(text[:-1]) + text[-1][:9])  # the process was killed while it wrote
  assert 'is complete' not in train(settings, folder)
  assert report.read(folder / 'eval.jsonl') == expected
  for step in ('8', '10'):
    shutil.rmtree(folder / 'checkpoints' / step)
  (folder / 'eval.jsonl').write_text('')
  train(settings, folder)
  assert report.read(folder / 'eval.jsonl') == expected and lines(folder) == lines(whole[0])


def test_epochs_are_counted(base):
  """D9: data that repeats says so in the log."""
  train(tiny_run.settings(base, steps=60, evaluate__every=0, checkpoint__every=0), base / 'again')
  epochs = [row['epoch'] for row in lines(base / 'again')]
  assert epochs[0] == 0 and epochs[-1] >= 1 and epochs == sorted(epochs)
