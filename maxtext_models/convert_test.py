import json
import os

import numpy as np
import pytest
import safetensors.numpy

from maxtext_models import checkpoint
from maxtext_models import convert
from maxtext_models import hf
from tests import programs
from tests.golden import golden

run = programs.fixture(convert.main)


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


def tensors(edit):
  """A way to spoil a directory: `edit` changes its tensors in place."""

  def spoil(directory):
    held = safetensors.numpy.load_file(f'{directory}/model.safetensors')
    edit(held)
    safetensors.numpy.save_file(held, f'{directory}/model.safetensors')

  return spoil


def fields(**changes):
  """A way to spoil a directory: changes fields of its config.json; None takes one away."""

  def spoil(directory):
    source = json.load(open(f'{directory}/config.json')) | changes
    json.dump({k: v for k, v in source.items() if v is not None}, open(f'{directory}/config.json', 'w'))

  return spoil


NORM = 'model.layers.1.input_layernorm.weight'


@pytest.mark.parametrize(
  'spoil, said',
  [
    (tensors(lambda t: t.update({'model.layers.0.extra': np.ones(3, np.float32)})), 'holds model.layers.0.extra'),
    (tensors(lambda t: t.pop(NORM)), f'lacks {NORM}'),
    (tensors(lambda t: t.update({NORM: np.ones(63, np.float32)})), f'{NORM} has shape [63], config.json makes it [64]'),
    (tensors(lambda t: t.update({NORM: np.ones(64, np.int32)})), f'{NORM} has dtype I32'),
    (lambda d: os.truncate(f'{d}/model.safetensors', 1000), 'model.safetensors is not a readable safetensors file'),
    (lambda d: os.rename(f'{d}/model.safetensors', f'{d}/pytorch_model.bin'), 'a pickle'),
    (fields(rms_norm_eps=None), 'lacks rms_norm_eps'),
    (fields(rope_parameters=None), 'neither rope_theta nor rope_parameters.rope_theta'),
    (fields(rope_parameters={'rope_type': 'longrope', 'rope_theta': 1e4}), "rope_type='longrope'"),
    (fields(hidden_act='swish2'), "hidden_act='swish2'"),
    (fields(quantization_config={'quant_method': 'awq'}), "quantization_config.quant_method='awq' is not supported"),
    (fields(model_type='lama'), "model_type='lama' is not supported; did you mean 'llama'"),
    (fields(num_hidden_layers=3), 'lacks model.layers.2.'),
    (fields(tie_word_embeddings=True), 'lm_head.weight differs'),
  ],
)
def test_a_damaged_source_is_one_line_and_leaves_no_target(run, tmp_path, spoil, said):
  """A8, A10, A11, A14: each names what and where, and nothing is written."""
  broken = golden.directory('llama', tmp_path)
  spoil(broken)
  code, _, err = run(f'--source={broken}', f'--target={tmp_path / "out"}', '--to=native')
  assert code == 2 and said in err and broken in err
  assert os.listdir(tmp_path) == ['llama']


def test_a_native_checkpoint_with_another_card_is_refused(run, source, tmp_path):
  """E1: through the program."""
  native = tmp_path / 'native'
  checkpoint.save(native, *checkpoint.load(source))
  card = json.loads((native / 'card.json').read_text()) | {'layers': 4}
  (native / 'card.json').write_text(json.dumps(card))
  code, _, err = run(f'--source={native}', f'--target={tmp_path / "out"}', '--to=hf')
  assert code == 2 and '22 missing: layers.2.ffn.down' in err and not (tmp_path / 'out').exists()


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
  (here / 'checkpoints/3/commit.json').write_text('{"files": {}}')
  (here / 'tokenizer').mkdir()
  (here / 'tokenizer/tokenizer.json').write_text('{"of": "the run"}')
  for to in ('native', 'hf'):
    assert run(f'--source={here}', f'--target={tmp_path / to}', f'--to={to}')[0] == 0
    assert checkpoint.kind(tmp_path / to) == to
    assert (tmp_path / to / 'tokenizer.json').read_text() == '{"of": "the run"}'
  assert (tmp_path / 'hf/model.safetensors').read_bytes() == open(f'{source}/model.safetensors', 'rb').read()
