"""Models here against transformers: logits at every position, and the way back. mutation_test.py shows what would show.

References are made by tests/golden/make_goldens.py. All in float32.
"""

import functools
import json

import numpy as np
import pytest
import safetensors.numpy

from maxtext_models import checkpoint
from maxtext_models import hf
from maxtext_models import scoring
from tests.golden import golden

TOLERANCE = 1e-4


@pytest.fixture(name='folder', scope='module')
def _folder(tmp_path_factory):
  """case -> its Hugging Face directory, made once."""
  parent = tmp_path_factory.mktemp('golden')
  return functools.cache(lambda case: golden.directory(case, parent))


@pytest.fixture(name='scores', scope='module')
def _scores(folder):
  """(case, scan) -> logits of the Hugging Face directory, computed once."""

  @functools.cache
  def scores(case, scan):
    _, model = checkpoint.load(folder(case), scan=scan)
    return scoring.scorer(model)(golden.reference(case).tokens)

  return scores


@pytest.mark.parametrize('case, scan', [(case, scan) for case in golden.CASES for scan in (True, False)])
def test_logits_equal_transformers(scores, folder, case, scan):
  """A12: with and without llama3 bands (factors 8, 32), linear, yarn, biases, tied or not. A7: random q/k norms."""
  reference, (card, _) = golden.reference(case), hf.read(folder(case))
  assert reference.logits.std() >= 1
  windows = [spec.mixer.window for spec in card.blocks() if getattr(spec.mixer, 'window', None)]
  assert reference.tokens.shape[1] > 2 * max(windows, default=0)
  assert np.abs(scores(case, scan) - reference.logits).max() <= TOLERANCE


def test_logits_equal_transformers_beyond_position_1000(scores):
  """A10: base 500000; output that rots slowly is seen at the end."""
  for case in ('llama_tied', 'llama3_factor32'):
    far = np.abs(scores(case, True) - golden.reference(case).logits)[:, 1000:]
    assert far.shape[1] == 24 and far.max() <= TOLERANCE


@pytest.mark.parametrize(
  'case',
  [
    'llama',
    'llama3_factor32',
    'llama_bias',
    'qwen3',
    'qwen3_tied',
    'mixtral',
    'qwen3_moe',
    'qwen3_moe_plain',
    'gpt_oss',
    'qwen3_next',
  ],
)
def test_native_scores_are_bit_equal_and_the_way_back_too(folder, scores, tmp_path, case):
  """A2: HF -> native -> HF is bit-equal whatever plans wrote and read it; native scores are the HF directory's."""
  source = safetensors.numpy.load_file(f'{folder(case)}/model.safetensors')
  for saved in (True, False):
    native = tmp_path / f'native-{saved}'
    checkpoint.save(native, *checkpoint.load(folder(case), scan=saved))
    for scan in (True, False):
      card, model = checkpoint.load(native, scan=scan)
      if saved:
        np.testing.assert_array_equal(scoring.scorer(model)(golden.reference(case).tokens), scores(case, scan))
      back = dict(hf.tensors(card, model))
      assert back.keys() == source.keys()
      assert all(back[k].dtype == source[k].dtype and back[k].tobytes() == source[k].tobytes() for k in source)
  assert card.hf_config()['rope_parameters'] == json.load(open(f'{folder(case)}/config.json'))['rope_parameters']


@pytest.mark.parametrize('case', ['llama', 'qwen3_tied'])
def test_scanned_and_unrolled_agree(scores, case):
  np.testing.assert_allclose(scores(case, True), scores(case, False), atol=1e-5, rtol=0)
