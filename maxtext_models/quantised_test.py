"""Quantised files written by hand, and what they stand for by the published formulas, element by element in NumPy."""

import json
import os

from flax import nnx
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from maxtext_layers import config
from maxtext_models import checkpoint
from maxtext_models import decoder
from maxtext_models import hf
from maxtext_models import quantised
from maxtext_models.families import gpt_oss
from tests.golden import golden

FP8 = {'quant_method': 'fp8', 'fmt': 'e4m3', 'activation_scheme': 'dynamic', 'weight_block_size': [48, 40]}
INT4 = {
  'quant_method': 'compressed-tensors',
  'format': 'pack-quantized',
  'config_groups': {
    'group_0': {
      'targets': ['Linear'],
      'input_activations': None,
      'weights': {
        'num_bits': 4, 'type': 'int', 'symmetric': True, 'strategy': 'group', 'group_size': 8, 'actorder': None,
      },
    }
  },
  'ignore': ['lm_head', 're:.*self_attn.*'],
}  # fmt: skip
MXFP4 = {'quant_method': 'mxfp4'}
MLP = [f'model.layers.{l}.mlp.{part}_proj.weight' for l in (0, 1) for part in ('gate', 'up', 'down')]


@pytest.fixture(name='made')
def _made(tmp_path):
  """made(settings, quantise) -> directory of the case `llama` in bfloat16, with quantise(name, weight) for MLPs."""

  def made(settings, quantise, edit=lambda tensors: None):
    directory = golden.directory('llama', tmp_path)
    tensors = safetensors.numpy.load_file(f'{directory}/model.safetensors')
    tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    for name in MLP:
      tensors |= quantise(name, tensors.pop(name).astype(np.float32))
    edit(tensors)
    safetensors.numpy.save_file(tensors, f'{directory}/model.safetensors', metadata={'format': 'pt'})
    source = json.load(open(f'{directory}/config.json')) | {'quantization_config': settings}
    json.dump(source, open(f'{directory}/config.json', 'w'))
    return directory

  return made


def blocks(name, weight, kind=np.float32):
  """Stored numbers of 8 bits and a scale for each block of 48 x 40, at random: only their product has a meaning."""
  rng = np.random.default_rng(len(name))
  sizes = [-(-n // b) for n, b in zip(weight.shape, (48, 40))]
  scales = np.exp2(rng.integers(-5, 3, sizes)) if kind != np.float32 else rng.uniform(0.1, 0.4, sizes)
  return {name: weight.astype(ml_dtypes.float8_e4m3fn), f'{name}_scale_inv': scales.astype(kind)}


def groups(name, weight):
  """Whole numbers from -8 to 7, eight a word, and a scale for each 8 elements of a row."""
  rng = np.random.default_rng(len(name))
  rows, columns = weight.shape
  packed = np.zeros((rows, columns // 8), np.uint32)
  for i, j in np.ndindex(rows, columns):
    packed[i, j // 8] |= np.uint32(rng.integers(0, 16)) << np.uint32(4 * (j % 8))
  return {
    f'{name}_packed': packed.view(np.int32),
    f'{name}_scale': rng.uniform(0.01, 0.1, (rows, columns // 8)).astype(ml_dtypes.bfloat16),
    f'{name}_shape': np.array([rows, columns], np.int32),
  }


def whole(name, weight):
  """Not quantised."""
  return {name: weight}


def exported(directory, tmp_path):
  card, model = checkpoint.load(directory)
  assert card.dtype == 'bfloat16' and str(model.dtype) == 'bfloat16'
  hf.save(tmp_path / 'out', card, model)
  assert 'quantization_config' not in json.load(open(tmp_path / 'out/config.json'))
  return safetensors.numpy.load_file(tmp_path / 'out/model.safetensors')


@pytest.mark.parametrize('kind', [np.float32, ml_dtypes.float8_e8m0fnu], ids=['float32', 'powers of two'])
def test_fp8_in_blocks(made, tmp_path, kind):
  """arXiv 2412.19437: element (i, j) is its number times scale (i // 48, j // 40); also where blocks overhang."""
  stored = {}

  def quantise(name, weight):
    tensors = blocks(name, weight, kind)
    stored.update({n: v.astype(np.float64) for n, v in tensors.items()})
    return tensors

  directory = made(FP8, quantise)
  back = exported(directory, tmp_path)
  for name in MLP:
    q, s = stored[name], stored[f'{name}_scale_inv']
    expected = [[q[i, j] * s[i // 48, j // 40] for j in range(q.shape[1])] for i in range(q.shape[0])]
    np.testing.assert_array_equal(back[name], np.array(expected).astype(np.float32).astype(ml_dtypes.bfloat16))
  (line,) = [line for line in hf.remarks(directory) if 'dequantised from fp8' in line]
  assert MLP[0] in line and 'scale_inv' not in line


def test_int4_in_groups(made, tmp_path):
  """compressed-tensors: element j is four bits of word j // 8, lowest first, less 8, times scale j // 8."""
  stored = {}

  def quantise(name, weight):
    tensors = groups(name, weight)
    stored.update(tensors)
    return tensors

  back = exported(made(INT4, quantise), tmp_path)
  for name in MLP:
    words, scales = stored[f'{name}_packed'].astype(np.int64), stored[f'{name}_scale'].astype(np.float64)
    rows, columns = stored[f'{name}_shape']
    expected = [
      [((words[i, j // 8] >> 4 * (j % 8)) % 16 - 8) * scales[i, j // 8] for j in range(columns)] for i in range(rows)
    ]
    np.testing.assert_array_equal(back[name], np.array(expected).astype(ml_dtypes.bfloat16))


def test_int8_in_one_word_of_four():
  """Four numbers of 8 bits, by hand: 0x80 is 0, 0xff is 127, 0x00 is -128, 0x81 is 1; scales 2 and 0.5."""
  settings = json.loads(json.dumps(INT4))
  settings['config_groups']['group_0']['weights'] |= {'num_bits': 8, 'group_size': 2}
  headers = {'a.weight_packed': ('I32', (1, 1)), 'a.weight_scale': ('F32', (1, 2)), 'a.weight_shape': ('I64', (2,))}
  made = quantised.method({'quantization_config': settings})(headers)
  word, scale, shape = np.array([[0x8100FF80]], np.uint32).view(np.int32), np.array([[2.0, 0.5]]), np.array([1, 4])
  assert made.keys() == {'a.weight'} and made['a.weight'].shape == (1, 4)
  assert made['a.weight'].make(word, scale, shape).tolist() == [[0.0, 254.0, -64.0, 0.5]]


def refused(directory):
  with pytest.raises(config.Error) as error:
    hf.load(directory)
  assert '\n' not in str(error.value) and str(directory) in str(error.value)
  return str(error.value)


def changed(settings, **fields):
  result = json.loads(json.dumps(settings))
  weights = result['config_groups']['group_0']['weights'] if 'config_groups' in result else result
  weights.update(fields)
  return result


@pytest.mark.parametrize(
  'settings, said',
  [
    ({'quant_method': 'fp9'}, "quantization_config.quant_method='fp9' is not supported; did you mean 'fp8'"),
    ('fp8', "quantization_config.quant_method='fp8' is not supported"),
    ({'quant_method': ['fp8']}, "quantization_config.quant_method=['fp8'] is not supported"),
    (
      INT4 | {'config_groups': {'group_0': {'weights': 4}}},
      'quantization_config.config_groups.weights=4 is not an object',
    ),
    (FP8 | {'weight_block_size': None}, 'quantization_config.weight_block_size=None is not supported'),
    (FP8 | {'fmt': 'e5m2'}, "quantization_config.fmt='e5m2' is not supported"),
    (INT4 | {'format': 'marlin'}, "quantization_config.format='marlin' is not supported; known: 'pack-quantized'"),
    (changed(INT4, num_bits=3), 'quantization_config.config_groups.weights.num_bits=3 is not supported; known: 4, 8'),
    (changed(INT4, symmetric=False), 'config_groups.weights.symmetric=False is not supported'),
    (changed(INT4, group_size=-1), 'config_groups.weights.group_size=-1 is not a positive'),
  ],
)
def test_what_is_not_known_is_an_error_that_names_the_field(made, settings, said):
  assert said in refused(made(settings, lambda name, weight: {name: weight}))


@pytest.mark.parametrize(
  'settings, quantise, edit, said',
  [
    (FP8, blocks, lambda t: t.pop(f'{MLP[0]}_scale_inv'), f'there is no {MLP[0]}_scale_inv'),
    (FP8, blocks, lambda t: t.update({f'{MLP[0]}_scale_inv': np.ones((2, 1), np.float32)}), 'makes it [2, 2]'),
    (FP8, blocks, lambda t: t.pop(MLP[0]), f'lacks {MLP[0]}'),
    (INT4, groups, lambda t: t.pop(f'{MLP[2]}_shape'), f'but not {MLP[2]}_shape'),
    (INT4, groups, lambda t: t.update({f'{MLP[2]}_shape': np.array([64, 87])}), 'weight_shape is [64, 87]'),
    (INT4, groups, lambda t: t.update({f'{MLP[2]}_packed': np.ones((64, 10), np.int32)}), 'do not fit groups of 8'),
    (INT4, groups, lambda t: t.update({f'{MLP[2]}_packed': np.ones((64, 11))}), f'{MLP[2]}_packed F64'),
    (INT4, groups, lambda t: t.update({f'{MLP[2]}_shape': np.array(64)}), f'{MLP[2]}_shape [] are not I32 and [2]'),
    (INT4, groups, lambda t: t.update({f'{MLP[2]}_scale': np.array(1.0)}), f'{MLP[2]}_scale [] are not two matrices'),
    (MXFP4, whole, lambda t: t.update({'a_blocks': np.ones(3), 'a_scales': np.ones(3)}), 'a_blocks F64'),
  ],
)
def test_parts_that_do_not_fit_are_one_line(made, settings, quantise, edit, said):
  assert said in refused(made(settings, quantise, edit))


def e2m1(code):
  """OCP Microscaling Formats 1.0, section 5.3.3: sign, two bits of exponent with bias 1, one of mantissa."""
  sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
  size = mantissa * 0.5 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa * 0.5)
  return -size if sign else size


def test_mxfp4(tmp_path):
  """Experts as GPT-OSS publishes them: 32 numbers of 4 bits with one exponent, low half of a byte first, transposed."""
  card = gpt_oss.GptOss(
    layers=2,
    d_model=64,
    d_ff=32,
    d_expert=32,
    heads=2,
    kv_heads=1,
    head_dim=8,
    vocab=31,
    context=64,
    experts=3,
    top_k=2,
  )
  hf.save(tmp_path / 'plain', card, decoder.Decoder(card, rngs=nnx.Rngs(0)))
  tensors = safetensors.numpy.load_file(tmp_path / 'plain/model.safetensors')
  rng, expected, stored = np.random.default_rng(0), {}, {}
  for name, value in tensors.items():
    stored[name] = value.astype(ml_dtypes.bfloat16)
    if name.endswith(('gate_up_proj', 'down_proj')):
      experts, columns, rows = value.shape
      del stored[name]
      blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16)).astype(np.uint8)
      scales = rng.integers(115, 135, (experts, rows, columns // 32)).astype(np.uint8)
      stored |= {f'{name}_blocks': blocks, f'{name}_scales': scales}
      of = np.empty((experts, columns, rows))
      for e, r, c in np.ndindex(experts, rows, columns):
        byte = int(blocks[e, r, c // 32, c % 32 // 2])
        of[e, c, r] = e2m1(byte >> 4 if c % 2 else byte & 15) * 2.0 ** (int(scales[e, r, c // 32]) - 127)
      expected[name] = of
  os.mkdir(tmp_path / 'small')
  safetensors.numpy.save_file(stored, tmp_path / 'small/model.safetensors', metadata={'format': 'pt'})
  source = json.load(open(tmp_path / 'plain/config.json'))
  source['quantization_config'] = {'quant_method': 'mxfp4', 'modules_to_not_convert': ['model.layers.*.self_attn']}
  json.dump(source, open(tmp_path / 'small/config.json', 'w'))
  back = exported(tmp_path / 'small', tmp_path)
  assert len(expected) == 4 and back.keys() == tensors.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(back[name].astype(np.float64), value)
