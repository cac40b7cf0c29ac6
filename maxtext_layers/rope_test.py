"""Frequencies against the formulas of `transformers.modeling_rope_utils` (5.24), written out element by element."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import config
from maxtext_layers import rope


def by_element(head_dim, theta):
  return [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]


def test_default_and_linear():
  np.testing.assert_allclose(rope.frequencies(rope.Spec(64, 5e5)), by_element(64, 5e5), rtol=1e-6)
  got = rope.frequencies(rope.Spec(64, 5e5, rope.Linear(8.0)))
  np.testing.assert_allclose(got, np.array(by_element(64, 5e5)) / 8, rtol=1e-6)


def test_llama3():
  """A12: the three bands of Llama 3.2 (factor 32, low 1, high 4, 8192)."""
  factor, low, high, trained = 32.0, 1.0, 4.0, 8192
  expected = []
  for f in by_element(128, 5e5):
    wave = 2 * math.pi / f
    if wave < trained / high:
      expected.append(f)
    elif wave > trained / low:
      expected.append(f / factor)
    else:
      smooth = (trained / wave - low) / (high - low)
      expected.append((1 - smooth) * f / factor + smooth * f)
  got = rope.frequencies(rope.Spec(128, 5e5, rope.Llama3(factor, low, high, trained)))
  np.testing.assert_allclose(got, expected, rtol=1e-5)
  plain = np.array(by_element(128, 5e5))
  changed = ~np.isclose(got, plain, rtol=1e-4)
  assert 0 < changed.sum() < 64 and np.isclose(got[-1], plain[-1] / 32, rtol=1e-5)


def test_llama3_of_one_band_is_a_step():
  """low = high = 1, as Llama 4 Scout publishes it (factor 16): waves longer than 8192 are stretched, others stay."""
  plain = np.array(by_element(128, 5e5))
  expected = np.where(2 * np.pi / plain > 8192, plain / 16, plain)
  got = rope.frequencies(rope.Spec(128, 5e5, rope.Llama3(16.0, 1.0, 1.0, 8192)))
  np.testing.assert_allclose(got, expected, rtol=1e-5)
  assert 0 < (expected != plain).sum() < 64


def test_proportional():
  """The first quarter of a head's frequencies turns as ever, the others are zero, and elements with them stay."""
  expected = [f / 2 if i < 8 else 0 for i, f in enumerate(by_element(64, 1e6))]
  spec = rope.Spec(64, 1e6, rope.Proportional(0.25, factor=2.0))
  np.testing.assert_allclose(rope.frequencies(spec), expected, rtol=1e-6)
  x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 2, 3, 64)), jnp.float32)
  got = rope.rotate(x, rope.table(spec, np.array([[0, 7, 300]])))
  stays = np.r_[8:32, 40:64]
  assert (got[..., stays] == x[..., stays]).all() and (np.abs(got - x)[:, :, 1:, 0] > 1e-3).all()


@pytest.mark.parametrize('truncate', [True, False])
def test_yarn(truncate):
  factor, trained, theta, size = 4.0, 32768, 1e6, 128
  bound = lambda turns: size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))
  low, high = bound(32.0), bound(1.0)
  if truncate:
    low, high = math.floor(low), math.ceil(high)
  expected = []
  for i, f in enumerate(by_element(size, theta)):
    stretched = min(max((i - low) / (high - low), 0), 1)
    expected.append(f / factor * stretched + f * (1 - stretched))
  spec = rope.Spec(size, theta, rope.Yarn(factor, trained, truncate=truncate))
  np.testing.assert_allclose(rope.frequencies(spec), expected, rtol=1e-5)
  assert rope.temperature(spec) == pytest.approx(0.1 * math.log(4) + 1)
  cos, _ = rope.table(spec, np.zeros((1, 1), np.int32))
  assert cos[0, 0, 0, 0] == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_temperatures():
  of = lambda **k: rope.temperature(rope.Spec(64, 1e4, rope.Yarn(40.0, 4096, **k)))
  assert of(attention=1.5) == 1.5
  assert of(mscale=1.0, mscale_all_dim=1.0) == 1.0  # DeepSeek V3
  assert of(mscale=0.707, mscale_all_dim=1.0) == pytest.approx((0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1))


def test_rotation_turns_halves():
  """A12: element i of the first half and element i of the second are the plane that turns by position * frequency."""
  spec = rope.Spec(8, 10000.0)
  positions = np.array([[0, 1, 300]])
  x = np.random.default_rng(0).standard_normal((1, 2, 3, 8)).astype(np.float32)
  got = rope.rotate(jnp.asarray(x), rope.table(spec, positions))
  for t, p in enumerate(positions[0]):
    for i, f in enumerate(by_element(8, 10000.0)):
      turned = (x[..., t, i] + 1j * x[..., t, i + 4]) * np.exp(1j * p * f)
      np.testing.assert_allclose(got[..., t, i], turned.real, atol=1e-4)
      np.testing.assert_allclose(got[..., t, i + 4], turned.imag, atol=1e-4)


def test_partial_rotation_leaves_the_rest():
  spec = rope.Spec(8, 10000.0, rotary=4)
  x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 2, 3, 8)), jnp.float32)
  table = rope.table(spec, np.arange(3)[None])
  got = rope.rotate(x, table)
  assert table[0].shape == (1, 1, 3, 2) and (got[..., 4:] == x[..., 4:]).all()
  np.testing.assert_allclose(
    got[..., :4], rope.rotate(x[..., :4], rope.table(rope.Spec(4, 10000.0), np.arange(3)[None]))
  )


def test_table_of_numbers_is_a_constant_and_equals_the_traced_one():
  spec = rope.Spec(64, 5e5, rope.Llama3(8.0, 1.0, 4.0, 8192))
  places = np.array([[0, 5, 131071]], np.int32)
  constant, traced = rope.table(spec, places), rope.table(spec, jnp.asarray(places))
  assert isinstance(constant[0], np.ndarray)
  for a, b in zip(constant, traced):
    np.testing.assert_allclose(a, b, atol=2e-6)


def test_neighbours_turn_together_and_come_out_as_halves():
  """The same plane and angle for elements 2i and 2i + 1, as in the paper; the rest stays."""
  spec = rope.Spec(10, 10000.0, rotary=8, pairs='neighbours')
  positions = np.array([[0, 1, 300]])
  x = np.random.default_rng(0).standard_normal((1, 2, 3, 10)).astype(np.float32)
  got = rope.rotate(jnp.asarray(x), rope.table(spec, positions), spec.pairs)
  for t, p in enumerate(positions[0]):
    for i, f in enumerate(by_element(8, 10000.0)):
      turned = (x[..., t, 2 * i] + 1j * x[..., t, 2 * i + 1]) * np.exp(1j * p * f)
      np.testing.assert_allclose(got[..., t, i], turned.real, atol=1e-4)
      np.testing.assert_allclose(got[..., t, i + 4], turned.imag, atol=1e-4)
  assert (got[..., 8:] == x[..., 8:]).all()


def test_sharpness_of_scores():
  """0.1 * 0.707 * ln 40 + 1 = 1.2608 squared, for the published scaling of DeepSeek V2 Lite."""
  of = lambda scaling: rope.sharpness(rope.Spec(64, 1e4, scaling))
  assert of(rope.Yarn(40.0, 4096, mscale=0.707, mscale_all_dim=0.707)) == pytest.approx(1.2608038**2, rel=1e-6)
  assert of(rope.Yarn(40.0, 4096)) == of(None) == 1.0


@pytest.mark.parametrize(
  'wrong, said',
  [
    (dict(theta=1.0), 'theta=1.0 is no base'),  # YaRN divides by its logarithm
    (dict(theta=math.nan), 'theta=nan is no base'),
    (dict(theta=math.inf), 'theta=inf is no base'),
    (dict(pairs='neighbors'), "pairs='neighbors' is none of halves, neighbours; did you mean 'neighbours'"),
  ],
)
def test_specs_that_make_no_sense(wrong, said):
  with pytest.raises(config.Error) as error:
    rope.Spec(**{'head_dim': 8, 'theta': 1e4} | wrong)
  assert said in str(error.value)
