"""Presets on eight fake devices. jax fixes their number when it starts, so the work is done in a process of its own."""

import json
import os
import subprocess
import sys

from flax import nnx
import jax
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from maxtext_layers import config
from maxtext_layers import param
from maxtext_layers import sharding

CASES = {
  'one': ('fsdp', (1, 1, 1)),
  'fsdp': ('fsdp', (1, 8, 1)),
  'tensor': ('tensor', (4, 1, 2)),
  'all three': ('fsdp_tensor', (2, 2, 2)),
}


def work():
  """Loss, gradients and weight specs of a small model on every mesh; two devices of which one has no token."""
  import jax.numpy as jnp

  from maxtext_layers import attention
  from maxtext_layers import block
  from maxtext_layers import embed
  from maxtext_layers import head
  from maxtext_layers import mlp
  from maxtext_layers import norm
  from maxtext_layers import rope
  from maxtext_layers import stack

  spec = block.Spec(attention.Spec(4, 2, 8, rope.Spec(8, 1e4), qk_norm=norm.Spec()), mlp.Spec(32), norm.Spec())

  class Model(nnx.Module):
    def __init__(self, rngs):
      self.embed = embed.Embed(48, 16, rngs=rngs)
      self.stack = stack.Stack([spec] * 2, 16, rngs=rngs, scan=True)
      self.head = embed.Embed(48, 16, rngs=rngs)

  rng = np.random.default_rng(0)
  batch = {
    'tokens': rng.integers(0, 48, (8, 12)),
    'targets': rng.integers(0, 48, (8, 12)),
    'segments': np.repeat([[1, 2, 0]], 8, 0).repeat(4, 1),
    'positions': np.tile(np.arange(4), (8, 3)),
    'weights': rng.random((8, 12), np.float32) * np.repeat([[1, 1, 0]], 8, 0).repeat(4, 1),
  }
  # uneven rows: the last half has no token that counts
  batch['weights'][4:] = 0
  build = lambda: nnx.state(Model(nnx.Rngs(0)))
  graph = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))[0]

  def losses(state, batch):
    model = nnx.merge(graph, state)
    x, _, _ = model.stack(model.embed(batch['tokens']), block.Context(batch['positions'], batch['segments']))
    args, weights = (x, model.head.w[...], batch['targets']), batch['weights']
    by_token = jnp.where(weights != 0, head.cross_entropy(*args, 4) * weights, 0).sum()
    return jnp.stack([by_token, head.cross_entropy_sum(*args, weights, 4)[0]])

  def both(state, batch):
    values, pull = jax.vjp(lambda state: losses(state, batch), state)
    return values, [pull(jnp.eye(2)[i])[0] for i in (0, 1)]

  def run(preset, sizes):
    count, rules = int(np.prod(sizes)), sharding.PRESETS[preset]
    mesh = sharding.mesh(jax.devices()[:count], **dict(zip(sharding.MESH, sizes)))
    with sharding.use(mesh, rules):
      shardings = sharding.shardings_of(jax.eval_shape(build), mesh, rules, large=0)
      state = jax.device_put(start, shardings)
      rows = sharding.partition(('batch', None), (8, 12), rules.activations, mesh)
      placed = jax.device_put(batch, jax.sharding.NamedSharding(mesh, rows))
      # a jitted function a preset: jit does not see the rules
      values, grads = jax.jit(lambda *a: both(*a), out_shardings=(None, [shardings, shardings]))(state, placed)
    flat = {'.'.join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    specs = {name: str(leaf.get_value().sharding.spec) for name, leaf in flat.items()}
    return np.asarray(values), [[np.asarray(g) for g in jax.tree.leaves(of)] for of in grads], specs

  start = jax.jit(build)()
  base, twins, _ = run(*CASES['one'])
  out = {}
  cases = {**CASES, 'half without tokens': ('fsdp', (1, 2, 1))}
  cases.pop('one')
  for name, case in cases.items():
    values, grads, specs = run(*case)
    worst = [max(float(np.abs(g - t).max()) for g, t in zip(*pair)) for pair in zip(grads, twins)]
    out[name] = {'loss': (values / base[0]).tolist(), 'grads': worst, 'specs': specs}
  out['largest gradient'] = max(float(np.abs(t).max()) for t in twins[0])
  print(json.dumps(out))


@pytest.fixture(scope='module')
def results():
  env = os.environ | {
    'XLA_FLAGS': '--xla_force_host_platform_device_count=8',
    'JAX_PLATFORMS': 'cpu',
    'PYTHONPATH': os.pathsep.join(p for p in sys.path if p),
  }
  done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize('name', [name for name in CASES if name != 'one'])
def test_a_preset_changes_no_number(results, name):
  """Loss within 1e-5 and gradients of eight devices equal those of one, for the loss by vocabulary and by time."""
  assert results[name]['loss'] == pytest.approx([1, 1], abs=1e-5)
  assert max(results[name]['grads']) < 1e-5 * max(1, results['largest gradient'])


def test_a_device_without_tokens(results):
  """B17: two devices, one of which has only masked rows: loss and gradients are those of one device."""
  assert results['half without tokens']['loss'] == pytest.approx([1, 1], abs=1e-5)
  assert max(results['half without tokens']['grads']) < 1e-5 * max(1, results['largest gradient'])


def test_weights_are_cut_where_the_preset_says(results):
  def spec(name, weight):
    return next(s for n, s in results[name]['specs'].items() if weight in n)

  cut = lambda *axes: str(PartitionSpec(*axes))
  assert spec('fsdp', 'ffn.gate') == cut(None, 'fsdp', None)
  assert spec('tensor', 'ffn.gate') == cut(None, None, 'tensor')
  assert spec('all three', 'ffn.down') == cut(None, 'tensor', 'fsdp')
  assert spec('all three', 'mixer.q.w') == cut(None, 'fsdp', 'tensor', None)
  assert spec('all three', 'embed') == cut('tensor', 'fsdp')


SHAPE = type('Mesh', (), {'shape': {'data': 2, 'fsdp': 4, 'tensor': 2}})()


def test_partition():
  table = sharding.PRESETS['fsdp_tensor'].weights
  assert sharding.partition(('embed', 'mlp'), (8, 6), table, SHAPE) == PartitionSpec(('fsdp',), ('tensor',))
  assert sharding.partition(('embed', 'mlp'), (6, 5), table, SHAPE) == PartitionSpec(None, None)
  assert sharding.partition(('heads', 'kv_heads'), (4, 4), table, SHAPE) == PartitionSpec(('tensor',), None)
  with pytest.raises(ValueError, match="unknown axis word 'mpl'"):
    sharding.partition(('mpl',), (4,), table, SHAPE)


def test_a_mesh_that_does_not_fit_is_an_error():
  for sizes in (dict(fsdp=3), dict(data=2, fsdp=-1), dict(fsdp=-1, tensor=-1), dict(fsdp=0)):
    with pytest.raises(config.Error, match=r'mesh data=\S+ x fsdp=\S+ x tensor=\S+ does not fit 1 devices'):
      sharding.mesh(jax.devices()[:1], **sizes)


def test_config_checks_itself():
  for value, says in (
    (
      sharding.Config(preset='fsdq'),
      r"config: preset='fsdq' is none of fsdp, tensor, fsdp_tensor; did you mean 'fsdp'",
    ),
    (sharding.Config(fsdp=-1, tensor=-1), 'more than one size is -1'),
    (sharding.Config(data=0), 'data=0'),
  ):
    with pytest.raises(config.Error, match=says):
      config.check(value)
  config.check(sharding.Config())
  assert sharding.Config().mesh(jax.devices()[:1]).size == 1


@pytest.mark.parametrize(
  ('given', 'sizes'),
  [
    ({}, (1, -1, 1)),
    ({'preset': 'tensor'}, (1, 1, -1)),
    ({'preset': 'tensor', 'data': 2}, (2, 1, -1)),
    ({'preset': 'tensor', 'data': -1, 'tensor': 2}, (-1, 1, 2)),
    ({'preset': 'fsdp_tensor', 'tensor': 2}, (1, -1, 2)),
    ({'data': -1}, (-1, 1, 1)),
    ({'data': 2, 'fsdp': 4}, (2, 4, 1)),
  ],
)
def test_devices_nobody_asked_for_go_to_the_axis_of_the_preset(given, sizes):
  assert tuple(sharding.Config(**given).sizes().values()) == sizes


@pytest.mark.parametrize(
  ('given', 'says'),
  [
    (
      {'preset': 'fsdp', 'tensor': 8},
      r'^tensor=8: preset=fsdp cuts no weight along tensor, .* it cuts fsdp, and data=8',
    ),
    (
      {'preset': 'tensor', 'fsdp': 8, 'tensor': 1},
      r'^fsdp=8: preset=tensor cuts no weight along fsdp.* it cuts tensor,',
    ),
    ({'preset': 'fsdp', 'fsdp': 2, 'tensor': -1}, r'^tensor=4: '),
    ({'preset': 'tensor', 'tensor': 2}, r'^mesh data=1 x fsdp=1 x tensor=2 does not fit 8 devices$'),
  ],
)
def test_devices_that_would_hold_the_same_weights_unasked_are_an_error(given, says, monkeypatch):
  eight = lambda sizes, names, **_: jax.sharding.AbstractMesh(tuple(sizes), names)
  monkeypatch.setattr(jax, 'make_mesh', eight)
  with pytest.raises(config.Error, match=says):
    sharding.Config(**given).mesh(range(8))
  for preset in sharding.PRESETS:
    assert sharding.Config(preset=preset).mesh(range(8)).shape[sharding.OWN[preset]] == 8
  assert sharding.Config(data=8).mesh(range(8)).shape['data'] == 8  # copies, and they are asked for


def test_a_large_weight_left_whole_is_an_error_that_names_it():
  rules, leaf = sharding.PRESETS['fsdp_tensor'], lambda *shape: param.constant(shape, ('embed', 'mlp'), value=0.0)
  mesh = jax.sharding.AbstractMesh((1, 4, 2), sharding.MESH)
  state = {'ffn': {'up': leaf(6, 5)}}
  with pytest.raises(config.Error) as caught:
    sharding.shardings_of(state, mesh, rules, large=100)
  assert str(caught.value) == (
    'weight ffn.up (embed=6, mlp=5) stays whole on every device: no axis of it divides by fsdp=4 or '
    'tensor=2 of the mesh'
  )
  sharding.shardings_of(
    state | {'down': leaf(4, 1)}, mesh, rules, large=120
  )  # 30 numbers of 4 bytes are not more than that
  sharding.shardings_of({'up': leaf(6, 4)}, mesh, rules, large=0)  # one way is enough


def test_a_model_of_which_nothing_is_cut_is_an_error():
  """Small weights may stay whole, but not all of them."""
  rules, leaf = sharding.PRESETS['fsdp'], lambda *shape: param.constant(shape, ('embed', 'mlp'), value=0.0)
  mesh = jax.sharding.AbstractMesh((1, 4, 1), sharding.MESH)
  with pytest.raises(
    config.Error, match=r'^weight up .embed=6, mlp=5. stays whole .* of the mesh, and so do all others$'
  ):
    sharding.shardings_of({'up': leaf(6, 5)}, mesh, rules)
  sharding.shardings_of({'up': leaf(6, 5), 'down': leaf(8, 5)}, mesh, rules)


def test_a_batch_that_does_not_divide_is_an_error_that_names_it():
  mesh, rules = jax.sharding.AbstractMesh((2, 4, 2), sharding.MESH), sharding.PRESETS['fsdp']
  sharding.check_rows(16, mesh, rules)
  with pytest.raises(config.Error, match=r'^config\.batch=12 does not divide over the mesh: data=2 x fsdp=4$'):
    sharding.check_rows(12, mesh, rules, 'config.batch')


if __name__ == '__main__':
  work()
