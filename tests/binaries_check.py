"""The programs as `bazel run` starts them. No *_test.py: outside Bazel there are no such binaries.

What a program does is tested with its layer; here: each starts, reads paths from the folder the user stands in, and has
the exit codes of the project.
"""

import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PROGRAMS = (
  'maxtext_models/convert',
  'maxtext_models/generate',
  'maxtext_models/models',
  'maxtext_models/score',
  'maxtext_models/verify',
  'maxtext_train/pretrain',
)


def run(program, *args, cwd):
  """As `bazel run` does: in the runfiles, with the user's folder in BUILD_WORKING_DIRECTORY."""
  env = {k: v for k, v in os.environ.items() if not k.startswith(('PYTHON', 'RUNFILES'))}
  env |= {'BUILD_WORKING_DIRECTORY': str(cwd), 'HOME': str(cwd), 'JAX_PLATFORMS': 'cpu'}
  return subprocess.run([ROOT / program, *args], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize('program', PROGRAMS)
def test_a_misspelt_flag_is_answered(program, tmp_path):
  done = run(program, '--no_such_flag=1', cwd=tmp_path)
  assert done.returncode == 2
  assert 'no_such_flag' in done.stderr and 'Traceback' not in done.stderr


def test_models_lists(tmp_path):
  done = run('maxtext_models/models', cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  assert 'qwen3-0.6b' in done.stdout


def test_a_program_can_start_again_for_its_allocator(tmp_path):
  done = run('maxtext_models/models', '--allocator=jemalloc', cwd=tmp_path)
  if done.returncode == 2:
    assert 'jemalloc is not installed' in done.stderr
  else:
    assert done.returncode == 0 and 'allocator: jemalloc (' in done.stderr and 'qwen3-0.6b' in done.stdout


def test_a_relative_path_is_the_users(tmp_path):
  """The config file lies beside the user; that its text is run shows which folder the path was read from."""
  (tmp_path / 'mine.py').write_text("def get_config():\n  raise ValueError('this very file')\n")
  done = run('maxtext_train/pretrain', '--config=mine.py', cwd=tmp_path)
  assert done.returncode == 2
  assert 'this very file' in done.stderr
