"""Mistakes in latent attention and routing, made on purpose; decoding; and a directory as Kimi K2.5 is published."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from maxtext_layers import rope
from maxtext_layers import router
from maxtext_models import checkpoint
from maxtext_models import hf
from maxtext_models import scoring
from tests import wrong
from tests.golden import golden


@pytest.fixture(name='folder', scope='module')
def _folder(tmp_path_factory):
  return wrong.folders(tmp_path_factory.mktemp('golden'))


YARN = rope.Yarn(4.0, 64, 32.0, 1.0, mscale=0.8, mscale_all_dim=1.3)


@pytest.mark.parametrize(
  'case, changes',
  [
    ('deepseek2', {'pairs': 'halves'}),
    ('deepseek3', {'pairs': 'halves'}),
    ('deepseek3_halves', {'pairs': 'neighbours'}),
    ('deepseek2', {'scaling': rope.Yarn(4.0, 64, 32.0, 1.0, mscale=0.8)}),
    ('deepseek3', {'scaling': rope.Yarn(4.0, 64, 32.0, 1.0, mscale=1.3, mscale_all_dim=1.3)}),
    ('deepseek3', {'scaling': None}),
    ('deepseek2_groups', {'groups': 1, 'top_groups': 1}),
    ('deepseek3', {'top_groups': 3}),
    ('deepseek3', {'normalize': False}),
    ('deepseek3_halves', {'normalize': True}),
    ('deepseek2', {'route_scale': 1.0}),
    ('deepseek3', {'top_k': 2}),
  ],
)
def test_other_numbers_are_seen(folder, case, changes):
  """A12: rotary pairs, the two temperatures; groups, normalisation, scale and number of chosen experts."""
  assert wrong.other_card(folder, case, **changes).max() > wrong.SEEN


def test_bias_in_the_combine_weights_is_seen(folder, monkeypatch):
  """The public system lets the selection bias into the weights for names that it does not expect (kimi-k2)."""
  whole = router.Router.__call__

  def leaking(self, x, context):
    chosen = whole(self, x, context)
    bias = jnp.take(self.correction[...], jnp.minimum(chosen.experts, self.spec.experts - 1))
    return chosen._replace(weights=chosen.weights + self.spec.scale * bias / self.spec.top_k)

  monkeypatch.setattr(router.Router, '__call__', leaking)
  model = checkpoint.load(folder('deepseek3'))[1]
  assert wrong.distance('deepseek3', model, wrong.changed).max() > wrong.SEEN


def test_another_score_function_is_seen(folder, monkeypatch):
  """Softmax where a sigmoid belongs; without normalisation, as with it a sum hides much."""
  monkeypatch.setattr(jax.nn, 'log_sigmoid', lambda x: jax.nn.log_softmax(x, -1))
  model = checkpoint.load(folder('deepseek3_halves'))[1]
  assert wrong.distance('deepseek3_halves', model, wrong.changed).max() > wrong.SEEN


@pytest.mark.parametrize(
  'case, first, second',
  [
    ('deepseek3', 'self_attn.q_a_layernorm', 'self_attn.kv_a_layernorm'),
    ('deepseek2', 'mlp.gate_proj', 'mlp.up_proj'),
  ],
)
def test_swapped_tensors_are_seen(folder, case, first, second):
  names = (f'model.layers.0.{name}.weight' for name in (first, second))
  edit = wrong.swap(*names, 20 if 'norm' in first else None)
  assert wrong.edited(folder, case, edit).max() > wrong.SEEN


def test_a_dropped_selection_bias_is_seen(folder):
  edit = lambda t: t['model.layers.1.mlp.gate.e_score_correction_bias'].fill(0)
  assert wrong.edited(folder, 'deepseek3', edit).max() > wrong.SEEN


@pytest.mark.parametrize('case', ['deepseek2', 'deepseek3'])
def test_decoding_equals_the_reference(folder, case):
  """An expanded prefill of 200 tokens and absorbed steps give transformers' logits, too."""
  _, model = checkpoint.load(folder(case))
  reference = golden.reference(case)
  got = wrong.decoded(model, reference.tokens[:, :224], 200)
  assert np.abs(got - reference.logits[:, :224]).max() <= wrong.TOLERANCE


def packed(name, weight):
  """Experts as Kimi K2-Thinking has them (compressed-tensors, 4 bits, groups of 8 here), and what they stand for."""
  rows, columns = weight.shape
  grouped = weight.astype(np.float32).reshape(rows, columns // 8, 8)
  scales = (np.abs(grouped).max(-1) / 7).astype(ml_dtypes.bfloat16)
  q = np.clip(np.round(grouped / scales.astype(np.float32)[..., None]), -8, 7) + 0.0  # no zero has a sign
  meant = (q * scales.astype(np.float32)[..., None]).astype(ml_dtypes.bfloat16).reshape(rows, columns)
  words = ((q.astype(np.int64) + 8) << 4 * np.arange(8)).sum(-1).astype(np.uint32).view(np.int32)
  shape = np.array([rows, columns], np.int32)
  return {f'{name}_packed': words, f'{name}_scale': scales, f'{name}_shape': shape}, meant


def test_kimi_k25_directory(folder, tmp_path):
  """As published: model_type kimi_k25, names below language_model, towers beside, experts of 4 bits; the selection bias
  in float32, all else in bfloat16. Scores are those of the same numbers in a directory of the text model."""
  source = json.load(open(f'{folder("deepseek3")}/config.json'))
  tensors = safetensors.numpy.load_file(f'{folder("deepseek3")}/model.safetensors')
  plain, stored = {}, {}
  for name, value in tensors.items():
    meant = value if name.endswith('bias') else value.astype(ml_dtypes.bfloat16)
    parts = {name: meant}
    if '.experts.' in name:
      parts, meant = packed(name, meant)
    plain[name] = meant
    stored |= {f'language_model.{n}': v for n, v in parts.items()}
  stored |= {
    'vision_tower.patch_embed.proj.bias': np.ones(5, np.float32),
    'mm_projector.pre_norm.bias': np.ones(3, np.float32),
  }
  weights = {'num_bits': 4, 'type': 'int', 'symmetric': True, 'strategy': 'group', 'group_size': 8, 'actorder': None}
  group = {'targets': ['Linear'], 'input_activations': None, 'weights': weights}
  quantisation = {'quant_method': 'compressed-tensors', 'format': 'pack-quantized', 'config_groups': {'group_0': group}}
  inner = {**source, 'model_type': 'kimi_k2', 'quantization_config': quantisation}
  outer = {
    'model_type': 'kimi_k25',
    'architectures': ['KimiK25ForConditionalGeneration'],
    'text_config': inner,
    'quantization_config': quantisation,
    'vision_config': {},
  }
  for where, config, files in (('plain', source, plain), ('kimi', outer, stored)):
    (tmp_path / where).mkdir()
    json.dump(config, open(tmp_path / where / 'config.json', 'w'))
    safetensors.numpy.save_file(files, tmp_path / where / 'model.safetensors', metadata={'format': 'pt'})
  tokens = golden.reference('deepseek3').tokens
  expected, got = (
    scoring.scorer(checkpoint.load(str(tmp_path / where), dtype='float32')[1])(tokens) for where in ('plain', 'kimi')
  )
  np.testing.assert_array_equal(got, expected)
  card, model = checkpoint.load(str(tmp_path / 'kimi'))
  assert str(model.dtype) == 'bfloat16' and any('vision_tower' in line for line in hf.remarks(str(tmp_path / 'kimi')))
  hf.save(tmp_path / 'out', card, model)
  back = safetensors.numpy.load_file(tmp_path / 'out/model.safetensors')
  assert back.keys() == plain.keys() and all(back[k].tobytes() == plain[k].tobytes() for k in back)
  assert json.load(open(tmp_path / 'out/config.json'))['model_type'] == 'deepseek_v3'
