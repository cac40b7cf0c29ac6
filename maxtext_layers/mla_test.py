"""Latent attention against the equations of arXiv 2405.04434, section 2.1, in float64, and its two forms compared."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import attend
from maxtext_layers import attention
from maxtext_layers import block
from maxtext_layers import config
from maxtext_layers import mla
from maxtext_layers import mlp
from maxtext_layers import norm
from maxtext_layers import rope
from maxtext_layers import stack
from tests import layer_cases

PLAIN = mla.Spec(3, 12, nope_dim=8, value_dim=10, rope=rope.Spec(6, 10000.0, pairs='neighbours'))
MIXERS = {
  'plain': PLAIN,
  'queries through a latent': dataclasses.replace(PLAIN, q_rank=14, bias=('q_down', 'kv_down', 'o')),
  'halves and a scale': dataclasses.replace(PLAIN, rope=rope.Spec(6, 10000.0), scale=0.7),
}
D = 16
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 12, D), np.float32))


def build(mixer, scan=True):
  spec = block.Spec(mixer, mlp.Spec(24), norm.Spec())
  return layer_cases.randomised(lambda: stack.Stack([spec] * 2, D, rngs=nnx.Rngs(0), scan=scan))


def twin(module, x):
  """Equations 9 to 19 of the paper for one row x [T, D], head by head and query by query, in float64."""
  spec = module.spec
  w = lambda part: np.asarray(part.w[...], np.float64)
  b = lambda part: 0.0 if part.b is None else np.asarray(part.b[...], np.float64)
  rms = lambda part, c: c / np.sqrt((c * c).mean(-1, keepdims=True) + spec.latent_norm.eps) * w(part)

  def turned(a, t):
    half = a.shape[-1] // 2
    angles = t * 10000.0 ** (-2 * np.arange(half) / (2 * half))
    pair = a.reshape(half, 2).T if spec.rope.pairs == 'neighbours' else a.reshape(2, half)
    z = (pair[0] + 1j * pair[1]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag])

  if spec.q_rank is None:
    q = np.einsum('td,dnh->tnh', x, w(module.q))
  else:
    q = np.einsum('tr,rnh->tnh', rms(module.q_norm, x @ w(module.q_down) + b(module.q_down)), w(module.q_up))
  down = x @ w(module.kv_down) + b(module.kv_down)
  up = np.einsum('tr,rnh->tnh', rms(module.kv_norm, down[:, : spec.kv_rank]), w(module.kv_up))
  out = np.zeros((len(x), spec.heads, spec.value_dim))
  for n in range(spec.heads):
    keys = [np.r_[up[s, n, : spec.nope_dim], turned(down[s, spec.kv_rank :], s)] for s in range(len(x))]
    for t in range(len(x)):
      query = np.r_[q[t, n, : spec.nope_dim], turned(q[t, n, spec.nope_dim :], t)]
      scores = np.array([query @ keys[s] for s in range(t + 1)]) * (spec.scale or (8 + 6) ** -0.5)
      raised = np.exp(scores - scores.max())
      out[t, n] = raised @ up[: t + 1, n, spec.nope_dim :] / raised.sum()
  return np.einsum('tnh,nhd->td', out, w(module.o)) + b(module.o)


@pytest.mark.parametrize('name', MIXERS)
def test_the_equations_of_the_paper(name):
  spec = MIXERS[name]
  module = layer_cases.randomised(lambda: spec.build(D, nnx.Rngs(0)))
  context = block.Context(tables={spec.rope: rope.table(spec.rope, np.arange(12)[None])}, kernel='chunked')
  y, _, aux = layer_cases.quick(lambda module, x: module(x, context))(module, X)
  assert not aux
  np.testing.assert_allclose(y, [twin(module, np.asarray(row, np.float64)) for row in X], atol=1e-5)


@pytest.mark.parametrize('name, scan', [*((name, True) for name in MIXERS), ('plain', False)])
def test_decode_parity(name, scan):
  """Expanded as a whole == expanded prefill of 7 and 5 absorbed steps of one token."""
  model = build(MIXERS[name], scan)
  caches = model.caches(2, 15)
  assert [a.shape[-3:] for a in jax.tree.leaves(caches)][:2] == [(1, 15, 12), (1, 15, 6)]
  np.testing.assert_allclose(layer_cases.decoded(model, X, 7, length=15), layer_cases.whole(model, X), atol=2e-5)


def test_absorbed_from_the_first_token_on():
  """A start that is an array is not known to be 0: the whole prompt reads the memory, absorbed."""
  model = build(MIXERS['queries through a latent'])
  y, _ = layer_cases.run(model, X, model.caches(2, 12), jnp.int32(0))
  np.testing.assert_allclose(y, layer_cases.whole(model, X), atol=2e-5)


def test_prefill_in_pieces():
  """A prompt written in two calls: the second starts behind the first and reads what it left."""
  model = build(PLAIN)
  y, caches = layer_cases.prefill(model, X[:, :5], 12)
  z, _ = layer_cases.run(model, X[:, 5:], caches, jnp.int32(5))
  np.testing.assert_allclose(jnp.concatenate([y, z], 1), layer_cases.whole(model, X), atol=2e-5)


def test_ragged_prompts_padded_left():
  """B3: prompts of 7 and 4 tokens in one batch, the second padded by 3 on the left: each decodes as if alone."""
  model = build(MIXERS['queries through a latent'])
  for row, y in enumerate(layer_cases.ragged(model, X, (7, 4), 3)):
    np.testing.assert_allclose(y, layer_cases.whole(model, X)[row, : len(y)], atol=2e-5)


def test_packed_documents_do_not_see_each_other():
  """Two documents in a row, positions starting again: each as if alone; padding is finite, with its gradients."""
  model = build(PLAIN)
  segments = jnp.asarray([[1] * 5 + [2] * 4 + [0] * 3] * 2)
  positions = jnp.asarray([[*range(5), *range(4), *range(3)]] * 2)

  def packed(model, x):
    return model(x, block.Context(positions, segments))[0]

  y = layer_cases.quick(packed)(model, X)
  np.testing.assert_allclose(y[:, :5], layer_cases.whole(model, X[:, :5]), atol=2e-5)
  np.testing.assert_allclose(y[:, 5:9], layer_cases.whole(model, X[:, 5:9]), atol=2e-5)
  gradients = layer_cases.quick(jax.grad(lambda x: (packed(model, x) ** 2).sum()))(X)
  assert np.isfinite(y).all() and np.isfinite(gradients).all()


def test_kernels_that_cannot_take_values_of_another_size_are_refused():
  assert PLAIN.needs() == {'values'} and not dataclasses.replace(PLAIN, value_dim=14).needs()
  with pytest.raises(config.Error, match=r"kernel 'cudnn' cannot do values.*chunked, xla"):
    attention.resolve('cudnn', 'gpu', specs=[PLAIN])
  assert attention.resolve('auto', 'cpu', specs=[PLAIN]) == 'chunked'


def test_chunked_and_whole_agree_with_values_of_another_size():
  rng = np.random.default_rng(3)
  q, k, v = (jnp.asarray(rng.standard_normal((2, n, 200, h), np.float32)) for n, h in ((4, 8), (2, 8), (2, 5)))
  shape = attend.Shape(0.4, window=70)
  y = layer_cases.quick(attend.chunked, static_argnums=3)(q, k, v, shape)
  assert y.shape == (2, 4, 200, 5)
  np.testing.assert_allclose(y, attend.xla(q, k, v, shape), atol=1e-5)
