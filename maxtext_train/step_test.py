"""The step on a tiny decoder. Compilations are shared: a step is compiled once for a layout."""

import functools

from absl import logging
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import config
from maxtext_layers import sharding
from maxtext_models import decoder
from maxtext_models.families import llama
from maxtext_train import losses
from maxtext_train import optimizer
from maxtext_train import schedule
from maxtext_train import state
from maxtext_train import step

B, T, V = 4, 32, 48
CARD = llama.Llama(layers=1, d_model=16, d_ff=24, heads=2, kv_heads=1, head_dim=8, vocab=V, context=T)
RULES = sharding.PRESETS['fsdp']
SETTINGS = optimizer.Config(clip=0.5)
RATE = schedule.build(schedule.Config(kind=schedule.Kind.LINEAR, peak=1e-2, warmup=2), 10)


@functools.cache
def mesh():
  return sharding.mesh(jax.devices()[:1])


@functools.cache
def plan(eps=1e-3):
  """eps is large: Adam's direction for a gradient near zero is the sign of rounding."""
  build = lambda: decoder.Decoder(CARD, rngs=nnx.Rngs(0), scan=False)
  transform = functools.partial(optimizer.build, optimizer.Config(clip=0.5, eps=eps))
  with sharding.use(mesh(), RULES):
    return state.plan(build, transform, mesh(), RULES)


@functools.cache
def compiled(accumulate=1, clip=0.5, rate=0.0, chunk=losses.Chunk.TOKENS, seed=None, kernel='chunked'):
  loss = functools.partial(losses.next_token, chunk=chunk, chunks=3, kernel=kernel, rate=rate)
  return step.Step(plan(), loss, RATE, accumulate=accumulate, clip=clip, seed=seed)


@functools.cache
def initial():
  with sharding.use(mesh(), RULES):
    return jax.device_get(state.create(plan()))


def fresh():
  """The state at step 0; a step takes it away."""
  return jax.device_put(initial(), plan().shardings)


def take(run, start, batch):
  with sharding.use(mesh(), RULES):
    return run(start, batch)


def batch(counts=(1, 7, 30, 2), seed=0, rows=B):
  """Rows with so many tokens that count; the rest is padding."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, V, (rows, T + 1), dtype=np.int32)
  real = np.arange(T)[None] < np.asarray(counts)[:, None]
  return {
    'tokens': tokens[:, :-1],
    'targets': tokens[:, 1:],
    'positions': np.broadcast_to(np.arange(T, dtype=np.int32), (rows, T)),
    'segments': real.astype(np.int32),
    'weights': real.astype(np.float32),
  }


def assert_close(a, b, **tolerance):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def bit_equal(a, b):
  return jax.tree.all(jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b))


@functools.cache
def whole():
  """One update on the uneven batch, in one piece."""
  return jax.device_get(take(compiled(), fresh(), batch()))


@pytest.mark.parametrize('accumulate', [2, 4])
@pytest.mark.parametrize('order', [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_layouts_give_one_update(accumulate, order):
  """C1, C2, C4: rows with 1, 7, 30 and 2 valid tokens: parameters, loss, gradient norm and clip (which acts, the norm
  being above 0.5) are those of the whole batch, for micro-batches of 2 and of 1, in any order."""
  shuffled = {name: value[list(order)] for name, value in batch().items()}
  after, metrics = jax.device_get(take(compiled(accumulate), fresh(), shuffled))
  expected, expected_metrics = whole()
  assert expected_metrics['grad_norm'] > 2 * 0.5
  assert expected_metrics['weight'] == 40
  assert_close(metrics, expected_metrics, rtol=2e-6)
  assert_close(after.params, expected.params, rtol=0, atol=1e-6)


def test_loss_is_the_mean_over_tokens():
  """C6, B13: the loss is the dense one over the tokens that count, in one division, and padding does not count."""
  params = fresh().params
  model = nnx.merge(plan().graph, params)
  data = batch()
  x, _, _ = model.hidden(data['tokens'], positions=data['positions'], segments=data['segments'], kernel='xla')
  logits = np.asarray(model.logits(x), np.float64)
  lse = np.log(np.exp(logits).sum(-1))
  nats = lse - np.take_along_axis(logits, data['targets'][..., None], -1)[..., 0]
  real = data['weights'] > 0
  assert real.sum() == 1 + 7 + 30 + 2 == data['weights'].sum()
  assert whole()[1]['loss'] == pytest.approx(nats[real].mean(), rel=1e-6)


def test_curves_of_two_layouts():
  """C3: five steps of one token stream give the same losses with four micro-batches of a row as with one of four."""
  curves = []
  for accumulate in (1, 4):
    now, curve = fresh(), []
    for k in range(5):
      now, metrics = take(compiled(accumulate), now, batch(seed=k))
      curve.append(float(metrics['loss']))
    curves.append(curve)
  np.testing.assert_allclose(curves[0], curves[1], rtol=1e-5)


def test_accumulator_is_float32():
  """C3: many small gradients of a bfloat16 parameter are not lost: 1 + 255 x 2^-9 needs 9 bits, bfloat16 has 8."""
  graph, params = nnx.split(nnx.Linear(1, 1, use_bias=False, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
  loss = lambda model, rows, key: losses.Loss((model.kernel[...].astype(jnp.float32) * rows).sum(), jnp.float32(1), {})
  rows = np.full((256, 1), 2.0**-9, np.float32)
  rows[0] = 1
  grads, out = step.summed(graph, loss, params, rows, None, 256, None)
  (total,) = jax.tree.leaves(grads)
  assert total.dtype == jnp.float32 and float(total[0, 0]) == 1 + 255 * 2.0**-9
  assert out.weight == 256


def test_auxiliary_terms_do_not_depend_on_accumulation():
  """An auxiliary loss other than zero: its gradient is not divided by the number of tokens or of micro-batches."""

  def loss(model, batch, key):
    aux = jnp.square(model.kernel[...]).sum()  # as a router's balance: a mean, the same for every micro-batch
    weight = batch.sum()
    total = (model(batch) * batch).sum() + aux * weight
    return losses.Loss(total, weight, {'balance': aux * weight})

  graph, params = nnx.split(nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0)))
  (w,) = jax.tree.leaves(params)
  rows = np.asarray([[1.0], [2.0], [3.0], [6.0]], np.float32)
  transform = optimizer.build(optimizer.Config(), params)
  for accumulate in (1, 2, 4):
    _, metrics = step.train_step(
      graph,
      loss,
      transform,
      0.1,
      state.State(params, transform.init(params), jnp.int32(0)),
      rows,
      accumulate=accumulate,
    )
    w0 = float(w[0, 0])
    assert float(metrics['balance']) == pytest.approx(w0**2, rel=1e-6)
    assert float(metrics['loss']) == pytest.approx(w0 * 50 / 12 + w0**2, rel=1e-6)
    assert float(metrics['grad_norm']) == pytest.approx(abs(50 / 12 + 2 * w0), rel=1e-6)


def test_batch_not_divisible():
  """C5: rows that fit no micro-batch are an error, not thrown away."""
  with pytest.raises(config.Error, match='batch=4 is not divisible by accumulate=3'):
    with sharding.use(mesh(), RULES):
      compiled(3).lower(plan().abstract, batch())


def test_clip_of_known_gradient():
  """A gradient (3, 4) has norm 5 and is clipped to (0.6, 0.8); the norm that is reported is the one before."""
  graph, params = nnx.split(nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0)))
  loss = lambda model, row, key: losses.Loss((model.kernel[...][:, 0] * row).sum(), jnp.float32(2), {})
  identity = optimizer.guarded(optimizer.optax.identity())
  before = state.State(params, identity.init(params), jnp.int32(0))
  after, metrics = step.train_step(graph, loss, identity, 1.0, before, np.asarray([6.0, 8.0], np.float32), clip=1.0)
  (old,), (new,) = jax.tree.leaves(params), jax.tree.leaves(after.params)
  np.testing.assert_allclose(old - new, [[0.6], [0.8]], rtol=1e-6)
  assert float(metrics['grad_norm']) == 5.0


@pytest.mark.parametrize('accumulate', [1, 4])
def test_rate_is_that_of_the_update(accumulate):
  """C9, E20: the logged rate at update k is schedule(k), whatever the accumulation, and it is the one that was used:
  the parameter moved by rate x direction, where the direction of a first Adam step is the gradient's sign."""
  graph, params = nnx.split(nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0)))
  loss = lambda model, row, key: losses.Loss((model.kernel[...] * row).sum(), jnp.float32(row.shape[0]), {})
  transform = optimizer.build(optimizer.Config(b1=0.0, b2=0.0, eps=1e-30, weight_decay=0.0), params)
  now = state.State(params, transform.init(params), jnp.int32(0))
  for k in range(10):
    old = float(jax.tree.leaves(now.params)[0][0, 0])
    now, metrics = step.train_step(
      graph, loss, transform, RATE, now, np.ones((4, 1), np.float32), accumulate=accumulate
    )
    u = k + 1
    expected = 1e-2 * (u / 2 if u < 2 else 1 - 0.9 * (u - 2) / 8)
    assert float(metrics['learning_rate']) == pytest.approx(expected, rel=1e-5)
    assert old - float(jax.tree.leaves(now.params)[0][0, 0]) == pytest.approx(expected, abs=2e-7)
    assert int(now.step) == k + 1


@pytest.mark.parametrize('accumulate, chunk', [(1, losses.Chunk.VOCABULARY), (2, losses.Chunk.TOKENS)])
def test_batch_without_weight_changes_nothing(chunk, accumulate):
  """B16: no supervised token: loss 0, gradient norm 0, parameters and moments bit-equal, counted; training goes on."""
  run = compiled(accumulate, chunk=chunk)
  before, _ = take(run, fresh(), batch())
  kept = jax.device_get(before)
  after, metrics = jax.device_get(take(run, before, batch(counts=(0, 0, 0, 0))))
  assert metrics['skipped'] == 1 and metrics['weight'] == 0 and metrics['loss'] == 0 and metrics['grad_norm'] == 0
  assert bit_equal(after.params, kept.params) and bit_equal(after.optimizer, kept.optimizer)
  assert after.step == kept.step + 1
  _, metrics = take(run, after, batch())
  assert metrics['skipped'] == 0 and np.isfinite(metrics['loss'])


@pytest.mark.parametrize('place', ['weights', 'params'])
def test_step_that_is_not_finite_changes_nothing(place):
  """A NaN or infinity in loss or gradient leaves parameters and moments as they were and is counted and reported."""
  before, data = fresh(), batch()
  if place == 'weights':
    data['weights'] = np.where(np.arange(B)[:, None] == 1, np.float32(np.inf), data['weights'])
  else:
    leaves, tree = jax.tree.flatten(before.params)
    leaves[0] = leaves[0] * jnp.nan
    before = before._replace(params=jax.tree.unflatten(tree, leaves))
  with sharding.use(mesh(), RULES):
    before = jax.device_put(before, plan().shardings)
  kept = jax.device_get(before)
  after, metrics = jax.device_get(take(compiled(), before, data))
  assert metrics['skipped'] == 1 and not np.isfinite(metrics['loss'])
  assert bit_equal(after.params, kept.params) and bit_equal(after.optimizer, kept.optimizer)


def test_first_update_after_a_skipped_one_is_a_first_update():
  """The bias correction counts updates that were applied, not batches."""
  run = compiled()
  skipped, _ = take(run, fresh(), batch(counts=(0, 0, 0, 0)))
  assert int(jax.tree.leaves(skipped.optimizer)[0]) == 0
  after, _ = take(run, skipped._replace(step=jax.device_put(jnp.int32(0), plan().shardings.step)), batch())
  assert bit_equal(jax.device_get(after.params), whole()[0].params)


def test_padding_row_is_harmless():
  """C15: a row of nothing but padding: loss and gradients are finite, and those of the other rows alone."""
  for kernel in ('chunked', 'xla'):
    _, metrics = take(compiled(kernel=kernel), fresh(), batch(counts=(1, 7, 0, 2)))
    assert metrics['skipped'] == 0 and metrics['weight'] == 10 and np.isfinite(metrics['grad_norm'])
  data = batch(counts=(1, 7, 0, 2))
  alone = {name: value[[0, 1, 3, 3]].copy() for name, value in data.items()}
  alone['weights'][3] = 0
  _, expected = take(compiled(), fresh(), alone)
  _, metrics = take(compiled(), fresh(), data)
  np.testing.assert_allclose(metrics['loss'], expected['loss'], rtol=1e-6)
  np.testing.assert_allclose(metrics['grad_norm'], expected['grad_norm'], rtol=1e-5)


@pytest.mark.parametrize('chunk', [losses.Chunk.TOKENS, losses.Chunk.VOCABULARY])
def test_content_of_padding_does_not_matter(chunk):
  """B2, B4: any token, target and position behind the mask: loss and update stay bit-equal; no id means padding."""
  run, data = compiled(chunk=chunk), batch()
  expected = jax.device_get(take(run, fresh(), data))
  rng, pad = np.random.default_rng(5), data['weights'] == 0
  other = dict(data)
  for name in ('tokens', 'targets'):
    other[name] = np.where(pad, rng.integers(0, V, pad.shape, dtype=np.int32), data[name])
  assert bit_equal(jax.device_get(take(run, fresh(), other)), expected)


def test_dropout_keys():
  """C14: dropout with micro-batches runs; one state gives one loss; another step or micro-batch another mask."""
  run = compiled(2, rate=0.5, seed=7)
  first = jax.device_get(take(run, fresh(), batch()))
  assert bit_equal(jax.device_get(take(run, fresh(), batch())), first)
  with sharding.use(mesh(), RULES):
    later = jax.device_put(fresh()._replace(step=jnp.int32(1)), plan().shardings)
  assert take(run, later, batch())[1]['loss'] != first[1]['loss']
  keys = []

  def loss(model, micro, key):
    keys.append(key)
    return losses.Loss(
      model.kernel[...].sum() * jax.random.uniform(key), jnp.float32(1), {'noise': jax.random.uniform(key)}
    )

  graph, params = nnx.split(nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0)))
  key = lambda index: jax.random.fold_in(jax.random.key(0), index)
  _, both = step.summed(graph, loss, params, np.ones((2, 1), np.float32), key, 2, None)
  singles = [float(jax.random.uniform(key(index))) for index in (0, 1)]
  assert singles[0] != singles[1]
  assert float(both.aux['noise']) == pytest.approx(sum(singles), rel=1e-6)


def test_compiles_once(caplog):
  """C13: five steps, one of them on a state that came back from the host as from a checkpoint: one compilation, counted
  by jax itself; another shape is a second one, and the log says which argument it was."""
  compilations = []
  listener = lambda event, seconds, **more: compilations.append(more) if 'backend_compile' in event else None
  run = step.Step(plan(), functools.partial(losses.next_token, chunk=losses.Chunk.TOKENS, kernel='xla'), RATE)
  now, data = fresh(), [batch(seed=k) for k in range(5)]
  jax.monitoring.register_event_duration_secs_listener(listener)
  try:
    for k in range(5):
      if k == 3:
        now = jax.tree.map(lambda a, s: jax.make_array_from_callback(a.shape, s, lambda i, a=a: a[i]),
                           jax.device_get(now), plan().shardings)  # fmt: skip
      now, metrics = take(run, now, data[k])
      float(metrics['loss'])
  finally:
    jax.monitoring.unregister_event_duration_listener(listener)
  assert run.compilations == 1
  assert len(compilations) == 1
  logging.get_absl_logger().propagate = True
  with caplog.at_level('WARNING', logger='absl'):
    take(run, now, {name: value[:2] for name, value in data[0].items()})
  assert run.compilations == 2
  assert 'batch.weights: float32[4, 32]' in caplog.text and 'float32[2, 32]' in caplog.text
  assert 'state.' not in caplog.text


def test_weak_type_is_named():
  """C13: the difference names the leaf whose Python scalar became an array."""
  before = step.signature(batch={'a': jnp.zeros(3), 'rate': jnp.float32(1)})
  after = step.signature(batch={'a': jnp.zeros(3), 'rate': jnp.asarray(1.0)})
  assert step.difference(before, after).startswith('batch.rate: float32[] ')
  assert ' weak' in step.difference(before, after)
  assert 'no argument changed' in step.difference(before, before)


def test_memory_of_accumulation():
  """C7: eight micro-batches need at most 1.2 times the temporary memory of one of the same size."""
  card = llama.Llama(layers=4, d_model=32, d_ff=64, heads=2, kv_heads=1, head_dim=16, vocab=64, context=256)
  loss = functools.partial(losses.next_token, chunk=losses.Chunk.TOKENS, chunks=4, kernel='chunked')
  with sharding.use(mesh(), RULES):
    larger = state.plan(
      lambda: decoder.Decoder(card, rngs=nnx.Rngs(0), scan=True),
      functools.partial(optimizer.build, SETTINGS),
      mesh(),
      RULES,
    )

    def temporary(rows, accumulate):
      data = {
        name: jax.ShapeDtypeStruct((rows, 256), jnp.int32) for name in ('tokens', 'targets', 'positions', 'segments')
      }
      data['weights'] = jax.ShapeDtypeStruct((rows, 256), jnp.float32)
      run = step.Step(larger, loss, RATE, accumulate=accumulate)
      return run.lower(larger.abstract, data).compile().memory_analysis().temp_size_in_bytes

    one = temporary(4, 1)
    assert temporary(32, 8) <= 1.2 * one
    assert temporary(32, 1) > 4 * one  # the test can see it


@pytest.mark.parametrize('dtype', [jnp.bfloat16])
def test_bfloat16_compute_keeps_float32_parameters(dtype):
  """Parameters, moments and metrics stay float32, and the loss is that of float32 within the precision of bfloat16."""
  with sharding.use(mesh(), RULES):
    low = state.plan(
      lambda: decoder.Decoder(CARD, rngs=nnx.Rngs(0), scan=False, dtype=dtype),
      functools.partial(optimizer.build, SETTINGS), mesh(), RULES)  # fmt: skip
    loss = functools.partial(losses.next_token, chunk=losses.Chunk.TOKENS, kernel='chunked')
    after, metrics = step.Step(low, loss, RATE)(state.create(low), batch())
  assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {jnp.dtype('float32'), jnp.dtype('int32')}
  assert metrics['loss'] == pytest.approx(float(whole()[1]['loss']), rel=1e-2)
  assert metrics['loss'] != whole()[1]['loss']


def test_positions_and_segments_are_optional():
  """Rows that are one document each, without padding, need neither; the numbers are the same."""
  data = batch(counts=(T,) * B)
  _, expected = take(compiled(), fresh(), data)
  bare = dict(data, positions=None, segments=None)
  _, metrics = take(compiled(), fresh(), bare)
  np.testing.assert_allclose(metrics['loss'], expected['loss'], rtol=1e-6)
  np.testing.assert_allclose(metrics['grad_norm'], expected['grad_norm'], rtol=1e-5)
