import json
import os
import shutil
import subprocess
import sys
import time

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import config
from maxtext_models import checkpoint as models
from maxtext_models import decoder
from maxtext_models import orbax_files
from maxtext_models.families import llama
from maxtext_train import checkpoint


def tree(step):
  return {
    'moments': {'mu': jnp.full((3, 4), float(step)), 'nu': jnp.arange(5.0)},
    'step': jnp.asarray(step, jnp.int32),
  }


def save(store, step, **options):
  store.save(step, {'optimizer': tree(step)}, {'train.json': json.dumps({'step': step})}, **options)


def equal(a, b):
  return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_what_is_saved_comes_back_while_the_step_donates_its_buffers(tmp_path):
  store = checkpoint.Checkpoints(tmp_path / 'checkpoints')
  step = jax.jit(lambda t: jax.tree.map(lambda a: a + 1, t), donate_argnums=0)
  state = tree(7)
  store.save(7, {'optimizer': state}, {})
  for _ in range(3):
    state = step(state)
  assert equal(store.restore(7, {'optimizer': tree(0)})['optimizer'], tree(7))


def test_restore_waits_for_a_save_under_way(tmp_path):
  """E5: a path that was named exists; restoring right after an asynchronous save waits and succeeds."""
  store = checkpoint.Checkpoints(tmp_path)
  save(store, 3)
  assert equal(store.restore(3, {'optimizer': tree(0)})['optimizer'], tree(3))
  assert store.steps() == [3]


def test_keep_and_keep_period(tmp_path):
  store = checkpoint.Checkpoints(tmp_path, keep=2, keep_period=4)
  for step in range(1, 8):
    save(store, step)
  store.wait()
  assert store.steps() == [4, 6, 7]  # the newest two, and the multiple of four
  assert sorted(p.name for p in tmp_path.iterdir()) == ['4', '6', '7']


def test_a_failed_write_surfaces_as_itself_and_nothing_half_is_listed(tmp_path, monkeypatch):
  """E3: the original error, no later than the next look; the failed step is not listed, the one before is whole."""
  store = checkpoint.Checkpoints(tmp_path)
  save(store, 3, wait=True)
  monkeypatch.setattr(store, '_commit', lambda *_: (_ for _ in ()).throw(RuntimeError('the writer broke')))
  save(store, 4)
  with pytest.raises(RuntimeError, match='the writer broke'):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
      store.check()
      time.sleep(0.01)
  assert store.steps() == [3] and [p.name for p in tmp_path.iterdir()] == ['3']
  store.check()  # it is raised once
  monkeypatch.undo()
  save(store, 5, wait=True)
  assert store.steps() == [3, 5]


@pytest.mark.parametrize(
  'error', [OSError(28, 'No space left on device'), ValueError('tensorstore: No space left on device')]
)
def test_a_full_disk_is_one_line_and_harms_nothing(tmp_path, monkeypatch, error):
  store = checkpoint.Checkpoints(tmp_path)
  save(store, 3, wait=True)
  monkeypatch.setattr(store, '_commit', lambda *_: (_ for _ in ()).throw(error))
  with pytest.raises(config.Failure, match=r'step 4 could not be written to .*: no space left'):
    save(store, 4, wait=True)
  assert equal(store.restore(3, {'optimizer': tree(0)})['optimizer'], tree(3))
  assert [p.name for p in tmp_path.iterdir()] == ['3']


def test_a_disk_too_small_is_known_before_anything_is_written(tmp_path, monkeypatch):
  store = checkpoint.Checkpoints(tmp_path)
  save(store, 3, wait=True)
  monkeypatch.setattr(checkpoint.shutil, 'disk_usage', lambda _: shutil._ntuple_diskusage(0, 0, 2**19))
  with pytest.raises(
    config.Failure, match=r'step 4 could not be written to .*: no space left: it takes 1 MiB, 0 MiB are'
  ):
    save(store, 4)
  assert [p.name for p in tmp_path.iterdir()] == ['3']


def test_a_copy_is_a_checkpoint_and_tidying_touches_only_our_own(tmp_path):
  """E4: cp -r of a checkpoint loads; cleaning up removes only folders that a save of ours marked as temporary."""
  store = checkpoint.Checkpoints(tmp_path / 'a')
  save(store, 3, wait=True)
  shutil.copytree(tmp_path / 'a' / '3', tmp_path / 'b' / '3')
  other = checkpoint.Checkpoints(tmp_path / 'b')
  for name in ('.4.0123abcd', '.5.0123abcd', 'notes', '6'):
    (tmp_path / 'b' / name).mkdir()
    (tmp_path / 'b' / name / 'file').write_text('x')
  (tmp_path / 'b' / '.4.0123abcd' / checkpoint.TEMPORARY).write_text('')
  other.tidy()
  assert sorted(p.name for p in (tmp_path / 'b').iterdir()) == ['.5.0123abcd', '3', '6', 'notes']
  assert other.steps() == [3]
  assert equal(other.restore(3, {'optimizer': tree(0)})['optimizer'], tree(3))


def test_part_of_a_copy_is_not_listed(tmp_path):
  """E4: a copy that was interrupted has the marker perhaps, but not all files that the marker names."""
  store = checkpoint.Checkpoints(tmp_path)
  save(store, 3, wait=True)
  names = json.loads((tmp_path / '3' / models.COMMIT).read_text())['files']
  assert 'train.json' in names and any(n.startswith('optimizer/') for n in names)
  for name in names:
    kept = (tmp_path / '3' / name).read_bytes()
    os.remove(tmp_path / '3' / name)
    assert store.steps() == []
    (tmp_path / '3' / name).write_bytes(kept)
  assert store.steps() == [3]


def test_a_partial_folder_of_the_same_step_is_replaced(tmp_path):
  """E8: the leftover of an interrupted save is no checkpoint and does not stop the next save of that step."""
  store = checkpoint.Checkpoints(tmp_path)
  save(store, 4, wait=True)
  shutil.copytree(tmp_path / '4', tmp_path / '6')
  os.remove(tmp_path / '6' / models.COMMIT)
  assert store.newest() == 4
  save(store, 6, wait=True)
  assert store.steps() == [4, 6]
  assert equal(store.restore(6, {'optimizer': tree(0)})['optimizer'], tree(6))


def test_typed_keys_come_back_with_type_and_stream(tmp_path):
  """E9: a state with typed PRNG keys needs no conversion by hand."""
  store = checkpoint.Checkpoints(tmp_path)
  state = {'one': jax.random.key(3), 'many': jax.random.split(jax.random.key(4, impl='rbg'), 2)}
  store.save(1, {'rng': state}, {}, wait=True)
  found = store.restore(1, {'rng': jax.eval_shape(lambda: state)})['rng']
  assert {k: v.dtype for k, v in found.items()} == {k: v.dtype for k, v in state.items()}
  assert jax.random.uniform(found['one']) == jax.random.uniform(state['one'])
  assert jax.random.uniform(found['many'][1]) == jax.random.uniform(state['many'][1])
  with pytest.raises(config.Error, match=r'one is key<fry>\[\], not key<rbg>\[\]'):
    store.restore(1, {'rng': {**state, 'one': jax.random.key(3, impl='rbg')}})


def test_another_shape_is_an_error_that_lists_the_leaves(tmp_path):
  """E1: missing, extra and mismatched leaves, the first ten and how many."""
  store = checkpoint.Checkpoints(tmp_path)
  there = {f'layer{i}': jnp.zeros((2, 3)) for i in range(16)} | {'wide': jnp.zeros(4), 'fine': jnp.zeros(1)}
  here = {f'block{i}': jnp.zeros((2, 3)) for i in range(12)} | {
    'wide': jnp.zeros(5),
    'fine': jnp.zeros(1, jnp.bfloat16),
  }
  store.save(1, {'optimizer': there}, {}, wait=True)
  with pytest.raises(config.Error) as error:
    store.restore(1, {'optimizer': here})
  text = str(error.value)
  assert '12 missing: block0, block1, block10, block11, block2, block3, block4, block5, block6, block7, ...; ' in text
  assert '16 extra: layer0, layer1, layer10, layer11, layer12, layer13, layer14, layer15, layer2, layer3, ...; ' in text
  assert '2 mismatched: fine is float32[1], not bfloat16[1], wide is float32[4], not float32[5]' in text
  assert '\n' not in text


def test_items_may_be_chosen_and_missing_ones_allowed(tmp_path):
  """E2: strict by default; `only` reads a part, `allow_missing` accepts a checkpoint from before an item existed."""
  store = checkpoint.Checkpoints(tmp_path)
  save(store, 1, wait=True)
  like = {'optimizer': tree(0), 'average': tree(0)}
  with pytest.raises(config.Error, match='holds no average; it holds optimizer'):
    store.restore(1, like)
  assert list(store.restore(1, like, only=['optimizer'])) == ['optimizer']
  assert list(store.restore(1, like, allow_missing=('average',))) == ['optimizer']
  with pytest.raises(config.Error, match=r'2 is no complete checkpoint; complete steps: .1.'):
    store.restore(2, like)


def card(layers):
  return llama.Llama(layers=layers, d_model=8, d_ff=16, heads=2, kv_heads=1, head_dim=4, vocab=11, context=32)


def params(layers, scan):
  model = decoder.Decoder(card(layers), rngs=nnx.Rngs(0), scan=scan)
  return nnx.state(model), model.stack.plan


def test_moments_follow_the_weights_into_another_scan_plan(tmp_path):
  """E10: weights and moments of a scanned run are read by an unrolled one, and the other way round."""
  store = checkpoint.Checkpoints(tmp_path)
  for step, scan in ((1, True), (2, False)):
    mine, plan = params(3, scan)
    moments = {'mu': jax.tree.map(lambda a: 2 * a, mine), 'count': jnp.asarray(step)}
    manifest = {
      models.MANIFEST: json.dumps(models.manifest(card(3), mine, plan)),
      models.CARD: json.dumps(models.card_to_dict(card(3))),
    }
    store.save(step, {'weights': models.weights_item(mine), 'optimizer': moments}, manifest, wait=True)
    other, other_plan = params(3, not scan)
    like = {'mu': other, 'count': jnp.asarray(0)}
    found = store.restore(step, {'optimizer': like}, segments=other_plan)['optimizer']
    assert equal(found, {'mu': jax.tree.map(lambda a: 2 * a, other), 'count': jnp.asarray(step)})
    assert equal(models.restore_weights(store.path(step), other, other_plan), other)
    _, loaded = models.load(store.path(step), scan=not scan)
    assert equal(nnx.state(loaded), other)


def test_12_layers_do_not_fit_16_and_the_error_names_them(tmp_path):
  """E1: 12 -> 16 and 16 -> 12 layers; the moments say it by layer."""
  store = checkpoint.Checkpoints(tmp_path)
  for there, here, word in ((12, 16, 'missing'), (16, 12, 'extra')):
    mine, plan = params(there, True)
    manifest = {models.MANIFEST: json.dumps(models.manifest(card(there), mine, plan))}
    store.save(there, {'optimizer': {'mu': mine}}, manifest, wait=True)
    other, other_plan = params(here, True)
    with pytest.raises(config.Error, match=rf'36 {word}: mu\.layers\.12\.'):  # 4 layers of 9 parameters
      store.restore(there, {'optimizer': {'mu': other}}, segments=other_plan)


_DEVICES = """
import sys
import jax, numpy as np
jax.config.update('jax_num_cpu_devices', 4)
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from maxtext_train import checkpoint
on = lambda n: NamedSharding(Mesh(np.array(jax.devices()[:n]), ('x',)), P('x'))
store = checkpoint.Checkpoints(sys.argv[1])
value = jax.device_put(np.arange(32.0).reshape(8, 4), on(4))
store.save(1, {'optimizer': {'m': value}}, {}, wait=True)
for n in (1, 2):
  like = {'optimizer': {'m': jax.ShapeDtypeStruct((8, 4), np.float32, sharding=on(n))}}
  found = store.restore(1, like)['optimizer']['m']
  assert len(found.addressable_shards) == n and np.array_equal(found, np.arange(32.0).reshape(8, 4))
"""


def test_saved_on_four_devices_read_on_one_and_two(tmp_path):
  """E6: metadata, plain numpy and arrays on fewer devices, all from a checkpoint of four."""
  environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, sys.path))}
  subprocess.run([sys.executable, '-c', _DEVICES, str(tmp_path)], check=True, env=environment)
  assert models.committed(tmp_path / '1')['leaves'] == {'optimizer': {'m': [[8, 4], 'float32']}}
  here = checkpoint.Checkpoints(tmp_path).restore(1, {'optimizer': {'m': jax.ShapeDtypeStruct((8, 4), np.float32)}})
  assert np.array_equal(here['optimizer']['m'], np.arange(32.0).reshape(8, 4))
  assert np.array_equal(orbax_files.Reader(tmp_path / '1' / 'optimizer')('m'), np.arange(32.0).reshape(8, 4))


def test_what_is_read_needs_no_budget(tmp_path, monkeypatch):
  """J13: reading does not go through Orbax, whose budget for arrays in flight has refused large checkpoints."""
  store = checkpoint.Checkpoints(tmp_path)
  big = {'w': jnp.ones((512, 1024))}
  store.save(1, {'optimizer': big}, {}, wait=True)
  import orbax.checkpoint as ocp

  monkeypatch.setattr(ocp.PyTreeCheckpointHandler, 'restore', None)
  assert equal(store.restore(1, {'optimizer': big})['optimizer'], big)
