"""Every way to compute a mixture against running each token through its experts one by one, forwards and backwards."""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import attention
from maxtext_layers import block
from maxtext_layers import config
from maxtext_layers import dispatch
from maxtext_layers import mlp
from maxtext_layers import moe
from maxtext_layers import norm
from maxtext_layers import rope
from maxtext_layers import router
from maxtext_layers import stack
from tests import layer_cases

B, T, D, F, E = 2, 9, 6, 10, 5
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((B, T, D)), jnp.float32)
SPEC = moe.Spec(router.Spec(E, 2), F)
VARIANTS = {
  'silu': {},
  'biases, clipped': dict(activation=mlp.Clipped(0.8, 1.702, 1.0), bias=('gate', 'up', 'down')),
  'weight on the input': dict(weigh='input'),
}


def chosen(kind, k):
  """int32 [B, T, K]: experts of each token, E for none."""
  rng = np.random.default_rng(k)
  picks = np.stack([[rng.permutation(E)[:k] for _ in range(T)] for _ in range(B)]).astype(np.int32)
  if kind == 'two experts are empty':
    picks = np.stack([[rng.permutation(E - 2)[:k] for _ in range(T)] for _ in range(B)]).astype(np.int32)
  if kind == 'all to the last':
    picks[..., 0] = E - 1
    picks[..., 1:] = np.arange(k - 1)
  if kind == 'padding':
    picks[0, 5:] = E
    picks[1, :2] = E
  if kind == 'nothing but padding':
    picks[:] = E
  return picks


KINDS = ('even', 'two experts are empty', 'all to the last', 'padding', 'nothing but padding')


def experts(variant, k, dispatch='sorted', **more):
  spec = dataclasses.replace(SPEC, router=router.Spec(E, k), dispatch=dispatch, **VARIANTS[variant], **more)
  module = moe.Experts(spec, D, rngs=nnx.Rngs(0))
  for name in ('gate_b', 'up_b', 'down_b'):
    if (value := getattr(module, name)) is not None:
      value[...] = jnp.asarray(np.random.default_rng(7).standard_normal(value[...].shape), jnp.float32)
  return module


def routing(kind, k):
  picks = chosen(kind, k)
  weights = np.random.default_rng(1).uniform(0.2, 1.0, picks.shape).astype(np.float32) * (picks < E)
  return jnp.asarray(picks), jnp.asarray(weights)


def twin(module, picks, weights, kept=None):
  """[B, T, D] in float64; `kept` [B, T, K] bool: choices that are not dropped."""
  spec = module.spec
  of = lambda name: np.asarray(getattr(module, name)[...], np.float64) if getattr(module, name) is not None else None
  gate, up, down, gate_b, up_b, down_b = map(of, ('gate', 'up', 'down', 'gate_b', 'up_b', 'down_b'))
  y, x = np.zeros(X.shape), np.asarray(X, np.float64)
  for b, t, k in np.ndindex(picks.shape):
    e, w = int(picks[b, t, k]), float(weights[b, t, k])
    if e == E or (kept is not None and not kept[b, t, k]):
      continue
    row = x[b, t] * (w if spec.weigh == 'input' else 1.0)
    g, u = row @ gate[e] + (0 if gate_b is None else gate_b[e]), row @ up[e] + (0 if up_b is None else up_b[e])
    if isinstance(spec.activation, mlp.Clipped):
      g, u = min_max(g, None, 0.8), min_max(u, -0.8, 0.8)
      hidden = (u + 1.0) * g / (1 + np.exp(-1.702 * g))
    else:
      hidden = g / (1 + np.exp(-g)) * u
    out = hidden @ down[e] + (0 if down_b is None else down_b[e])
    y[b, t] += out * (1.0 if spec.weigh == 'input' else w)
  return y


def min_max(a, low, high):
  return np.minimum(a if low is None else np.maximum(a, low), high)


@functools.partial(layer_cases.quick, static_argnames=('graph', 'platform'))
def both(graph, state, x, picks, weights, platform=None):
  """(y, gradients with respect to parameters, x and weights) of a loss that weighs all outputs differently."""

  def loss(state, x, weights):
    module = nnx.merge(graph, state)
    if platform is None:
      y = module(x, router.Routing(picks, weights, {}))
    else:
      names = ('gate', 'up', 'down', 'gate_b', 'up_b', 'down_b')
      held = {n: getattr(module, n)[...] for n in names if getattr(module, n) is not None}
      y = moe._grouped(module.spec, platform, x, picks, weights, held)
    return (y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum(), y

  (_, y), grads = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(state, x, weights)
  return y, grads


def assert_same(a, b, **tolerance):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('variant, k', [('silu', 1), ('silu', 3), ('biases, clipped', 2), ('weight on the input', 2)])
def test_all_ways_agree(variant, k, kind):
  """Dropless whatever the loads are; `capacity` with room for all tokens drops none (F6: more room than tokens)."""
  picks, weights = routing(kind, k)
  dense = experts(variant, k, 'dense')
  y, grads = both(*nnx.split(dense), X, picks, weights)
  np.testing.assert_allclose(y, twin(dense, picks, weights), atol=2e-5)
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
  real = jnp.asarray(picks < E)
  where = lambda grads: (*grads[:2], jnp.where(real, grads[2], 0))  # what a choice that is none would weigh is nothing
  for name, platform in (('sorted', None), ('sorted', 'tpu'), ('capacity', None)):
    module = experts(variant, k, name, **({'capacity': 1e6} if name == 'capacity' else {}))
    other, others = both(*nnx.split(module), X, picks, weights, platform)
    np.testing.assert_allclose(other, y, atol=1e-5, err_msg=f'{name} {platform}')
    assert_same(where(others), where(grads), atol=2e-5)


@pytest.mark.parametrize('capacity, kind', [(1.0, 'even'), (0.5, 'all to the last'), (0.01, 'even'), (0.5, 'padding')])
def test_what_does_not_fit_is_dropped(capacity, kind):
  """Room an expert and row: ceil(capacity * T * K / E); first choices come first, then the order of the tokens."""
  k = 2
  picks, weights = routing(kind, k)
  module = experts('silu', k, 'capacity', capacity=capacity)
  room = max(int(np.ceil(capacity * T * k / E)), 1)
  kept, used = np.zeros(picks.shape, bool), np.zeros((B, E + 1), int)
  for b, j, t in np.ndindex(B, k, T):
    e = picks[b, t, j]
    kept[b, t, j] = used[b, e] < room
    used[b, e] += 1
  y, grads = both(*nnx.split(module), X, picks, weights)
  np.testing.assert_allclose(y, twin(module, picks, weights, kept), atol=2e-5)
  assert (used[:, :E] > room).any() and kept[picks < E].any()
  dropped = np.asarray(picks < E) & ~kept
  assert not np.asarray(grads[2])[dropped].any() and np.asarray(grads[2])[kept & np.asarray(picks < E)].all()


def test_more_room_than_tokens():
  """F6: three tokens, room for many more: nothing is dropped and the result is the dropless one."""
  picks, weights = (a[:1, :3] for a in routing('even', 2))
  a, _ = both(*nnx.split(experts('silu', 2, 'capacity', capacity=100.0)), X[:1, :3], picks, weights)
  b, _ = both(*nnx.split(experts('silu', 2)), X[:1, :3], picks, weights)
  np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize('tokens', [1, 3, 40])
def test_blocks_suffice_for_every_load(tokens):
  """Each choice has a row of its own in a block of its expert, for loads from even to all on one."""
  rng = np.random.default_rng(tokens)
  for size in (1, 2, 8):
    for spread in (E, 2, 1):
      picks = jnp.asarray(rng.integers(0, spread, (tokens, 2)), jnp.int32)
      plan = dispatch.sorted_plan(picks, E, size, ragged=False)
      rows = np.asarray(plan.slots).ravel()
      assert len(set(rows)) == 2 * tokens and rows.max() < plan.blocks * size
      np.testing.assert_array_equal(np.asarray(plan.experts)[rows // size], np.asarray(picks).ravel())
      np.testing.assert_array_equal(np.asarray(plan.sources)[rows], np.arange(2 * tokens))
      assert (np.asarray(plan.sources) < 2 * tokens).sum() == 2 * tokens


def test_shared_experts():
  """What all visit is added, times the sigmoid of its gate where there is one."""
  base = dataclasses.replace(SPEC, shared=mlp.Spec(7))
  gated = dataclasses.replace(base, shared_gate=True)
  for spec in (base, gated):
    module = spec.build(D, nnx.Rngs(1))
    y, aux = module(X, block.Context())
    shared, _ = module.shared(X, None)
    if spec.shared_gate:
      z = np.asarray(X) @ np.asarray(module.shared_gate.w[...])
      shared = shared / (1 + np.exp(-z))
    routed = module.experts(X, module.router(X, block.Context()))
    np.testing.assert_allclose(y, routed + shared, atol=1e-5)
    assert aux == {}


BLOCK = block.Spec(
  attention.Spec(2, 1, 4, rope.Spec(4, 1e4)),
  moe.Spec(router.Spec(E, 2, score='sigmoid', correction=True, balance=router.Balance(0.1, z_loss=0.01)), F),
  norm.Spec(),
)
DENSE = dataclasses.replace(BLOCK, ffn=mlp.Spec(F))


def test_losses_and_loads_leave_the_stack():
  """F2: scanned and unrolled, plain and nested in periods, with recomputation: the same losses, above 0; loads are
  those of each layer, under the path of its bias."""
  blocks = [DENSE, *[DENSE, BLOCK] * 2]
  results = {}
  for scan, remat in ((True, 'none'), (False, 'none'), (True, 'full')):
    model = layer_cases.alike(lambda s=scan, r=remat: stack.Stack(blocks, D, rngs=nnx.Rngs(0), scan=s, remat=r))
    graph, state = nnx.split(model)
    segments = jnp.asarray(np.repeat([[1, 2, 0]], B, 0).repeat(3, 1))

    @layer_cases.quick
    @functools.partial(jax.grad, has_aux=True)
    def run(state, graph=graph, segments=segments):
      _, _, aux = nnx.merge(graph, state)(X, block.Context(segments=segments))
      return aux['balance_loss'] + aux['router_z_loss'], aux

    grads, aux = run(state)
    paths = {'.'.join(map(str, path)) for path, _ in nnx.to_flat_state(state)}
    loads = aux.pop('loads')
    assert loads.keys() == {p for p in paths if p.endswith('ffn.router.correction')}
    by_layer = {}
    for path, load in loads.items():
      _, i, _, j, *_ = path.split('.')
      for repeat, row in enumerate(load):
        by_layer[model.plan[int(i)].layer(repeat, int(j))] = np.asarray(row)
    assert sorted(by_layer) == [2, 4] and all(row.sum() == B * 6 * 2 for row in by_layer.values())
    assert any(np.any(g) for g in jax.tree.leaves(grads))
    results[scan, remat] = (aux, by_layer)
  first, loads = results[True, 'none']
  assert set(first) == {'balance_loss', 'router_z_loss'} and min(first.values()) > 0
  for aux, by_layer in results.values():
    assert_same(aux, first, rtol=1e-5)
    assert_same(by_layer, loads)


def test_low_precision_routes_as_float32_does():
  """Scores are float32: rounding of x and w apart, bfloat16 experts get the tokens that float32 ones get."""
  module = SPEC.build(D, nnx.Rngs(2))
  x = X.astype(jnp.bfloat16)
  low = module.router(x, block.Context())
  high = module.router(x.astype(jnp.float32), block.Context())
  np.testing.assert_array_equal(low.experts, high.experts)
  assert low.weights.dtype == jnp.float32 and module(x, block.Context())[0].dtype == jnp.bfloat16


def test_specs_that_make_no_sense():
  with pytest.raises(config.Error, match="dispatch 'sort' is none of sorted, dense, capacity; did you mean 'sorted'"):
    dataclasses.replace(SPEC, dispatch='sort')
  with pytest.raises(config.Error, match="weigh 'inputs'"):
    dataclasses.replace(SPEC, weigh='inputs')
  with pytest.raises(config.Error, match='capacity=0'):
    dataclasses.replace(SPEC, capacity=0.0)
