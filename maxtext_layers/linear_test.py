"""The small layers against their formulas."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import cache
from maxtext_layers import config
from maxtext_layers import embed
from maxtext_layers import linear
from maxtext_layers import mlp
from maxtext_layers import norm
from maxtext_layers import param

X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 8), np.float32))


@pytest.mark.parametrize(
  'equation, x, w',
  [
    ('BTD,DF->BTF', (2, 3, 4), (4, 5)),
    ('BTD,DNH->BNTH', (2, 3, 4), (4, 2, 5)),
    ('BNTH,NHD->BTD', (2, 3, 4, 5), (3, 5, 6)),
  ],
)
def test_einsum_is_an_einsum(equation, x, w):
  rng = np.random.default_rng(0)
  a, b = rng.standard_normal(x).astype(np.float32), rng.standard_normal(w).astype(np.float32)
  got, pull = jax.vjp(lambda a, b: linear.einsum(equation, a, b), a, b)
  expected, twin = jax.vjp(lambda a, b: jnp.einsum(equation, a, b), a, b)
  np.testing.assert_allclose(got, expected, atol=1e-5)
  for g, t in zip(pull(expected), twin(expected)):
    np.testing.assert_allclose(g, t, atol=1e-4)


def test_no_operand_of_a_gradient_is_transposed_in_memory():
  """The reason for products of two axes: none of the products of value and gradient has two contracted axes."""
  f = lambda a, b: linear.einsum('BTD,DNH->BNTH', a, b).sum()
  text = str(jax.make_jaxpr(jax.grad(f, (0, 1)))(jnp.ones((2, 3, 4)), jnp.ones((4, 2, 5))))
  contracted = [line for line in text.splitlines() if 'dimension_numbers=((' in line]
  assert contracted and all(
    line.split('dimension_numbers=((')[1].startswith(('[0], [0]', '[1], [0]', '[1], [1]', '[0], [1]'))
    for line in contracted
  )


def test_bias_stands_on_the_axes_of_the_output():
  layer = linear.Linear('BTD,DNH->BNTH', (8, 2, 4), ('embed', 'heads', 'head_dim'), bias=True, rngs=nnx.Rngs(0))
  plain = layer(X)
  layer.b[...] = jnp.arange(8.0).reshape(2, 4)
  np.testing.assert_allclose(
    layer(X) - plain, np.broadcast_to(np.arange(8).reshape(1, 2, 1, 4), (2, 2, 3, 4)), atol=1e-5
  )


def test_first_values():
  """A truncated normal within two sigmas of fan_in ** -0.5 has a standard deviation of 0.8796 times that."""
  w = linear.Linear('BTNH,NHD->BTD', (4, 16, 512), ('heads', 'head_dim', 'embed'), rngs=nnx.Rngs(0)).w[...]
  assert jnp.abs(w).max() <= 2 * 64**-0.5 and w.std() == pytest.approx(0.8796 * 64**-0.5, rel=0.02)
  with pytest.raises(ValueError, match='do not fit'):
    param.constant((2, 3), ('embed',), value=0.0)


def test_norm_is_computed_in_float32():
  """A16: the weight may be stored as a difference from one; bfloat16 goes in and out, float32 is between."""
  layer = norm.Norm(norm.Spec(1e-6, offset=1.0), 8)
  assert (layer.w[...] == 0).all()
  layer.w[...] = jnp.full(8, 0.5)
  exact = np.asarray(X, np.float64)
  exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6) * 1.5
  np.testing.assert_allclose(layer(X), exact, atol=1e-5)
  half = X.astype(jnp.bfloat16)
  expected = layer(half.astype(jnp.float32)).astype(jnp.bfloat16)
  assert layer(half).dtype == jnp.bfloat16 and (layer(half) == expected).all()


def test_norm_over_all_heads():
  """One mean square for the 3 * 8 numbers of a token; the norm over one head at a time is another function."""
  layer = norm.Heads(norm.Spec(1e-6), 3, 8)
  layer.w[...] = jnp.asarray(np.random.default_rng(1).standard_normal((3, 8), np.float32))
  x = (np.random.default_rng(2).standard_normal((2, 3, 5, 8)) * np.arange(1, 4)[:, None, None]).astype(np.float32)
  flat = x.swapaxes(1, 2).reshape(2, 5, 24).astype(np.float64)
  flat = flat / np.sqrt((flat**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(layer.w[...]).reshape(-1)
  expected = flat.reshape(2, 5, 3, 8).swapaxes(1, 2)
  np.testing.assert_allclose(layer(x), expected, atol=1e-5)
  one = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6) * np.asarray(layer.w[...])[:, None]
  assert np.abs(expected - one).max() > 0.1


def test_layer_norm():
  """Mean 0, variance 1 before weight and bias; computed in float32."""
  layer = norm.Layer(1e-5).build(8)
  x = np.asarray(X, np.float64) + 3
  plain = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
  np.testing.assert_allclose(layer(X + 3), plain, atol=1e-5)
  layer.w[...], layer.b[...] = jnp.arange(8.0), jnp.full(8, 0.25)
  np.testing.assert_allclose(layer(X + 3), plain * np.arange(8) + 0.25, atol=1e-5)
  half = X.astype(jnp.bfloat16)
  expected = layer(half.astype(jnp.float32)).astype(jnp.bfloat16)
  assert layer(half).dtype == jnp.bfloat16 and (layer(half) == expected).all()


def test_learned_positions():
  """By place in the document, from the start of a call or counted; padding is harmless; no position is made up."""
  table = embed.Positions(5, 4, rngs=nnx.Rngs(0))
  w = table.w[...]
  assert (table(None, 0, 3) == w[None, :3]).all() and (table(None, 2, 3) == w[None, 2:]).all()
  assert (table(None, jnp.asarray([0, 3]), 2) == w[jnp.asarray([[0, 1], [3, 4]])]).all()
  assert (table(jnp.asarray([[0, 1, 0]]), 0, 3) == w[jnp.asarray([[0, 1, 0]])]).all()
  assert np.isfinite(table(jnp.asarray([[-2, -1, 0]]), 0, 3)).all()
  assert table(None, 0, 2, jnp.bfloat16).dtype == jnp.bfloat16
  with pytest.raises(config.Error, match='6 positions, but the model has learned 5'):
    table(None, 2, 4)


def test_plain_mlp():
  layer = mlp.Plain(16, bias=('up', 'down')).build(8, nnx.Rngs(0))
  layer.up.b[...], layer.down.b[...] = jnp.full(16, 0.3), jnp.full(8, -0.2)
  u, d = (np.asarray(getattr(layer, n).w[...], np.float64) for n in ('up', 'down'))
  h = np.asarray(X, np.float64) @ u + 0.3
  h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
  np.testing.assert_allclose(layer(X, None)[0], h @ d - 0.2, atol=1e-5)


def test_mlp():
  layer = mlp.Mlp(mlp.Spec(16, bias=('gate', 'down')), 8, rngs=nnx.Rngs(0))
  layer.gate.b[...], layer.down.b[...] = jnp.full(16, 0.3), jnp.full(8, -0.2)
  g, u, d = (np.asarray(getattr(layer, n).w[...], np.float64) for n in ('gate', 'up', 'down'))
  gate = np.asarray(X) @ g + 0.3
  np.testing.assert_allclose(layer(X, None)[0], (gate / (1 + np.exp(-gate)) * (X @ u)) @ d - 0.2, atol=1e-5)


def test_gelu_is_the_tanh_one():
  """A16."""
  x = np.linspace(-3, 3, 7)
  expected = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
  np.testing.assert_allclose(mlp.ACTIVATIONS['gelu'](jnp.asarray(x, jnp.float32)), expected, atol=1e-6)


def test_norm_without_a_weight_has_no_parameter():
  layer = norm.Norm(norm.Spec(1e-6, weight=False), 8)
  x = np.asarray(X, np.float64)
  np.testing.assert_allclose(layer(X), x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6), atol=1e-6)
  assert not jax.tree.leaves(nnx.state(layer))


def test_embedding_scale_is_rounded_to_the_compute_dtype():
  """A16: sqrt(3072) is 55.4256 and 55.5 in bfloat16."""
  table = embed.Embed(5, 4, scale=3072**0.5, rngs=nnx.Rngs(0))
  ids = jnp.asarray([[1, 4]])
  np.testing.assert_allclose(table(ids), table.w[...][ids] * 3072**0.5, rtol=1e-6)
  half = table(ids, jnp.bfloat16)
  assert (half == table.w[...][ids].astype(jnp.bfloat16) * jnp.bfloat16(55.5)).all()


def test_cache_is_written_in_place():
  """The donated buffer of all layers is updated where it is: the compiled step needs no second one."""
  k, v = cache.zeros(3, 2, 2, 64, 8, 8, dtype=jnp.float32)

  def write(k, v, new, start):
    view = cache.View((k, v), jnp.int32(1)).write((new, new), start)
    return view.memory

  new = jnp.ones((2, 2, 1, 8))
  for start in (jnp.int32(5), jnp.asarray([5, 7])):
    compiled = jax.jit(write, donate_argnums=(0, 1)).lower(k, v, new, start).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < k.nbytes / 4
    assert compiled.memory_analysis().alias_size_in_bytes == k.nbytes + v.nbytes
  got, _ = write(k, v, new, jnp.asarray([5, 7]))
  assert jnp.argwhere(got[1, :, 0, :, 0]).tolist() == [[0, 5], [1, 7]] and got.sum() == 2 * 2 * 8
