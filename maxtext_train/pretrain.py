"""Pretrains a model: python -m maxtext_train.pretrain [--config=FILE[:MODEL]] [--config.FIELD=VALUE ...]

FILE is a path or the name of a packaged config: `quickstart` (a million parameters on the text that every Python
brings, minutes on two cores) or `pretrain` (with any model that maxtext_models.models lists, e.g. pretrain:qwen3-0.6b).
A run directory that holds checkpoints is resumed.

Reading order: `train`, which is in the order of time.
"""

import errno
import functools
import importlib.resources
import sys

from absl import flags

from maxtext_models import program

_WORKDIR = flags.DEFINE_string('workdir', None, 'The run directory. None: runs/ and the name of the run.')
_EXPLAIN = flags.DEFINE_bool(
  'explain', False, 'Print the resolved config and plan of the run as it would go on, and stop.'
)


def main(settings):
  """The program; `settings` are a run.Pretrain."""
  folder = _WORKDIR.value or f'runs/{settings.name}'
  if _EXPLAIN.value:
    return explain(settings, folder)
  return train(settings, folder)


def explain(settings, folder):
  """Prints the whole config, what follows from it, and where the run in `folder` would go on. Changes nothing there."""
  # Imported here, as below: before main() runs, the allocator may start the process again.
  from maxtext_layers import config
  from maxtext_train import assembly
  from maxtext_train import explain as explained
  from maxtext_train import session

  with session.look(settings, folder) as run:
    parts = assembly.build(settings, run.card)
    run.read_data()
    _keep_compiled(settings.cache)
    print(config.dump(settings) + '\n' + explained.text(run.plan(parts, parts.compile())))
    with parts.in_mesh():
      run.found(parts)
    if run.complete:
      run.say_complete()


def train(settings, folder):
  """Trains, or resumes, the run in `folder`. -> exit code."""
  from maxtext_layers import config
  from maxtext_train import assembly
  from maxtext_train import hooks
  from maxtext_train import loop
  from maxtext_train import platform
  from maxtext_train import session
  from maxtext_train import stop as stops

  place = platform.load(settings.platform)
  place.start()
  stop = stops.Stop(settings.checkpoint.on_sigterm)
  try:
    with stop.watching(), session.open_run(settings, folder) as run:
      if run.complete:
        run.say_complete()
        return 0
      parts = assembly.build(settings, run.card)
      data = run.read_data()
      with parts.in_mesh():
        print(f'compilation cache: {_keep_compiled(settings.cache) or "off"}')
        state = run.begin(parts)
        run.offer(stop, run.start, state, lambda: None, data, run.tokens)
        run.compile(parts)
        log = hooks.Log(settings.log_every, settings.steps)
        record = hooks.Record(run.folder)
        listed = [
          log,
          *run.evaluation(parts, state, stop, log.say),
          hooks.Save(settings.checkpoint.every, run.save, run.checkpoints.check),
          *run.profile(log.say),
          *place.hooks(settings),
        ]
        try:
          state, done = loop.run(
            parts.step, state, run.batches(parts), listed, stop, start=run.start, steps=settings.steps, data=data,
            tokens=run.tokens, describe=run.describe, record=record, dump=run.dump,
            offer=functools.partial(run.offer, stop),
          )  # fmt: skip
        finally:
          for hook in (record, *listed):
            hook.close()
        run.finish(state, done)
    return 0
  except OSError as error:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO):
      raise
    raise config.Failure(f'{error.filename or folder}: {error.strerror}') from error
  except KeyboardInterrupt:
    print('\n' + session.interrupted(folder), file=sys.stderr)
    raise
  except stops.Stopped:
    print('SIGTERM: ' + run.stopped(), file=sys.stderr)
    return stops.CODE
  finally:
    place.stop()


def _keep_compiled(setting):
  """Has jax keep compiled programs where `config.cache` says. -> the folder or None."""
  import jax

  chosen = program.compilation_cache('config.cache', setting)
  for name, value in chosen.items():
    jax.config.update(name, value)  # for the whole process: a program's to decide
  return chosen['jax_compilation_cache_dir']


def resolve(name):
  """The path of a packaged config."""
  from maxtext_layers import config

  folder = importlib.resources.files('maxtext_train') / 'configs'
  known = sorted(p.name.removesuffix('.py') for p in folder.iterdir() if p.name.endswith('.py') and p.name[0] != '_')
  if name not in known:
    raise config.Error(f'--config={name}: no such file; packaged: {", ".join(known)}{config.nearest(name, known)}')
  return str(folder / f'{name}.py')


def cli():
  """The console script."""
  program.run(main, config='quickstart', resolve=resolve)


if __name__ == '__main__':
  cli()
