import os

import numpy as np
import pytest

from maxtext_models import checkpoint
from maxtext_models import score
from tests import programs
from tests.golden import golden

run = programs.fixture(score.main)


@pytest.fixture(name='source', scope='module')
def _source(tmp_path_factory):
  return golden.directory('qwen3', tmp_path_factory.mktemp('golden'))


@pytest.fixture(name='native', scope='module')
def _native(source, tmp_path_factory):
  directory = tmp_path_factory.mktemp('native') / 'qwen3'
  checkpoint.save(directory, *checkpoint.load(source, scan=True))
  return directory


def test_native_scores_are_bit_equal_to_those_of_the_hf_directory(run, source, native, tmp_path):
  """A2: no tokenizer in either; float32 [B, T, V], and what transformers computed."""
  reference = golden.reference('qwen3')
  np.save(tmp_path / 'in.npy', reference.tokens)
  for directory, name in ((source, 'hf'), (native, 'native')):
    code, out, _ = run(f'--checkpoint={directory}', f'--tokens={tmp_path}/in.npy', f'--logits={tmp_path}/{name}.npy')
    assert code == 0 and 'float32 [2, 256, 151]' in out
  a, b = np.load(tmp_path / 'hf.npy'), np.load(tmp_path / 'native.npy')
  assert a.dtype == np.float32 and a.tobytes() == b.tobytes()
  assert np.abs(a - reference.logits).max() <= 1e-4


def test_dtype_is_that_of_the_computation(run, source, tmp_path):
  reference = golden.reference('qwen3')
  np.save(tmp_path / 'in.npy', reference.tokens[:1, :64].astype(np.uint8))
  code, _, _ = run(
    f'--checkpoint={source}', f'--tokens={tmp_path}/in.npy', f'--logits={tmp_path}/o.npy', '--dtype=bfloat16'
  )
  got = np.load(tmp_path / 'o.npy')
  distance = np.abs(got - reference.logits[:1, :64]).max()
  assert code == 0 and got.dtype == np.float32 and 1e-3 < distance < 0.5


@pytest.mark.parametrize(
  'tokens, said',
  [
    (np.array([[1, 151]]), 'id 151 at [0, 1] is outside of the vocabulary of 151'),
    (np.array([[1, 2], [-1, 3]]), 'id -1 at [1, 0]'),
    (np.array([[1.0, 2.0]]), 'float64[1, 2], not integers [B, T]'),
    (np.array([1, 2]), 'int64[2], not integers [B, T]'),
    (np.zeros((0, 4), np.int32), 'holds no ids'),
    (np.array([['a']], dtype=object), 'is not a .npy file of numbers'),
  ],
)
def test_ids_that_are_none_are_named(run, source, tmp_path, tokens, said):
  np.save(tmp_path / 'in.npy', tokens, allow_pickle=True)
  code, _, err = run(f'--checkpoint={source}', f'--tokens={tmp_path}/in.npy', f'--logits={tmp_path}/o.npy')
  assert code == 2 and said in err and 'in.npy' in err
  assert os.listdir(tmp_path) == ['in.npy']


def test_files_that_cannot_be_are_named(run, source, tmp_path):
  np.save(tmp_path / 'in.npy', np.array([[1, 2]]))
  (tmp_path / 'text.npy').write_text('ids')
  (tmp_path / 'half.npy').write_bytes(b'PK\x03\x04 the beginning of an archive')
  good = [f'--checkpoint={source}', f'--tokens={tmp_path}/in.npy', f'--logits={tmp_path}/o.npy']
  for at, other, said in (
    (0, '--checkpoint=/nowhere', '/nowhere is not a directory'),
    (1, '--tokens=/nowhere.npy', 'cannot read /nowhere.npy'),
    (1, f'--tokens={tmp_path}/text.npy', 'text.npy is not a .npy file'),
    (2, f'--logits={tmp_path}/no/o.npy', f'there is no directory {tmp_path}/no'),
    (2, f'--logits={tmp_path}', 'is a directory'),
    (1, f'--tokens={tmp_path}/half.npy', 'half.npy is not a .npy file'),
    (0, '--allocator=system', 'flag --checkpoint is needed'),
  ):
    arguments = list(good)
    arguments[at] = other
    code, _, err = run(*arguments)
    assert code == 2 and said in err


def test_a_full_disk_is_known_before_the_first_row(run, source, tmp_path, monkeypatch):
  np.save(tmp_path / 'in.npy', np.array([[1, 2]]))

  def full(*args):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(os, 'posix_fallocate', full)
  code, _, err = run(f'--checkpoint={source}', f'--tokens={tmp_path}/in.npy', f'--logits={tmp_path}/o.npy')
  assert code == 1 and 'disk full' in err and '1,208 bytes' in err
  assert os.listdir(tmp_path) == ['in.npy']
