"""The laws of the house, each a checker over source text that is also shown a text which breaks it.

A checker takes (path, text) and returns what is wrong, in words. `LAWS` runs over the packages as they are, without
their tests; `BROKEN` are the controls. What concerns more than one file (cycles, BUILD files, names of files) follows.
"""

import ast
import functools
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
BELOW = {
  'maxtext_layers': (),
  'maxtext_models': ('maxtext_layers',),
  'maxtext_train': ('maxtext_layers', 'maxtext_models'),
  'maxtext_posttrain': ('maxtext_layers', 'maxtext_models', 'maxtext_train'),
  'maxtext_eval': ('maxtext_layers', 'maxtext_models', 'maxtext_train'),
  'maxtext_decoupled': ('maxtext_layers', 'maxtext_models', 'maxtext_train', 'maxtext_posttrain', 'maxtext_eval'),
}
CLOUD = ('google.cloud', 'google.auth', 'google.api_core', 'gcsfs', 'pathwaysutils', 'ml_goodput_measurement')
GCP = 'maxtext_train/gcp/'
# Heavy or optional libraries and the one module each that wraps it; a folder ends in /.
WRAPPERS = {
  'torch': (),
  'tensorflow': (),
  'tunix': ('maxtext_posttrain/tunix_bridge.py',),
  'tokamax': ('maxtext_layers/kernels/',),
  'transformers': ('maxtext_models/verify.py',),
  'vllm': ('maxtext_models/vllm_sampler.py',),
}
# What changes the process for everybody in it, and the modules whose main() may have it changed.
PROCESS = {
  'jax.config': ('maxtext_models/generate.py', 'maxtext_train/pretrain.py'),
  'os.chdir': ('maxtext_models/program.py',),
  'os.environ': ('maxtext_models/allocator.py', 'maxtext_models/program.py'),
  'os.putenv': (),
  'os.unsetenv': (),
  'signal.set_wakeup_fd': ('maxtext_train/stop.py',),
  'signal.setitimer': (),
  'signal.signal': ('maxtext_train/stop.py',),
  'sys.path': ('maxtext_models/program.py',),
}
# Methods of these that change nothing.
READS = {'copy', 'count', 'get', 'index', 'items', 'keys', 'values'}
# llama3 alone is the published name of a rope scaling, not of a model.
FAMILY = re.compile(r'(?<![a-z])(llama(?!3)|qwen|gemma|mistral|mixtral|deepseek|kimi|gpt_?oss|glm|phi|smollm)', re.I)
AXES = {'data', 'fsdp', 'tensor', 'expert', 'context', 'pipeline', 'replica', 'stage'}
NAME_BANS = ('util', 'utils', 'common', 'base', 'helper', 'helpers', 'misc')
# Import names that are not the distribution's.
DISTRIBUTIONS = {
  'ml_dtypes': 'ml-dtypes',
  'absl': 'absl-py',
  'orbax': 'orbax-checkpoint',
  'ml_collections': 'ml-collections',
  'yaml': 'pyyaml',
}


@functools.cache
def tree(text):
  return ast.parse(text)


def imports(text, nested=True):
  """[(line, module)], of which a module may be a name inside one; only those of module level if not nested."""
  found = []
  for node in ast.walk(tree(text)) if nested else at_import(text):
    if isinstance(node, ast.Import):
      found += [(node.lineno, alias.name) for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert not node.level, f'line {node.lineno}: a relative import'
      found += [(node.lineno, f'{node.module}.{alias.name}') for alias in node.names]
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
      if getattr(node.func, 'attr', getattr(node.func, 'id', '')) in (
        'import_module',
        '__import__',
        'files',
      ):  # importlib.resources.files
        found.append((node.lineno, str(node.args[0].value)))
  return found


def at_import(text):
  """The nodes that run when the module is imported: no function bodies, no `if __name__ == '__main__'`."""

  def visit(node):
    yield node
    for name, value in ast.iter_fields(node):
      if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and name == 'body':
        continue
      for child in value if isinstance(value, list) else [value]:
        if isinstance(child, ast.If) and '__name__' in ast.dump(child.test):
          continue
        if isinstance(child, ast.AST):
          yield from visit(child)

  return visit(tree(text))


def code_words(text):
  """[(line, word)]: every identifier and every string but docstrings; comments say what they like."""
  docs = set()
  for node in ast.walk(tree(text)):
    body = getattr(node, 'body', None)
    for child in body if isinstance(body, list) else []:
      if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
        docs.add(child.value)
  for node in ast.walk(tree(text)):
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docs:
      yield node.lineno, node.value
    for field in ('id', 'attr', 'name', 'arg', 'module'):
      word = getattr(node, field, None)
      if isinstance(word, str):
        yield getattr(node, 'lineno', 0), word


def is_in(name, prefixes):
  return any(name == prefix or name.startswith(prefix + '.') for prefix in prefixes)


def downward(path, text):
  layer = path.split('/')[0]
  allowed = (*BELOW[layer], layer)
  for line, name in imports(text):
    if name.startswith('maxtext_') and name.split('.')[0] not in allowed:
      yield f'line {line}: imports {name}'


def no_cloud(path, text):
  for line, name in imports(text):
    if is_in(name, CLOUD) and not path.startswith(GCP):
      yield f'line {line}: imports {name}'
    if is_in(name, [GCP.strip('/').replace('/', '.')]) and not path.startswith(GCP):
      yield f'line {line}: imports the cloud by statement: {name}'


def empty_init(path, text):
  if not path.endswith('__init__.py'):
    return
  body = list(tree(text).body)
  if not (body and isinstance(body[0], ast.Expr) and ast.get_docstring(tree(text))):
    yield 'no docstring'
    return
  names = [ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ast.unparse(node) for node in body[1:]]
  if names != (['__version__'] if path.count('/') == 1 else []):
    yield f'holds {names}'


def no_family(path, text):
  if path.startswith('maxtext_layers/'):
    for line, word in code_words(text):
      if FAMILY.search(word):
        yield f'line {line}: names a family: {word!r}'


def no_axis(path, text):
  if not path.startswith('maxtext_models/families/'):
    return
  for line, word in code_words(text):
    if word in AXES and not re.search(rf'\b{word}\b\s*[:=.(]|\.{word}\b', text.splitlines()[line - 1]):
      yield f'line {line}: names a mesh axis: {word!r}'
  for line, name in imports(text):
    if is_in(name, ['maxtext_layers.sharding', 'jax.sharding']):
      yield f'line {line}: imports {name}'


def no_name_switch(path, text):
  """Behaviour hangs on what a card says, never on what a model is called."""
  if path in ('maxtext_models/registry.py',):  # names are what it is about
    return
  for node in ast.walk(tree(text)):
    if isinstance(node, ast.Compare):
      sides = [node.left, *node.comparators]
    elif isinstance(node, ast.Call) and getattr(node.func, 'attr', '') in (
      'startswith',
      'endswith',
      'fullmatch',
      'search',
    ):
      sides = [getattr(node.func, 'value', node.func), *node.args]
    elif isinstance(node, ast.Match):
      sides = [node.subject]
    else:
      continue
    for side in sides:
      words = ast.unparse(side)
      if re.search(r'(^|[._])(card|model)(\.|_)name$', words):
        yield f'line {node.lineno}: compares the name of a model: {ast.unparse(node)[:80]}'
      if isinstance(side, ast.Constant) and isinstance(side.value, str) and FAMILY.match(side.value):
        yield f'line {node.lineno}: compares with the name of a family: {ast.unparse(node)[:80]}'


def quiet_import(path, text):
  """No environment read, no change of global JAX state and no start of a backend at import."""
  del path
  for node in at_import(text):
    words = ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Call)) else ''
    if re.match(r'os\.(environ|getenv|putenv)', words):
      yield f'line {node.lineno}: {words}'
    if re.match(r'jax\.config\.|jax\.(devices|local_devices|device_count|default_backend|process_index)\(', words):
      yield f'line {node.lineno}: {words}'


def process_changes(path, text):
  """The process belongs to its main(): JAX's settings, environment, folder, search path and signal handlers."""
  names = {}  # what a local name stands for
  for node in ast.walk(tree(text)):
    if isinstance(node, ast.Import):
      names |= {alias.asname: alias.name for alias in node.names if alias.asname}
    elif isinstance(node, ast.ImportFrom):
      names |= {alias.asname or alias.name: f'{node.module}.{alias.name}' for alias in node.names}

  def dotted(node):
    while isinstance(node, ast.Subscript):
      node = node.value
    first, _, rest = ast.unparse(node).partition('.')
    return '.'.join(filter(None, [names.get(first, first), rest]))

  for node in ast.walk(tree(text)):
    if isinstance(node, ast.Call):
      changed, _, method = dotted(node.func).rpartition('.')
      changed = f'{changed}.{method}' if f'{changed}.{method}' in PROCESS else '' if method in READS else changed
    elif isinstance(getattr(node, 'ctx', None), (ast.Store, ast.Del)):
      changed = dotted(node)
      changed = 'jax.config' if changed.startswith('jax.config.') else changed
    else:
      continue
    if changed in PROCESS and path not in PROCESS[changed]:
      yield f'line {node.lineno}: changes the process: {ast.unparse(node)[:80]}'


def wrapped(path, text):
  for line, name in imports(text):
    for library, homes in WRAPPERS.items():
      if is_in(name, [library]) and not any(path == h or (h.endswith('/') and path.startswith(h)) for h in homes):
        yield f'line {line}: imports {name}'


def words_of_the_house(path, text):
  del text
  if pathlib.PurePath(path).stem in NAME_BANS:
    yield f'{path}: says nothing of what is inside'


LAWS = (
  downward,
  no_cloud,
  empty_init,
  no_family,
  no_axis,
  no_name_switch,
  quiet_import,
  process_changes,
  wrapped,
  words_of_the_house,
)
BROKEN = (
  (downward, 'maxtext_layers/x.py', 'from maxtext_models import card'),
  (downward, 'maxtext_models/x.py', 'def f():\n  import maxtext_train.step'),
  (downward, 'maxtext_eval/x.py', 'from maxtext_posttrain import losses'),
  (downward, 'maxtext_train/x.py', 'import importlib\nimportlib.import_module("maxtext_decoupled.main")'),
  (no_cloud, 'maxtext_train/x.py', 'from google.cloud import storage'),
  (no_cloud, 'maxtext_train/x.py', 'from google import auth'),
  (no_cloud, 'maxtext_train/x.py', 'def f():\n  import gcsfs'),
  (no_cloud, 'maxtext_train/x.py', 'from maxtext_train import gcp'),
  (empty_init, 'maxtext_train/__init__.py', '"""Doc."""\nfrom maxtext_train import step\n__version__ = "1"'),
  (empty_init, 'maxtext_train/__init__.py', '"""Doc."""'),
  (empty_init, 'maxtext_train/data/__init__.py', '"""Doc."""\nX = 1'),
  (empty_init, 'maxtext_train/data/__init__.py', ''),
  (no_family, 'maxtext_layers/x.py', 'def llama_rope(): pass'),
  (no_family, 'maxtext_layers/x.py', 'kind = "Qwen3"'),
  (no_axis, 'maxtext_models/families/x.py', 'spec = ("fsdp", None)'),
  (no_axis, 'maxtext_models/families/x.py', 'from maxtext_layers import sharding'),
  (no_name_switch, 'maxtext_models/x.py', 'def f(card):\n  if card.name == "a": pass'),
  (no_name_switch, 'maxtext_train/x.py', 'def f(self):\n  return self.model.name.startswith("g")'),
  (no_name_switch, 'maxtext_train/x.py', 'def f(kind):\n  return kind in ("a",) or kind == "gemma3"'),
  (no_name_switch, 'maxtext_layers/x.py', 'def f(model_name):\n  match model_name:\n    case "a": pass'),
  (quiet_import, 'maxtext_layers/x.py', 'import os\nX = os.environ.get("X")'),
  (quiet_import, 'maxtext_layers/x.py', 'import os\ndef f(x=os.getenv("X")): pass'),
  (quiet_import, 'maxtext_layers/x.py', 'import jax\njax.config.update("jax_enable_x64", True)'),
  (quiet_import, 'maxtext_layers/x.py', 'import jax\nclass A:\n  n = jax.device_count()'),
  (process_changes, 'maxtext_train/loop.py', 'import jax\ndef f():\n  jax.config.update("jax_enable_x64", True)'),
  (process_changes, 'maxtext_train/loop.py', 'from jax import config\ndef f():\n  config.update("jax_enable_x64", 1)'),
  (process_changes, 'maxtext_train/loop.py', 'import jax\ndef f():\n  jax.config.jax_enable_x64 = True'),
  (process_changes, 'maxtext_train/loop.py', 'import os\ndef f():\n  os.environ["X"] = "1"'),
  (process_changes, 'maxtext_train/loop.py', 'import os\ndef f():\n  del os.environ["X"]'),
  (process_changes, 'maxtext_train/loop.py', 'import os\ndef f():\n  os.environ |= {"X": "1"}'),
  (process_changes, 'maxtext_train/loop.py', 'import os as o\ndef f():\n  o.environ.setdefault("X", "1")'),
  (process_changes, 'maxtext_train/loop.py', 'from os import environ as e\ndef f():\n  e.pop("X")'),
  (process_changes, 'maxtext_train/pretrain.py', 'import os\ndef f():\n  os.putenv("X", "1")'),
  (process_changes, 'maxtext_train/pretrain.py', 'import os\ndef f():\n  os.chdir("/")'),
  (process_changes, 'maxtext_train/pretrain.py', 'import signal\ndef f():\n  signal.signal(signal.SIGINT, g)'),
  (process_changes, 'maxtext_train/pretrain.py', 'import sys\ndef f():\n  sys.path.insert(0, "x")'),
  (process_changes, 'maxtext_train/pretrain.py', 'import sys\ndef f():\n  sys.path[:0] = ["x"]'),
  (process_changes, 'maxtext_train/pretrain.py', 'import sys\ndef f():\n  sys.path = []'),
  (wrapped, 'maxtext_models/hf.py', 'def f():\n  import transformers'),
  (wrapped, 'maxtext_train/x.py', 'from torch import nn'),
  (words_of_the_house, 'maxtext_train/data/utils.py', ''),
)
KEPT = (
  (no_family, 'maxtext_layers/x.py', '"""As in Llama."""\nscaling = "llama3"  # Qwen too'),
  (no_axis, 'maxtext_models/families/x.py', 'X = Card(context=8, rows=[("layers.{l}.q", "x.data.y")])'),
  (no_name_switch, 'maxtext_models/x.py', 'def f(node):\n  return node.name == "a"'),
  (
    quiet_import,
    'maxtext_layers/x.py',
    'import os\ndef f():\n  return os.environ["X"]\nif __name__ == "__main__":\n  f()',
  ),
  (
    process_changes,
    'maxtext_train/loop.py',
    'import os, sys\nfrom maxtext_layers import config\ndef f(settings):\n  config.update(settings)\n'
    '  settings.environ = {**os.environ, "X": os.environ.get("X"), "Y": os.environ["Y"]}\n  return sys.path.index("x")',
  ),
  (process_changes, 'maxtext_train/stop.py', 'import signal\ndef f():\n  signal.signal(signal.SIGTERM, g)'),
  (wrapped, 'maxtext_models/verify.py', 'def f():\n  import transformers'),
)


@functools.cache
def modules():
  """{path: text} of every module of the six packages, without tests."""
  found = {}
  for layer in BELOW:
    for path in sorted((ROOT / layer).rglob('*.py')):
      if not path.name.endswith('_test.py') and path.name != 'conftest.py' and '_programs' not in path.parts:
        found[path.relative_to(ROOT).as_posix()] = path.read_text(encoding='utf-8')
  assert {path.split('/')[0] for path in found} == set(BELOW)
  return found


@pytest.mark.parametrize('law', LAWS, ids=lambda law: law.__name__)
def test_law(law):
  broken = [f'{path}: {what}' for path, text in modules().items() for what in law(path, text)]
  assert not broken, '\n' + '\n'.join(broken)


@pytest.mark.parametrize('law, path, text', BROKEN, ids=[f'{law.__name__}-{i}' for i, (law, *_) in enumerate(BROKEN)])
def test_law_bites(law, path, text):
  assert list(law(path, text))


@pytest.mark.parametrize('law, path, text', KEPT, ids=[law.__name__ for law, *_ in KEPT])
def test_law_lets_be(law, path, text):
  assert not list(law(path, text))


def cycles(sources):
  """Cycles of imports at module level among {dotted name: text}."""

  def module_of(name):
    while name and name not in sources:
      name = name.rpartition('.')[0]
    return name

  graph = {
    name: {module_of(other) for _, other in imports(text, nested=False)} - {name, ''} for name, text in sources.items()
  }
  found, done = [], set()

  def visit(name, way):
    if name in way:
      found.append(way[way.index(name) :] + [name])
    elif name not in done:
      for other in sorted(graph[name]):
        visit(other, [*way, name])
      done.add(name)

  for name in sorted(graph):
    visit(name, [])
  return found


def test_no_import_cycle():
  sources = {path[: -len('.py')].replace('/', '.').removesuffix('.__init__'): text for path, text in modules().items()}
  assert not cycles(sources)


def test_cycles_are_found():
  a, b = 'from p import b', 'import p.c'
  assert cycles({'p.a': a, 'p.b': b, 'p.c': 'from p.a import x'}) == [['p.a', 'p.b', 'p.c', 'p.a']]
  assert not cycles({'p.a': a, 'p.b': b, 'p.c': 'def f():\n  from p.a import x'})


def rules(package, kind):
  """The calls of `kind` in a package's BUILD file, as {keyword: value}: Starlark that Python can run."""
  text = (ROOT / package / 'BUILD').read_text(encoding='utf-8')
  called = {
    node.func.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and hasattr(node.func, 'id')
  }
  found, scope = [], {name: lambda *args, **keywords: [] for name in called}
  scope[kind] = lambda **keywords: found.append(keywords)
  one = scope.get('maxtext_test', lambda **keywords: [])
  scope['maxtext_tests'] = lambda tests, **keywords: [one(srcs=[name + '.py'], **keywords) for name in tests]
  exec(compile(text, f'{package}/BUILD', 'exec'), scope)
  return found


@pytest.mark.parametrize('package', [*BELOW, 'tests'])
def test_every_test_file_has_its_target(package):
  """No test file is forgotten, and what pytest calls slow is what Bazel calls slow."""
  slow = {src: 'slow' in rule.get('tags', ()) for rule in rules(package, 'maxtext_test') for src in rule['srcs']}
  files = {path.relative_to(ROOT / package).as_posix(): path for path in (ROOT / package).rglob('*_test.py')}
  assert not set(files) - set(slow)
  assert not [name for name in slow if not (ROOT / package / name).is_file()]
  for name, path in files.items():
    text = path.read_text(encoding='utf-8')
    assert bool(re.search(r'^pytestmark = .*\bslow\b', text, re.M)) == slow[name], name
    assert slow[name] or not re.search(r'^\s*@pytest\.mark\.slow', text, re.M), (
      f'{name}: slow tests have their own files'
    )


@pytest.mark.parametrize('layer', BELOW)
def test_a_layer_declares_what_it_imports(layer):
  """Each distribution that a layer imports is declared, to Bazel and in its wheel, and none beside these."""
  optional = {*WRAPPERS, *(name.split('.')[0] for name in CLOUD)}
  used = set()
  for path, text in modules().items():
    if path.startswith(layer + '/') and not path.startswith(GCP):
      tops = {name.split('.')[0] for _, name in imports(text)}
      used |= {
        DISTRIBUTIONS.get(t, t)
        for t in tops
        if t not in sys.stdlib_module_names and t not in optional and t not in BELOW
      }
  (rule,) = rules(layer, 'maxtext_layer')
  assert {name.lower() for name in used} == {name.lower() for name in rule.get('requires', ())}
