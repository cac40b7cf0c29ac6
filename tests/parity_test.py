"""Models here against transformers: logits at every position, padded, packed, decoded, and the way back.

mutation_test.py shows what would show. References are made by tests/golden/make_goldens.py. All in float32.
"""

import functools
import json
import re

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from maxtext_models import checkpoint
from maxtext_models import hf
from maxtext_models import scoring
from tests import wrong
from tests.golden import golden

TOLERANCE = golden.TOLERANCE
ONE_OF_EACH = tuple({weights: case for case, weights in reversed(golden.WEIGHTS.items())}.values())  # set of weights


@pytest.fixture(name='folder', scope='module')
def _folder(tmp_path_factory):
  """case -> its Hugging Face directory, made once."""
  parent = tmp_path_factory.mktemp('golden')
  return functools.cache(lambda case: golden.directory(case, parent))


@pytest.fixture(name='loaded', scope='module')
def _loaded(folder):
  """(case, scan) -> (card, model) of the Hugging Face directory, read once."""
  return functools.cache(lambda case, scan: checkpoint.load(folder(case), scan=scan))


@pytest.fixture(name='scores', scope='module')
def _scores(loaded):
  """(case, scan) -> logits of the Hugging Face directory, computed once."""
  return functools.cache(lambda case, scan: scoring.scorer(loaded(case, scan)[1])(golden.reference(case).tokens))


@pytest.mark.parametrize('case, scan', [(case, scan) for case in golden.CASES for scan in (True, False)])
def test_logits_equal_transformers(scores, loaded, case, scan):
  """A12: with and without llama3 bands (factors 8, 32), linear, yarn, biases, tied or not. A7: random q/k norms."""
  reference, card = golden.reference(case), loaded(case, scan)[0]
  assert reference.logits.std() >= 1
  windows = [spec.mixer.window for spec in card.blocks() if getattr(spec.mixer, 'window', None)]
  assert reference.tokens.shape[1] > 2 * max(windows, default=0)
  assert np.abs(scores(case, scan) - reference.logits).max() <= TOLERANCE


@functools.partial(jax.jit, static_argnames='graph', compiler_options=wrong.QUICK)
def packed(graph, state, tokens, positions, segments):
  model = nnx.merge(graph, state)
  return model.logits(model.hidden(tokens, positions=positions, segments=segments)[0])


@pytest.mark.parametrize('case', [*ONE_OF_EACH, 'mistral_1', 'mistral_2', 'mixtral_window'])
def test_neither_padding_nor_a_second_document_changes_a_logit(loaded, case):
  """A6, B6: a row with padding on the right, and a row of two documents: each has the logits that it has alone."""
  reference = golden.reference(case)
  ids, expected = reference.tokens[0], reference.logits[0]
  length, first = len(ids), len(ids) // 3
  padding = max(length // 20, 1)
  tokens = np.stack([ids, np.concatenate([ids[:first], ids[: length - first]])])
  tokens[0, -padding:] = 0
  positions = np.stack([np.arange(length), np.concatenate([np.arange(first), np.arange(length - first)])])
  segments = np.repeat([[1, 1, 0], [1, 2, 2]], [first, length - padding - first, padding], 1)
  whole = packed(*nnx.split(loaded(case, True)[1]), tokens, positions, segments)
  assert np.isfinite(whole).all()
  assert np.abs(whole[0] - expected)[:-padding].max() <= TOLERANCE
  assert np.abs(whole[1, :first] - expected[:first]).max() <= TOLERANCE
  assert np.abs(whole[1, first:] - expected[: length - first]).max() <= TOLERANCE


DECODED = (
  'llama', 'qwen2', 'mistral', 'gemma', 'gemma2', 'gemma3', 'olmo3', 'gpt2', 'mixtral', 'qwen3_moe', 'gpt_oss',
  'qwen3_next', 'qwen3_5', 'deepseek32', 'deepseek4',
)  # fmt: skip


@pytest.mark.parametrize('case', DECODED)
def test_decoding_equals_transformers(loaded, case):
  """A prompt that is longer than any window, then six steps of one token; a single block of rows an expert."""
  reference = golden.reference(case)
  logits = wrong.decoded(loaded(case, True)[1], reference.tokens, reference.tokens.shape[1] - 6)
  assert np.abs(logits - reference.logits).max() <= TOLERANCE


def test_logits_equal_transformers_beyond_position_1000(scores):
  """A10, A9: base 500000, and two bases with a stretch on one of them; output that rots slowly is seen at the end."""
  for case in ('llama_tied', 'llama3_factor32', 'gemma3'):
    far = np.abs(scores(case, True) - golden.reference(case).logits)[:, 1000:]
    assert far.shape[1] == 24 and far.max() <= TOLERANCE


@pytest.mark.parametrize('case', ONE_OF_EACH)
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
  source, ours = json.load(open(f'{folder(case)}/config.json')), card.hf_config()
  assert holds(ours.get('rope_parameters', {}), source.get('rope_parameters', {}))


def holds(ours, theirs):
  """Whether a dict of dicts has all that another one has."""
  deep = lambda a, b: holds(a, b) if isinstance(b, dict) else a == b
  return ours.keys() >= theirs.keys() and all(deep(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize('case', ['llama', 'qwen3_tied'])
def test_scanned_and_unrolled_agree(scores, case):
  np.testing.assert_allclose(scores(case, True), scores(case, False), atol=1e-5, rtol=0)


def test_the_text_part_of_an_image_text_directory(folder, tmp_path):
  """The published Gemma 3 from 4B up: other names, a tower beside, text_config inside; a text model comes out."""
  source = json.load(open(f'{folder("gemma3")}/config.json'))
  whole = {'model_type': 'gemma3', 'architectures': ['Gemma3ForConditionalGeneration'], 'text_config': source}
  tensors = safetensors.numpy.load_file(f'{folder("gemma3")}/model.safetensors')
  named = {f'language_model.{name}': value for name, value in tensors.items()}
  named['vision_tower.vision_model.head.weight'] = named['multi_modal_projector.x'] = np.ones(3, np.float32)
  json.dump(whole, open(tmp_path / 'config.json', 'w'))
  safetensors.numpy.save_file(named, tmp_path / 'model.safetensors', metadata={'format': 'pt'})
  card, model = hf.load(tmp_path)
  assert card.hf_config()['architectures'] == ['Gemma3ForCausalLM']
  back = dict(hf.tensors(card, model))
  assert back.keys() == tensors.keys() and all((back[name] == tensors[name]).all() for name in tensors)


@pytest.mark.parametrize('case', ['qwen3_5_moe', 'qwen3_5'])
def test_qwen3_5_as_it_is_published(folder, scores, tmp_path, case):
  """Names of the image-text model, the experts of a layer in two tensors, a tower beside, and a module of multi-token
  prediction (tests/mtp_test.py), with experts one of the same sizes in another case."""
  text = json.load(open(f'{folder(case)}/config.json'))
  named, stacked = {}, {}
  for name, value in safetensors.numpy.load_file(f'{folder(case)}/model.safetensors').items():
    if found := re.fullmatch(r'(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight', name):
      stacked.setdefault(found[1], {})[found[3], int(found[2])] = value
    else:
      named[name] = value
  for name, experts in stacked.items():
    gate, up, down = (np.stack([experts[kind, e] for e in range(7)]) for kind in ('gate_proj', 'up_proj', 'down_proj'))
    named |= {f'{name}.gate_up_proj': np.concatenate([gate, up], 1), f'{name}.down_proj': down}
  there = {name.replace('model.', 'model.language_model.', 1): value for name, value in named.items()}
  there['model.visual.blocks.0.attn.qkv.bias'] = np.ones(3, np.float32)
  other = {'qwen3_5_moe': 'qwen3_next', 'qwen3_5': 'qwen3_5'}[case]
  ahead = safetensors.numpy.load_file(golden.HERE / f'{other}_mtp.safetensors')
  there, named = there | ahead, named | ahead
  kind = text['model_type'].removesuffix('_text')
  whole = {'model_type': kind, 'text_config': text, 'tie_word_embeddings': case == 'qwen3_5', 'vision_config': {}}
  whole['architectures'] = [{'qwen3_5_moe': 'Qwen3_5Moe', 'qwen3_5': 'Qwen3_5'}[kind] + 'ForConditionalGeneration']
  json.dump(whole, open(tmp_path / 'config.json', 'w'))
  safetensors.numpy.save_file(there, tmp_path / 'model.safetensors', metadata={'format': 'pt'})
  card, model = hf.load(tmp_path)
  np.testing.assert_array_equal(scoring.scorer(model)(golden.reference(case).tokens), scores(case, False))
  back = dict(hf.tensors(card, model))
  assert back.keys() == named.keys() and all(back[name].tobytes() == named[name].tobytes() for name in named)
  assert len(model.ahead) == card.hf_config()['mtp_num_hidden_layers'] == 1
  assert holds(card.hf_config(), {'model_type': text['model_type'], 'architectures': text['architectures']})
  assert '  passed over, because only the text model is read: model.visual.blocks.0.attn.qkv.bias' in hf.remarks(
    tmp_path
  )


def test_bfloat16_says_what_transformers_says_in_bfloat16(folder):
  """A16: embeddings scaled by a rounded sqrt(d_model), norms in float32 with their 1 + w, rotation in float32."""
  with np.load(golden.HERE / 'gemma_bfloat16.npz') as file:
    tokens, said = file['tokens'], file['said']
  _, model = checkpoint.load(folder('gemma'), dtype='bfloat16')
  assert tokens.size == 256 and model.embed.w[...].dtype == jnp.bfloat16
  logits = scoring.scorer(model)(tokens).copy()
  np.put_along_axis(logits, tokens[..., None], -np.inf, -1)  # of a tied table: the id itself, sure to be likeliest
  assert (logits.argmax(-1) == said).all()
