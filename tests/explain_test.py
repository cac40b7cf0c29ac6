"""What --explain prints, what a second start finds compiled, and the whole config of a run of each family."""

import contextlib
import io
import json
import pathlib
import re

import jax
from jax import monitoring
from jax.experimental.compilation_cache import compilation_cache
import pytest

from maxtext_layers import config
from maxtext_models import registry
from maxtext_train import explain as explained
from maxtext_train import pretrain
from maxtext_train import schedule
from tests import tiny_run

GOLDEN = pathlib.Path(__file__).parent / 'golden'


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  return tmp_path_factory.mktemp('explain')


def explain(settings, folder):
  with contextlib.redirect_stdout(io.StringIO()) as out:
    pretrain.explain(settings, folder)
  return out.getvalue()


def test_the_plan_is_explained_and_the_second_start_compiles_nothing(base):
  """B9, C10, J11: mask policy, packing, kernel, mesh, decay list, memory and FLOPs; the cache is on by default."""
  settings = tiny_run.settings(base)
  jax.config.update('jax_compilation_cache_dir', None)  # another test's
  compilation_cache.reset_cache()
  events = []
  monitoring.register_event_listener(lambda event, **_: events.append(event.rsplit('/', 1)[-1]))
  first = explain(settings, base / 'run')
  assert events.count('cache_hits') == 0 and events.count('cache_misses') > 0
  events.clear()
  jax.clear_caches()  # what another process would not have
  assert explain(settings, base / 'run') == first and not (base / 'run').exists()
  assert events.count('cache_hits') > 0 and events.count('cache_misses') == 0
  assert first.startswith(config.dump(settings)) and 'resumed' not in first and 'warning' not in first
  for text in (
    'masks: causal; documents are isolated, padding is masked', 'kernels: attention chunked', 'documents concatenated',
    'mesh: preset fsdp, data 1, fsdp 1, tensor 1', 'loss: cross-entropy in 1 chunk(s) along the tokens, z-loss 0.0',
    'scan: 1 block(s) x 1 from layer 0; 1 block(s) x 1 from layer 1', 'embed.w', 'decays: 14 parameters',
    'schedule: kind cosine, updates 10, first 0.005', 'last 0.001',
  ):  # fmt: skip
    assert text in first, text
  memory = re.search(r'memory of a device: state_and_batch ([\d.,]+) MiB, temporary ([\d.,]+) MiB', first)
  parameters = 259 * 16 + 2 * (2 * 16 + 16 * 8 * (2 + 1 + 1 + 2) + 3 * 16 * 32) + 16  # table, blocks, last norm
  state = 3 * 4 * parameters + 2 * 4  # float32 weights and two moments; two counters
  assert float(memory[1]) == pytest.approx((state + 5 * 4 * 4 * 32) / 2**20, abs=0.06)  # and five arrays of the batch
  flops = 6 * (parameters - 5 * 16) * 4 * 32 + 2 * 6 * 2 * 8 * 32 * 32 * 4  # all but norms; 2 layers of attention
  assert f'flops_per_step: {flops:,}' in first


def test_a_run_is_explained_where_it_would_go_on(base, monkeypatch):
  """B9: the card and the place of the newest checkpoint in --workdir, read and left as they are; what training would
  refuse is refused."""
  settings = tiny_run.settings(base, steps=2, evaluate__every=0)
  with contextlib.redirect_stdout(io.StringIO()):
    pretrain.train(settings, base / 'begun')
  before = {p: p.read_bytes() for p in (base / 'begun').rglob('*') if p.is_file()}
  monkeypatch.setattr(explained, 'room', lambda: (2**19, 'this host has'))
  out = explain(tiny_run.settings(base, steps=3, evaluate__every=0, model=None), base / 'begun')
  assert 'model: name tiny, family Llama' in out and '\nresumed: step 2, epoch 0, ' in out
  found = re.search(r'\nwarning: a step needs ([\d.]+) GiB on each device; this host has 0.00 GiB\n', out)
  parts = re.search(r'state_and_batch ([\d.]+) MiB, temporary ([\d.]+) MiB, code ([\d.]+) MiB', out)
  assert float(found[1]) == pytest.approx(sum(map(float, parts.groups())) / 2**10, abs=0.006)
  assert '\nchanged since step 2: ' in out and 'steps 2 -> 3' in out
  assert f'{base / "begun"} is complete: step 2' in explain(settings, base / 'begun')
  assert {p: p.read_bytes() for p in (base / 'begun').rglob('*') if p.is_file()} == before

  started = tiny_run.settings(base, evaluate__every=0, init_from=str(base / 'begun'))
  assert f'\nweights: {base / "begun"}' in explain(started, base / 'new')
  wider = tiny_run.settings(base, init_from=str(base / 'begun'))
  wider.model.d_ff = 48
  (base / 'foreign').mkdir()
  (base / 'foreign' / 'thesis.tex').touch()
  for settings, folder, text in (
    (wider, 'new', 'begun holds another model: d_ff=32, the config says 48'),
    (started, 'begun', 'begun has checkpoints .newest: step 2.: a run either starts from weights or'),
    (tiny_run.settings(base, init_from=str(base / 'foreign')), 'new', 'foreign is no checkpoint'),
    (tiny_run.settings(base), 'foreign', 'foreign is not empty and no run directory'),
    (tiny_run.settings(base, sample='the ' * 16), 'new', r"config\.sample='the the .*' has 65 tokens, .* is 64$"),
  ):
    for go in (explain, pretrain.train):
      with pytest.raises(config.Error, match=text):
        go(settings, base / folder)
  assert not (base / 'new').exists()


@pytest.mark.parametrize('model', ['llama3.2-1b', 'qwen3-0.6b'])
def test_config_goldens(model):
  """The resolved config of one run a family: a diff shows what a change did to every model."""
  value, rest = config.parse([f'--config=pretrain:{model}'], None, pretrain.resolve)
  golden = GOLDEN / f'config_{model}.txt'
  assert not rest and config.dump(value) == golden.read_text()


def test_examples_of_the_readme_are_valid():
  """Short runs fit their schedule, and text that is named is read."""
  for arguments in (
    ['--config=pretrain:qwen3-0.6b', '--config.data.source=text', '--config.data.paths=texts/*.txt'],
    ['--config=pretrain:qwen3-0.6b', '--config.steps=10', '--config.model.layers=4'],
    ['--config=quickstart', '--config.steps=10'],
  ):
    value, _ = config.parse(arguments, None, pretrain.resolve)
    config.check(value)
    schedule.build(value.schedule, value.steps)


def test_every_model_has_a_pretraining_config():
  for name in registry.names():
    value, _ = config.parse([f'--config=pretrain:{name}'], None, pretrain.resolve)
    assert value.name == name and value.length <= value.model.context


def test_the_quickstart_is_small_and_needs_nothing():
  value, _ = config.parse([], 'quickstart', pretrain.resolve)
  assert value.name == 'quickstart' and value.data.source == 'stdlib' and not value.data.paths
  assert 0.7e6 < value.model.parameters() < 1.3e6
  assert json.dumps(value.sample) == '"def "'
