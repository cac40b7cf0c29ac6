"""Compressed attention against a twin written from the report's equations; decode, padding and packed rows."""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import block
from maxtext_layers import compressed
from maxtext_layers import config
from maxtext_layers import indexer
from maxtext_layers import mlp
from maxtext_layers import norm
from maxtext_layers import rope
from maxtext_layers import stack
from tests import layer_cases

EPS, ROTARY, N, H = 1e-5, 4, 4, 6
WINDOW = compressed.Spec(
  heads=N, head_dim=H, q_rank=7, groups=2, o_rank=3, rope=rope.Spec(ROTARY, 50.0), window=5, norm=norm.Spec(EPS)
)
HEAVY = dataclasses.replace(WINDOW, compress=compressed.Compress(7))
LIGHT = dataclasses.replace(WINDOW, compress=compressed.Compress(3, overlap=True, index=indexer.Spec(2, 8, top_k=2)))
SPECS = {'window': WINDOW, 'heavy': HEAVY, 'light': LIGHT}
D, T = 10, 70  # more tokens than a block of queries
X = np.random.default_rng(0).standard_normal((2, T, D))


def apply(layer, x, positions=None, segments=None):
  places = np.arange(x.shape[1])[None] if positions is None else positions
  tables = {layer.spec.rope: rope.table(layer.spec.rope, places)}
  return layer(x, block.Context(positions, segments, tables=tables))[0]


_apply = layer_cases.quick(apply)


def call(layer, x, positions=None, segments=None):
  return _apply(layer, jnp.asarray(x, jnp.float32), positions, segments)


def turned(x, position, sign=1):
  """The last ROTARY elements of x [.., H], neighbour with neighbour, by a position."""
  angle = sign * position * 50.0 ** (-np.arange(ROTARY // 2) / (ROTARY // 2))
  y = np.array(x)
  a, b = x[..., -ROTARY::2], x[..., 1 - ROTARY :: 2]
  y[..., -ROTARY::2] = a * np.cos(angle) - b * np.sin(angle)
  y[..., 1 - ROTARY :: 2] = b * np.cos(angle) + a * np.sin(angle)
  return y


def rms(x, weight=1.0):
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def entries(pool, compress, x):
  """Equations 9 to 12 (overlap) and 20 to 23 of section 2.3: the entries of a row [T, D]."""
  kv, gate, b = (np.asarray(a[...], np.float64) for a in (pool.kv.w, pool.gate.w, pool.b))
  weight, m = np.asarray(pool.norm.w[...], np.float64), compress.ratio
  values, logits = np.einsum('TD,DCH->CTH', x, kv), np.einsum('TD,DCH->CTH', x, gate)
  out = []
  for e in range(len(x) // m):
    own = slice(e * m, e * m + m)
    c, z = values[-1, own], logits[-1, own] + b[:, -1]
    if compress.overlap and e:
      before = slice(e * m - m, e * m)
      c, z = np.concatenate([values[0, before], c]), np.concatenate([logits[0, before] + b[:, 0], z])
    share = np.exp(z - z.max(0))
    out.append(turned(rms((share / share.sum(0) * c).sum(0), weight), e * m))
  return np.array(out).reshape(-1, kv.shape[-1])


def twin(layer, x):
  """One row [T, D] in float64, a query at a time."""
  spec, compress = layer.spec, layer.spec.compress
  w = {}
  for path, v in nnx.to_flat_state(nnx.state(layer)):
    w['.'.join(map(str, path))] = np.asarray(v.get_value(), np.float64)
  latent = rms(x @ w['q_down.w'], w['q_norm.w'])
  q = rms(np.einsum('TQ,QNH->TNH', latent, w['q_up.w']))
  kv = rms(x @ w['kv.w'], w['kv_norm.w'])
  kv = np.array([turned(a, t) for t, a in enumerate(kv)])
  made = entries(layer.pool, compress, x) if compress else None
  if compress and compress.index:
    keys = entries(layer.indexer.pool, compress, x)
    ask = np.einsum('TQ,QJI->TJI', latent, w['indexer.q.w'])
    head_weights = x @ w['indexer.weights.w'] * 2**-0.5 * 8**-0.5
  y = []
  for t in range(len(x)):
    seen = kv[max(0, t - spec.window + 1) : t + 1]
    if compress:
      closed = np.arange((t + 1) // compress.ratio)
      if compress.index:
        ranks = np.array([head_weights[t] @ np.maximum(turned(ask[t], t) @ keys[e], 0) for e in closed])  # 13 to 16
        closed = np.argsort(-ranks, kind='stable')[: compress.index.top_k] if len(closed) else closed
      seen = np.concatenate([seen, made[closed]])
    raised = np.exp(turned(q[t], t) @ seen.T * H**-0.5)  # [N, S]
    p = raised / (raised.sum(-1, keepdims=True) + np.exp(w['sinks'])[:, None])
    o = turned(p @ seen, t, -1).reshape(spec.groups, -1, H)
    y.append(np.einsum('GNH,GNHR,GRD->D', o, w['o_down'], w['o_up.w']))
  return np.array(y)


@pytest.fixture(name='layers', scope='module')
def _layers():
  return {name: layer_cases.randomised(lambda spec=spec: spec.build(D, nnx.Rngs(0))) for name, spec in SPECS.items()}


@pytest.mark.parametrize('name', SPECS)
def test_layer_equals_the_equations(layers, name):
  got = call(layers[name], X)
  np.testing.assert_allclose(got, np.stack([twin(layers[name], x) for x in X]), atol=5e-5)


@pytest.mark.parametrize('name', SPECS)
def test_packed_rows_equal_rows_of_their_own(layers, name):
  """B6: stretches begin with the document, not with the row; padding stays finite, in gradients too."""
  segments = jnp.asarray([[1] * 25 + [2] * 40 + [0] * 5])
  positions = jnp.asarray([[*range(25), *range(40), *[0] * 5]])
  x = jnp.asarray(X[:1], jnp.float32)

  @functools.partial(jax.grad, has_aux=True)
  def packed(x):
    y = apply(layers[name], x, positions, segments)
    return (y[:, :25] ** 2).sum(), y

  gradient, whole = layer_cases.quick(packed)(x)
  for y in (whole, call(layers[name], x, segments=segments)):
    np.testing.assert_allclose(y[:, :25], call(layers[name], X[:1, :25]), atol=5e-5)
    np.testing.assert_allclose(y[:, 25:65], call(layers[name], X[:1, 25:65]), atol=5e-5)
    assert np.isfinite(y).all()
  assert np.isfinite(gradient).all() and not gradient[:, 25:].any()


def test_padding_on_the_right_changes_nothing(layers):
  for layer in layers.values():
    np.testing.assert_allclose(call(layer, X[:1, 25:65])[:, :25], call(layer, X[:1, 25:50]), atol=1e-5)


@pytest.fixture(name='models', scope='module')
def _models():
  build = lambda spec: stack.Stack([block.Spec(spec, mlp.Spec(9), norm.Spec())] * 2, D, rngs=nnx.Rngs(0), scan=True)
  return {name: layer_cases.randomised(lambda spec=spec: build(spec)) for name, spec in SPECS.items()}


@pytest.mark.parametrize('name', SPECS)
def test_decode_equals_the_whole(models, name):
  """A prompt of 8 in one call, of 6 in another, then a token at a time, across windows and stretches."""
  model, x = models[name], jnp.asarray(X[:, :24], jnp.float32)
  np.testing.assert_allclose(layer_cases.decoded(model, x, 8, 14), layer_cases.whole(model, x), atol=1e-4)


@pytest.mark.parametrize('name', SPECS)
@pytest.mark.parametrize('side', ['left', 'right'])
def test_ragged_prompts(models, name, side):
  """B3: prompts of 10 and 6 tokens in one batch; padding on either side is said by negative positions."""
  model, x = models[name], jnp.asarray(X[:, :24], jnp.float32)
  for row, y in enumerate(layer_cases.ragged(model, x, (10, 6), 7, side)):
    np.testing.assert_allclose(y, layer_cases.whole(model, x)[row, : len(y)], atol=1e-4)


def test_memory_grows_by_entries_not_by_tokens():
  """A layer at the released sizes: 4 tokens an entry of 512 and one of 128 numbers, whatever the window holds."""
  spec = compressed.Spec(
    heads=64, head_dim=512, q_rank=1024, groups=8, o_rank=1024, rope=rope.Spec(64, 1e4), window=128, norm=norm.Spec(),
    compress=compressed.Compress(4, True, indexer.Spec(64, 128, 512)),
  )  # fmt: skip
  sizes = [sum(a.size for a in jax.eval_shape(lambda n=n: spec.cache(1, 1, n, jnp.bfloat16))) for n in (1024, 2048)]
  assert sizes[1] - sizes[0] == 1024 // 4 * (512 + 128)


def test_what_cannot_be_is_said():
  with pytest.raises(config.Error, match='groups=3'):
    dataclasses.replace(WINDOW, groups=3)
  with pytest.raises(config.Error, match='window=0 is not a positive whole number'):
    dataclasses.replace(WINDOW, window=0)
  with pytest.raises(config.Error, match='ratio=0 is not a positive whole number'):
    compressed.Compress(0)
  with pytest.raises(config.Error, match='head_dim=8 is odd, or larger than head_dim=6'):
    dataclasses.replace(WINDOW, rope=rope.Spec(8, 50.0))
  with pytest.raises(config.Error, match='loss'):
    index = dataclasses.replace(LIGHT.compress.index, loss=1.0)
    dataclasses.replace(LIGHT, compress=dataclasses.replace(LIGHT.compress, index=index)).build(D, nnx.Rngs(0))
