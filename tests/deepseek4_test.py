"""Mistakes in sparse and compressed attention, hashed experts and residual streams, made on purpose; and the table."""

import json
import re

from flax import nnx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from maxtext_layers import config
from maxtext_layers import hyper
from maxtext_layers import rope
from maxtext_layers import router
from maxtext_models import checkpoint
from maxtext_models import decoder
from maxtext_models import hf
from maxtext_models import quantised
from tests import wrong

V32, V4 = 'deepseek32', 'deepseek4'


@pytest.fixture(name='folder', scope='module')
def _folder(tmp_path_factory):
  return wrong.folders(tmp_path_factory.mktemp('golden'))


@pytest.mark.parametrize(
  'case, changes',
  [
    (V32, {'index_top_k': 41}),
    (V32, {'index_stage': 'dense'}),
    (V32, {'pairs': 'halves'}),
    (V4, {'index_top_k': 5}),
    (V4, {'window': 20}),
    (V4, {'far_theta': 100.0}),
    (V4, {'scaling': rope.Yarn(4.0, 64, 32.0, 1.0)}),
    (V4, {'limit': 1.4}),
    (V4, {'sinkhorn': 3}),
  ],
)
def test_other_numbers_are_seen(folder, case, changes):
  """How many keys and entries are chosen, windows, the far base, the temperature; bounds and Sinkhorn's steps."""
  assert wrong.other_card(folder, case, **changes).max() > wrong.SEEN


def test_another_compression_ratio_is_seen(folder):
  """Entries of 19 tokens, which have the first 19 weights by place of those of 20."""
  card, model = checkpoint.load(folder(V4))
  card.heavy = 19
  graph, state = nnx.split(decoder.abstract(card))
  old = dict(nnx.to_flat_state(nnx.state(model)))
  cut = lambda a, like: a.replace(a.get_value()[tuple(map(slice, like.get_value().shape))])
  state = nnx.from_flat_state([(path, cut(old[path], like)) for path, like in nnx.to_flat_state(state)])
  assert wrong.distance(V4, nnx.merge(graph, state), wrong.changed).max() > wrong.SEEN


@pytest.mark.parametrize('case', [V32, V4])
def test_bias_in_the_combine_weights_is_seen(folder, monkeypatch, case):
  whole = router.Router.__call__

  def leaking(self, x, context):
    chosen = whole(self, x, context)
    if self.correction is None:
      return chosen
    bias = jnp.take(self.correction[...], jnp.minimum(chosen.experts, self.spec.experts - 1))
    return chosen._replace(weights=chosen.weights + self.spec.scale * bias / self.spec.top_k)

  monkeypatch.setattr(router.Router, '__call__', leaking)
  assert wrong.distance(case, checkpoint.load(folder(case))[1], wrong.changed).max() > wrong.SEEN


def test_another_score_function_is_seen(folder, monkeypatch):
  """A sigmoid where the square root of a softplus belongs."""
  monkeypatch.setattr(router, 'log_scores', lambda logits, score: jax.nn.log_sigmoid(logits))
  assert wrong.distance(V4, checkpoint.load(folder(V4))[1], wrong.changed).max() > wrong.SEEN


def test_streams_mixed_the_other_way_are_seen(folder, monkeypatch):
  sinkhorn = hyper.sinkhorn
  monkeypatch.setattr(hyper, 'sinkhorn', lambda *args: sinkhorn(*args).swapaxes(-1, -2))
  assert wrong.distance(V4, checkpoint.load(folder(V4))[1], wrong.changed).max() > wrong.SEEN


TABLE = 'layers.0.ffn.gate.tid2eid'


@pytest.mark.parametrize(
  'case, edit',
  [
    (V32, wrong.swap('model.layers.1.self_attn.indexer.k_norm.weight', 'model.layers.1.self_attn.indexer.k_norm.bias')),
    (V32, lambda t: t['model.layers.2.mlp.gate.e_score_correction_bias'].fill(0)),
    (V4, lambda t: t.update({TABLE: (t[TABLE] + 1) % 6})),
    (V4, lambda t: t['layers.1.attn.compressor.ape'].fill(0)),
    (V4, lambda t: t['layers.0.attn.attn_sink'].fill(0)),
    (V4, lambda t: t['layers.1.ffn.gate.bias'].fill(0)),
  ],
)
def test_tensors_in_the_wrong_place_are_seen(folder, case, edit):
  assert wrong.edited(folder, case, edit).max() > wrong.SEEN


@pytest.mark.parametrize('dtype', [None, 'bfloat16'])
def test_the_table_of_experts_is_whole_numbers(folder, tmp_path, dtype):
  """int32 here whatever the model is computed in, int64 in files, in native form and after it, and never cast."""
  stored = hf.read(folder(V4))[1].get(TABLE)
  assert stored.dtype == np.int64
  card, model = checkpoint.load(folder(V4), dtype=dtype)
  checkpoint.save(tmp_path / 'native', card, model)
  for read in (model, checkpoint.load(tmp_path / 'native', dtype=dtype)[1]):
    table = read.stack.segments[0].blocks[0].ffn.router.table[...]
    assert table.dtype == jnp.int32
    np.testing.assert_array_equal(table[0], stored)
    back = dict(hf.tensors(card, read))[TABLE]
    assert back.dtype == np.int64 and back.tobytes() == stored.tobytes()
    assert read.embed.w[...].dtype == (dtype or 'float32')
  assert checkpoint.dtypes(model) == {dtype or 'float32'}


@pytest.mark.parametrize(
  'name, value, said',
  [
    (TABLE, np.full((101, 2), 6), 'do not lie between 0 and 5'),
    (TABLE, np.full((101, 2), -1), 'do not lie between 0 and 5'),
    (TABLE, np.zeros((101, 2), np.float32), 'has dtype F32, which is not supported; known: I64, I32'),
    ('norm.weight', np.zeros(36, np.int64), 'has dtype I64, which is not supported; known: F32'),
  ],
)
def test_numbers_that_name_no_expert_are_refused(folder, name, value, said):
  """From the header alone where that is enough."""
  card, files = hf.read(folder(V4))
  read, kinds = files.get, {'int64': 'I64', 'float32': 'F32'}
  files.get = lambda tensor: value if tensor == name else read(tensor)
  files.headers[name] = (kinds[str(value.dtype)], value.shape)
  model = decoder.abstract(card)
  with pytest.raises(config.Error, match=said):
    hf.fill(card, nnx.split(model)[1], model.stack.plan, files)


def eight_bits(weight):
  """(stored, scale, what is meant) with a power of two for each block of 16 x 12."""
  scale = np.exp2(
    np.random.default_rng(weight.size).integers(-2, 2, [-(-n // b) for n, b in zip(weight.shape, (16, 12))])
  )
  stored = weight.astype(ml_dtypes.float8_e4m3fn)
  spread = np.kron(scale, np.ones((16, 12)))[: weight.shape[0], : weight.shape[1]]
  return stored, scale.astype(ml_dtypes.float8_e8m0fnu), (stored.astype(np.float32) * spread).astype(ml_dtypes.bfloat16)


def test_a_directory_with_numbers_of_eight_bits(folder, tmp_path):
  """As V4 Flash is published: names .weight and .scale, `compress_ratios`, a module that looks ahead beside. Scores
  are those of the same numbers in bfloat16."""
  _, files = hf.read(folder(V4))
  plain, stored = {}, {'mtp.0.norm.weight': np.ones(3, np.float32)}
  for name in files.headers:
    value = files.get(name)
    plain[name] = stored[name] = value
    if re.search(r'experts[.].*weight|wq_b|wo_b', name):
      packed, scale, plain[name] = eight_bits(value)
      stored |= {name: packed, name.removesuffix('.weight') + '.scale': scale}
  source = hf.read_config(folder(V4))
  settings = {'quant_method': 'fp8', 'fmt': 'e4m3', 'scale_fmt': 'ue8m0', 'weight_block_size': [16, 12]}
  for where, tensors, more in (('plain', plain, {}), ('stored', stored, {'quantization_config': settings})):
    (tmp_path / where).mkdir()
    (tmp_path / where / 'config.json').write_text(json.dumps({**source, **more}))
    safetensors.numpy.save_file(tensors, tmp_path / where / 'model.safetensors', metadata={'format': 'pt'})
  read = [dict(hf.tensors(*hf.load(tmp_path / where, dtype='float32'))) for where in ('plain', 'stored')]
  assert read[0].keys() == read[1].keys()
  assert all(a.tobytes() == read[1][name].tobytes() for name, a in read[0].items())
  assert any('mtp.0.norm.weight' in line for line in hf.remarks(tmp_path / 'stored'))


def test_experts_of_four_bits_by_hand():
  """The numbers of OCP Microscaling 1.0, table 5: two a byte, the low half first, and a power of two for each 32."""
  packed = np.zeros((2, 32), np.int8)
  packed[0, 0], packed[1, 16] = 0x7A, -1  # 0xA = -1, 0x7 = 6; 0xFF: -6, -6
  scale = np.array([[2.0, 1.0], [1.0, 0.5]]).astype(ml_dtypes.float8_e8m0fnu)
  headers = {'x.weight': ('I8', (2, 32)), 'x.scale': ('F8_E8M0', (2, 2))}
  made = quantised.fp8({'fmt': 'e4m3', 'weight_block_size': [128, 128]})(headers)['x.weight']
  expected = np.zeros((2, 64))
  expected[0, :2], expected[1, 32:34] = (-2, 12), -3
  assert made.shape == (2, 64) and made.parts == ('x.weight', 'x.scale')
  np.testing.assert_array_equal(made.make(packed, scale).astype(np.float32), expected)
