"""Every module of every layer imports where the cloud's and the heavy optional libraries cannot be imported.

In a process of its own whose first act is to refuse them: pytest has imported this file's parent package, and a plugin
may have imported more, before a hook set here could see it.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys

LAYERS = (
  'maxtext_layers',
  'maxtext_models',
  'maxtext_train',
  'maxtext_posttrain',
  'maxtext_eval',
  'maxtext_decoupled',
)
HEAVY = (
  r'google\.(cloud|api_core|auth)|gcsfs|pathwaysutils|ml_goodput_measurement|tensorflow|torch|transformers|tunix|vllm'
)
# As if they were not installed: to those who import them, and to those who only ask whether they are there.
REFUSE = r"""
import importlib, importlib.machinery, json, pkgutil, re, sys

REFUSED = re.compile(r'^(%s)(\.|$)')

class Others(importlib.machinery.PathFinder):
  @classmethod
  def find_spec(cls, name, path=None, target=None):
    return None if REFUSED.match(name) else super().find_spec(name, path, target)

sys.meta_path[:] = [Others if f is importlib.machinery.PathFinder else f for f in sys.meta_path]
"""
IMPORT = r"""
names = []
for layer in sys.argv[1:]:
  package = importlib.import_module(layer)
  names += [m.name for m in pkgutil.walk_packages(package.__path__, layer + '.', onerror=lambda name: 1 / 0)]
names = [n for n in names if not n.endswith(('_test', '.conftest'))]
for name in names:
  importlib.import_module(name)
print(json.dumps({'imported': names, 'refused': [m for m in sys.modules if REFUSED.match(m)]}))
"""
TRAIN = r"""
from maxtext_train import pretrain
sys.argv[0] = 'pretrain'
pretrain.cli()
"""


def run(code, *args, refused=HEAVY):
  env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p), JAX_PLATFORMS='cpu')
  command = [sys.executable, '-c', REFUSE % refused + code, *args]
  return subprocess.run(command, env=env, capture_output=True, text=True)


def test_the_refusal_bites():
  """Shown on what is installed: refused, it cannot be imported, in parts neither, and seems not to be there."""
  code = 'import importlib.util; print(importlib.util.find_spec("einops")); import einops.layers'
  allowed, refused = run(code), run(code, refused=HEAVY + '|einops')
  assert allowed.returncode == 0 and 'ModuleSpec' in allowed.stdout
  assert refused.returncode == 1 and refused.stdout == 'None\n'
  assert "ModuleNotFoundError: No module named 'einops'" in refused.stderr


def test_every_module_imports_without_them():
  """J5: no module of any layer needs google.cloud, tensorflow, torch or vllm to be imported."""
  done = run(IMPORT, *LAYERS)
  assert done.returncode == 0, done.stderr
  told = json.loads(done.stdout.splitlines()[-1])
  assert not told['refused']
  assert {'maxtext_layers.attention', 'maxtext_models.families.llama', 'maxtext_train.pretrain'} <= set(
    told['imported']
  )


def test_it_trains_without_them(tmp_path):
  """A whole run, with a checkpoint and an evaluation, where none of them can be imported at any moment."""
  flags = ['--config=quickstart', '--config.steps=2', '--config.batch=2', '--config.length=32', '--allocator=system']
  flags += ['--config.model.layers=1', '--config.schedule.kind=constant', '--config.schedule.warmup=0']
  flags += ['--config.sample=none', '--config.cache=none', f'--workdir={tmp_path / "run"}']
  done = run(TRAIN, *flags)
  assert done.returncode == 0, done.stderr
  steps = [json.loads(line)['step'] for line in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()]
  assert steps == [1, 2]


def test_no_cloud_distribution_is_installed():
  """Under Bazel only declared distributions are there: none of them is a client of a cloud."""
  names = {d.metadata['Name'].lower() for d in importlib.metadata.distributions()}
  assert 'jax' in names
  assert not [n for n in names if re.match(r'^(google-(cloud|api|auth)|gcsfs|pathways)', n)]
