"""The table of models in maxtext_models/README.md, made from the registry and from what tests are registered to prove.

python -m tests.shelf            # prints it
python -m tests.shelf --write    # puts it into the README

A family's proof is its cases of golden.CASES, which parity_test.py runs one by one at golden.TOLERANCE, and its twin of
golden.TWINS. What no test runs, the table cannot say. shelf_test.py fails when the README is another.

Reading order: `text`, `_row`, `_proof`.
"""

import collections
import json
import pathlib
import re
import sys

from maxtext_models import registry
from tests.golden import golden

README = pathlib.Path(__file__).parent.parent / 'maxtext_models' / 'README.md'
BEGIN = '<!-- made by `python -m tests.shelf --write` -->\n'
END = '<!-- end of what is made -->\n'
PUBLISHED = 'https://huggingface.co/'


def text() -> str:
  """The table, and the cards whose source is not a published model's page."""
  lines = [
    '| family | models: parameters, those that a token meets | proved against, all logits in float32 | within |',
    '|---|---|---|---|',
    *(_row(family) for family in registry.FAMILIES),
  ]
  places = collections.defaultdict(list)
  for name in registry.names():
    if not (source := registry.card(name).source).startswith(PUBLISHED):
      places[source].append(f'`{name}`')
  lines += ['', 'Without a published model whose page could be read, so that the numbers are those of:', '']
  lines += [f'- {source or "no source"}: {", ".join(names)}' for source, names in places.items()]
  return '\n'.join(lines) + '\n'


def classes(family) -> list[str]:
  """Names of the classes of a family's cards."""
  return list(dict.fromkeys(type(c).__name__ for c in family.CARDS.values()))


def cases(family) -> list[str]:
  """Those of golden.CASES whose card is of a class of this family."""
  return [case for case in golden.CASES if type(registry.card_from_hf(_config(case))).__name__ in classes(family)]


def _row(family):
  models = []
  for name in family.CARDS:
    card = registry.card(name)
    total, active = card.parameters(), card.active_parameters()
    models.append(f'`{name}` {_digits(total)}' + (f' ({_digits(active)})' if active != total else ''))
  proofs, tolerances = zip(*_proofs(family), strict=True)
  return f'| {", ".join(classes(family))} | {", ".join(models)} | {"; ".join(proofs)} | {"; ".join(tolerances)} |'


def _proofs(family):
  """(what, tolerance) of each kind of proof."""
  out = []
  if found := cases(family):
    versions = sorted({_config(case)['transformers_version'] for case in found})
    lengths = sorted({golden.reference(case).tokens.shape[1] for case in found})
    shape = f'T = {", ".join(map(str, lengths))}'
    out.append((f'transformers {", ".join(versions)}, {shape}: {", ".join(found)}', f'{golden.TOLERANCE:g}'))
  module = family.__name__.rsplit('.', 1)[-1]
  if twin := golden.TWINS.get(module):
    source = (pathlib.Path(__file__).parent / f'{twin}.py').read_text()
    (tolerance,) = re.findall(r'^TOLERANCE = (\S+)', source, re.MULTILINE)
    out.append((f'NumPy float64: tests/{twin}.py', f'{float(tolerance):g}'))
  return out


def _config(case):
  return json.loads((golden.HERE / f'{case}.json').read_text())


def _digits(number):
  """Three digits.

  >>> _digits(596049920), _digits(52_000), _digits(1.04e12)
  ('596M', '52.0K', '1.04T')
  """
  for unit, size in (('T', 1e12), ('B', 1e9), ('M', 1e6), ('K', 1e3)):
    if number >= size * 0.9995:
      value = number / size
      return f'{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}{unit}'
  return str(number)


def written(page: str) -> str:
  """The README with the table between its marks."""
  before, rest = page.split(BEGIN)
  return before + BEGIN + '\n' + text() + '\n' + END + rest.split(END)[1]


if __name__ == '__main__':
  if sys.argv[1:] == ['--write']:
    README.write_text(written(README.read_text()))
  else:
    print(text(), end='')
