"""Loss, gradient norm and update on eight devices are those of one, for every preset.

The update is compared under SGD: Adam divides by the gradient's own size and so makes rounding visible. The number of
CPU devices is set before JAX starts, so a child process does the work.
"""

import functools
import json
import os
import subprocess
import sys

import pytest

PRESETS = {
  'fsdp': {'fsdp': 8},
  'tensor': {'tensor': 8, 'fsdp': 1},
  'fsdp_tensor': {'fsdp': 4, 'tensor': 2},
  'data_fsdp': {'data': 2, 'fsdp': 4},
  'data': {'data': 8, 'fsdp': 1},
}
RULES = {'tensor': 'tensor', 'fsdp_tensor': 'fsdp_tensor'}


def measure():
  """{name: {loss, grad_norm, weight, skipped, change of the parameters against one device}} for every layout."""
  import jax

  jax.config.update('jax_num_cpu_devices', 8)
  from flax import nnx
  import numpy as np

  from maxtext_layers import sharding
  from maxtext_models import decoder
  from maxtext_models.families import qwen3
  from maxtext_train import losses
  from maxtext_train import optimizer
  from maxtext_train import state
  from maxtext_train import step

  rows, length, vocab = 16, 16, 64
  card = qwen3.Qwen3(layers=2, d_model=32, d_ff=64, heads=8, kv_heads=8, head_dim=8, vocab=vocab, context=length)
  tokens = np.random.default_rng(0).integers(0, vocab, (rows, length + 1), dtype=np.int32)
  # uneven: the rows of the first devices hold nothing (B17), the others 1 to 16 tokens
  counts = np.asarray([0, 0, 0, 0, 1, 7, 16, 2, 5, 16, 3, 9, 16, 1, 12, 4])
  real = np.arange(length)[None] < counts[:, None]
  batch = {
    'tokens': tokens[:, :-1],
    'targets': tokens[:, 1:],
    'positions': np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)).copy(),
    'segments': real.astype(np.int32),
    'weights': real.astype(np.float32),
  }  # fmt: skip
  sgd = lambda params: optimizer.guarded(optimizer.optax.identity())

  def run(preset, devices, sizes, chunk, accumulate=1):
    mesh, rules = sharding.mesh(devices, **sizes), sharding.PRESETS[preset]
    with sharding.use(mesh, rules):
      plan = state.plan(lambda: decoder.Decoder(card, rngs=nnx.Rngs(0), scan=True), sgd, mesh, rules)
      loss = functools.partial(losses.next_token, chunk=chunk, chunks=4, kernel='chunked')
      now = state.create(plan)
      spread = max(len(leaf.sharding.device_set) for leaf in jax.tree.leaves(now.params))
      whole = sum(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(now.params))
      where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(('data', 'fsdp')))
      after, metrics = step.Step(plan, loss, 0.1, accumulate=accumulate, clip=0.5)(now, jax.device_put(batch, where))
      shardings = jax.tree.map(lambda a, s: a.sharding.is_equivalent_to(s, a.ndim), after, plan.shardings)
      return jax.device_get(after.params), {
        **{name: float(value) for name, value in metrics.items()},
        'spread': spread,
        'whole': whole,
        'stays': jax.tree.all(shardings),
      }

  one = jax.devices()[:1]
  vocabulary, along = losses.Chunk.VOCABULARY, losses.Chunk.TOKENS
  expected, first = run('fsdp', one, {}, along)
  out = {'one': first}
  cases = {name: (RULES.get(name, 'fsdp'), jax.devices(), sizes, vocabulary) for name, sizes in PRESETS.items()}
  cases['tokens_accumulate'] = ('fsdp', jax.devices(), {'fsdp': 8}, along, 2)
  for name, case in cases.items():
    params, out[name] = run(*case)
    change = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), params, expected)
    out[name]['change'] = max(jax.tree.leaves(change))
  print('RESULT ' + json.dumps(out))


@functools.cache
def results():
  root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  path = os.pathsep.join([root, *sys.path])
  command = [sys.executable, '-c', 'from tests import sharding_parity_test as t; t.measure()']
  done = subprocess.run(
    command, capture_output=True, text=True, check=False, env={**os.environ, 'PYTHONPATH': path, 'JAX_PLATFORMS': 'cpu'}
  )
  lines = [line for line in done.stdout.splitlines() if line.startswith('RESULT ')]
  assert lines, done.stderr[-3000:]
  return json.loads(lines[0].removeprefix('RESULT '))


@pytest.mark.parametrize('name', [*PRESETS, 'tokens_accumulate'])
def test_same_as_one_device(name):
  """C8, B17: with an uneven mask, whole devices of padding among it, loss, gradient norm and clipped SGD update equal
  those of one device."""
  got, expected = results()[name], results()['one']
  assert expected['weight'] == 92 and expected['grad_norm'] > 0.5  # the clip acts
  for value in ('loss', 'lm_loss', 'grad_norm', 'weight', 'skipped'):
    assert got[value] == pytest.approx(expected[value], rel=3e-6), value
  assert got['change'] <= 3e-7


@pytest.mark.parametrize('name', PRESETS)
def test_state_is_spread_and_stays(name):
  """Parameters live on all eight devices, cut unless only rows are, and the step gives them back where they were."""
  got = results()[name]
  assert got['spread'] == 8 and got['stays']
  if name == 'data':
    assert got['whole'] > 10
  elif name in ('fsdp', 'data_fsdp'):
    assert got['whole'] == 2  # q_norm and k_norm, over head_dim
