"""The laws of the house. Each law is a checker over source text, shown to bite on a text that breaks it."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parent.parent
BELOW = {
  'maxtext_layers': (),
  'maxtext_models': ('maxtext_layers',),
  'maxtext_train': ('maxtext_layers', 'maxtext_models'),
  'maxtext_posttrain': ('maxtext_layers', 'maxtext_models', 'maxtext_train'),
  'maxtext_eval': ('maxtext_layers', 'maxtext_models', 'maxtext_train'),
  'maxtext_decoupled': ('maxtext_layers', 'maxtext_models', 'maxtext_train', 'maxtext_posttrain', 'maxtext_eval'),
}


def imports(text):
  found = []
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Import):
      found += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      found.append(node.module or '')
  return found


def upward(layer, text):
  allowed = BELOW[layer] + (layer,)
  return [
    name
    for name in imports(text)
    if name.split('.')[0].startswith('maxtext_') and name.split('.')[0] not in allowed
  ]


def test_imports_go_down_only():
  """Law 1: a layer imports only layers below it."""
  assert upward('maxtext_layers', 'from maxtext_models import card') == ['maxtext_models']
  for layer in BELOW:
    files = sorted((ROOT / layer).rglob('*.py'))
    assert files, layer
    for path in files:
      assert not upward(layer, path.read_text()), path
