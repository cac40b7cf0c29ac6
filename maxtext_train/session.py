"""One process's share of a run: the run directory, where it stands, and what is written there.

    RUN/config.txt       the whole resolved config
    RUN/manifest.json    versions, commit, devices, the resolved plan
    RUN/metrics.jsonl    a line a step          RUN/eval.jsonl   a line an evaluation
    RUN/tensorboard/     the same as events     RUN/report.html  the same as curves
    RUN/tokenizer/       the tokenizer's files
    RUN/checkpoints/N/   model.json weights/ optimizer/ train.json data.json config.txt, see checkpoint.py
    RUN/diagnostics/     what is left of a step whose loss was not finite

Reading order: `open_run` and `look`, then the methods of `Run` in the order in which `pretrain.train` calls them.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import shlex
import sys
import threading
import time

from flax import nnx
import jax
from jax import monitoring
import numpy as np

from maxtext_layers import config
from maxtext_models import checkpoint as models
from maxtext_train import checkpoint
from maxtext_train import evaluate
from maxtext_train import explain
from maxtext_train import hooks
from maxtext_train import inputs
from maxtext_train import loop
from maxtext_train import metrics as record
from maxtext_train import report
from maxtext_train import state as states
from maxtext_train.data import config as data_config
from maxtext_train.data import feed

_LOCK = 'lock'


@contextlib.contextmanager
def open_run(settings, folder):
  """The run in `folder`, which no other process may train at the same time.

  Raises:
    config.Error: `folder` is something else, belongs to another process, or both `init_from` and checkpoints are there.
  """
  folder = pathlib.Path(folder)
  _refuse_foreign(folder)
  with _lock(folder):
    run = Run(settings, folder)
    try:
      yield run
    except BaseException:
      with contextlib.suppress(Exception):  # what ended the run is the news
        run.checkpoints.wait()
        run.report()
      raise
    finally:
      run.close()
    run.checkpoints.wait()


@contextlib.contextmanager
def look(settings, folder):
  """The same run, only to be read: nothing is made in `folder`, and another process may train there."""
  folder = pathlib.Path(folder)
  _refuse_foreign(folder)
  run = Run(settings, folder)
  try:
    yield run
  finally:
    run.close()


class Run:
  """Where a run stands."""

  def __init__(self, settings, folder):
    self.settings, self.folder = settings, folder
    self.checkpoints = checkpoint.Checkpoints(
      folder / 'checkpoints', keep=settings.checkpoint.keep, keep_period=settings.checkpoint.keep_period
    )
    newest = self.checkpoints.newest()
    damaged = self.checkpoints.damaged()
    if damaged and newest is None:
      raise config.Error(
        f'{folder} has no whole checkpoint: {damaged[0]} is incomplete or changed; mend it, or take another --workdir'
      )
    for path in damaged:
      print(f'{path} is incomplete or changed and is not used; going on from step {newest}')
    if newest is not None and settings.init_from is not None:
      raise config.Error(
        f'config.init_from={settings.init_from} and {folder} has checkpoints (newest: step {newest}): a run either '
        'starts from weights or is resumed; leave one out, or take another --workdir'
      )
    self.resumed = newest
    self.told = _notes(self.checkpoints.path(newest)) if newest is not None else None
    self.start, self.tokens = (self.told['step'], self.told['tokens']) if self.told else (0, 0)
    if self.told and self.told['rng'] != self._rng():
      raise config.Error(f'config.seed={settings.seed}, but {folder} was started with seed {self.told["rng"]["seed"]}')
    self.card = inputs.card(settings, self.checkpoints.path(newest) if newest is not None else None)
    self._loader, self._held, self._tokenizer, self._prompt, self._parts, self._plan, self._writing = (None,) * 7
    self._began = time.monotonic()

  @property
  def complete(self):
    """Whether no step is left to do, nor the evaluation at the end."""
    if self.told is None or (self.start < self.settings.steps and not self._data_ended()):
      return False
    return not self.settings.evaluate.every or self.start in self._evaluated()

  def say_complete(self):
    """What to do with a run that is done."""
    why = 'its data ended' if self.start < self.settings.steps else f'config.steps={self.settings.steps}'
    print(f'{self.folder} is complete: step {self.start} ({why})')
    self._say_commands()

  def read_data(self):
    """Opens the data where the run stands. -> loop.Data."""
    self._open()
    if self.settings.evaluate.every:
      self._held = inputs.loader(self.settings, self.card, self._tokenizer, split='heldout')
    self._prompt = inputs.prompt(self.settings, self.card, self._tokenizer)
    return loop.Data(self._loader, self._loader.position())

  def found(self, parts):
    """The state that is there already: of the newest checkpoint, or from `init_from`. None for a new one."""
    if self.told:
      state = self._restore(parts)
      print(resume_line(self.told))
      if changes := _changes((self.checkpoints.path(self.resumed) / 'config.txt').read_text(), self.settings):
        print(f'changed since step {self.start}: {", ".join(changes)}')
      return state
    if self.settings.init_from is not None:
      state = states.create(parts.plan, inputs.weights(self.settings, parts))
      print(f'weights: {self.settings.init_from}')
      return state
    return None

  def begin(self, parts):
    """The state to go on from. Prepares the run directory."""
    self._parts = parts
    if (state := self.found(parts)) is None:
      state = states.create(parts.plan)
    self.folder.mkdir(parents=True, exist_ok=True)
    self.checkpoints.tidy()
    for name in ('metrics.jsonl', 'eval.jsonl'):
      hooks.truncate(self.folder / name, self.start)
    _write(self.folder / 'config.txt', config.dump(self.settings))
    if self._tokenizer is not None:
      self._tokenizer.save(str(self.folder / 'tokenizer'))
    return state

  def compile(self, parts):
    """Compiles the step and says what will happen; writes manifest.json."""
    seen = []
    monitoring.register_event_listener(lambda event, **_: seen.append(event))
    since = time.monotonic()
    compiled = parts.compile()
    seconds = time.monotonic() - since
    hit = any(event.endswith('/cache_hits') for event in seen)
    self._plan = self.plan(parts, compiled)
    _write(self.folder / 'manifest.json', explain.manifest(self.settings, self._plan, resumed=self.resumed))
    shown = self._plan['model']
    print(
      f'{shown["name"] or shown["family"]}: {shown["parameters"]:,} parameters; {self.settings.steps - self.start} '
      f'steps of {self.settings.batch} x {self.settings.length} tokens; step compiled in {seconds:.1f} s'
      + (' (from the cache)' if hit else '')
    )

  def plan(self, parts, compiled):
    """What is decided, see explain.plan."""
    return explain.plan(self.settings, parts, self._loader.describe(), compiled)

  def batches(self, parts):
    """(global batch, real tokens in it, Data behind it)."""
    with feed.Feed(self._loader, parts.place) as fed:
      for batch in fed:
        yield batch, fed.tokens, loop.Data(self._loader, fed.position())

  def evaluation(self, parts, state, stop, say):
    """The evaluation hook, if there is evaluation; what the checkpoint still owes is done at once."""
    if self._held is None:
      return []
    held = self._held
    go_on = lambda: not stop.requested

    def measure(params):
      return evaluate.evaluate(parts.evaluate, params, (parts.place(batch) for batch in held), go_on)

    hook = hooks.Evaluate(self.folder, self.settings.evaluate.every, measure, say, self._evaluated())
    hook.catch_up(self.start, state.params)
    return [hook]

  def profile(self, say):
    """The profiler hook, if there is to be a profile."""
    asked = self.settings.profile
    if not asked.first:
      return []
    hook = hooks.Profile(self.folder / 'profile', asked.first, asked.last, say)
    if asked.first == self.start + 1:
      hook.start()
    return [hook]

  def describe(self, step, metrics, seconds, count, tokens, data):
    """A line of metrics.jsonl."""
    parts, epoch = self._parts, data.report()['epoch']
    return record.record(
      step, metrics, seconds=seconds, tokens=count, tokens_seen=tokens, epoch=epoch, flops=parts.flops, peak=parts.peak,
      devices=jax.device_count(),
    )  # fmt: skip

  def dump(self, step, batch, metrics):
    """Keeps the batch of a step whose loss is not finite, away from the checkpoints."""
    folder = self.folder / 'diagnostics' / f'step_{step}'
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / 'batch.npz', **jax.device_get(batch))
    _write(folder / 'metrics.json', json.dumps({name: repr(value) for name, value in metrics.items()}, indent=1))
    return folder

  def offer(self, stop, step, state, flush, data, tokens):
    """Tells the watcher of SIGTERM how to save this state, should the main thread be busy."""

    def save():
      flush()
      self._store(step, state, data, tokens, wait=True)

    stop.offer(f'step {step}', save, lambda: step in self.checkpoints.steps())

  def save(self, now, wait):
    """The checkpoint of a finished step; in the background, the report so far."""
    self._store(now.step, now.state, now.data, now.tokens, wait=wait)
    if not wait and not (self._writing and self._writing.is_alive()):
      self._writing = threading.Thread(target=self._report_so_far, name='report', daemon=True)
      self._writing.start()

  def finish(self, state, done):
    """Says what came of it."""
    self.report()
    rows, evals = report.read(self.folder / 'metrics.jsonl'), report.read(self.folder / 'eval.jsonl')
    if done < self.settings.steps:
      print(f'the data ended after step {done} (data.at_end=stop)')
    if self.settings.sample is not None:
      self._sample(state)
    parts = [f'step {done}']
    if rows and rows[-1]['loss'] is not None:
      parts.append(f'loss {rows[-1]["loss"]:.4f}')
    if evals and evals[-1]['eval_loss'] is not None:
      parts.append(f'held-out loss {evals[-1]["eval_loss"]:.4f}')
    print(f'{self.folder}: ' + ', '.join(parts) + f', {hooks.duration(time.monotonic() - self._began)}')
    self._say_commands()

  def stopped(self):
    """What SIGTERM left."""
    return f'{self.checkpoints.path(self.checkpoints.newest())} is saved; resume with {self._command()}'

  def report(self):
    """Writes report.html, if a step can have been trained."""
    if self._plan is None:
      return
    if self._writing and self._writing is not threading.current_thread():
      self._writing.join()
    rows = report.read(self.folder / 'metrics.jsonl')
    facts = {'Run': self.settings.name, 'Model': self._plan['model']['name'] or self._plan['model']['family']}
    facts['Parameters'] = f'{self._plan["model"]["parameters"]:,}'
    if rows:
      facts |= {'Steps': f'{rows[-1]["step"]} of {self.settings.steps}', 'Tokens': f'{rows[-1]["tokens_seen"]:,}'}
    report.write(self.folder, facts)

  def close(self):
    """Ends data workers and writers."""
    if self._loader is not None:
      self._loader.close()

  def _report_so_far(self):
    with contextlib.suppress(OSError):  # the report at the end says it
      self.report()

  def _open(self):
    """The loader, where the run stands."""
    if self._loader is None:
      self._tokenizer = inputs.tokenizer(self.settings, self.card)
      state = json.loads((self.checkpoints.path(self.resumed) / 'data.json').read_text()) if self.told else None
      self._loader = inputs.loader(self.settings, self.card, self._tokenizer, state)
    return self._loader

  def _data_ended(self):
    """Whether the data has no batch left, where the run stands; what does not stop is not even opened."""
    return self.settings.data.at_end == data_config.AtEnd.STOP and self._open().ended()

  def _evaluated(self):
    """The steps in eval.jsonl."""
    return {row['step'] for row in report.read(self.folder / 'eval.jsonl')}

  def _store(self, step, state, data, tokens, *, wait):
    found = data.report()
    notes = {
      'step': step,
      'tokens': tokens,
      'epoch': found['epoch'],
      'records_consumed': found['records'],
      'next_record': found['next_record'],
      'learning_rate': float(self._parts.schedule(max(step - 1, 0))),
      'rng': self._rng(),
    }
    files = {
      'train.json': json.dumps(notes, indent=1),
      'data.json': json.dumps(data.state()),
      'config.txt': config.dump(self.settings),
      models.CARD: json.dumps(models.card_to_dict(self.card), indent=2),
      models.MANIFEST: json.dumps(models.manifest(self.card, state.params, self._parts.segments), indent=2),
    }
    trees = {
      'weights': models.weights_item(state.params),
      'optimizer': {'optimizer': state.optimizer, 'step': state.step},
    }
    self.checkpoints.save(step, trees, files, wait=wait)

  def _restore(self, parts):
    path, abstract = self.checkpoints.path(self.resumed), parts.plan.abstract
    like = {'optimizer': {'optimizer': abstract.optimizer, 'step': abstract.step}}
    params = models.restore_weights(path, abstract.params, parts.segments)
    rest = self.checkpoints.restore(self.resumed, like, segments=parts.segments)['optimizer']
    return states.State(params, rest['optimizer'], rest['step'])

  def _rng(self):
    return {'seed': self.settings.seed, 'implementation': str(jax.config.jax_default_prng_impl)}

  def _sample(self, state):
    """What the model says after the prompt."""
    from maxtext_models import sampler

    known, ids = self._tokenizer, self._prompt
    model = nnx.merge(self._parts.plan.graph, state.params)
    source = sampler.Jax(model, context=self.card.context, end_ids=known.eos_ids)
    asked = sampler.Settings(max_new_tokens=min(256, self.card.context - len(ids)), temperature=0.7)
    said = known.decode(source.sample([ids], asked)[0].ids, skip_special=True)
    print(f'--- sample after {self.settings.sample!r} ---\n{self.settings.sample}{said}\n---')

  def _say_commands(self):
    print(f'  continue: {self._command()} --config.steps={2 * self.settings.steps}')
    generate = f'{_program("maxtext_models.generate")} --checkpoint={shlex.quote(str(self.folder))}'
    print(f'  generate: {generate} --prompt={shlex.quote(self.settings.sample or "Once")}')

  def _command(self):
    once = ('--config.steps=', '--config.init_from=', '--explain', '-explain', '--noexplain')
    arguments = [a for a in sys.argv[1:] if not a.startswith(once)]
    if not any(a.startswith('--workdir') for a in arguments):
      arguments.append(f'--workdir={self.folder}')
    return ' '.join([_program('maxtext_train.pretrain'), *map(shlex.quote, arguments)])


def interrupted(folder):
  """What Ctrl-C, which saves nothing, left."""
  steps = checkpoint.Checkpoints(pathlib.Path(folder) / 'checkpoints').steps()
  kept = f'the newest checkpoint is that of step {steps[-1]}' if steps else 'there is no checkpoint yet'
  return f'Ctrl-C saves nothing: {kept}; kill -TERM saves the last finished step'


def resume_line(notes):
  """The one line that says where a run goes on."""
  return (
    f'resumed: step {notes["step"]}, epoch {notes["epoch"]}, records consumed {notes["records_consumed"]}, '
    f'next record {notes["next_record"]}, learning rate {notes["learning_rate"]:.6g}'
  )


def _changes(before, settings):
  """['schedule.peak 0.001 -> 0.004', ..]: what the config of a checkpoint and this one do not have in common."""
  texts = (before, config.dump(settings))
  old, new = (dict(line.split(' = ', 1) for line in text.splitlines() if ' = ' in line) for text in texts)
  return [f'{name} {old.get(name)} -> {new.get(name)}' for name in {**old, **new} if old.get(name) != new.get(name)]


def _notes(path):
  try:
    return json.loads((path / 'train.json').read_text())
  except FileNotFoundError:
    raise config.Error(
      f'{path} holds weights only and cannot be resumed; start from it with --config.init_from={path}'
    ) from None


def _refuse_foreign(folder):
  if not folder.exists():
    return
  if not folder.is_dir():
    raise config.Error(f'--workdir={folder} is a file')
  names = {p.name for p in folder.iterdir()}
  if names & {'model.json', 'config.json', 'model.safetensors'}:
    raise config.Error(
      f'--workdir={folder} holds exported weights, which cannot be resumed; start from them with '
      f'--config.init_from={folder} and another --workdir'
    )
  if names and not names & {'config.txt', 'checkpoints', _LOCK}:
    raise config.Error(f'--workdir={folder} is not empty and no run directory: it holds {sorted(names)[0]}')


@contextlib.contextmanager
def _lock(folder):
  try:
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / _LOCK, 'a+')
  except OSError as error:
    raise config.Error(f'--workdir={folder}: {error.strerror}') from error
  with file:
    try:
      fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise config.Error(f'--workdir={folder}: another process is training this run') from None
    try:
      yield
    finally:
      if [p.name for p in folder.iterdir()] == [_LOCK]:  # nothing came of it: leave nothing
        (folder / _LOCK).unlink()
        folder.rmdir()


def _program(module):
  if 'BUILD_WORKSPACE_DIRECTORY' in os.environ:
    package, name = module.split('.')
    return f'./bazelw run //{package}:{name} --'
  return f'python -m {module}'


def _write(path, text):
  temporary = path.with_name(path.name + '.part')
  temporary.write_text(text, encoding='utf-8')
  os.replace(temporary, path)
