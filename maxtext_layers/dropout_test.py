import jax
import jax.numpy as jnp
import pytest

from maxtext_layers import dropout

X = jnp.ones((40, 50))
KEY = jax.random.key(0)


def test_share_and_scale():
  """A share `rate` is zero, the rest is scaled so that the mean stays: 2000 draws, four standard deviations."""
  y = dropout.apply(X, KEY, 0.25, 'ffn')
  assert sorted(set(y.ravel().tolist())) == pytest.approx([0.0, 1 / 0.75])
  assert abs((y == 0).mean() - 0.25) < 4 * (0.25 * 0.75 / 2000) ** 0.5


def test_off():
  assert dropout.apply(X, None, 0.5, 'ffn') is X and dropout.apply(X, KEY, 0.0, 'ffn') is X
  assert dropout.layer_key(None, 3) is None


def test_noise_depends_on_step_micro_batch_layer_and_site():
  noise = lambda step, micro, layer, site: dropout.apply(
    X, dropout.layer_key(dropout.step_key(KEY, step, micro), layer), 0.5, site
  )
  base = noise(3, 1, 2, 'ffn')
  assert (noise(jnp.int32(3), jnp.int32(1), jnp.int32(2), 'ffn') == base).all()
  for other in ((4, 1, 2, 'ffn'), (3, 0, 2, 'ffn'), (3, 1, -1, 'ffn'), (3, 1, 2, 'mixer')):
    assert 0.4 < (noise(*other) == base).mean() < 0.6
