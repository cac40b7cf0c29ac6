"""Programs, run in the process of a test."""

from absl import flags
import pytest

from maxtext_models import program


def fixture(main):
  """The fixture `run` for a test file: run(flag, ...) -> (exit code, stdout, stderr) of the program whose main it is.

  Whatever happens, stderr is one line at most and never a traceback.
  """
  name = main.__module__.rsplit('.', 1)[-1]

  @pytest.fixture(name='run')
  def made(capsys):
    def run(*arguments):
      flags.FLAGS.unparse_flags()
      capsys.readouterr()
      with pytest.raises(SystemExit) as ended:
        program.run(main, argv=[name, *arguments])
      out, err = capsys.readouterr()
      assert 'Traceback' not in err and err.count('\n') <= 1
      return ended.value.code or 0, out, err

    return run

  return made
