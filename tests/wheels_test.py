"""The six wheels as files: what is inside, what they declare, and that the same content gives the same bytes.

Outside Bazel there are no wheels to look at: `bazel build //...:wheel` makes them, and `bazel test //tests:wheels_test`
runs this. What does not need the wheels runs anyway. That they install and work is in wheels_slow_test.
"""

import base64
import csv
import email
import hashlib
import importlib.util
import io
import os
import pathlib
import random
import re
import zipfile

from packaging import requirements
from packaging import specifiers
import pytest

ROOT = pathlib.Path(__file__).parent.parent
LAYERS = ('maxtext_layers', 'maxtext_models', 'maxtext_train', 'maxtext_posttrain', 'maxtext_eval', 'maxtext_decoupled')
BELOW = {
  'maxtext_layers': set(),
  'maxtext_models': {'maxtext-layers'},
  'maxtext_train': {'maxtext-layers', 'maxtext-models'},
  'maxtext_posttrain': {'maxtext-layers', 'maxtext-models', 'maxtext-train'},
  'maxtext_eval': {'maxtext-layers', 'maxtext-models', 'maxtext-train'},
  'maxtext_decoupled': {'maxtext-layers', 'maxtext-models', 'maxtext-train', 'maxtext-posttrain', 'maxtext-eval'},
}
PROGRAMS = {
  'maxtext_models': {'convert', 'generate', 'models', 'score', 'verify'},
  'maxtext_train': {'pretrain'},
}
ACCELERATOR = re.compile(r'^(nvidia|jax-(cuda|rocm)|libtpu|triton|torch)|\[(cuda|tpu|rocm)')


@pytest.fixture(scope='module')
def wheels():
  """{layer: ZipFile}."""
  found = {layer: list((ROOT / layer).glob('*.whl')) for layer in LAYERS}
  if not os.environ.get('TEST_TARGET') and not any(found.values()):
    pytest.skip('only Bazel makes the wheels: bazel test //tests:wheels_test')
  assert all(len(paths) == 1 for paths in found.values()), found
  return {layer: zipfile.ZipFile(paths[0]) for layer, paths in found.items()}


def info(wheel, name):
  (path,) = [n for n in wheel.namelist() if n.endswith(f'.dist-info/{name}')]
  return wheel.read(path).decode()


def metadata(wheel):
  return email.message_from_string(info(wheel, 'METADATA'))


def needs(wheel):
  return [requirements.Requirement(r) for r in metadata(wheel).get_all('Requires-Dist', [])]


def test_inside(wheels):
  """Every module and nothing of the tests; typed, licensed, and recorded with the right hashes."""
  for layer, wheel in wheels.items():
    code = {n for n in wheel.namelist() if '.dist-info/' not in n}
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / layer).rglob('*.py')}
    modules = {m for m in modules if not m.endswith(('_test.py', 'conftest.py')) and '/_programs/' not in m}
    assert code == modules | {f'{layer}/py.typed'}, layer
    assert 'Apache License' in info(wheel, 'licenses/LICENSE')
    recorded = {name: (digest, size) for name, digest, size in csv.reader(io.StringIO(info(wheel, 'RECORD')))}
    assert set(recorded) == set(wheel.namelist())
    for name in recorded:
      if not name.endswith('/RECORD'):
        data = wheel.read(name)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()
        assert recorded[name] == (f'sha256={digest}', str(len(data))), name


def test_no_two_paths_differ_only_in_case(wheels):
  """J2: on a file system that does not tell a from A, nothing overwrites anything."""
  paths = [name for wheel in wheels.values() for name in wheel.namelist()]
  assert len(paths) == len({path.lower() for path in paths})


def test_declared(wheels):
  """J9: an older Python is told so, instead of getting an older release; the layers below are those of this release."""
  for layer, wheel in wheels.items():
    told = metadata(wheel)
    version = told['Version']
    assert told['Name'] == layer.replace('_', '-')
    assert told['Requires-Python'] == '>=3.12'
    assert '3.11' not in specifiers.SpecifierSet(told['Requires-Python'])
    assert told['Description-Content-Type'] == 'text/markdown'
    assert told.get_payload().startswith(f'# {layer}')
    assert f'__version__ = "{version}"' in wheel.read(f'{layer}/__init__.py').decode().replace("'", '"')
    lower = {r.name: str(r.specifier) for r in needs(wheel) if r.name.startswith('maxtext-')}
    assert lower == dict.fromkeys(BELOW[layer], f'=={version}')


def test_the_base_needs_no_accelerator(wheels):
  """J3, J8: whoever installs without extras gets the CPU's jax, on any system."""
  assert ACCELERATOR.search('jax[cuda13]') and ACCELERATOR.search('nvidia-cudnn-cu13')
  for layer, wheel in wheels.items():
    for requirement in needs(wheel):
      assert not ACCELERATOR.search(str(requirement)), (layer, requirement)
      assert requirement.marker is None or 'extra' in str(requirement.marker), (layer, requirement)


def test_the_lock_is_what_the_wheels_allow(wheels):
  """E14: the versions that the tests run on are among those that are declared, and each declaration has a floor."""
  lock = dict(re.findall(r'^([\w.-]+)==([^\s;]+)', (ROOT / 'requirements_lock.txt').read_text(), re.M))
  for layer, wheel in wheels.items():
    for requirement in needs(wheel):
      if not requirement.name.startswith('maxtext-'):
        assert requirement.specifier.contains(lock[requirement.name.lower()]), (layer, requirement)
        assert any(s.operator == '>=' for s in requirement.specifier), (layer, requirement)


def test_console_scripts(wheels):
  """Every program is a script of its layer's wheel, and is called without arguments."""
  for layer, wheel in wheels.items():
    names = set()
    if layer in PROGRAMS:
      for line in info(wheel, 'entry_points.txt').split('\n')[1:]:
        if line:
          script, module, function = re.fullmatch(r'(maxtext-[a-z-]+) = ([\w.]+):(\w+)', line).groups()
          names.add(script.removeprefix('maxtext-'))
          source = wheel.read(module.replace('.', '/') + '.py').decode()
          assert re.search(rf'^def {function}\(\)', source, re.M), line
    assert names == PROGRAMS.get(layer, set())


def test_same_content_same_bytes(tmp_path):
  """Neither the order of the files, nor their times, nor their modes, nor the folder enter the wheel."""
  path = ROOT / 'build_defs/wheelmaker.py'
  spec = importlib.util.spec_from_file_location('wheelmaker', path)
  wheelmaker = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(wheelmaker)
  made = []
  for turn in range(2):
    folder = tmp_path / f'{turn}'
    folder.mkdir()
    files = []
    for name in ('b.py', 'a.py', 'c.txt'):
      file = folder / name
      file.write_text(f'# {name}\n')
      file.chmod(0o600 if turn else 0o755)
      os.utime(file, (1e9 * (turn + 1),) * 2)
      files.append([f'p/{name}', str(file)])
    random.Random(turn).shuffle(files)
    out = folder / 'p.whl'
    wheelmaker.write(
      {
        'name': 'p', 'version': '1', 'tag': 'py3-none-any', 'out': str(out), 'files': files, 'strip_path_prefixes': [],
        'requires': ['jax>=0.12'], 'extra_requires': {'x': ['y ; python_version < "4"']}, 'python_requires': '>=3.12',
        'license': '', 'summary': 'one', 'author': '', 'homepage': '', 'project_urls': {}, 'classifiers': [],
        'entry_points': {'console_scripts': ['p = p.a:cli']}, 'description': '', 'extra_distinfo': {},
      }
    )  # fmt: skip
    made.append(out.read_bytes())
  assert made[0] == made[1]
  with zipfile.ZipFile(io.BytesIO(made[0])) as wheel:
    assert {entry.date_time for entry in wheel.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert metadata(wheel).get_all('Requires-Dist') == ['jax>=0.12', 'y; (python_version < "4") and extra == \'x\'']
