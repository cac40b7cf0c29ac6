"""Training models with experts: what reaches the loss and what moves the selection bias.

Neither depends on how an update is cut into micro-batches or spread over devices.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import block
from maxtext_layers import config
from maxtext_layers import norm
from maxtext_layers import sharding
from maxtext_models import decoder
from maxtext_models.families import mixtral
from maxtext_train import assembly
from maxtext_train import losses
from maxtext_train import optimizer
from maxtext_train import run
from maxtext_train import state
from maxtext_train import step

ROWS, LENGTH, VOCAB = 8, 16, 48
RULES = sharding.PRESETS['fsdp']


@config.config
class Corrected(mixtral.Mixtral):
  """With scores and a selection bias as in arXiv 2412.19437."""

  def blocks(self):
    experts = self.mixture({'score': 'sigmoid', 'normalize': True, 'correction': True})
    return [block.Spec(self.mixer(), experts, norm.Spec(self.eps))] * self.layers


def make_card(cls=Corrected, **changes):
  return cls(**{
    'layers': 2, 'd_model': 16, 'd_ff': 16, 'd_expert': 16, 'heads': 2, 'kv_heads': 2, 'head_dim': 8, 'vocab': VOCAB,
    'context': LENGTH, 'experts': 6, 'top_k': 2, 'balance_loss': 0.5, 'router_z_loss': 0.01, **changes,
  })  # fmt: skip


def make_batch(counts=None, seed=0):
  """Rows that hold so many tokens; all of them, if not said."""
  tokens = np.random.default_rng(seed).integers(0, VOCAB, (ROWS, LENGTH + 1), dtype=np.int32)
  real = np.arange(LENGTH)[None] < np.asarray(counts or [LENGTH] * ROWS)[:, None]
  return {
    'tokens': tokens[:, :-1],
    'targets': tokens[:, 1:],
    'positions': np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH)).copy(),
    'segments': real.astype(np.int32),
    'weights': real.astype(np.float32),
  }


def build(card, rate=0.25, settings=None, devices=None, sizes=None, preset='fsdp', scan=True, accumulate=1):
  """(mesh, plan, step): Adam, or plain gradients without `settings`."""
  mesh = sharding.mesh(devices or jax.devices()[:1], **(sizes or {}))
  transform = lambda params: optimizer.guarded(optimizer.optax.identity())
  if settings:
    transform = functools.partial(optimizer.build, settings)
  with sharding.use(mesh, sharding.PRESETS[preset]):
    plan = state.plan(
      lambda: decoder.Decoder(card, rngs=nnx.Rngs(0), scan=scan), transform, mesh, sharding.PRESETS[preset]
    )
    loss = functools.partial(losses.next_token, chunk=losses.Chunk.VOCABULARY, chunks=4, kernel='chunked')
    return mesh, plan, step.Step(plan, loss, 0.1, accumulate=accumulate, balance_rate=rate)


@functools.cache
def updated(accumulate=1, scan=True, counts=None, **changes):
  """(parameters before, parameters after, metrics) of one update, by path."""
  mesh, plan, take = build(make_card(**changes), accumulate=accumulate, scan=scan)
  with sharding.use(mesh, RULES):
    start = state.create(plan)
    before = jax.device_get(start.params)
    after, metrics = jax.device_get(take(start, make_batch(list(counts) if counts else None)))
  of = lambda params: dict(zip(optimizer.paths(params), jax.tree.leaves(params), strict=True))
  return of(before), of(after.params), {k: float(v) for k, v in metrics.items()}


def corrections(params):
  return {path: value for path, value in params.items() if path.endswith('router.correction')}


def test_what_is_in_the_loss():
  """F2: lm_loss is the cross-entropy alone; the loss is that and both terms of the routers, which are not 0."""
  _, _, metrics = updated()
  assert metrics['balance_loss'] > 0 and metrics['router_z_loss'] > 0
  assert metrics['loss'] == pytest.approx(sum(metrics[k] for k in ('lm_loss', 'balance_loss', 'router_z_loss')))
  model = decoder.Decoder(make_card(), rngs=nnx.Rngs(0), scan=False)
  data = make_batch()
  x, _, terms = model.hidden(data['tokens'], positions=data['positions'], segments=data['segments'], kernel='xla')
  logits = np.asarray(model.logits(x), np.float64)
  nats = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, data['targets'][..., None], -1)[..., 0]
  assert metrics['lm_loss'] == pytest.approx(nats.mean(), rel=1e-5)
  assert metrics['balance_loss'] == pytest.approx(float(terms['balance_loss']), rel=1e-5)


def test_the_coefficient_is_that_of_the_published_form():
  """transformers: coefficient × E × sum of f and P with f not divided by K, over all layers at once. Of one layer, with
  every token's scores and choices the same kind of number, that is ours times top_k / layers."""
  from maxtext_layers import router

  spec = make_card(mixtral.Mixtral, layers=4).blocks()[0].ffn.router
  assert spec.balance == router.Balance(0.5 * 2 / 4, 'micro', 0.01)


def test_scanned_and_unrolled_updates_agree():
  """F2: losses and loads found for layers in a loop and for layers that stand alone."""
  _, scanned, metrics = updated()
  _, single, others = updated(scan=False)
  assert others == pytest.approx(metrics, rel=1e-5)
  rows = np.concatenate(list(corrections(single).values()))
  (stacked,) = corrections(scanned).values()
  np.testing.assert_array_equal(rows, stacked)


COUNTS = (3, 16, 0, 9, 16, 1, 12, 4)


@pytest.mark.parametrize('counts', [None, COUNTS])
def test_selection_biases_follow_the_loads_of_the_update(counts):
  """arXiv 2408.15664, algorithm 1: up by the rate where an expert had fewer tokens than the mean, down where more."""
  before, after, _ = updated(counts=counts)
  model = decoder.Decoder(make_card(), rngs=nnx.Rngs(0), scan=True)
  data = make_batch(list(counts) if counts else None)
  _, _, aux = model.hidden(data['tokens'], positions=data['positions'], segments=data['segments'], kernel='xla')
  (path,) = corrections(before)
  (load,) = aux['loads'].values()
  assert set(aux['loads']) == {path} and load.shape == (2, 6)
  assert (load.sum(-1) == 2 * data['weights'].sum()).all()
  np.testing.assert_allclose(after[path] - before[path], 0.25 * np.sign(load.mean(-1, keepdims=True) - load))
  assert np.any(after[path])


def test_micro_batches_add_up():
  """The bias moves by the loads of all micro-batches together, not by each; and nothing else moves it."""
  (path,) = corrections(updated(counts=COUNTS)[0])
  np.testing.assert_array_equal(updated(2, counts=COUNTS)[1][path], updated(counts=COUNTS)[1][path])


def test_neither_optimizer_nor_decay_nor_a_skipped_step_moves_a_bias():
  """Rate 0 under AdamW with decay of all: bit-equal. A batch without weight: likewise, at any rate."""
  for rate, counts in ((0.0, None), (0.25, [0] * ROWS)):
    settings = optimizer.Config(no_decay=())
    mesh, plan, take = build(make_card(), rate, settings)
    with sharding.use(mesh, RULES):
      start = state.create(plan)
      at = [i for i, path in enumerate(optimizer.paths(start.params)) if path.endswith('router.correction')]
      leaves = jax.tree.leaves(start.params)
      for i in at:
        leaves[i] = leaves[i] + 0.5
      start = start._replace(params=jax.tree.unflatten(jax.tree.structure(start.params), leaves))
      after, metrics = take(start, make_batch(counts))
    assert at and all((jax.tree.leaves(after.params)[i] == 0.5).all() for i in at)
    assert metrics['skipped'] == (counts is not None)
  decayed, others = optimizer.decayed(optimizer.Config(no_decay=()), plan.abstract.params)
  assert [path for path in others if path.endswith('router.correction')] == others and others
  assert not [path for path in decayed if 'correction' in path]


@pytest.mark.parametrize('scope', ['sequence', 'micro'])
def test_the_scope_says_whether_micro_batches_matter(scope):
  """F4, F7: the loss of each sequence is the same in any cut, and so is what a router learns; that of a micro-batch has
  its name from being another.
  """
  (_, whole, one), (_, cut, two) = (updated(accumulate, balance_scope=scope) for accumulate in (1, 2))
  change = max(np.abs(whole[path] - cut[path]).max() for path in whole if 'router' in path)
  if scope == 'sequence':
    assert one['balance_loss'] == pytest.approx(two['balance_loss'], rel=1e-5)
    assert change <= 1e-6
  else:
    assert abs(one['balance_loss'] - two['balance_loss']) > 1e-3 * one['balance_loss']
    assert change > 1e-4


def test_the_scope_of_a_batch():
  """F7, F9: of an update in one piece it is the value of the whole batch; an update in pieces is refused."""
  assert updated(balance_scope='batch')[2] == pytest.approx(updated()[2], rel=1e-6)
  settings = run.Pretrain(name='x', steps=1, batch=8, length=LENGTH, accumulate=2)
  with pytest.raises(config.Error, match=r'config.accumulate=2: config.model.balance_scope=batch'):
    assembly.build(settings, make_card(balance_scope='batch'))
  with pytest.raises(config.Error, match="balance scope 'global'"):
    make_card(balance_scope='global').check()


LAYOUTS = {
  'fsdp': ('fsdp', {'fsdp': 4}, {}),
  'both': ('fsdp_tensor', {'fsdp': 2, 'tensor': 2}, {}),
  'capacity': ('fsdp_tensor', {'fsdp': 2, 'tensor': 2}, {'dispatch': 'capacity', 'capacity': 1.0}),
}


def measure():
  """{layout: metrics, and the largest difference of a parameter from one device's} on four devices."""
  jax.config.update('jax_num_cpu_devices', 4)
  out = {}

  @functools.cache
  def update(preset, count, sizes, changes):
    mesh, plan, take = build(
      make_card(**dict(changes)), devices=jax.devices()[:count], sizes=dict(sizes), preset=preset
    )
    with sharding.use(mesh, sharding.PRESETS[preset]):
      rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(('data', 'fsdp')))
      after, metrics = take(state.create(plan), jax.device_put(make_batch(list(COUNTS)), rows))
      return jax.device_get(after.params), {k: float(v) for k, v in metrics.items()}

  for name, (preset, sizes, changes) in LAYOUTS.items():
    changes = tuple(changes.items())
    one, four = update('fsdp', 1, (), changes), update(preset, 4, tuple(sizes.items()), changes)
    change = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), one[0], four[0])
    out[name] = (one[1], four[1], max(jax.tree.leaves(change)))
  print('RESULT ' + json.dumps(out))


@functools.cache
def results():
  root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  path = os.pathsep.join([root, *sys.path])
  command = [sys.executable, '-c', 'from tests import moe_training_test as t; t.measure()']
  done = subprocess.run(
    command, capture_output=True, text=True, check=False, env={**os.environ, 'PYTHONPATH': path, 'JAX_PLATFORMS': 'cpu'}
  )
  lines = [line for line in done.stdout.splitlines() if line.startswith('RESULT ')]
  assert lines, done.stderr[-3000:]
  return json.loads(lines[0].removeprefix('RESULT '))


@pytest.mark.parametrize('name', LAYOUTS)
def test_four_devices_update_as_one_does(name):
  """F4: losses, gradient norm and SGD update, the routers' and the selection biases' among them."""
  one, four, change = results()[name]
  assert four == pytest.approx(one, rel=1e-5)
  assert change <= 1e-6 and one['balance_loss'] > 0


def test_first_values_differ_by_expert():
  """Experts of one layer must not begin alike, or they stay alike."""
  model = decoder.Decoder(dataclasses.replace(make_card()), rngs=nnx.Rngs(0))
  w = np.asarray(jnp.asarray(model.stack.segments[0].blocks[0].ffn.experts.gate[...]))[0]
  assert np.abs(w - w[:1])[1:].min(0).max() > 0 and 0.7 < w.std() * 4 < 1.1
