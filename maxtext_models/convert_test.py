from absl import flags
import numpy as np
import pytest
import safetensors.numpy

from maxtext_models import checkpoint
from maxtext_models import convert
from maxtext_models import hf
from maxtext_models import program
from tests.golden import golden


@pytest.fixture(name='run')
def _run(capsys):
  """run(flag, ...) -> (exit code, stdout, stderr)."""

  def run(*arguments):
    flags.FLAGS.unparse_flags()
    with pytest.raises(SystemExit) as ended:
      program.run(convert.main, argv=['convert', *arguments])
    out, err = capsys.readouterr()
    assert 'Traceback' not in err and err.count('\n') <= 1
    return ended.value.code or 0, out, err

  return run


@pytest.fixture(name='source', scope='module')
def _source(tmp_path_factory):
  directory = golden.directory('qwen3', tmp_path_factory.mktemp('golden'))
  open(f'{directory}/tokenizer.json', 'w').write('{"version": "1.0"}')
  open(f'{directory}/generation_config.json', 'w').write('{"eos_token_id": 7}')
  return directory


def test_there_and_back_is_bit_equal(run, source, tmp_path):
  """A2: through the programs; tokenizer and generation config go along both times."""
  native, back = tmp_path / 'native', tmp_path / 'back'
  code, out, _ = run(f'--source={source}', f'--target={native}', '--to=native')
  assert code == 0 and 'Qwen3' in out and '90,400 parameters' in out and f'wrote {native}' in out
  assert run(f'--source={native}', f'--target={back}', '--to=hf')[0] == 0
  assert (back / 'model.safetensors').read_bytes() == open(f'{source}/model.safetensors', 'rb').read()
  for name in ('tokenizer.json', 'generation_config.json'):
    assert (native / name).read_bytes() == (back / name).read_bytes() == open(f'{source}/{name}', 'rb').read()
  assert hf.read(back)[0] == hf.read(source)[0]


def test_what_is_converted_already_is_refused(run, source, tmp_path):
  """A17: known by its marks; nothing is written."""
  native, again = tmp_path / 'native', tmp_path / 'again'
  assert run(f'--source={source}', f'--target={native}', '--to=native')[0] == 0
  for directory, to in ((native, 'native'), (source, 'hf')):
    code, _, err = run(f'--source={directory}', f'--target={again}', f'--to={to}')
    assert code == 2 and f'{directory} is {to} already' in err
  assert not again.exists()


def test_a_filled_target_is_refused_before_anything_is_read(run, source, tmp_path, monkeypatch):
  (tmp_path / 'target').mkdir()
  (tmp_path / 'target/mine').write_text('x')
  monkeypatch.setattr(checkpoint, 'load', None)
  code, _, err = run(f'--source={source}', f'--target={tmp_path / "target"}', '--to=native')
  assert code == 2 and 'not an empty directory' in err


@pytest.mark.parametrize(
  'arguments, said',
  [
    ([], 'flag --source is needed'),
    (['--source={source}'], 'flag --target is needed'),
    (['--source={source}', '--target=x'], 'flag --to is needed'),
    (['--source={source}', '--target=x', '--to=torch'], 'torch'),
    (['--source=/nowhere', '--inspect'], '/nowhere is not a directory'),
    (
      ['--source={source}', '--source_format=native', '--inspect'],
      '--source_format=native, but {source} is marked as hf',
    ),
    (['--source={source}', '--traget=x'], 'unknown flag --traget; did you mean --target'),
  ],
)
def test_bad_flags_are_one_line_and_code_2(run, source, arguments, said):
  code, _, err = run(*[a.format(source=source) for a in arguments])
  assert code == 2
  assert said.format(source=source).replace("'", '') in err.replace("'", '')


def test_a_damaged_source_is_one_line_and_leaves_no_target(run, source, tmp_path):
  broken = golden.directory('llama', tmp_path)
  tensors = safetensors.numpy.load_file(f'{broken}/model.safetensors')
  tensors['model.layers.0.extra'] = np.ones(3, np.float32)
  safetensors.numpy.save_file(tensors, f'{broken}/model.safetensors')
  code, _, err = run(f'--source={broken}', f'--target={tmp_path / "out"}', '--to=native')
  assert code == 2 and 'model.layers.0.extra' in err and not (tmp_path / 'out').exists()


def test_inspect_shows_what_a_directory_holds(run, source, tmp_path):
  code, out, _ = run(f'--source={source}', '--inspect')
  shown = dict(line.split(None, 1) for line in out.splitlines() if len(line.split(None, 1)) == 2)
  assert code == 0
  assert (shown['kind'], shown['model_type'], shown['parameters'], shown['dtype']) == ('hf', 'qwen3', '90,400', 'F32')
  run(f'--source={source}', f'--target={tmp_path / "native"}', '--to=native')
  code, out, _ = run(f'--source={tmp_path / "native"}', '--inspect')
  shown = dict(line.split(None, 1) for line in out.splitlines() if len(line.split(None, 1)) == 2)
  assert code == 0
  assert (shown['kind'], shown['family'], shown['vocab'], shown['dtype']) == ('native', 'Qwen3', '151', 'float32')


def test_a_run_becomes_a_directory_of_either_kind(run, source, tmp_path):
  """The newest checkpoint of a run, with the tokenizer of the run."""
  here = tmp_path / 'run'
  (here / 'checkpoints').mkdir(parents=True)
  (here / 'config.txt').write_text('')
  checkpoint.save(here / 'checkpoints/3', *checkpoint.load(source))
  (here / 'tokenizer').mkdir()
  (here / 'tokenizer/tokenizer.json').write_text('{"of": "the run"}')
  for to in ('native', 'hf'):
    assert run(f'--source={here}', f'--target={tmp_path / to}', f'--to={to}')[0] == 0
    assert checkpoint.kind(tmp_path / to) == to
    assert (tmp_path / to / 'tokenizer.json').read_text() == '{"of": "the run"}'
  assert (tmp_path / 'hf/model.safetensors').read_bytes() == open(f'{source}/model.safetensors', 'rb').read()
