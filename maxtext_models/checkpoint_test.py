"""The native format: what it refuses, what it keeps, and on which machine it is read."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import orbax.checkpoint as ocp
import pytest

from maxtext_layers import config
from maxtext_layers import rope
from maxtext_models import atomic
from maxtext_models import checkpoint
from maxtext_models import decoder
from maxtext_models import layout
from maxtext_models import orbax_files
from maxtext_models import registry

TINY = dict(d_model=16, d_ff=24, heads=2, kv_heads=1, head_dim=8, vocab=11, context=64, name='tiny')


def card_of(layers=3, **changes):
  return dataclasses.replace(registry.card('qwen3-0.6b'), **(TINY | {'layers': layers} | changes))


def values(model):
  """name -> array of every parameter, whatever the plan."""
  leaves = layout.leaves(nnx.state(model, nnx.Param))
  slots = layout.slots(leaves, model.stack.plan)
  return {n: np.asarray(leaves[s.path].get_value())[... if s.repeat is None else s.repeat] for n, s in slots.items()}


@pytest.fixture(name='model', scope='module')
def _model():
  return initial()


def initial():
  """12 scanned layers of random numbers."""
  graph, state = nnx.split(decoder.abstract(card_of(12), scan=True))
  rng = np.random.default_rng(3)
  return nnx.merge(graph, jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape).astype(leaf.dtype)), state))


@pytest.fixture(name='saved', scope='module')
def _saved(model, tmp_path_factory):
  """A native checkpoint of 12 scanned layers."""
  directory = str(tmp_path_factory.mktemp('native') / 'twelve')
  checkpoint.save(directory, card_of(12), model)
  return directory


def abstract_of(card, **options):
  model = decoder.abstract(card, **options)
  return nnx.split(model)[1], model.stack.plan


@pytest.mark.parametrize('scan', [True, False, 'auto'])
def test_any_plan_reads_what_any_plan_wrote(model, saved, tmp_path, scan):
  """A2, E10: scanned -> another plan -> scanned, bit by bit."""
  card, other = checkpoint.load(saved, scan=scan)
  assert card == card_of(12)
  assert len(other.stack.plan) == (1 if scan else 12)
  checkpoint.save(tmp_path / 'again', card, other)
  _, back = checkpoint.load(tmp_path / 'again', scan=True)
  wanted, got = values(model), values(back)
  assert wanted.keys() == got.keys()
  assert all((wanted[n] == got[n]).all() for n in wanted)


@pytest.mark.parametrize(
  'changes, said',
  [
    (dict(layers=16), ['44 missing: layers.12.ffn.down, ', 'layers.12.mixer.v, ...']),
    (dict(layers=8), ['44 left over: layers.10.ffn.down, ']),
    (dict(d_ff=32), ['36 mismatched: layers.0.ffn.down (float32[24, 16], the model has float32[32, 16])']),
    (dict(layers=13, d_ff=32), ['11 missing', '36 mismatched']),
    (dict(tied=False), ['1 missing: head']),
    (dict(vocab=12), ['1 mismatched: embed (float32[11, 16], the model has float32[12, 16])']),
  ],
)
def test_another_shape_lists_what_differs(saved, changes, said):
  """E1: more layers, fewer, other widths: what is missing, left over and mismatched, the first ten and the counts."""
  state, plan = abstract_of(card_of(**{'layers': 12} | changes))
  with pytest.raises(config.Error) as error:
    checkpoint.restore_weights(saved, state, plan)
  text = str(error.value)
  assert saved in text and '\n' not in text
  for words in said:
    assert words in text
  assert text.count('layers.') <= 20 + text.count('(')


def test_another_dtype_is_an_error_unless_asked_for(saved):
  """E1: dtypes are compared; a program that wants another says so."""
  card = card_of(12)
  state, plan = abstract_of(card)
  half = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, 'bfloat16'), state)
  with pytest.raises(config.Error, match=r'134 mismatched: embed \(float32\[11, 16\], the model has bfloat16'):
    checkpoint.restore_weights(saved, half, plan)
  assert checkpoint.load(saved, dtype='bfloat16')[1].embed.w[...].dtype == 'bfloat16'
  assert checkpoint.load(saved)[1].embed.w[...].dtype == 'float32'


def test_orbax_and_this_module_read_each_other(model, saved, tmp_path):
  """E10: one layout; what Orbax writes is read here, what is written here Orbax reads."""
  tree = ocp.PyTreeCheckpointer().restore(os.path.join(saved, 'weights'))
  flat = {'.'.join(p): np.asarray(v.get_value()) for p, v in layout.leaves(nnx.state(model, nnx.Param)).items()}
  manifest = checkpoint.read_manifest(saved)
  assert set(manifest['weights']) == set(flat)
  for key, value in flat.items():
    inner = tree
    for word in key.split('.'):
      inner = inner[word]
    np.testing.assert_array_equal(inner, value)
  by_orbax = tmp_path / 'by-orbax'
  with ocp.CheckpointManager(by_orbax, item_names=('weights',)) as manager:
    item = checkpoint.weights_item(nnx.state(model, nnx.Param))
    manager.save(7, args=ocp.args.Composite(weights=ocp.args.PyTreeSave(item)))
  checkpoint.write_manifest(by_orbax / '7', card_of(12), nnx.state(model, nnx.Param), model.stack.plan)
  _, back = checkpoint.load(by_orbax / '7', scan=False)
  wanted, got = values(model), values(back)
  assert all((wanted[n] == got[n]).all() for n in wanted)


def test_a_copied_directory_loads(model, saved, tmp_path):
  """E4: no commit marker of a file system is needed, and a folder's name is no URL."""
  shutil.copytree(saved, tmp_path / 'a copy #1 of 50%20?')
  wanted, got = values(model), values(checkpoint.load(tmp_path / 'a copy #1 of 50%20?')[1])
  assert all((wanted[n] == got[n]).all() for n in wanted)


def test_save_and_load_at_once_leaves_no_temporary_names(model, tmp_path):
  """E5: a path that was saved to exists."""
  checkpoint.save(tmp_path / 'now', card_of(12), model)
  assert checkpoint.load(tmp_path / 'now')[0] == card_of(12)
  assert os.listdir(tmp_path) == ['now']


WRITER = """
import jax, numpy as np, sys
from flax import nnx
from maxtext_layers import sharding
from maxtext_models import checkpoint, decoder
sys.path.insert(0, sys.argv[3])
import checkpoint_test
assert len(jax.devices()) == 4
if sys.argv[1] == 'write':
  model = checkpoint_test.initial()
  graph, state = nnx.split(model)
  state = jax.device_put(state, checkpoint_test.split_over(state, 4))
  assert state['stack']['segments'][0]['blocks'][0]['mixer']['q']['w'].get_value().sharding.num_devices == 4
  checkpoint.save(sys.argv[2], checkpoint_test.card_of(12), nnx.merge(graph, state))
"""


def split_over(state, devices):
  """Shardings that cut the axis `embed` over so many devices."""
  mesh = Mesh(np.array(jax.devices()[:devices]), ('x',))

  def of(variable):
    axes = [('x' if word == 'embed' else None) for word in variable.get_metadata('axes')]
    return variable.replace(NamedSharding(mesh, PartitionSpec(*axes)))

  return jax.tree.map(of, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def test_saved_on_four_devices_read_on_one(model, tmp_path):
  """E6: metadata, arrays as numpy, and the model, on fewer devices than wrote them."""
  here = pathlib.Path(__file__)
  env = os.environ | {'XLA_FLAGS': '--xla_force_host_platform_device_count=4', 'JAX_PLATFORMS': 'cpu'}
  env['PYTHONPATH'] = os.pathsep.join(map(os.path.abspath, sys.path))
  target = str(tmp_path / 'four')
  subprocess.run([sys.executable, '-c', WRITER, 'write', target, str(here.parent)], check=True, env=env, timeout=120)
  assert checkpoint.describe(target)['layers'] == 12
  key = 'stack.segments.0.blocks.0.mixer.q.w'
  reader = orbax_files.Reader(os.path.join(target, 'weights'))
  q = np.asarray(model.stack.segments[0].blocks[0].mixer.q.w[...])
  np.testing.assert_array_equal(reader(key), q)
  np.testing.assert_array_equal(reader(key, (slice(3, 5), slice(0, 4))), q[3:5, :4])
  _, one = checkpoint.load(target, scan=False)
  wanted, got = values(model), values(one)
  assert all((wanted[n] == got[n]).all() for n in wanted)


def test_a_sharded_restore_reads_its_shards(model, saved, monkeypatch):
  """J13: what is in flight is one device's part of one parameter, so there is no budget to exceed."""
  largest = []
  gather = checkpoint.gather

  def watched(reader, slots, wanted, index):
    part = gather(reader, slots, wanted, index)
    largest.append(part.nbytes)
    return part

  monkeypatch.setattr(checkpoint, 'gather', watched)
  _, got = checkpoint.load(saved, scan=True, shardings=lambda state: split_over(state, 1))
  assert got.embed.w[...].sharding.mesh.axis_names == ('x',)
  wanted, got = values(model), values(got)
  assert all((wanted[n] == got[n]).all() for n in wanted)
  assert max(largest) == max(np.asarray(v.get_value()).nbytes for v in layout.leaves(nnx.state(model)).values())


def test_kind_is_read_from_marks(saved, tmp_path):
  """A17: by what a directory is marked as, never by its tensors; two marks are an error."""
  assert checkpoint.kind(saved) == 'native'
  run = tmp_path / 'run'
  (run / 'checkpoints').mkdir(parents=True)
  (run / 'config.txt').write_text('')
  assert checkpoint.kind(run) == 'run'
  with pytest.raises(config.Error, match='run without a finished checkpoint'):
    checkpoint.load(run)
  young = tmp_path / 'young'
  young.mkdir()
  (young / 'config.txt').write_text('')
  (young / 'metrics.jsonl').write_text('')
  with pytest.raises(config.Error, match='young is a run without a finished checkpoint'):
    checkpoint.load(young)
  (tmp_path / 'nothing').mkdir()
  with pytest.raises(config.Error, match='is no checkpoint: neither'):
    checkpoint.kind(tmp_path / 'nothing')
  with pytest.raises(config.Error, match='is not a directory'):
    checkpoint.kind(tmp_path / 'absent')
  both = tmp_path / 'both'
  shutil.copytree(saved, both)
  (both / 'config.json').write_text('{}')
  (both / 'model.safetensors').write_text('')
  with pytest.raises(config.Error, match='marked as native and as hf'):
    checkpoint.kind(both)


def test_a_run_means_its_newest_finished_checkpoint(saved, tmp_path):
  """E8: half-written steps and temporary names are not steps."""
  run = tmp_path / 'run'
  (run / 'checkpoints').mkdir(parents=True)
  (run / 'config.txt').write_text('')
  (run / 'tokenizer').mkdir()
  (run / 'tokenizer/tokenizer.json').write_text('{}')
  for step in ('4', '10'):
    shutil.copytree(saved, run / 'checkpoints' / step)
    (run / 'checkpoints' / step / 'commit.json').write_text('{"files": {}}')
  shutil.copytree(saved, run / 'checkpoints/11')  # without the marker, as training leaves it when it is killed
  shutil.copytree(saved, run / 'checkpoints/12')
  (run / 'checkpoints/12/commit.json').write_text('{"files": {"model.json": 1}}')  # half a copy
  (run / 'checkpoints/13').mkdir()
  (run / 'checkpoints/14.orbax-checkpoint-tmp').mkdir()
  (run / 'checkpoints/10/train.json').write_text('{"step": 10, "learning_rate": 0.5, "other": [1]}')
  assert checkpoint.resolve(run) == str(run / 'checkpoints/10')
  assert checkpoint.finished_steps(run) == [4, 10]
  said = checkpoint.remarks(run)
  assert [line.split(' is ')[0] for line in said] == [str(run / 'checkpoints' / step) for step in ('11', '12', '13')]
  assert all(line.endswith('is incomplete or changed and is not used; step 10 is taken') for line in said)
  assert checkpoint.remarks(saved) == []
  with pytest.raises(config.Error, match=r'checkpoints/12 is incomplete or changed: not all files have the sizes'):
    checkpoint.load(run / 'checkpoints/12')
  assert checkpoint.load(run)[0] == card_of(12)
  assert checkpoint.tokenizer_files(run) == str(run / 'tokenizer')
  assert checkpoint.tokenizer_files(run / 'checkpoints/10') == str(run / 'tokenizer')
  shown = checkpoint.describe(run)
  assert (shown['kind'], shown['step'], shown['learning_rate'], shown['checkpoints']) == ('run', 10, 0.5, '4 10')


@pytest.mark.parametrize(
  'spoil, said',
  [
    (lambda d: (d / 'model.json').write_text('{"format": "other"}'), "format='other'"),
    (lambda d: (d / 'model.json').write_text('{'), 'model.json is not JSON'),
    (lambda d: rewrite(d / 'model.json', version=2), 'version=2 is not 1'),
    (lambda d: rewrite(d / 'model.json', plan=[{'start': 0}]), 'is damaged'),
    (lambda d: (d / 'card.json').unlink(), 'card.json'),
    (lambda d: rewrite(d / 'card.json', layer=3), "unknown field 'layer'; did you mean 'layers'"),
    (lambda d: rewrite(d / 'card.json', family='qwen'), "family 'qwen'"),
    (lambda d: rewrite(d / 'card.json', kv_heads=3), 'kv_heads=3'),
    (lambda d: shutil.rmtree(d / 'weights'), 'has no readable array'),
    (lambda d: shutil.rmtree(d / 'weights' / 'd'), 'array'),
  ],
)
def test_damage_is_one_line(saved, tmp_path, spoil, said):
  directory = tmp_path / 'damaged'
  shutil.copytree(saved, directory)
  spoil(directory)
  with pytest.raises(config.Error) as error:
    checkpoint.load(directory)
  assert said in str(error.value) and str(directory) in str(error.value) + str(directory / 'card.json')
  assert '\n' not in str(error.value)


def rewrite(path, **changes):
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_cards_survive_json():
  cards = [registry.card(name) for name in registry.names()]
  cards.append(
    dataclasses.replace(cards[0], scaling=rope.Yarn(factor=2.0, trained=64, attention=1.0), vocab_multiple=8)
  )
  for card in cards:
    assert checkpoint.card_from_dict(json.loads(json.dumps(checkpoint.card_to_dict(card)))) == card


def test_nothing_is_left_of_a_save_that_fails(model, tmp_path, monkeypatch):
  """The disk fills during a save: one line, no directory, and what was there stays."""
  (tmp_path / 'before').write_text('kept')

  def full(*args, **kwargs):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(checkpoint, 'write_manifest', full)
  with pytest.raises(config.Failure, match='disk full while writing'):
    checkpoint.save(tmp_path / 'target', card_of(12), model)
  assert os.listdir(tmp_path) == ['before']


def test_too_small_a_disk_is_known_before_anything_is_written(model, tmp_path, monkeypatch):
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: shutil._ntuple_diskusage(100, 0, 100))
  with pytest.raises(config.Failure, match=r'needs 95,232 bytes, 100 are free'):
    checkpoint.save(tmp_path / 'target', card_of(12), model)
  assert not os.listdir(tmp_path)


def test_a_target_behind_a_link_is_written_where_it_points(model, tmp_path):
  (tmp_path / 'disk').mkdir()
  for there in (True, False):
    place, link = tmp_path / f'disk/{there}', tmp_path / f'link-{there}'
    if there:
      place.mkdir()
    link.symlink_to(place)
    checkpoint.save(link, card_of(12), model)
    assert link.is_symlink() and checkpoint.kind(place) == checkpoint.kind(link) == 'native'
  assert sorted(os.listdir(tmp_path / 'disk')) == ['False', 'True']


def test_a_mount_point_is_refused_before_the_work(model, tmp_path, monkeypatch):
  (tmp_path / 'target').mkdir()
  monkeypatch.setattr(os.path, 'ismount', lambda path: str(path) == str(tmp_path / 'target'))
  monkeypatch.setattr(checkpoint, 'write_manifest', None)
  with pytest.raises(config.Error, match='target is a mount point, which no directory can replace; name one inside'):
    checkpoint.save(tmp_path / 'target', card_of(12), model)
  assert os.listdir(tmp_path) == ['target']


def test_a_filled_target_is_refused_and_kept(tmp_path):
  (tmp_path / 'target').mkdir()
  (tmp_path / 'target/mine').write_text('x')
  with pytest.raises(config.Error, match='not an empty directory'):
    with atomic.directory(tmp_path / 'target'):
      pass
  assert (tmp_path / 'target/mine').read_text() == 'x'
