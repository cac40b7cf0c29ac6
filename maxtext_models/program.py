"""How a program starts and ends.

A program is a module with flags and this, of which `main` is what Bazel and the wheel's console script call:

    def main():
      program.run(_main)

    def _main(args): ...                     # args: what is left of the command line after the flags, mostly []

    if __name__ == '__main__':
      main()

`run` settles the host allocator, moves to the folder the user stands in, parses flags and turns errors into exit codes.
Nothing heavy is imported here, and a program imports what is heavy inside `_main`: one that starts itself again under
another allocator must not pay for jax twice, and a misspelt flag is answered at once.

Reading order: `run`, `_arguments` (the command line), `_said` (an exception as exit code); `compilation_cache`.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import os
import pathlib
import re
import select
import sys
from typing import Any
from typing import NoReturn

from absl import flags

from maxtext_models import allocator

_ALLOCATOR = flags.DEFINE_enum(
  'allocator',
  'auto',
  allocator.NAMES,
  'Host memory allocator. auto: on a CPU the fastest that is installed, else the system one. All but system start the '
  'program again once, because an allocator must be there before the process is.',
)


def run(
  main: Callable[[Any], int | None],
  *,
  argv: Sequence[str] | None = None,
  config: str | None = None,
  resolve: Callable[[str], str | None] | None = None,
  positional: bool = False,
  computes: bool = True,
) -> NoReturn:
  """Runs a program and ends the process (SystemExit): 0 done, 2 bad flag, config or input, 1 anything else.

  A `config.Error` raised anywhere below is one line on stderr and code 2, a `config.Failure` one line and code 1. A
  reader of our output that left (`| head`) is silence and 141, Ctrl-C 130. Anything else is a bug: traceback, code 1.

  Args:
    main: called with flags parsed. `main(args)` gets the arguments that are no flags; with `config` it is
      `main(value)` and gets the configuration. What it returns is the exit code; None is 0.
    argv: the command line, program name first. None: that of this process, and only then the allocator is settled,
      because the process is ours to restart.
    config: the `--config` to take when the user names none. None: the program has no `--config`.
    resolve: handed to `maxtext_layers.config.parse`; finds the file of a packaged configuration's name.
    positional: whether arguments that are no flags are welcome; else one is an error.
    computes: whether the allocator matters; if not, only one that is asked for is settled.
  """
  own, argv = argv is None, list(sys.argv if argv is None else argv)
  own = own and (computes or allocator.named(argv) != 'auto')
  code: int | None = 0
  try:
    if set(argv[1:]) & {'--help', '-help', '-h', '-?'}:
      print(_help(main, argv[0], config))
    else:
      if own:
        allocator.settle(argv)
      _stand_where_the_user_stands()
      value = _arguments(argv, config, resolve, positional)
      if own and (line := allocator.announcement()):  # only now, so that a wrong flag is answered by one line
        print(line, file=sys.stderr, flush=True)
      code = main(value)
    sys.stdout.flush()
  except KeyboardInterrupt:
    code = _say('interrupted', 130)
  except Exception as error:
    if (code := _said(error)) is None:
      raise
  sys.exit(code)


def compilation_cache(name: str, setting: str | None) -> dict[str, Any]:
  """The settings of jax with which it keeps what it compiles, so that the next start finds it; main() has them set.

  Args:
    name: of the setting, for an error.
    setting: a folder; auto: what the environment tells jax ($JAX_COMPILATION_CACHE_DIR), else maxtext/xla in the user's
      folder for caches ($XDG_CACHE_HOME, else ~/.cache), nowhere if that cannot be written; None: nowhere.

  Returns:
    {name of jax's: value}; `jax_compilation_cache_dir` is the folder, which is there now, or None.

  Raises:
    config.Error: the folder asked for cannot be made.
  """
  from maxtext_layers import config as settings

  nowhere = {'jax_compilation_cache_dir': None}
  if setting is None:
    return nowhere
  if setting == 'auto' and (told := os.environ.get('JAX_COMPILATION_CACHE_DIR')):
    folder = pathlib.Path(told)
  elif setting == 'auto':
    folder = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache', 'maxtext', 'xla')
  else:
    folder = pathlib.Path(setting)
  folder = folder.expanduser()
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    if setting == 'auto':
      return nowhere
    raise settings.Error(f'{name}={setting}: {error.strerror}') from error
  return {
    'jax_compilation_cache_dir': str(folder),
    'jax_persistent_cache_min_compile_time_secs': 0.2,
    'jax_persistent_cache_min_entry_size_bytes': -1,
  }


def _stand_where_the_user_stands():
  """`bazel run` starts programs in a folder of its own and tells in a variable where the user is."""
  if folder := os.environ.pop('BUILD_WORKING_DIRECTORY', None):  # popped: it is not meant for the programs we start
    sys.path[:] = [os.path.abspath(entry) for entry in sys.path]
    os.chdir(folder)


def _arguments(argv, config, resolve, positional):
  """What `main` gets; sets the flags. Errors are `config.Error`."""
  from maxtext_layers import config as settings

  for argument in argv[1:]:
    if re.fullmatch(r'--?help\w*=.*', argument, re.DOTALL):
      raise settings.Error(f'flag {argument.partition("=")[0]} takes no value')
  value = None
  if config is not None:
    value, rest = settings.parse(argv[1:], config, resolve)
    argv = [argv[0], *rest]
  try:
    args = flags.FLAGS(argv)[1:]
  except flags.UnrecognizedFlagError as error:
    known = [f'--{name}' for name in [*flags.FLAGS, *(['config'] if config is not None else [])]]
    if value is not None and error.flagname in {field.name for field in dataclasses.fields(value)}:
      raise settings.Error(f'unknown flag --{error.flagname}; the setting is --config.{error.flagname}') from None
    raise settings.Error(f'unknown flag --{error.flagname}{settings.nearest("--" + error.flagname, known)}') from None
  except flags.Error as error:
    text = ' '.join(' '.join(map(str, error.args)).split())
    if missing := re.match(r'flag --([\w.]+)=None: Flag --\1 must have a value', text):
      text = f'flag --{missing[1]} is needed'
    raise settings.Error(text) from None
  if args and not positional:
    raise settings.Error(f'unexpected argument {args[0]!r}; settings are written --name=value')
  if _ALLOCATOR.value not in ('auto', named := allocator.named(argv)):
    raise settings.Error(f'--allocator={_ALLOCATOR.value} must stand on the command line itself, not {named}')
  return args if config is None else value


def _help(main, name, config):
  """The module's docstring and its flags."""
  module = sys.modules[main.__module__]
  own = flags.FLAGS.get_flags_for_module(name if main.__module__ == '__main__' else module)
  lines = [(module.__doc__ or '').strip(), '', 'Flags:']
  if config is not None:
    lines.append(f'  --config=FILE[:MODEL]  (default {config}); --config.FIELD=VALUE changes a field of it')
  for flag in [*own, flags.FLAGS['allocator']]:
    default = '' if flag.default is None else f' (default {flag.default_as_str})'
    lines.append(f'  --{flag.name}  {flag.help}{default}')
  return '\n'.join(lines)


def _said(error):
  """Tells the user what an exception means to him; its exit code, or None for a bug."""
  from maxtext_layers import config as settings  # here and not above: a program that restarts does not need it yet

  if isinstance(error, settings.Error):
    return _say(f'error: {error}', 2)
  if isinstance(error, settings.Failure):
    return _say(f'error: {error}', 1)
  if isinstance(error, BrokenPipeError) and (_unread(1) or _unread(2)):  # else it is a pipe of ours, and a bug
    for number in (1, 2):
      if _unread(number):  # Python flushes once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return 141
  return None


def _say(text, code):
  print(' '.join(text.split()), file=sys.stderr)
  return code


def _unread(number):
  """Whether file descriptor `number` is a pipe or socket that nobody reads any more."""
  poll = select.poll()
  poll.register(number, 0)
  return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
