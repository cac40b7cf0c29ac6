"""Conditional memory against its paper's equations (twins/engram.py)."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import block
from maxtext_layers import engram
from tests import layer_cases
from tests.twins import engram as twin

TOLERANCE = 2e-5  # sums of tens of numbers of size 1 in float32
IDS, CANONICAL, PAD = 41, 23, 5
T, D, H = 29, 10, 3
LAYER, HEADS, SIZES = 4, 2, (50, 31)  # n-grams of 2 and 3
HASH = engram.hashes([1, LAYER], SIZES, HEADS, CANONICAL, seed=3)[LAYER]
COMPRESS = tuple(np.random.default_rng(0).integers(0, CANONICAL, IDS).tolist())
SPEC = engram.Spec(HASH, D, H, PAD, COMPRESS, streams=2, eps=1e-5)
TOKENS = np.random.default_rng(1).integers(0, IDS, (2, T))
X = np.random.default_rng(2).standard_normal((2, T, 2, D))


def built(spec):
  return layer_cases.randomised(lambda: spec.build(D, nnx.Rngs(0)))


def ours(spec, module, tokens=TOKENS, x=X, segments=None):
  @jax.jit
  def forward(x, tokens, segments):
    return module(x, block.Context(tokens=tokens, segments=segments))[0]

  segments = None if segments is None else jnp.asarray(segments, jnp.int32)
  x = jnp.asarray(x if spec.streams else x[:, :, 0], jnp.float32)
  return np.asarray(forward(x, jnp.asarray(tokens, jnp.int32), segments)).reshape(*x.shape[:2], -1, D)


def theirs(spec, module, tokens=TOKENS[0], x=X[0], phi=None, **changes):
  """Y [T, M, d] of one row with the module's parameters in the paper's shapes; `changes` are mistakes."""
  w = {path[0]: np.asarray(leaf.get_value(), np.float64) for path, leaf in nnx.to_flat_state(nnx.state(module))}
  branches = spec.streams or 1
  primes = {(n, k): p for n, row in enumerate(spec.hash.primes, 2) for k, p in enumerate(row)}
  borders = np.cumsum([0, *primes.values()])
  tables = {key: w['embed'][i:j] for key, i, j in zip(primes, borders, borders[1:])}
  phi = phi or twin.released_hash(spec.hash.factors, primes)
  canonical = spec.canonical.__getitem__ if spec.canonical else int
  e = twin.memory(tokens, tables, phi, canonical, spec.pad)
  shaped = lambda a: a.reshape(-1, branches, D)
  given = dict(
    w_k=shaped(w['key']).swapaxes(0, 1),
    w_v=w['value'],
    norms={'h': w['q_norm'].reshape(-1, D), 'k': w['k_norm'].reshape(-1, D), 'v': w['v_norm'].reshape(-1, D)},
    kernel=shaped(w['conv']),
    dilation=len(spec.hash.primes) + 1,  # the largest n
    eps=spec.eps,
    signed_root=spec.root,
  )
  return twin.fused(x[:, :branches], e, **given | changes)


@pytest.fixture(name='module', scope='module')
def _module():
  return built(SPEC)


@pytest.fixture(name='y', scope='module')
def _y(module):
  return ours(SPEC, module)


def test_memory_equals_equations_1_to_6(module, y):
  for row in range(2):
    expected = theirs(SPEC, module, TOKENS[row], X[row])
    assert expected.std() > 0.3
    np.testing.assert_allclose(y[row], expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_with_a_mistake_it_is_far_away(module, y):
  primes = {(n, k): p for n, row in enumerate(HASH.primes, 2) for k, p in enumerate(row)}
  right = twin.released_hash(HASH.factors, primes)
  distance = lambda **changes: np.abs(y[0] - theirs(SPEC, module, **changes)).max()
  assert distance(dilation=2) > 100 * TOLERANCE
  assert distance(signed_root=True) > 100 * TOLERANCE
  assert distance(phi=lambda n, k, gram: right(n, k, gram[::-1])) > 100 * TOLERANCE
  assert distance(phi=lambda n, k, gram: right(n, 1 - k, gram) % primes[n, k]) > 100 * TOLERANCE
  kernel = np.asarray(module.conv[...], np.float64)
  assert distance(kernel=kernel[::-1]) > 100 * TOLERANCE
  branches = np.asarray(module.key.w[...], np.float64).transpose(1, 0, 2)
  assert distance(w_k=branches[::-1]) > 100 * TOLERANCE


def test_one_branch_is_equation_4():
  spec = dataclasses.replace(SPEC, streams=None, canonical=None)
  module = built(spec)
  tokens = TOKENS % CANONICAL
  expected = theirs(spec, module, tokens[0])
  np.testing.assert_allclose(ours(spec, module, tokens)[0], expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_signed_root_is_that_of_the_released_code():
  spec = dataclasses.replace(SPEC, root=True)
  module = built(spec)
  np.testing.assert_allclose(ours(spec, module)[0], theirs(spec, module), atol=TOLERANCE, rtol=TOLERANCE)


def test_a_packed_document_is_that_document_alone(module):
  border = 11
  segments = np.where(np.arange(T) < border, 1, 2)[None].repeat(2, 0)
  y = ours(SPEC, module, segments=segments)[0]
  for part in (slice(0, border), slice(border, T)):
    expected = theirs(SPEC, module, TOKENS[0, part], X[0, part])
    np.testing.assert_allclose(y[part], expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_hashes_are_those_of_the_released_code():
  layers, sizes, heads, ids = [1, 15], (5000, 5000, 6000), 3, 997
  made = engram.hashes(layers, sizes, heads, ids, seed=7)
  for layer, (factors, primes) in twin.released_parameters(layers, sizes, heads, ids, seed=7).items():
    assert made[layer].factors == tuple(factors)
    flat = [p for row in made[layer].primes for p in row]
    assert flat == [primes[key] for key in sorted(primes)]


def test_rows_of_large_factors_are_exact():
  """63 bits of product, without 64-bit integers on our side."""
  ids = 128_000
  made = engram.hashes([1], (1_000_000, 2_000_000), 2, ids)[1]
  grams = np.random.default_rng(5).integers(0, ids, (50, 3))
  rows = np.asarray(jax.jit(lambda g: engram.rows_of(g, made))(jnp.asarray(grams, jnp.int32)))
  primes = {(n, k): p for n, row in enumerate(made.primes, 2) for k, p in enumerate(row)}
  phi = twin.released_hash(made.factors, primes)
  starts = np.cumsum([0, *primes.values()])
  for gram, row in zip(grams, rows):
    expected = [phi(n, k, tuple(gram[:n][::-1])) + start for (n, k), start in zip(primes, starts)]
    assert row.tolist() == expected
