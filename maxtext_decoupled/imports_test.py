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
REFUSE = r"""
import importlib, importlib.abc, json, pkgutil, re, sys

REFUSED = re.compile(
  r'^(google\.(cloud|api_core|auth)|gcsfs|pathwaysutils|ml_goodput_measurement|tensorflow|torch|transformers|tunix|vllm)(\.|$)'
)

class Refuse(importlib.abc.MetaPathFinder):
  def find_spec(self, name, path=None, target=None):
    if REFUSED.match(name):
      raise ImportError('refused: ' + name)

sys.meta_path.insert(0, Refuse())
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


def run(code, *args):
  env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p), JAX_PLATFORMS='cpu')
  return subprocess.run([sys.executable, '-c', REFUSE + code, *args], env=env, capture_output=True, text=True)


def test_the_refusal_bites():
  for name in ('google.cloud.storage', 'torch', 'vllm.entrypoints'):
    done = run(f'import {name}')
    assert done.returncode == 1
    assert f'refused: {name.removesuffix(".storage").removesuffix(".entrypoints")}' in done.stderr


def test_every_module_imports_without_them():
  """J5: no module of any layer needs google.cloud, tensorflow, torch or vllm to be imported."""
  done = run(IMPORT, *LAYERS)
  assert done.returncode == 0, done.stderr
  told = json.loads(done.stdout.splitlines()[-1])
  assert not told['refused']
  assert {'maxtext_layers.attention', 'maxtext_models.families.llama', 'maxtext_train.pretrain'} <= set(
    told['imported']
  )


def test_no_cloud_distribution_is_installed():
  """Under Bazel only declared distributions are there: none of them is a client of a cloud."""
  names = {d.metadata['Name'].lower() for d in importlib.metadata.distributions()}
  assert 'jax' in names
  assert not [n for n in names if re.match(r'^(google-(cloud|api|auth)|gcsfs|pathways)', n)]
