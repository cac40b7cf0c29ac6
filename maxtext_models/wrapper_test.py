"""Directories of image-text models: the text model is read, the towers are passed over and named."""

import doctest
import json

import numpy as np
import pytest
import safetensors.numpy

from maxtext_layers import config
from maxtext_models import card
from maxtext_models import checkpoint
from maxtext_models import hf
from maxtext_models import registry
from maxtext_models.families import llama
from tests.golden import golden

WRAPPER = card.Wrapper(
  architectures=('LlamaSeesForConditionalGeneration',), text='llama', towers=(r'vision_tower\..*', r'projector\..*')
)
TOWER = {'vision_tower.blocks.0.w': np.ones((3, 5), np.int8), 'projector.bias': np.ones(4, np.float32)}
OLD, NEW = 'language_model.', 'model.language_model.'


@pytest.fixture(name='made')
def _made(tmp_path, monkeypatch):
  """made(case, style, changes of config.json) -> a directory in which the text model of a case is wrapped."""
  monkeypatch.setattr(llama, 'WRAPPERS', {'llama_sees': WRAPPER}, raising=False)

  def made(case='llama', style=OLD, text=(), **fields):
    directory = golden.directory(case, tmp_path)
    tensors = safetensors.numpy.load_file(f'{directory}/model.safetensors')
    renamed = {name: f'{OLD}{name}' for name in tensors}
    if style == NEW:
      renamed = {n: n if n == 'lm_head.weight' else NEW + n.removeprefix('model.') for n in tensors}
    wrapped = {renamed[name]: value for name, value in tensors.items()} | TOWER
    safetensors.numpy.save_file(wrapped, f'{directory}/model.safetensors', metadata={'format': 'pt'})
    inner = json.load(open(f'{directory}/config.json')) | dict(text)
    outer = {
      'model_type': 'llama_sees',
      'architectures': ['LlamaSeesForConditionalGeneration'],
      'dtype': inner.pop('dtype'),
      'vision_config': {'depth': 2},
      'text_config': {k: v for k, v in inner.items() if v is not None},
    }
    json.dump({k: v for k, v in (outer | fields).items() if v is not None}, open(f'{directory}/config.json', 'w'))
    return directory, tensors

  return made


@pytest.mark.parametrize('style', [OLD, NEW])
def test_export_is_a_text_only_directory_bit_equal(made, tmp_path, style):
  directory, tensors = made(style=style)
  source, model = checkpoint.load(directory)
  hf.save(tmp_path / 'out', source, model)
  back = safetensors.numpy.load_file(tmp_path / 'out/model.safetensors')
  assert back.keys() == tensors.keys()
  assert all(back[k].tobytes() == tensors[k].tobytes() for k in tensors)
  written = json.load(open(tmp_path / 'out/config.json'))
  assert (written['model_type'], written['architectures']) == ('llama', ['LlamaForCausalLM'])
  assert 'text_config' not in written and written['dtype'] == 'float32'
  assert registry.card_from_hf(written) == registry.card_from_hf(json.load(open(f'{directory}/config.json')))


def test_towers_are_named_in_one_line(made):
  directory, _ = made()
  (line,) = [line for line in hf.remarks(directory) if 'only the text model' in line]
  assert line == '  passed over, because only the text model is read: projector.bias, vision_tower.blocks.0.w'


def test_a_tensor_of_no_tower_and_no_text_is_refused(made):
  directory, tensors = made()
  extra = {f'{OLD}{k}': v for k, v in tensors.items()} | TOWER | {'audio_tower.w': np.ones(3, np.float32)}
  safetensors.numpy.save_file(extra, f'{directory}/model.safetensors', metadata={'format': 'pt'})
  with pytest.raises(config.Error, match=r'holds audio_tower\.w, which a Llama'):
    hf.load(directory)


def test_the_tie_flag_of_the_outer_level_counts_where_the_inner_one_is_silent(made):
  directory, _ = made('llama_tied', text={'tie_word_embeddings': None}, tie_word_embeddings=True)
  assert hf.load(directory)[0].tied


def test_a_text_part_without_model_type_has_the_wrappers(made):
  directory, _ = made(text={'model_type': None})
  assert isinstance(hf.load(directory)[0], llama.Llama)


@pytest.mark.parametrize(
  'fields, said',
  [
    ({'text_config': None}, "model_type 'llama_sees' lacks text_config"),
    ({'architectures': ['LlamaHears']}, r"architectures=\['LlamaHears'\] is not supported for model_type 'llama_sees'"),
    ({'model_type': 'llama_see'}, "model_type='llama_see' is not supported; did you mean 'llama_sees'"),
  ],
)
def test_what_does_not_fit_is_one_line(made, fields, said):
  directory, _ = made(**fields)
  with pytest.raises(config.Error, match=said) as error:
    hf.load(directory)
  assert directory in str(error.value) and '\n' not in str(error.value)


def test_doctests():
  assert doctest.testmod(card).failed == 0
