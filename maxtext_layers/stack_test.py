"""One stack under every plan and remat policy: the same numbers, and a program whose size does not grow with depth."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import attention
from maxtext_layers import block
from maxtext_layers import config
from maxtext_layers import mlp
from maxtext_layers import norm
from maxtext_layers import plan
from maxtext_layers import residual
from maxtext_layers import rope
from maxtext_layers import stack

LOCAL = block.Spec(attention.Spec(2, 1, 8, rope.Spec(8, 10000.0), window=3), mlp.Spec(24), norm.Spec())
GLOBAL = dataclasses.replace(LOCAL, mixer=dataclasses.replace(LOCAL.mixer, window=None))
BLOCKS = [LOCAL, GLOBAL, LOCAL, GLOBAL, LOCAL]
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, 16), np.float32))


def build(blocks=BLOCKS, **options):
  return stack.Stack(blocks, 16, rngs=nnx.Rngs(0), **options)


def weights(model):
  """{(layer, path): value}, so that gradients of different plans can be compared."""
  flat = {}
  for i, segment in enumerate(model.segments):
    for path, leaf in nnx.to_flat_state(nnx.state(segment)):
      for repeat, value in enumerate(leaf[...]):
        flat[model.plan[i].layer(repeat, path[1]), *path[2:]] = value
  return flat


def gradients(model, key=None, x=X):
  graph, state = nnx.split(model)

  @jax.jit
  def run(state, key):
    context = block.Context(dropout=key, rate=0.25)
    loss = lambda state: (nnx.merge(graph, state)(x, context)[0] ** 2).mean()
    return jax.value_and_grad(loss)(state)

  loss, grads = run(state, key)
  return loss, weights(nnx.merge(graph, grads))


@pytest.fixture(scope='module')
def scanned():
  model = build(scan=True)
  return model, gradients(model), gradients(model, jax.random.key(3))


def test_the_plan_is_computed(scanned):
  assert [(len(s.specs), s.count) for s in scanned[0].plan] == [(2, 2), (1, 1)]
  made = lambda blocks: nnx.eval_shape(lambda: build(blocks, scan='auto')).plan
  assert len(made(BLOCKS)) == 5 and len(made([LOCAL] * 9)) == 1


def test_unrolled_equals_scanned(scanned):
  """J12: the same first values, losses and gradients, with dropout as without."""
  model, plain, dropped = scanned
  flat = build(scan=False)
  ours, theirs = weights(model), weights(flat)
  assert ours.keys() == theirs.keys() and all((ours[k] == theirs[k]).all() for k in ours)
  for (loss, grads), key in ((plain, None), (dropped, jax.random.key(3))):
    other, others = gradients(flat, key)
    np.testing.assert_allclose(other, loss, rtol=1e-6)
    for k in grads:
      np.testing.assert_allclose(others[k], grads[k], atol=1e-6, err_msg=str(k))
  assert abs(plain[0] - dropped[0]) > 1e-3


@pytest.fixture(scope='module')
def two():
  return gradients(build([LOCAL] * 2, scan=True), jax.random.key(3))


@pytest.mark.parametrize('remat, scan', [('full', True), ('full', False), ('dots', True), ('qkv,hidden', True)])
def test_remat_changes_no_number(two, remat, scan):
  loss, grads = two
  other, others = gradients(build([LOCAL] * 2, scan=scan, remat=remat), jax.random.key(3))
  np.testing.assert_allclose(other, loss, rtol=1e-6)
  for k in grads:
    np.testing.assert_allclose(others[k], grads[k], atol=1e-6, err_msg=str(k))


@pytest.mark.parametrize('scan', [True, False], ids=['scanned', 'unrolled'])
def test_remat_keeps_less(scan):
  """What is kept between forward and backward, in order: nothing, the named, everything."""

  def kept(remat):
    graph, state = nnx.split(nnx.eval_shape(lambda: build([LOCAL] * 2, scan=scan, remat=remat)))
    loss = lambda state, x: nnx.merge(graph, state)(x, block.Context())[0].sum()
    pull = jax.eval_shape(lambda *args: jax.vjp(loss, *args)[1], state, X)
    return sum(a.size for a in jax.tree.leaves(pull))

  assert kept('full') < kept('hidden') < kept('qkv,hidden') < kept('none')


def test_unknown_remat_names_the_known():
  with pytest.raises(config.Error, match=r"remat 'qvk': 'qvk' is none of none, full, dots or a list of qkv, .*'qkv'"):
    build(remat='qvk')


def equations(jaxpr):
  """All equations, those of inner programs too."""
  total = 0
  for equation in jaxpr.eqns:
    inner = [p for p in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program) if is_program(p)]
    total += 1 + sum(equations(getattr(p, 'jaxpr', p)) for p in inner)
  return total


def is_program(value):
  return hasattr(value, 'eqns') or hasattr(getattr(value, 'jaxpr', None), 'eqns')


def test_program_size_does_not_grow_with_depth():
  """J12: forward and backward of 4 and of 16 scanned layers are programs of equally many equations."""

  def size(layers, scan):
    model = nnx.eval_shape(lambda: build([LOCAL] * layers, scan=scan))
    graph, state = nnx.split(model)
    loss = lambda state, x: nnx.merge(graph, state)(x, block.Context())[0].sum()
    return equations(jax.make_jaxpr(jax.grad(loss))(state, X).jaxpr)

  assert size(4, True) == size(16, True)
  assert size(4, False) > 2 * size(2, False) * 0.9  # the count does see depth


def test_norm_placement():
  """pre, post and sandwich against the formulas, with a mixer that does nothing."""

  @config.spec
  class Nothing:
    rope = None

    def needs(self):
      return frozenset()

    def build(self, d_model, rngs):
      return lambda x, context, view: (0 * x, view, {'calls': jnp.ones(())})

  def run(where):
    spec = dataclasses.replace(LOCAL, mixer=Nothing(), norm=where)
    layer = block.Block(spec, 16, rngs=nnx.Rngs(0))
    return layer(X, block.Context())[0], lambda x: layer.ffn(x, None)[0]

  rms = lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
  y, f = run(norm.Spec())
  np.testing.assert_allclose(y, X + f(rms(X)), atol=1e-5)
  y, f = run(residual.post(norm.Spec()))
  np.testing.assert_allclose(y, X + rms(f(X)), atol=1e-5)
  y, f = run(residual.sandwich(norm.Spec()))
  np.testing.assert_allclose(y, X + rms(f(rms(X))), atol=1e-5)


def test_auxiliary_values_are_summed_over_layers():
  """Scanned or not, what layers return beside x comes back as one sum a name."""

  @config.spec
  class Counting:
    d_ff: int = 4

    def build(self, d_model, rngs):
      return Counter()

  class Counter(nnx.Module):
    def __call__(self, x, context):
      return x, {'load': jnp.ones(3), 'loss': jnp.float32(0.5)}

  spec = dataclasses.replace(LOCAL, ffn=Counting())
  for scan in (True, False):
    _, _, aux = jax.jit(lambda m, x: m(x, block.Context()))(build([spec] * 3 + [LOCAL], scan=scan), X)
    assert aux['load'].tolist() == [3.0, 3.0, 3.0] and aux['loss'] == 1.5


def test_every_layer_has_its_address():
  for scan in (True, False):
    made = plan.plan(BLOCKS, scan)
    for layer in range(len(BLOCKS)):
      segment, position, repeat = plan.address(made, layer)
      assert made[segment].layer(repeat, position) == layer and made[segment].specs[position] == BLOCKS[layer]
  with pytest.raises(IndexError):
    plan.address(plan.plan(BLOCKS), 5)


def test_segments_do_not_go_with_caches():
  model = build()
  with pytest.raises(ValueError, match='negative positions'):
    model(X, block.Context(segments=jnp.ones((2, 6), jnp.int32)), model.caches(2, 6))
