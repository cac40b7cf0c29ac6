import importlib.util

import numpy as np
import pytest
import safetensors.numpy

from maxtext_models import checkpoint
from maxtext_models import scoring
from maxtext_models import verify
from tests import programs
from tests.golden import golden

REFERENCE = str(golden.HERE / 'llama.npz')


run = programs.fixture(verify.main)


@pytest.fixture(autouse=True)
def _no_transformers(monkeypatch):
  """The same everywhere: transformers is not there."""
  find = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util, 'find_spec', lambda n, *a: None if n in ('torch', 'transformers') else find(n, *a)
  )


@pytest.fixture(name='source', scope='module')
def _source(tmp_path_factory):
  return golden.directory('llama', tmp_path_factory.mktemp('golden'))


@pytest.fixture(name='swapped', scope='module')
def _swapped(tmp_path_factory):
  """A native checkpoint whose gate and up of layer 1 are swapped."""
  parent = tmp_path_factory.mktemp('swapped')
  directory = golden.directory('llama', parent)
  tensors = safetensors.numpy.load_file(f'{directory}/model.safetensors')
  gate, up = (f'model.layers.1.mlp.{n}_proj.weight' for n in ('gate', 'up'))
  tensors[gate], tensors[up] = tensors[up], tensors[gate]
  safetensors.numpy.save_file(tensors, f'{directory}/model.safetensors')
  checkpoint.save(parent / 'native', *checkpoint.load(directory))
  return parent / 'native'


def test_a_good_model_passes(run, source):
  code, out, _ = run(f'--hf={source}', f'--reference={REFERENCE}', '--max_kl=1e-6', '--min_top1=1.0')
  assert code == 0
  for words in ('max |difference|', 'KL per position', 'top-1 agreement    100.0000%', 'worst at row', 'passed'):
    assert words in out


def test_swapped_gate_and_up_fail_against_stored_logits(run, source, swapped):
  """A3: the Hugging Face directory passes, the checkpoint misses by more than 100 times; exit code 1."""
  code, out, _ = run(f'--hf={source}', f'--checkpoint={swapped}', f'--reference={REFERENCE}')
  good, bad = out.split('\ncheckpoint: ')
  assert code == 1 and 'passed' in good and 'MISSED' not in good
  missed = [line for line in bad.splitlines() if 'MISSED --max_abs=0.0001: ' in line]
  assert len(missed) == 1 and float(missed[0].split(': ')[1]) > 1e-2
  assert 'top-1 agreement    100' not in bad


def test_two_directories_are_compared_live(run, source, swapped, tmp_path):
  """A3: without a reference both forward passes run now, and the report says what that shows."""
  checkpoint.save(tmp_path / 'native', *checkpoint.load(source, scan=True))
  code, out, _ = run(f'--hf={source}', f'--checkpoint={tmp_path / "native"}')
  assert code == 0 and 'equal weights, not right mathematics' in out
  assert run(f'--hf={source}', f'--checkpoint={swapped}')[0] == 1


def test_each_threshold_counts(run, source, swapped):
  arguments = [f'--hf={source}', f'--checkpoint={swapped}', f'--reference={REFERENCE}', '--max_abs=1e9']
  assert run(*arguments)[0] == 0
  code, out, _ = run(*arguments, '--max_kl=1e-3')
  assert code == 1 and 'MISSED --max_kl=0.001' in out
  code, out, _ = run(*arguments, '--min_top1=0.99')
  assert code == 1 and 'MISSED --min_top1=0.99' in out


def test_logits_that_are_not_finite_never_pass(run, source, tmp_path):
  reference = golden.reference('llama')
  logits = reference.logits.copy()
  logits[1, 17, 5] = np.nan
  np.savez(tmp_path / 'r.npz', tokens=reference.tokens, logits=logits)
  code, out, _ = run(f'--hf={source}', f'--reference={tmp_path}/r.npz', '--max_abs=1e30', '--max_kl=1e30')
  assert code == 1 and 'row 1, position 17, id 5' in out


def test_comparison_by_hand():
  """Two ids: p = (1/2, 1/2), q = (3/4, 1/4): KL = ln(2 / sqrt 3)."""
  d = scoring.compare(np.log([[0.75, 0.25]]), np.log([[0.5, 0.5]]))
  assert d.kl[0] == pytest.approx(np.log(2 / np.sqrt(3)))
  assert d.absolute[0] == pytest.approx(np.log(2)) and d.worst[0] == 1
  assert scoring.compare(np.array([[1.0, 2.0]]), np.array([[2.0, 1.0]])).agree.tolist() == [False]


def test_what_is_missing_is_said(run, source, tmp_path):
  reference = golden.reference('llama')
  np.savez(tmp_path / 'lacks.npz', tokens=reference.tokens)
  np.savez(tmp_path / 'shape.npz', tokens=reference.tokens, logits=reference.logits[..., :150])
  np.savez(tmp_path / 'ids.npz', tokens=reference.tokens + 100, logits=reference.logits)
  (tmp_path / 'text.npz').write_text('no')
  (tmp_path / 'half.npz').write_bytes((tmp_path / 'ids.npz').read_bytes()[:5000])
  np.save(tmp_path / 'one.npy', reference.tokens)
  for arguments, said in (
    ([], 'flag --hf is needed'),
    ([f'--hf={source}'], 'transformers is not installed here, so verify needs --reference'),
    ([f'--hf={tmp_path}'], 'is no checkpoint'),
    ([f'--hf={source}', '--reference=/nowhere.npz'], 'cannot read /nowhere.npz'),
    ([f'--hf={source}', f'--reference={tmp_path}/lacks.npz'], 'lacks logits'),
    ([f'--hf={source}', f'--reference={tmp_path}/shape.npz'], '[2, 256, 150], the model makes it [2, 256, 151]'),
    ([f'--hf={source}', f'--reference={tmp_path}/ids.npz'], 'outside of the vocabulary'),
    ([f'--hf={source}', f'--reference={tmp_path}/text.npz'], 'is not an .npz file'),
    ([f'--hf={source}', f'--reference={tmp_path}/half.npz'], 'is not an .npz file'),
    ([f'--hf={source}', f'--reference={tmp_path}/one.npy'], 'one.npy is one array'),
    ([f'--hf={source}', '--max_abs=small'], 'max_abs'),
  ):
    code, _, err = run(*arguments)
    assert code == 2 and said in err
