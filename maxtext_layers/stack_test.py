"""One stack under every plan and remat policy: the same numbers, and a program whose size does not grow with depth."""

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
from maxtext_layers import mlp
from maxtext_layers import norm
from maxtext_layers import per_layer
from maxtext_layers import plan
from maxtext_layers import residual
from maxtext_layers import rope
from maxtext_layers import stack
from tests import layer_cases

LOCAL = block.Spec(attention.Spec(2, 1, 8, rope.Spec(8, 10000.0), window=3), mlp.Spec(24), norm.Spec())
GLOBAL = dataclasses.replace(LOCAL, mixer=dataclasses.replace(LOCAL.mixer, window=None))
BLOCKS = [LOCAL, GLOBAL, LOCAL, GLOBAL, LOCAL]
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, 16), np.float32))


KEY = jax.random.key(3, impl='unsafe_rbg')  # whose draws compile in a tenth of the time


def build(blocks=BLOCKS, **options):
  return stack.Stack(blocks, 16, rngs=nnx.Rngs(0), **options)


def alike(blocks=BLOCKS, **options):
  """The same with values that are not drawn: quick, and alike under every plan."""
  return layer_cases.alike(lambda: build(blocks, **options))


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

  @layer_cases.quick
  def run(state, key):
    context = block.Context(dropout=key, rate=0.25)
    loss = lambda state: (nnx.merge(graph, state)(x, context)[0] ** 2).mean()
    return jax.value_and_grad(loss)(state)

  loss, grads = run(state, key)
  return loss, weights(nnx.merge(graph, grads))


@pytest.fixture(scope='module')
def scanned():
  model = build(scan=True)
  return model, gradients(model), gradients(model, KEY)


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
  for (loss, grads), key in ((plain, None), (dropped, KEY)):
    other, others = gradients(flat, key)
    np.testing.assert_allclose(other, loss, rtol=1e-6)
    for k in grads:
      np.testing.assert_allclose(others[k], grads[k], atol=1e-6, err_msg=str(k))
  assert abs(plain[0] - dropped[0]) > 1e-3


@pytest.fixture(scope='module')
def two():
  return gradients(alike([LOCAL] * 2, scan=True), KEY)


@pytest.mark.parametrize('remat, scan', [('full', True), ('full', False), ('dots', True), ('qkv,hidden', True)])
def test_remat_changes_no_number(two, remat, scan):
  loss, grads = two
  other, others = gradients(alike([LOCAL] * 2, scan=scan, remat=remat), KEY)
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
    _, _, aux = layer_cases.quick(lambda m, x: m(x, block.Context()))(alike([spec] * 3 + [LOCAL], scan=scan), X)
    assert aux['load'].tolist() == [3.0, 3.0, 3.0] and aux['loss'] == 1.5


KEEPING = dataclasses.replace(LOCAL, mixer=dataclasses.replace(LOCAL.mixer, keep='local'))
READING = dataclasses.replace(LOCAL, mixer=dataclasses.replace(LOCAL.mixer, reuse='local'))
GIVEN = per_layer.Spec(5, norm.Spec())
SHARED = [
  dataclasses.replace(spec, given=GIVEN, scaled=True)
  for spec in (LOCAL, LOCAL, KEEPING, GLOBAL, READING, GLOBAL, READING, GLOBAL)
]
EACH = jnp.asarray(np.random.default_rng(1).standard_normal((8, 2, 6, 5), np.float32))


def with_inputs(key=None, **options):
  """(loss, gradients of the weights by layer, of x and of the layers' inputs) of SHARED."""
  model = alike(SHARED, **options)
  graph, state = nnx.split(model)

  @layer_cases.quick
  def run(state, x, each, key):
    loss = lambda *a: (nnx.merge(graph, a[0])(a[1], block.Context(dropout=key, rate=0.25), None, a[2])[0] ** 2).mean()
    return jax.value_and_grad(loss, (0, 1, 2))(state, x, each)

  loss, (grads, x, each) = run(state, X, EACH, key)
  return loss, weights(nnx.merge(graph, grads)) | {('x',): x, ('inputs',): each}


@pytest.fixture(scope='module')
def kept():
  return {dropout: with_inputs(KEY if dropout else None, scan=True) for dropout in (False, True)}


def test_kept_keys_and_values_make_their_own_segments():
  made = nnx.eval_shape(lambda: build(SHARED, scan=True))
  assert [(len(s.specs), s.count) for s in made.plan] == [(1, 2), (1, 1), (2, 2), (1, 1)]
  mixer = made.segments[2].blocks[1].mixer
  assert mixer.k is None and mixer.v is None and made.caches(1, 8)[2][1] == ()


@pytest.mark.parametrize('options', [{'scan': False}, {'scan': True, 'remat': 'full'}, {'scan': False, 'remat': 'full'},
                                     {'scan': True, 'remat': 'qkv,hidden'}], ids=str)  # fmt: skip
@pytest.mark.parametrize('dropout', [False, True], ids=['plain', 'dropout'])
def test_kept_keys_and_values_and_inputs_under_every_plan(kept, options, dropout):
  """Losses and gradients of weights, x and inputs are those of the scan: unrolled, recomputed, with dropout or not."""
  loss, grads = kept[dropout]
  other, others = with_inputs(KEY if dropout else None, **options)
  np.testing.assert_allclose(other, loss, rtol=1e-6)
  for k in grads:
    np.testing.assert_allclose(others[k], grads[k], atol=2e-5, rtol=1e-5, err_msg=str(k))
    if (k[-2:] == ('k', 'w') and k[0] == 2) or k == ('inputs',):
      assert np.abs(grads[k]).max() > 1e-6, k


def test_a_reader_attends_to_what_was_kept():
  """Two layers written out: the second's queries against the keys and values of the first."""
  model = alike([KEEPING, READING], scan=False)
  first, second = (nnx.merge(nnx.graphdef(s), jax.tree.map(lambda a: a[0], nnx.state(s))).blocks[0]
                   for s in model.segments)  # fmt: skip
  context = block.Context(tables={LOCAL.mixer.rope: rope.table(LOCAL.mixer.rope, np.arange(6)[None])}, kernel='xla')
  x, _, _ = first(X, context)
  k, v = first.mixer._keys_and_values(first.mixer_norm(X), context)
  q = rope.rotate(second.mixer.q(second.mixer_norm(x)), context.tables[LOCAL.mixer.rope])
  x = x + second.mixer.o(attend.xla(q, k, v, attend.Shape(8**-0.5, 3)))
  x = x + second.ffn(second.ffn_norm(x), context)[0]
  np.testing.assert_allclose(model(X, block.Context(kernel='xla'))[0], x, atol=1e-5)


@pytest.mark.parametrize('scan', [True, False], ids=['scanned', 'unrolled'])
@pytest.mark.parametrize('pad', [0, 2])
def test_decoding_from_kept_keys_and_values(scan, pad):
  """A full pass equals a prefill of 4 and 2 steps, also of a row padded on the left; readers have no memory."""
  model = alike(SHARED, scan=scan)
  whole = layer_cases.quick(lambda m, x, e: m(x, block.Context(), None, e)[0])(
    model, X[:, : 6 - pad], EACH[:, :, : 6 - pad]
  )
  fill = lambda a, axis: jnp.pad(a, [(pad if i == axis else 0, 0) for i in range(a.ndim)], constant_values=9.0)
  x, each = fill(X[:, : 6 - pad], 1), fill(EACH[:, :, : 6 - pad], 2)
  places = lambda begin, end: jnp.broadcast_to(jnp.arange(begin, end) - pad, (2, end - begin)) if pad else None
  y, caches = layer_cases.quick(lambda m, x, e, p: m(x, block.Context(p), m.caches(2, 8), e)[:2])(
    model, x[:, :4], each[:, :, :4], places(0, 4)
  )
  step = layer_cases.quick(lambda m, x, e, p, c, t: m(x, block.Context(p, start=t), c, e)[:2])
  parts = [y]
  for t in (4, 5):
    y, caches = step(model, x[:, t : t + 1], each[:, :, t : t + 1], places(t, t + 1), caches, jnp.int32(t))
    parts.append(y)
  np.testing.assert_allclose(jnp.concatenate(parts, 1)[:, pad:], whole, atol=2e-5)


def test_packed_rows_of_kept_keys_and_values():
  """Documents of 2 and 4 in a row equal each alone, though readers see only what was kept."""
  model = alike(SHARED, scan=True)
  run = layer_cases.quick(lambda m, x, p, s, e: m(x, block.Context(p, s), None, e)[0])
  packed = run(model, X, jnp.asarray([[0, 1, 0, 1, 2, 3]] * 2), jnp.asarray([[1, 1, 2, 2, 2, 2]] * 2), EACH)
  for part in (slice(0, 2), slice(2, 6)):
    alone = run(model, X[:, part], None, None, EACH[:, :, part])
    np.testing.assert_allclose(packed[:, part], alone, atol=2e-5)


def test_the_number_of_a_block_is_not_trained():
  model = alike([dataclasses.replace(LOCAL, scaled=True)] * 2, scan=True)
  model.segments[0].blocks[0].scale[...] = jnp.full((2, 1), 0.5)
  _, grads = gradients(model)
  scales = {k: g for k, g in grads.items() if 'scale' in k}
  assert len(scales) == 2 and all((g == 0).all() for g in scales.values())


@pytest.mark.parametrize('specs, says', [
  ([KEEPING, LOCAL, KEEPING], "layer 2 keeps 'local', as a layer before it does"),
  ([LOCAL, READING], "layer 1 reuses 'local', which no layer before it keeps"),
])  # fmt: skip
def test_names_of_what_is_kept_are_checked(specs, says):
  with pytest.raises(config.Error, match=says):
    build(specs)


def test_every_layer_has_its_address():
  for scan in (True, False):
    made = plan.plan(BLOCKS, scan)
    for layer in range(len(BLOCKS)):
      segment, position, repeat = plan.address(made, layer)
      assert made[segment].cut(np.arange(5) + 10)[repeat, position] == layer + 10
      assert made[segment].layer(repeat, position) == layer and made[segment].specs[position] == BLOCKS[layer]
  with pytest.raises(IndexError):
    plan.address(plan.plan(BLOCKS), 5)


def test_segments_do_not_go_with_caches():
  model = alike()
  with pytest.raises(ValueError, match='negative positions'):
    model(X, block.Context(segments=jnp.ones((2, 6), jnp.int32)), model.caches(2, 6))
