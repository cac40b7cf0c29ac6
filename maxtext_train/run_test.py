import pytest

from maxtext_layers import config
from maxtext_layers import sharding
from maxtext_models.families import llama
from maxtext_train import run


def settings(**changes):
  card = llama.Llama(layers=1, d_model=8, d_ff=16, heads=2, kv_heads=1, head_dim=4, vocab=259, context=32)
  return run.Pretrain(**{'name': 'x', 'model': card, 'steps': 5, 'batch': 4, 'length': 16, **changes})


def test_a_config_that_is_fine():
  config.check(settings())


@pytest.mark.parametrize(
  ('changes', 'text'),
  [
    ({'batch': 6, 'accumulate': 4}, 'config: batch=6 is not divisible by accumulate=4'),
    ({'accumulate': 0}, 'config: accumulate=0 is not positive'),
    ({'length': 33}, r'config: length=33 exceeds model\.context=32'),
    ({'sample': ''}, 'config: sample is empty; none asks for no sample'),
    ({'dropout': 1.0}, r'config: dropout=1\.0 lies outside 0'),
    ({'remat': 'ful'}, "remat 'ful'.*did you mean 'full'"),
    ({'mesh': sharding.Config(preset='tensr')}, r"config\.mesh: preset='tensr' is none of .*did you mean 'tensor'"),
    ({'mesh': sharding.Config(data=0)}, r'config\.mesh: data=0 is neither positive nor -1'),
    ({'mesh': sharding.Config(data=-1, fsdp=-1)}, r'config\.mesh: more than one size is -1'),
    ({'checkpoint': run.Checkpoint(keep=0)}, r'config\.checkpoint: keep=0 is not positive; none switches it off'),
    ({'checkpoint': run.Checkpoint(every=-1)}, r'config\.checkpoint: every=-1 is negative'),
    ({'profile': run.Profile(first=5, last=3)}, r'config\.profile: last=3 is before first=5'),
  ],
)
def test_what_cannot_work_is_named(changes, text):
  with pytest.raises(config.Error, match=text):
    config.check(settings(**changes))


def test_the_mesh_fits_the_devices_and_the_batch(monkeypatch):
  """Before anything is compiled: sizes that do not fit, and rows of a micro-batch that do not divide."""
  import jax

  with pytest.raises(config.Error, match=r'^config\.mesh: mesh data=1 x fsdp=\d+ x tensor=1 does not fit'):
    run.mesh(settings(mesh=sharding.Config(fsdp=3 * jax.device_count())))

  four = jax.sharding.AbstractMesh((2, 2, 1), sharding.MESH)
  monkeypatch.setattr(run.sharding, 'mesh', lambda *_, **__: four)
  run.mesh(settings(batch=8, accumulate=2))
  with pytest.raises(
    config.Error, match=r'^config\.batch=8 / config\.accumulate=2 does not divide over the mesh: data=2 x fsdp=2$'
  ):
    run.mesh(settings(batch=8, accumulate=4))
