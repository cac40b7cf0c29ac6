import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

PROGRAM = """
'''Says hello.'''
import os, sys
from absl import flags
from maxtext_models import program
NAME = flags.DEFINE_string('name', 'you', 'Whom to greet.')
COUNT = flags.DEFINE_integer('count', 1, 'How often.')
DO = flags.DEFINE_string('do', '', 'What to do.')
NEEDED = flags.DEFINE_string('needed', None, 'A file.', required='{needed}' == 'yes')

def main():
  program.run(_main, {options})

def _main(args):
  from maxtext_layers import config
  if DO.value == 'error': raise config.Error('card.json: layers is\\n-1')
  if DO.value == 'failure': raise config.Failure('step 7: loss is nan')
  if DO.value == 'bug': return 1 // 0
  if DO.value == 'code': return 1
  if DO.value == 'much':
    for i in range(1_000_000): print('line', i)
  if DO.value == 'own_pipe':
    there, here = os.pipe(); os.close(there); os.write(here, b'x')
  if DO.value == 'wait':
    print('waiting', flush=True)
    import time; time.sleep(60)
  print('hello', NAME.value, args, os.getcwd(), sorted({{'jax', 'yaml', 'numpy'}} & set(sys.modules)))

if __name__ == '__main__':
  main()
"""


@pytest.fixture
def start(tmp_path):
  def start(*arguments, options='', needed='no', cwd=tmp_path, **kwargs):
    path = tmp_path / 'hello.py'
    path.write_text(PROGRAM.format(options=options, needed=needed))
    environment = {**os.environ, 'PYTHONPATH': ':'.join([str(ROOT), *filter(None, sys.path)])}
    environment.pop('BUILD_WORKING_DIRECTORY', None)
    environment |= kwargs.pop('env', {})
    kwargs = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True} | kwargs
    return subprocess.Popen(
      [sys.executable, str(path), '--allocator=system', *arguments], cwd=cwd, env=environment, **kwargs
    )

  return start


@pytest.fixture
def run(start):
  def run(*arguments, **kwargs):
    process = start(*arguments, **kwargs)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err

  return run


def test_done_is_zero(run, tmp_path):
  code, out, err = run('--name=Ada')
  assert (code, err) == (0, '')
  assert out.startswith('hello Ada [] ')


@pytest.mark.parametrize(
  'arguments, code, line',
  [
    (['--do=error'], 2, 'error: card.json: layers is -1\n'),
    (['--help=foo'], 2, 'error: flag --help takes no value\n'),
    (['--do=failure'], 1, 'error: step 7: loss is nan\n'),
    (['--nam=Ada'], 2, "error: unknown flag --nam; did you mean '--name'?\n"),
    (['--qqqq'], 2, 'error: unknown flag --qqqq\n'),
    (['--count=many'], 2, "error: flag --count=many: invalid literal for int() with base 10: 'many'\n"),
    (['Ada'], 2, "error: unexpected argument 'Ada'; settings are written --name=value\n"),
    (
      ['--allocator=malloc'],
      2,
      'error: flag --allocator=malloc: value should be one of <auto|system|huge_pages|jemalloc|tcmalloc>\n',
    ),
    (['--do=code'], 1, ''),
  ],
)
def test_what_is_wrong_is_one_line_and_a_code(run, arguments, code, line):
  """J: an unknown flag is an error with the nearest names, without a page of usage and without a traceback."""
  assert run(*arguments) == (code, '', line)


def test_a_missing_flag_is_named(run):
  assert run(needed='yes') == (2, '', 'error: flag --needed is needed\n')


def test_a_bug_shows_its_traceback(run):
  code, out, err = run('--do=bug')
  assert (code, out) == (1, '')
  assert err.startswith('Traceback') and 'ZeroDivisionError' in err


def test_arguments_where_they_are_welcome(run):
  code, out, _ = run('a b', '--name=Ada', '--', '--count', options='positional=True')
  assert code == 0
  assert out.startswith("hello Ada ['a b', '--count'] ")


def test_help_is_short_and_no_error(run):
  code, out, err = run('--help', needed='yes')
  assert (code, err) == (0, '')
  assert out.startswith('Says hello.') and "--count  How often. (default '1')" in out and '--allocator' in out
  assert len(out.splitlines()) < 12


def test_a_reader_that_leaves_is_silence(start):
  process = start('--do=much')
  assert process.stdout.readline() == 'line 0\n'
  process.stdout.close()
  assert process.wait(timeout=60) == 141
  assert process.stderr.read() == ''


def test_a_broken_pipe_of_our_own_is_a_bug(run):
  code, _, err = run('--do=own_pipe')
  assert code == 1
  assert 'BrokenPipeError' in err


def test_interrupt(start):
  process = start('--do=wait')
  assert process.stdout.readline() == 'waiting\n'
  time.sleep(0.2)
  process.send_signal(signal.SIGINT)
  _, err = process.communicate(timeout=60)
  assert (process.returncode, err) == (130, 'interrupted\n')


def test_relative_paths_mean_the_folder_of_the_user(run, tmp_path):
  (tmp_path / 'here').mkdir()
  (tmp_path / 'there').mkdir()
  code, out, _ = run(cwd=tmp_path / 'there', env={'BUILD_WORKING_DIRECTORY': str(tmp_path / 'here')})
  assert code == 0
  assert out.split()[3] == str(tmp_path / 'here')


def test_nothing_heavy_is_loaded_before_the_allocator(tmp_path):
  code = (
    'import sys; from maxtext_models import program;'
    'print(sorted({"jax", "numpy", "yaml", "ml_collections", "flax"} & set(sys.modules)))'
  )
  environment = {**os.environ, 'PYTHONPATH': ':'.join([str(ROOT), *filter(None, sys.path)])}
  out = subprocess.run([sys.executable, '-c', code], env=environment, capture_output=True, text=True, check=True)
  assert out.stdout == '[]\n'


CONFIG = """
import dataclasses
@dataclasses.dataclass(slots=True, kw_only=True)
class Run:
  steps: int = 3
def get_config(arg=None):
  return Run()
"""


def test_a_program_with_a_configuration(run, tmp_path):
  """B: overrides follow --config, other flags may stand anywhere, a misspelt field is one line with the nearest."""
  (tmp_path / 'c.py').write_text(CONFIG)
  options = f'config={str(tmp_path / "c.py")!r}'
  code, out, err = run('--config.steps=5', '--name=Ada', options=options)
  assert (code, err) == (0, '')
  assert out.startswith('hello Ada Run(steps=5) ')
  code, out, err = run('--config.step=5', options=options)
  assert (code, out) == (2, '')
  assert err.startswith('error: ') and 'did you mean' in err and 'steps' in err and err.count('\n') == 1
  code, out, err = run('--nam=5', options=options)
  assert (code, out, err) == (2, '', "error: unknown flag --nam; did you mean '--name'?\n")
