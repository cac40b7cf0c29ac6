"""The attention layer: decode parity, the order of norms and rotation, and which kernel may run where."""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import attend
from maxtext_layers import attention
from maxtext_layers import block
from maxtext_layers import config
from maxtext_layers import mlp
from maxtext_layers import norm
from maxtext_layers import rope
from maxtext_layers import stack
from tests import layer_cases

PLAIN = attention.Spec(4, 2, 8, rope.Spec(8, 10000.0))
MIXERS = {
  'plain': PLAIN,
  'window': dataclasses.replace(PLAIN, window=3),
  'cap': dataclasses.replace(PLAIN, cap=0.5, scale=1.0),
  'sinks and biases': dataclasses.replace(PLAIN, sinks=True, bias=('q', 'k', 'v', 'o')),
  'qk-norm': dataclasses.replace(PLAIN, qk_norm=norm.Spec()),
  'qk-norm over heads': dataclasses.replace(PLAIN, qk_norm=norm.Spec(), qk_norm_over='heads'),
  'no rope': dataclasses.replace(PLAIN, rope=None),
  'gate, part of a head turns': dataclasses.replace(PLAIN, gate=True, rope=rope.Spec(8, 10000.0, rotary=4)),
  'chunk': dataclasses.replace(PLAIN, chunk=3),
  'temperature': dataclasses.replace(PLAIN, rope=None, temperature=attention.Temperature(2, 0.7)),
  'norm after the rotation': dataclasses.replace(
    PLAIN, rope=rope.Spec(8, 10000.0, pairs='neighbours'), turned_norm=norm.Spec(weight=False)
  ),
}


@functools.cache
def build(mixer, layers=2, scan=True):
  spec = block.Spec(mixer, mlp.Spec(24), norm.Spec())
  return layer_cases.randomised(lambda: stack.Stack([spec] * layers, 16, rngs=nnx.Rngs(0), scan=scan))


X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 12, 16), np.float32))


@pytest.mark.parametrize('name, scan', [*((name, True) for name in MIXERS), ('plain', False)])
def test_decode_parity(name, scan):
  """A full forward pass equals a prefill of 7 and 5 steps of one token."""
  mixer = MIXERS[name]
  model = build(mixer, scan=scan)
  np.testing.assert_allclose(layer_cases.decoded(model, X, 7, length=15), layer_cases.whole(model, X), atol=2e-5)


REMEMBER = ['plain', 'window', 'sinks and biases', 'chunk', 'temperature']


@pytest.mark.parametrize('name', REMEMBER)
def test_prefill_in_pieces(name):
  """A prompt written in two calls: the second starts behind the first and reads what it left."""
  model = build(MIXERS[name])
  y, caches = layer_cases.prefill(model, X[:, :5], 12)
  z, _ = layer_cases.run(model, X[:, 5:], caches, jnp.int32(5))
  np.testing.assert_allclose(jnp.concatenate([y, z], 1), layer_cases.whole(model, X), atol=2e-5)


@pytest.mark.parametrize('name', REMEMBER)
def test_ragged_prompts_padded_left(name):
  """B3: prompts of 7 and 4 tokens in one batch, the second padded by 3 on the left: each decodes as if alone."""
  model = build(MIXERS[name])
  for row, y in enumerate(layer_cases.ragged(model, X, (7, 4), 3)):
    np.testing.assert_allclose(y, layer_cases.whole(model, X)[row, : len(y)], atol=2e-5)


@pytest.mark.parametrize('name', ['window', 'chunk', 'temperature'])
def test_ragged_prompts_padded_right(name):
  """The same with one start a row: padding on the right is overwritten by the next tokens before anyone sees it."""
  model = build(MIXERS[name])
  rows = jnp.stack([X[0, :7], jnp.concatenate([X[1, :4], jnp.full((3, 16), 50.0)])])
  y, caches = layer_cases.prefill(model, rows, 12)
  out, lengths = [[y[0]], [y[1, :4]]], jnp.asarray([7, 4])
  for i in range(3):
    step = jnp.stack([X[0, 7 + i], X[1, 4 + i]])[:, None]
    y, caches = layer_cases.run(model, step, caches, lengths + i)
    for row in (0, 1):
      out[row].append(y[row])
  whole = layer_cases.whole(model, X)
  np.testing.assert_allclose(jnp.concatenate(out[0]), whole[0, :10], atol=2e-5)
  np.testing.assert_allclose(jnp.concatenate(out[1]), whole[1, :7], atol=2e-5)


@pytest.mark.parametrize('name', ['plain', 'chunk', 'temperature'])
def test_packed_rows_equal_rows_of_their_own(name):
  """B6, B7: positions that start again and segments together; (a) a change in one document leaves the other's output as
  it was, (b) so does a shift of the document in its row."""
  model = build(MIXERS[name])
  run = layer_cases.quick(lambda x, p, s: model(x, block.Context(p, s))[0])
  count = lambda *lengths: jnp.asarray([[i for n in lengths for i in range(n)]])
  names = lambda *lengths: jnp.asarray([[d + 1 for d, n in enumerate(lengths) for _ in range(n)]])
  x = X[:1]
  packed = run(x, count(5, 7), names(5, 7))
  np.testing.assert_allclose(packed[:, 5:], layer_cases.whole(model, x[:, 5:]), atol=2e-5)
  np.testing.assert_allclose(packed[:, :5], layer_cases.whole(model, x[:, :5]), atol=2e-5)
  assert (run(x.at[:, :5].add(1), count(5, 7), names(5, 7))[:, 5:] == packed[:, 5:]).all()
  shifted = run(jnp.concatenate([x[:, 3:5], x[:, 5:], x[:, :3]], 1), count(2, 7, 3), names(2, 7, 3))
  np.testing.assert_allclose(shifted[:, 2:9], packed[:, 5:], atol=2e-5)


def test_norms_come_before_the_rotation():
  """A7: with random norm weights the order shows; ours is norm, then rotation, written out here."""
  spec = dataclasses.replace(PLAIN, heads=2, kv_heads=2, qk_norm=norm.Spec(1e-6))
  layer = layer_cases.randomised(lambda: attention.Attention(spec, 16, rngs=nnx.Rngs(0)))
  table = rope.table(spec.rope, np.arange(12)[None])
  context = block.Context(tables={spec.rope: table}, kernel='xla')
  w = {name: np.asarray(getattr(layer, name).w[...], np.float64) for name in ('q', 'k', 'v', 'o', 'q_norm', 'k_norm')}

  def expected(norm_first):
    x = np.asarray(X, np.float64)

    def turned(a, weight):
      normed = lambda a: a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-6) * weight
      a1, a2 = np.split(normed(a) if norm_first else a, 2, -1)
      cos, sin = np.asarray(table[0][0, 0]), np.asarray(table[1][0, 0])
      a = np.concatenate([a1 * cos - a2 * sin, a2 * cos + a1 * sin], -1)
      return a if norm_first else normed(a)

    q, k, v = (np.einsum('BTD,DNH->BNTH', x, w[n]) for n in 'qkv')
    scores = np.einsum('BNTH,BNSH->BNTS', turned(q, w['q_norm']), turned(k, w['k_norm'])) * 8**-0.5
    p = np.exp(np.where(np.tril(np.ones((12, 12), bool)), scores, -np.inf))
    return np.einsum('BNTS,BNSH,NHD->BTD', p / p.sum(-1, keepdims=True), v, w['o'])

  got = layer(X, context)[0]
  np.testing.assert_allclose(got, expected(True), atol=1e-4)
  assert np.abs(got - expected(False)).max() > 1e-2


def test_the_gate_multiplies_what_heads_say():
  """Element by element, before the output map; the rotation leaves the rest of a head alone."""
  spec = dataclasses.replace(PLAIN, gate=True, rope=rope.Spec(8, 10000.0, rotary=4), bias=('gate',))
  layer = layer_cases.randomised(lambda: attention.Attention(spec, 16, rngs=nnx.Rngs(0)))
  table = rope.table(spec.rope, np.arange(12)[None])
  w = {name: np.asarray(getattr(layer, name).w[...], np.float64) for name in ('q', 'k', 'v', 'o', 'gate')}
  x = np.asarray(X, np.float64)
  angle = np.arange(12)[:, None] * 10000.0 ** -np.array([0.0, 0.5])  # of elements 0 and 2, 1 and 3

  def turned(a):
    a1, a2, rest = a[..., :2], a[..., 2:4], a[..., 4:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a1 * cos - a2 * sin, a2 * cos + a1 * sin, rest], -1)

  q, k, v = (np.einsum('BTD,DNH->BNTH', x, w[n]) for n in 'qkv')
  k, v = (np.repeat(a, 2, 1) for a in (k, v))
  scores = np.einsum('BNTH,BNSH->BNTS', turned(q), turned(k)) * 8**-0.5
  p = np.exp(np.where(np.tril(np.ones((12, 12), bool)), scores, -np.inf))
  heads = np.einsum('BNTS,BNSH->BNTH', p / p.sum(-1, keepdims=True), v)
  gate = np.einsum('BTD,DNH->BNTH', x, w['gate']) + np.asarray(layer.gate.b[...])[:, None]
  expected = np.einsum('BNTH,NHD->BTD', heads / (1 + np.exp(-gate)), w['o'])
  got = layer(X, block.Context(tables={spec.rope: table}, kernel='xla'))[0]
  np.testing.assert_allclose(got, expected, atol=1e-4)


def test_what_stands_between_rotation_and_scores():
  """Neighbours turn together, then the norm without a weight, then chunks; and queries whose temperature is their
  position's: written out here in float64."""
  turned = dataclasses.replace(MIXERS['norm after the rotation'], chunk=5)
  for spec in (turned, MIXERS['temperature']):
    layer = layer_cases.randomised(lambda spec=spec: attention.Attention(spec, 16, rngs=nnx.Rngs(0)))
    tables = {spec.rope: rope.table(spec.rope, np.arange(12)[None])} if spec.rope else {}
    w = {name: np.asarray(getattr(layer, name).w[...], np.float64) for name in 'qkvo'}
    q, k, v = (np.einsum('BTD,DNH->BNTH', np.asarray(X, np.float64), w[n]) for n in 'qkv')
    place = np.arange(12)
    seen = np.tril(np.ones((12, 12), bool))
    if spec.rope:
      wheel = np.exp(1j * place[:, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8))
      q, k = (((a[..., 0::2] + 1j * a[..., 1::2]) * wheel).view(np.float64) for a in (q, k))
      q, k = (a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-6) for a in (q, k))
      seen &= place[:, None] // 5 == place // 5
    else:
      q = q * (1 + 0.7 * np.log(1 + (place + 1) // 2))[:, None]
    scores = np.einsum('BKGTH,BKSH->BKGTS', q.reshape(2, 2, 2, 12, 8), k) * 8**-0.5
    p = np.exp(np.where(seen, scores, -np.inf))
    expected = np.einsum('BKGTS,BKSH->BKGTH', p / p.sum(-1, keepdims=True), v).reshape(2, 4, 12, 8)
    got = layer(X, block.Context(tables=tables, kernel='xla'))[0]
    np.testing.assert_allclose(got, np.einsum('BNTH,NHD->BTD', expected, w['o']), atol=1e-4)


def test_a_norm_over_all_heads_has_a_weight_for_each_number():
  layer = attention.Attention(MIXERS['qk-norm over heads'], 16, rngs=nnx.Rngs(0))
  assert layer.q_norm.w.shape == (4, 8) and layer.k_norm.w.shape == (2, 8)
  assert layer.k_norm.w.get_metadata('axes') == ('kv_heads', 'head_dim')
  with pytest.raises(ValueError, match="qk_norm_over='all' is neither"):
    attention.Attention(dataclasses.replace(PLAIN, qk_norm=norm.Spec(), qk_norm_over='all'), 16, rngs=nnx.Rngs(0))


def test_biases_and_sinks_have_the_shapes_of_their_axes():
  layer = attention.Attention(MIXERS['sinks and biases'], 16, rngs=nnx.Rngs(0))
  shapes = {name: getattr(layer, name).b.shape for name in 'qkvo'}
  assert shapes == {'q': (4, 8), 'k': (2, 8), 'v': (2, 8), 'o': (16,)} and layer.sinks.shape == (4,)
  assert layer.q.b.get_metadata('axes') == ('heads', 'head_dim')


def test_auto_takes_what_works():
  """J10: auto picks the path of the platform, and one that can do what the model needs."""
  sinks = [MIXERS['sinks and biases']]
  assert attention.resolve('auto', 'cpu', packed=True, specs=MIXERS.values()) == 'chunked'
  assert attention.resolve('auto', 'tpu', packed=True, specs=[MIXERS['window'], MIXERS['cap']]) == 'splash'
  assert attention.resolve('auto', 'tpu', specs=sinks) == 'chunked'
  assert attention.resolve('auto', 'gpu', packed=True) == 'chunked'
  assert attention.resolve('cudnn', 'gpu', specs=[MIXERS['window']]) == 'cudnn'
  assert attention.resolve('auto', 'tpu', specs=[MIXERS['chunk']]) == 'splash'
  with pytest.raises(config.Error, match='cannot do segments'):
    attention.resolve('cudnn', 'gpu', specs=[MIXERS['chunk']])


@pytest.mark.parametrize(
  'kernel, platform, needs, takes',
  [
    ('auto', 'tpu', {'length': 256}, 'splash'),
    ('auto', 'tpu', {'length': 100}, 'chunked'),  # what is scored has any length
    ('auto', 'tpu', {'length': 16}, 'chunked'),  # and so have prompts
    ('splash', 'tpu', {'length': 128, 'dtype': 'float32'}, 'splash'),
    ('cudnn', 'gpu', {'length': 100, 'dtype': 'bfloat16'}, 'cudnn'),
    ('cudnn', 'gpu', {'dtype': jnp.float16}, 'cudnn'),
    ('auto', 'gpu', {'length': 100, 'dtype': 'float32'}, 'chunked'),
  ],
)
def test_a_kernel_takes_the_shapes_and_dtypes_that_it_can(kernel, platform, needs, takes):
  """J10: pairs of a kernel and a length, of a kernel and a dtype; auto never takes one that would refuse."""
  assert attention.resolve(kernel, platform, specs=[PLAIN], **needs) == takes


@pytest.mark.parametrize(
  'kernel, platform, needs, says',
  [
    (
      'splash',
      'tpu',
      {'length': 100},
      "kernel 'splash' cannot do rows of 100 tokens (only multiples of 128), which this run needs; "
      'what works here: auto, chunked, xla',
    ),
    (
      'cudnn',
      'gpu',
      {'dtype': jnp.float32},
      "kernel 'cudnn' cannot do float32 (only bfloat16 and float16), which this run needs; "
      'what works here: auto, chunked, xla',
    ),
    (
      'cudnn',
      'gpu',
      {'packed': True, 'length': 100, 'dtype': 'float32'},
      "kernel 'cudnn' cannot do segments, float32 (only bfloat16 and float16), which this run needs; "
      'what works here: auto, chunked, xla',
    ),
  ],
)
def test_a_kernel_refuses_the_shapes_and_dtypes_that_it_cannot(kernel, platform, needs, says):
  """J10: before anything is traced, with the names of those that work here."""
  with pytest.raises(config.Error) as caught:
    attention.resolve(kernel, platform, specs=[PLAIN], **needs)
  assert str(caught.value) == says


@pytest.mark.parametrize(
  'kernel, platform, packed, mixer, says',
  [
    ('splash', 'cpu', False, 'plain', "kernel 'splash' does not run on cpu; what works here: auto, chunked, xla"),
    (
      'cudnn',
      'gpu',
      True,
      'plain',
      "kernel 'cudnn' cannot do segments, which this run needs; what works here: auto, chunked, xla",
    ),
    (
      'cudnn',
      'gpu',
      False,
      'cap',
      "kernel 'cudnn' cannot do cap, which this run needs; what works here: auto, chunked, xla",
    ),
    (
      'splash',
      'tpu',
      True,
      'sinks and biases',
      "kernel 'splash' cannot do sinks, which this run needs; what works here: auto, chunked, xla",
    ),
    (
      'chunkd',
      'cpu',
      False,
      'plain',
      "kernel 'chunkd' is unknown; did you mean 'chunked'?; what works here: auto, chunked, xla",
    ),
  ],
)
def test_others_refuse(kernel, platform, packed, mixer, says):
  """J10, B1, A15: a kernel that cannot run here, or cannot do what is needed, refuses and names those that can."""
  with pytest.raises(config.Error) as caught:
    attention.resolve(kernel, platform, packed, [MIXERS[mixer]])
  assert str(caught.value) == says


def test_the_stack_refuses_what_nobody_resolved():
  """B1: segments with a kernel that ignores them do not get past tracing."""
  model = build(PLAIN)
  with pytest.raises(config.Error, match='cannot do segments'):
    model(X, block.Context(segments=jnp.ones((2, 12), jnp.int32), kernel='cudnn'))
  for kernel, says in (('cudnn', r'cannot do float32 \(only'), ('splash', r'cannot do rows of 12 tokens \(only')):
    with pytest.raises(config.Error, match=says):
      model(X, block.Context(kernel=kernel))


def test_padding_on_the_left_of_a_prompt_needs_segments():
  """B3: a prefill with positions has padding; later calls read memories, which no kernel does."""
  model = build(PLAIN)
  x, places = X.astype(jnp.bfloat16), jnp.arange(12) - jnp.asarray([[0], [3]])
  caches = model.caches(2, 16, jnp.bfloat16)
  with pytest.raises(config.Error, match='cannot do segments'):
    model(x, block.Context(places, kernel='cudnn'), caches)
  y, _, _ = model(X[:, :1], block.Context(places[:, -1:] + 1, start=12, kernel='cudnn'), caches)
  assert y.shape == (2, 1, 16)


def test_auto_on_a_tpu_asks_for_the_length(monkeypatch):
  """J10: the stack knows the rows: 12 tokens are no block of splash, 128 are."""
  ran = []
  kernels = {
    name: dataclasses.replace(k, run=lambda *a, name=name, run=k.run: (ran.append(name), attend.xla(*a))[1])
    for name, k in attend.KERNELS.items()
  }
  monkeypatch.setattr(attend, 'KERNELS', kernels)
  monkeypatch.setattr(jax, 'default_backend', lambda: 'tpu')
  model = build(PLAIN, layers=1)
  for length, takes in ((12, 'chunked'), (128, 'splash')):
    ran.clear()
    jax.eval_shape(lambda x: model(x, block.Context())[0], jnp.zeros((1, length, 16)))
    assert ran == [takes]
