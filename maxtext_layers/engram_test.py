"""Conditional memory against twins: the hash as released, in 64-bit integers; the layer from the paper's equations."""

import dataclasses

from flax import nnx
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import attention
from maxtext_layers import block
from maxtext_layers import config
from maxtext_layers import engram
from maxtext_layers import hyper
from maxtext_layers import mlp
from maxtext_layers import norm
from maxtext_layers import residual
from maxtext_layers import rope
from maxtext_layers import stack
from tests import layer_cases

D, V = 6, 30
HASHES = engram.hashes([1, 4], [20, 31], heads=2, ids=V, seed=3)
SPEC = engram.Spec(HASHES[4], d_model=D, head_dim=4, pad=2, canonical=tuple(np.arange(40) % V), taps=3)
STREAMS = dataclasses.replace(SPEC, streams=2, bias=('key', 'value'), root=True)
RNG = np.random.default_rng(0)
TOKENS, X = RNG.integers(0, 40, (2, 17)), RNG.standard_normal((2, 17, 2, D))


def released(hash, grams):
  """grams int64 [T, n], the latest first -> rows [T, tables], in 64-bit integers."""
  out, offset = [], 0
  for n, primes in enumerate(hash.primes, 2):
    mix = grams[:, 0] * hash.factors[0]
    for k in range(1, n):
      mix = np.bitwise_xor(mix, grams[:, k] * hash.factors[k])
    for prime in primes:
      out.append(mix % prime + offset)
      offset += prime
  return np.stack(out, -1)


def test_hash_equals_64_bit_integers():
  """At the sizes of a released tokenizer and of tables a hundred times as large as here."""
  ids = 129280
  big = engram.hashes([1, 15], [646400, 2262400], heads=3, ids=ids)[15]
  assert max(big.factors) > 2**40
  grams = RNG.integers(0, ids, (500, 3))
  np.testing.assert_array_equal(engram.rows_of(jnp.asarray(grams, jnp.int32), big), released(big, grams))


def test_hashes_are_those_of_the_released_code():
  """Odd factors of a generator a layer, and primes that no other head or layer has, each the next after the last."""
  drawn = np.random.default_rng(3 + 10007 * 4).integers(0, np.iinfo(np.int64).max // V // 2, 3, np.int64)
  assert HASHES[4].factors == tuple(int(a) * 2 + 1 for a in drawn)
  assert HASHES[1].primes == ((23, 29), (31, 37)) and HASHES[4].primes == ((41, 43), (47, 53))
  assert HASHES[4].tables == (41, 43, 47, 53)
  with pytest.raises(config.Error, match='ids='):
    engram.hashes([1], [20], heads=1, ids=2**21)


def test_canonical_ids():
  """Case, accents, compatible characters and blanks make no difference; what is no text stays what it is."""
  texts = ['Apple', ' apple', 'ÁPPLE', 'ﬁ', 'fi', '\n\n', ' ', '\ufffd', '\ufffd', '']
  pieces = [*texts[:7], '<0xC3>', '<0xC4>', '<pad>']
  assert engram.canonical(texts, pieces) == (0, 0, 0, 1, 1, 2, 2, 3, 4, 5)


def twin(layer, x, tokens):
  """One row, x [T, S, D], tokens [T], in float64: the paper's equations, a token and a stream at a time."""
  spec = layer.spec
  w = {
    '.'.join(map(str, path)): np.asarray(v.get_value(), np.float64) for path, v in nnx.to_flat_state(nnx.state(layer))
  }
  rms = lambda a, weight: a / np.sqrt((a * a).mean(-1, keepdims=True) + spec.eps) * weight
  ids = np.array(spec.canonical)[tokens]
  known = np.concatenate([[spec.pad] * 2, ids])
  rows = released(spec.hash, np.stack([known[2:], known[1:-1], known[:-2]], -1))
  e = w['embed'][rows].reshape(len(x), -1)
  value = e @ w['value.w'] + w.get('value.b', 0)
  key = np.einsum('TE,ESD->TSD', e, w['key.w']) + w.get('key.b', 0)
  u = np.zeros_like(x)
  for t, s in np.ndindex(x.shape[:2]):
    logit = rms(x[t, s], w['q_norm'][s]) @ rms(key[t, s], w['k_norm'][s]) / D**0.5
    if spec.root:
      logit = np.sign(logit) * np.sqrt(abs(logit))
    u[t, s] = value[t] / (1 + np.exp(-logit))
  c, y = rms(u, w['v_norm']), np.zeros_like(u)
  for t in range(len(x)):
    total = sum(w['conv'][j] * c[t - back] for j, back in enumerate((6, 3, 0)) if t >= back)  # 3 taps, 3 apart
    y[t] = u[t] + total / (1 + np.exp(-total))
  return y


@layer_cases.quick
def _call(layer, x, tokens, segments):
  return layer(x, block.Context(tokens=tokens, segments=segments))[0]


def call(layer, x, tokens, segments=None):
  return _call(layer, jnp.asarray(x, jnp.float32), jnp.asarray(tokens), segments)


@pytest.fixture(name='layers', scope='module')
def _layers():
  return {
    spec: layer_cases.randomised(lambda spec=spec: spec.build(D, nnx.Rngs(0)), scale=0.7) for spec in (SPEC, STREAMS)
  }


def of(spec, x):
  return x if spec.streams else x[:, :, 0]


@pytest.mark.parametrize('spec', [SPEC, STREAMS], ids=['paper', 'streams'])
def test_layer_equals_the_equations(layers, spec):
  got = call(layers[spec], of(spec, X), TOKENS)
  expected = np.stack([twin(layers[spec], x[:, : spec.streams or 1], t) for x, t in zip(X, TOKENS)])
  np.testing.assert_allclose(got.reshape(expected.shape), expected, atol=2e-5)


@pytest.mark.parametrize('spec', [SPEC, STREAMS], ids=['paper', 'streams'])
def test_packed_rows_equal_rows_of_their_own(layers, spec):
  """B6: neither an n-gram nor the convolution reaches into another document; padding on the right changes nothing."""
  layer, x = layers[spec], of(spec, X[:1])
  y = call(layer, x, TOKENS[:1], segments=jnp.asarray([[1] * 7 + [2] * 8 + [0] * 2]))
  np.testing.assert_allclose(y[:, :7], call(layer, x[:, :7], TOKENS[:1, :7]), atol=1e-5)
  np.testing.assert_allclose(y[:, 7:15], call(layer, x[:, 7:15], TOKENS[:1, 7:15]), atol=1e-5)
  np.testing.assert_allclose(
    call(layer, x[:, :8], TOKENS[:1, :8])[:, :7], call(layer, x[:, :7], TOKENS[:1, :7]), atol=1e-5
  )


def test_it_begins_without_convolution_and_with_half_open_gates():
  layer = SPEC.build(D, nnx.Rngs(0))
  tokens = jnp.asarray(TOKENS)
  y = call(layer, jnp.zeros((2, 17, D)), tokens)
  ids = np.concatenate([np.full((2, 2), 2), TOKENS % V], 1)
  grams = np.stack([ids[:, 2:], ids[:, 1:-1], ids[:, :-2]], -1)
  e = layer.embed[...][released(SPEC.hash, grams.reshape(-1, 3))].reshape(2, 17, -1)
  np.testing.assert_allclose(y, 0.5 * e @ layer.value.w[...], atol=1e-5)


@pytest.fixture(name='model', scope='module')
def _model():
  """Two memories in front of the first and third of three blocks with two residual streams."""
  plain = block.Spec(attention.Spec(2, 1, 4, rope.Spec(4, 100.0)), mlp.Spec(9), norm.Spec(), hyper.Manifold(2))
  memories = [
    block.Spec(dataclasses.replace(STREAMS, hash=hash), None, residual.Spec(None)) for hash in HASHES.values()
  ]
  blocks = [memories[0], plain, plain, memories[1], plain]
  return layer_cases.randomised(lambda: stack.Stack(blocks, D, rngs=nnx.Rngs(0), scan=True), scale=0.7)


INPUT = jnp.asarray(X[:, :, 0], jnp.float32)


@layer_cases.quick
def run(model, x, tokens, caches=None, start=0, positions=None):
  return model(x, block.Context(positions, start=start, tokens=tokens), caches)[:2]


@layer_cases.quick
def prefill(model, x, tokens, positions=None):
  return model(x, block.Context(positions, tokens=tokens), model.caches(2, 20))[:2]


def test_decode_equals_the_whole(model):
  tokens = jnp.asarray(TOKENS)
  whole, _ = run(model, INPUT, tokens)
  assert whole.shape == (2, 17, 2, D)
  y, caches = prefill(model, INPUT[:, :6], tokens[:, :6])
  parts = [y]
  y, caches = run(model, INPUT[:, 6:9], tokens[:, 6:9], caches, jnp.int32(6))
  parts.append(y)
  for t in range(9, 17):
    y, caches = run(model, INPUT[:, t : t + 1], tokens[:, t : t + 1], caches, jnp.int32(t))
    parts.append(y)
  np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, atol=1e-4)


@pytest.mark.parametrize('side', ['left', 'right'])
def test_ragged_prompts(model, side):
  """B3: prompts of 8 and 5 tokens in one batch; padding on either side is said by negative positions."""
  lengths, tokens = np.array([8, 5]), jnp.asarray(TOKENS)
  junk, noise = jnp.full((3, D), 50.0), jnp.asarray([7, 7, 7])
  if side == 'left':
    join, places, begin = lambda a, b: jnp.concatenate([b, a]), [[*range(8)], [*range(-3, 5)]], 3
  else:
    join, places, begin = lambda a, b: jnp.concatenate([a, b]), [[*range(8)], [*range(5), *[-1] * 3]], 0
  rows = jnp.stack([INPUT[0, :8], join(INPUT[1, :5], junk)])
  y, caches = prefill(model, rows, jnp.stack([tokens[0, :8], join(tokens[1, :5], noise)]), jnp.asarray(places))
  out = [[y[0]], [y[1, begin : begin + 5]]]
  for i in range(8):
    step = jnp.stack([INPUT[0, 8 + i], INPUT[1, 5 + i]])[:, None]
    ids = jnp.stack([tokens[0, 8 + i], tokens[1, 5 + i]])[:, None]
    start = jnp.int32(8 + i) if side == 'left' else jnp.asarray(lengths + i)
    y, caches = run(model, step, ids, caches, start, jnp.asarray(lengths + i)[:, None])
    for row in (0, 1):
      out[row].append(y[row])
  for row, length in enumerate(lengths + 8):
    alone, _ = run(model, INPUT[row : row + 1, :length], tokens[row : row + 1, :length])
    np.testing.assert_allclose(jnp.concatenate(out[row]), alone[0], atol=1e-4)


def test_a_memory_knows_the_size_of_its_model():
  with pytest.raises(config.Error, match='d_model=6'):
    SPEC.build(8, nnx.Rngs(0))
