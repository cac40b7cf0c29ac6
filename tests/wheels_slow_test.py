"""The wheels, installed one layer more at a time into empty virtual environments, and that layer's smoke.

Nothing comes from a network: pip finds the layers in a folder, and of third-party distributions a virtual environment
holds just those that the wheels declare, and what these declare in turn, as links to this test's own. A
declaration that is missing makes pip fail; one that is too narrow does too; an import that nobody declared fails in the
smoke. Outside Bazel there are no wheels: `bazel test --config=slow //tests:wheels_slow_test`.
"""

import collections
from importlib import metadata
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import zipfile

from packaging import requirements
from packaging import utils
import pytest

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parent.parent
LAYERS = ('maxtext_layers', 'maxtext_models', 'maxtext_train', 'maxtext_posttrain', 'maxtext_eval', 'maxtext_decoupled')
BELOW = {'maxtext_posttrain': LAYERS[:3], 'maxtext_eval': LAYERS[:3], 'maxtext_decoupled': LAYERS[:5]}

BLOCK = """
from flax import nnx
import jax
from maxtext_layers import attention, block, mlp, norm, rope, stack

mixer = attention.Spec(heads=4, kv_heads=2, head_dim=8, rope=rope.Spec(head_dim=8, theta=1e4))
model = stack.Stack([block.Spec(mixer, mlp.Spec(64), norm.Spec())] * 2, 32, rngs=nnx.Rngs(0))
x = jax.random.normal(jax.random.key(0), (1, 6, 32))
y, changed = (model(z, block.Context())[0] for z in (x, x.at[:, -1].set(0)))
print(*y.shape, bool(jax.numpy.isfinite(y).all()), *(y == changed).all(-1)[0].tolist())
"""


@pytest.fixture(scope='module')
def wheels():
  """The folder of the six wheels, as pip wants it."""
  found = [path for layer in LAYERS for path in (ROOT / layer).glob('*.whl')]
  if not os.environ.get('TEST_TARGET') and not found:
    pytest.skip('only Bazel makes the wheels: bazel test --config=slow //tests:wheels_slow_test')
  assert len(found) == len(LAYERS), found
  return found


def declared(wheels, layers):
  """{name: distribution} that the wheels of `layers` declare, and what these declare in turn, on this system."""
  waiting = []
  for wheel in wheels:
    if wheel.name.startswith(tuple(f'{layer}-' for layer in layers)):
      with zipfile.ZipFile(wheel) as archive:
        (path,) = [n for n in archive.namelist() if n.endswith('.dist-info/METADATA')]
        waiting += re.findall(r'^Requires-Dist: (.*)$', archive.read(path).decode(), re.M)
  found, done = {}, set()
  waiting = [(requirements.Requirement(r), ('',)) for r in waiting]
  while waiting:
    requirement, extras = waiting.pop()
    name = utils.canonicalize_name(requirement.name)
    wanted = requirement.marker is None or any(requirement.marker.evaluate({'extra': extra}) for extra in extras)
    if name.startswith('maxtext-') or not wanted or (name, *sorted(requirement.extras)) in done:
      continue
    done.add((name, *sorted(requirement.extras)))
    found[name] = metadata.distribution(name)
    waiting += [(requirements.Requirement(r), ('', *requirement.extras)) for r in found[name].requires or []]
  return found


def linked(distributions):
  """{path in site-packages: what it stands for}; whole folders where no other distribution shares them."""
  owners, files = collections.defaultdict(set), {}
  for distribution in metadata.distributions():
    name = utils.canonicalize_name(distribution.metadata['Name'])
    files[name] = [f for f in distribution.files or [] if f.parts[0] not in ('..', 'bin', 'share')]
    for file in files[name]:
      for path in [file, *file.parents][:-1]:
        owners[path].add(name)
  found = {}
  for name, distribution in distributions.items():
    for file in files[name]:
      path = next((p for p in reversed([file, *file.parents][:-1]) if owners[p] == {name}), file)
      found.setdefault(path, os.path.realpath(distribution.locate_file(path)))
  return found


def install(folder, wheels, layer):
  """An environment that holds `layer` and what it declares. -> its bin folder."""
  subprocess.run([sys.executable, '-m', 'venv', folder], check=True)
  (site,) = (folder / 'lib').glob('python3.*/site-packages')
  layers = (*BELOW.get(layer, LAYERS[: LAYERS.index(layer)]), layer)
  distributions = declared(wheels, layers)
  assert {'jax', 'flax', 'numpy'} <= set(distributions) and 'pytest' not in distributions
  for path, target in linked(distributions).items():
    (site / path).parent.mkdir(parents=True, exist_ok=True)
    (site / path).symlink_to(target)
  links = sorted({str(wheel.parent) for wheel in wheels})
  command = [folder / 'bin/python', '-m', 'pip', 'install', '-q', '--no-index', '--no-cache-dir', '--no-input']
  command += [f'--find-links={link}' for link in links] + [layer.replace('_', '-')]
  run(command, folder)
  installed = run([folder / 'bin/python', '-m', 'pip', 'list', '--format=json'], folder)
  names = {utils.canonicalize_name(d['name']) for d in json.loads(installed.stdout)}
  assert {n.replace('-', '_') for n in names if n.startswith('maxtext-')} == set(layers)
  run([folder / 'bin/python', '-m', 'pip', 'check'], folder)
  return folder / 'bin'


def run(command, cwd):
  """Runs in `cwd` without this process' environment: neither PYTHONPATH nor a home."""
  env = {'PATH': '/usr/bin:/bin', 'JAX_PLATFORMS': 'cpu', 'HOME': str(cwd), 'PIP_CONFIG_FILE': os.devnull}
  env['PIP_DISABLE_PIP_VERSION_CHECK'] = '1'
  done = subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
  assert done.returncode == 0, f'{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}'
  return done


def smoke_layers(bin, empty):
  done = run([bin / 'python', '-c', BLOCK], empty)
  assert done.stdout.split() == ['1', '6', '32', 'True', *['True'] * 5, 'False']  # the past does not see the last token


def smoke_models(bin, empty):
  done = run([bin / 'maxtext-models'], empty)
  assert re.search(r'^qwen3-0\.6b\b', done.stdout, re.M)
  assert 'q_proj' not in done.stdout
  assert re.search(r'Qwen3|qwen3', run([bin / 'maxtext-models', '--name=qwen3-0.6b'], empty).stdout)


def smoke_train(bin, empty):
  """J2, J4: from an empty folder, with the wheels alone, a packaged configuration trains two steps."""
  tiny = ['--config.steps=2', '--config.batch=2', '--config.length=32', '--config.model.layers=1']
  tiny += ['--config.schedule.kind=constant', '--config.schedule.warmup=0']
  tiny += ['--config.evaluate.every=0', '--config.sample=none']
  run([bin / 'maxtext-pretrain', '--config=quickstart', *tiny], empty)
  lines = (empty / 'runs/quickstart/metrics.jsonl').read_text().splitlines()
  steps = [json.loads(line) for line in lines]
  assert [s['step'] for s in steps] == [1, 2]
  assert abs(steps[0]['loss'] - math.log(259)) < 0.5  # an untrained model guesses; these are 64 tokens


def smoke_import(layer):
  def smoke(bin, empty):
    code = f'import {layer}; print({layer}.__version__, {layer}.__file__)'
    version, file = run([bin / 'python', '-c', code], empty).stdout.split()
    assert version == '0.1.0' and 'site-packages' in file

  return smoke


SMOKES = {
  'maxtext_layers': smoke_layers,
  'maxtext_models': smoke_models,
  'maxtext_train': smoke_train,
} | {layer: smoke_import(layer) for layer in LAYERS[3:]}


@pytest.mark.parametrize('layer', LAYERS)
def test_installs_and_works_alone(layer, wheels, tmp_path):
  """J7, J8: each layer installs, with the CPU's jax, next to just what its wheel declares, and does its work there."""
  bin = install(tmp_path / 'venv', wheels, layer)
  empty = tmp_path / 'empty'
  empty.mkdir()
  SMOKES[layer](bin, empty)


def test_what_is_not_declared_is_not_there(wheels, tmp_path):
  """The control: the lowest layer's environment has no optimizer library, and no layer above."""
  bin = install(tmp_path / 'venv', wheels, 'maxtext_layers')
  for name in ('maxtext_models', 'grain', 'pytest'):
    with pytest.raises(AssertionError, match='ModuleNotFoundError'):
      run([bin / 'python', '-c', f'import {name}'], tmp_path)
