"""The measuring programs measure: shapes are the peers', command lines parse, the printed line is complete."""

import hashlib
import importlib.util
import json
import subprocess
import sys

import pytest

from maxtext_models import registry
from maxtext_train import flops
from tests.benchmarks import compile_depth
from tests.benchmarks import convert_memory
from tests.benchmarks import delta_ratio
from tests.benchmarks import depth
from tests.benchmarks import first_step
from tests.benchmarks import import_time
from tests.benchmarks import loading
from tests.benchmarks import loss_memory
from tests.benchmarks import measure
from tests.benchmarks import mla_ratio
from tests.benchmarks import train_ratio
from tests.benchmarks import twin_sweep
from tests.benchmarks import vs_maxtext
from tests.benchmarks import vs_torch
from tests.benchmarks import workloads

FIGURES = {
  'tokens_per_s': 200.0,
  'step_ms': 10.0,
  'cpu_s_per_step': 0.02,
  'first_step_s': 3.0,
  'first_step_cpu_s': 4.0,
  'rss_mb': 100,
  'faults_per_step': 7.0,
  'loss_first': 6.0,
  'loss_last': 5.0,
  'others': 0.25,
}


@pytest.fixture(scope='module')
def theirs():
  spec = importlib.util.spec_from_file_location('theirs', measure.PEERS / 'workloads.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def line(program, arguments, monkeypatch, capsys):
  monkeypatch.setattr(sys, 'argv', ['program', *arguments])
  program.main()
  return json.loads(capsys.readouterr().out)


def test_peers_are_as_they_were_written():
  found = {p.name: hashlib.sha256(p.read_bytes()).hexdigest()[:16] for p in measure.PEERS.glob('*.py')}
  assert found['bench_jax_min.py'] == '3a2632f48acb130b'
  assert found['workloads.py'] == 'c79b07ed98c42b71'
  assert found['bench_torch.py'] == 'a856c43b4ad4067d'
  assert found['bench_maxtext.py'] == '2569ffcc334c5dd1'


@pytest.mark.parametrize('name', workloads.SHAPES)
def test_workloads_are_the_peers(name, theirs):
  settings, shape, hyper = workloads.get_config(name), theirs.WORKLOADS[name], theirs.HYPER
  card = settings.model
  ours = (card.layers, card.d_model, card.heads, card.kv_heads, card.head_dim, card.d_ff, card.vocab, card.tied)
  words = ('layers', 'emb', 'heads', 'kv', 'hd', 'mlp', 'vocab', 'tied')
  assert ours == tuple(shape[word] for word in words)
  assert (settings.batch, settings.length) == (shape['batch'], shape['seq'])
  assert (card.eps, card.theta) == (1e-5, 10000.0)  # bench_jax_min.py: rms, rope_tables
  total, active, operations = theirs.counts(shape)
  assert (card.parameters(), card.matmul_parameters()) == (total, active)
  assert flops.step(card, settings.batch, settings.length) == operations
  o = settings.optimizer
  assert (settings.schedule.peak, o.b1, o.b2, o.eps, o.weight_decay, o.clip) == tuple(
    hyper[word] for word in ('lr', 'b1', 'b2', 'eps', 'wd', 'clip')
  )
  assert o.no_decay == () and settings.schedule.kind == 'constant' and settings.schedule.warmup == 0


def test_a_process_is_measured():
  code = 'import sys; x = bytearray(b"x" * (64 << 20)); print(len(x)); print("said", file=sys.stderr)'
  pids = set()
  process = measure.Process([sys.executable, '-c', code], watch=pids.add)
  assert (process.out, process.err, len(pids)) == (f'{64 << 20}\n', 'said\n', 1)
  assert process.rss_mb >= 64 and process.faults > 1000
  assert 0 < process.cpu <= process.seconds * 8 and 0 <= process.others <= 1
  with pytest.raises(RuntimeError, match='ended with 3\nlast words'):
    measure.Process([sys.executable, '-c', 'print("last words"); raise SystemExit(3)'])


def test_sides_take_turns_and_rounds_are_compared():
  order = []
  sides = {name: lambda name=name: order.append(name) or FIGURES for name in ('a', 'b')}
  measure.interleaved(sides, 3)
  assert order == ['a', 'b', 'b', 'a', 'a', 'b']
  rows = {'a': [{'x': 2.0}, {'x': 3.0}, {'x': 8.0}], 'b': [{'x': 1.0}, {'x': 3.0}, {'x': 2.0}]}
  assert measure.compared(rows, 'a', 'b', 'x') == {'ratio': 2.0, 'range': [1.0, 4.0]}
  assert measure.median(rows, 'x') == {'a': 3.0, 'b': 2.0}


def test_ours_and_the_twin_run(monkeypatch, capsys):
  """Both, really, on the smallest workload."""
  arguments = ['--workload=W0', '--allocator=system', '--rounds=1', '--steps=20', '--set=seed=3']
  found = line(train_ratio, arguments, monkeypatch, capsys)
  assert found['ratio'] == found['range'][0] == found['range'][1] > 0
  assert found['ratio'] == pytest.approx(found['tokens_per_s']['ours'] / found['tokens_per_s']['twin'], rel=1e-3)
  assert (
    found['cpu_ratio'] > 0 and found['switches'] == '--layers unroll --attn chunk --ce fused --opt hand --ce_chunks 4'
  )
  for name in ('ours', 'twin'):  # ln 512 = 6.24, and one batch over and over
    assert 6.0 < found['loss_first'][name] < 7.0 and found['loss_last'][name] < found['loss_first'][name]
    assert found['first_step_s'][name] > 0.5 and found['rss_mb'][name] > 100 and found['faults_per_step'][name] > 0
  assert found['cpus'] >= 1


@pytest.mark.parametrize(
  'program, arguments, sides',
  [
    (vs_torch, ['--torch_python=python', '--passive'], {'ours', 'torch'}),
    (vs_maxtext, ['--maxtext_python=python', '--maxtext_set=scan_layers=false'], {'ours', 'maxtext'}),
  ],
)
def test_a_peer_is_compared(program, arguments, sides, monkeypatch, capsys):
  ran = []

  def process(command, *, environment, folder):
    ran.append(command)
    shown = {'step_ms_median': 1.0, 'peak_rss_mb': 1, **dict.fromkeys(FIGURES, 100.0)}
    return type('Done', (), {'out': 'noise\n' + json.dumps(shown), 'faults': 50, 'others': 0.0})

  monkeypatch.setattr(measure, 'ours', lambda *_, **__: FIGURES)
  monkeypatch.setattr(measure, 'Process', process)
  found = line(program, [*arguments, '--rounds=2', '--steps=10', '--workload=W2'], monkeypatch, capsys)
  assert found['ratio'] == 2.0 and found['range'] == [2.0, 2.0] and found['cpu_ratio'] == 5000.0
  assert set(found['tokens_per_s']) == sides and found['workload'] == 'W2'
  assert len(ran) == 2 and 'W2' in ran[0] and '10' in ran[0]
  if program is vs_maxtext:
    assert ran[0][-1] == 'scan_layers=false' and found['settings'] == ['scan_layers=false']


def test_first_step_has_a_cold_and_a_warm_side(monkeypatch, capsys):
  caches = []
  ours = lambda workload, name, folder, *, steps, cache: caches.append(cache) or FIGURES
  monkeypatch.setattr(measure, 'ours', ours)
  monkeypatch.setattr(vs_maxtext, 'maxtext', lambda *_: FIGURES | {'first_step_s': 12.0, 'first_step_cpu_s': 16.0})
  found = line(first_step, ['--maxtext_python=python', '--rounds=2'], monkeypatch, capsys)
  assert found['ratio'] == found['cpu_ratio'] == 0.25
  assert found['first_step_s'] == {'ours': 3.0, 'warm': 3.0, 'maxtext': 12.0}
  assert caches.count(None) == 2 and len(caches) == 5  # one more fills the cache


def test_import_time(monkeypatch, capsys):
  took = {import_time.OURS: 1.0, import_time.WHOLE: 3.0, import_time.THEIRS: 2.0, 'pass': 0.1}
  monkeypatch.setattr(import_time, 'imported', lambda s: {'seconds': took[s], 'cpu': took[s], 'others': 0.0})
  found = line(import_time, ['--rounds=2'], monkeypatch, capsys)
  assert found['ratio'] == 0.5 and found['whole']['ratio'] == 1.5 and found['cpu_s']['theirs'] == 2.0


def test_the_sweep_is_complete_and_finds_the_best(monkeypatch, capsys):
  assert len(set(twin_sweep.combinations('W1'))) == 2 * 4 * 2 * (1 + 3 + 3)
  assert len(set(twin_sweep.combinations('W3'))) == 2 * 4 * 2 * (1 + 3 + 3) * (3 + 3)
  best = '--layers scan --attn bhsd --ce fused --opt hand --ce_chunks 4'
  twin = lambda *_, steps, switches: FIGURES | {'cpu_s_per_step': 1.0 if switches == best else 2.0}
  monkeypatch.setattr(measure, 'twin', twin)
  found = line(twin_sweep, ['--workload=W1'], monkeypatch, capsys)
  assert found['best'] == best and found['combinations'] == 112 and found['worst_cpu_s_per_step'] == 2.0


def test_values_set_aside_are_tried_beside_the_best(monkeypatch):
  monkeypatch.setitem(measure.BEST, 'W1', '--layers unroll --attn chunk --ce fused --opt hand --ce_chunks 4')
  among = twin_sweep.beside_the_best('W1', ['attn=bhsd', 'attn=sdpa', 'ce=full', 'layers=scan'])
  assert len(among) == 1 * 2 * 2 * (3 + 3) + 4
  assert among[-4:] == [
    '--layers unroll --attn bhsd --ce fused --opt hand --ce_chunks 4',
    '--layers unroll --attn sdpa --ce fused --opt hand --ce_chunks 4',
    '--layers unroll --attn chunk --ce full --opt hand --ce_chunks 4',
    '--layers scan --attn chunk --ce fused --opt hand --ce_chunks 4',
  ]
  with pytest.raises(ValueError, match='no combination has --attn flash'):
    twin_sweep.beside_the_best('W1', ['attn=flash'])


def test_compile_depth(monkeypatch, capsys):
  monkeypatch.setattr(
    compile_depth, 'compiled', lambda n: {'seconds': n / 4, 'trace_s': 0.1, 'cpu': float(n), 'others': 0.0}
  )
  found = line(compile_depth, ['--rounds=1'], monkeypatch, capsys)
  assert (found['ratio'], found['cpu_ratio'], found['layers']) == (4.0, 4.0, [4, 16])


def test_both_forms_of_the_delta_net_are_compared(monkeypatch, capsys):
  found = line(delta_ratio, ['--length=130', '--size=8', '--rounds=1'], monkeypatch, capsys)
  assert (
    found['loss']['chunked'] == pytest.approx(found['loss']['recurrent'], rel=1e-3) and found['loss']['chunked'] > 0
  )
  assert found['ratio'] == found['range'][0] > 0 and found['cpu_ratio'] > 0 and found['length'] == 130


def test_loading_compares_both_sides(monkeypatch, capsys):
  took = {'ours': {'seconds': 3.0, 'cpu': 2.0}, 'theirs': {'seconds': 2.0, 'cpu': 4.0}}
  monkeypatch.setattr(loading, 'child', lambda side, _: took[side] | {'others': 0.0, 'rss_mb': 1})
  found = line(loading, ['--source=x', '--rounds=3'], monkeypatch, capsys)
  assert (found['ratio'], found['cpu_ratio'], found['seconds']) == (1.5, 0.5, {'ours': 3.0, 'theirs': 2.0})


def test_conversion_streams(monkeypatch, capsys, tmp_path):
  """There and back, really, in this process, on files of a megabyte; and both sides of loading read what comes out."""
  monkeypatch.setattr(convert_memory, 'child', convert_memory.convert)
  found = line(convert_memory, ['--layers=3', '--d_model=128', '--shard_mb=1'], monkeypatch, capsys)
  assert found['same'] and found['files'] > 2 and found['peak_mb'].keys() == {'native', 'hf'}
  convert_memory.make(tmp_path / 'one', convert_memory.card(2, 128), 1 << 30)
  assert all(loading.timed(side, str(tmp_path / 'one'))['seconds'] > 0 for side in ('ours', 'theirs'))


def test_three_forms_of_latent_attention_are_compared(monkeypatch, capsys):
  found = line(mla_ratio, ['--length=130', '--rounds=1'], monkeypatch, capsys)
  for name in ('naive', 'absorbed'):
    assert found['loss'][name] == pytest.approx(found['loss']['expanded'], rel=1e-3) and found['loss'][name] > 0
  assert found['ratio'] == found['range'][0] > 0 and found['absorbed_ratio'] > 0 and found['length'] == 130


def test_depth(monkeypatch, capsys):
  """Half the repeats, of the longest segment: 29 of 58 after three dense layers, 5 of 10 periods of six before two."""
  layers = {name: depth.halved(registry.card(name)).layers for name in ('deepseek3-671b', 'gemma3-27b')}
  assert layers == {'deepseek3-671b': 3 + 29, 'gemma3-27b': 5 * 6 + 2}
  fields = dict.fromkeys(('step_s', 'cpu', 'others', 'blocks'), 1.0)
  monkeypatch.setattr(depth, 'lowered', lambda card: {'seconds': card.layers / 4, 'layers': card.layers, **fields})
  found = line(depth, ['--models', 'gemma3-27b', '--rounds=1'], monkeypatch, capsys)
  assert found['ratio'] == pytest.approx(62 / 32, rel=1e-3) and found['layers'] == {'half': 32, 'full': 62}


def test_the_loss_needs_a_quarter_of_the_logits():
  """Less than 25 % of B·T·V·4 bytes for B·T = 4096, V = 32768; the plain loss needs all of them, twice."""
  found = loss_memory.shares(4, 1024, 32768, 256, 16)
  assert found['tokens'] < 0.25 and found['vocabulary'] < 0.25
  assert found['whole'] > 1


@pytest.mark.parametrize('name', ['vs_torch', 'vs_maxtext'])
def test_a_peer_must_be_named(name):
  done = subprocess.run(
    [sys.executable, '-m', f'tests.benchmarks.{name}'], capture_output=True, text=True, cwd=measure.ROOT, check=False
  )
  assert done.returncode == 2 and '_python' in done.stderr.splitlines()[-1]
