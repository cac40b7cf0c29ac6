"""bazelw on machines that have, lack or cannot get Bazel and Python: PATH holds stand-ins and a few plain commands."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

BAZELW = pathlib.Path(__file__).parent.parent / 'bazelw'
PLAIN = ('sh', 'grep', 'env')
SHOW = 'echo "python $MAXTEXT_PYTHON"; for a in "$@"; do echo "<$a>"; done'


class Machine:
  """A PATH of its own; `command(name, text)` puts a shell script there, `run` starts bazelw."""

  def __init__(self, folder):
    self.bin = folder / 'bin'
    self.bin.mkdir()
    self.log = folder / 'log'
    self.log.touch()
    self.env = {'PATH': str(self.bin), 'HOME': str(folder)}
    for name in PLAIN:
      (self.bin / name).symlink_to(shutil.which(name))

  def command(self, name, text):
    (self.bin / name).write_text(f'#!/bin/sh\n{text}\n')
    (self.bin / name).chmod(0o755)

  def python(self, name='python3.12', version='3.12'):
    """An interpreter, as far as bazelw asks."""
    self.command(name, f'case "$2" in *executable*) echo {self.bin}/{name};; *) [ {version} = 3.12 ];; esac')

  def user(self, number):
    self.command('id', f'echo {number}')

  def records(self, name, more=':'):
    """A package manager that writes down what it is asked for."""
    self.command(name, f'echo "{name} $*" >> {self.log}; {more}')

  def run(self, *args):
    done = subprocess.run([BAZELW, *args], env=self.env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout.splitlines(), done.stderr.strip()


@pytest.fixture
def machine(tmp_path):
  return Machine(tmp_path)


def test_arguments_pass_unchanged(machine):
  machine.python()
  machine.command('bazel', SHOW)
  args = ['run', '//a:b', '--', '', '--x=$HOME *', "it's", 'two words']
  code, out, _ = machine.run(*args)
  assert (code, out) == (0, [f'python {machine.bin}/python3.12', *(f'<{a}>' for a in args)])


def test_exit_code_passes(machine):
  machine.python()
  machine.command('bazel', 'exit 3')
  assert machine.run('test')[0] == 3


def test_bazelisk_serves(machine):
  machine.python()
  machine.command('bazelisk', SHOW)
  assert machine.run('build')[:2] == (0, [f'python {machine.bin}/python3.12', '<build>'])


def test_a_python_of_another_version_is_passed_over(machine):
  machine.command('bazel', SHOW)
  machine.python('python3', '3.11')
  home = pathlib.Path(machine.env['HOME'])
  own = home / '.pyenv/versions/3.12.1/bin'
  own.mkdir(parents=True)
  machine.python('good')
  (machine.bin / 'good').rename(own / 'python')
  code, out, _ = machine.run()
  assert (code, out) == (0, [f'python {machine.bin}/good'])


def test_the_real_interpreter_is_found(machine):
  machine.command('bazel', SHOW)
  (machine.bin / 'python3.12').write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
  (machine.bin / 'python3.12').chmod(0o755)
  code, out, error = machine.run()
  if sys.version_info[:2] == (3, 12):
    assert (code, out) == (0, [f'python {sys.executable}'])
  else:
    assert code == 1 and 'Python 3.12' in error


def test_a_wrong_wish_is_an_error(machine):
  machine.command('bazel', SHOW)
  machine.python('other', '3.11')
  machine.env['MAXTEXT_PYTHON'] = str(machine.bin / 'other')
  code, out, error = machine.run()
  assert (code, out) == (1, [])
  assert error == f'bazelw: MAXTEXT_PYTHON={machine.bin}/other is no Python 3.12 with venv and ensurepip'


def test_others_are_told_the_one_command(machine):
  machine.user(1000)
  machine.records('apt-get')
  machine.records('sudo')
  machine.python()
  code, out, error = machine.run('test', '//...')
  assert (code, out) == (1, [])
  assert error == (
    'bazelw: Bazel not found; as an administrator run: apt-get update && apt-get install -y bazel-bootstrap'
  )
  assert machine.log.read_text() == ''  # nothing was run


@pytest.mark.parametrize(
  'commands, told',
  [
    (['uv'], 'apt-get install -y bazel-bootstrap; then as yourself run: uv python install 3.12'),
    (['pyenv'], 'apt-get install -y bazel-bootstrap; then as yourself run: pyenv install 3.12'),
    ([], 'apt-get install -y bazel-bootstrap pipx; then as yourself run: pipx run uv python install 3.12'),
    (['apt-cache'], 'apt-get install -y bazel-bootstrap python3.12 python3.12-venv'),
  ],
)
def test_both_missing_is_one_line(machine, commands, told):
  """What uv and pyenv install lies in the home of whoever ran them: the administrator gets apt's command only."""
  machine.user(1000)
  machine.records('apt-get')
  for name in commands:
    machine.records(name, 'echo "  Candidate: 3.12.3-1"' if name == 'apt-cache' else ':')
  code, _, error = machine.run()
  assert code == 1
  assert error == (f'bazelw: Bazel and Python 3.12 not found; as an administrator run: apt-get update && {told}')
  assert 'install' not in machine.log.read_text()  # nothing was


def test_what_needs_no_administrator_asks_for_none(machine):
  machine.user(1000)
  machine.records('apt-get')
  machine.records('uv')
  machine.command('bazel', SHOW)
  assert machine.run() == (1, [], 'bazelw: Python 3.12 not found; run: uv python install 3.12')


def test_without_apt_the_user_installs_both(machine):
  machine.user(501)
  machine.records('brew')
  told = 'bazelw: Bazel and Python 3.12 not found; run: brew install bazelisk && brew install python@3.12'
  assert machine.run() == (1, [], told)


def test_an_installation_that_brings_nothing_is_told(machine):
  machine.user(0)
  bazel = f"printf '#!/bin/sh\\necho here\\n' > {machine.bin}/bazel; {shutil.which('chmod')} +x {machine.bin}/bazel"
  machine.records('apt-get', f'case "$1" in install) {bazel};; esac')
  machine.records('uv')  # and installs nothing
  code, _, error = machine.run('info')
  assert code == 1
  assert 'installing: apt-get install -y bazel-bootstrap && uv python install 3.12' in error
  assert error.endswith('bazelw: Bazel and Python 3.12: installed, but not found where this script looks')


def test_root_installs_and_says_so(machine):
  machine.user(0)
  machine.python()
  bazel = f"printf '#!/bin/sh\\necho here\\n' > {machine.bin}/bazel; {shutil.which('chmod')} +x {machine.bin}/bazel"
  machine.records('apt-get', f'case "$1" in install) {bazel};; esac')
  code, out, error = machine.run('info')
  assert (code, out) == (0, ['here'])
  assert 'bazelw: Bazel not found; installing: apt-get install -y bazel-bootstrap' in error
  assert machine.log.read_text().splitlines() == ['apt-get update', 'apt-get install -y bazel-bootstrap']


def test_a_failed_installation_is_one_line(machine):
  machine.user(0)
  machine.python()
  machine.records('apt-get', 'case "$1" in install) exit 100;; esac')
  code, _, error = machine.run()
  assert code == 1
  assert error.splitlines()[-1] == 'bazelw: the installation of Bazel failed: apt-get install -y bazel-bootstrap'


def test_no_package_manager(machine):
  machine.user(0)
  assert machine.run() == (
    1,
    [],
    'bazelw: no Bazel found, and no package manager that has it; install Bazel and run this again',
  )


def test_never_sudo():
  assert 'sudo' not in BAZELW.read_text()
  assert os.access(BAZELW, os.X_OK)
