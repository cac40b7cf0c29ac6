"""The README's table of models says what is on the shelf and what is proved, no more and no less."""

import doctest
import pathlib

from maxtext_models import registry
from tests import shelf
from tests.golden import golden


def test_the_readme_is_up_to_date():
  page = shelf.README.read_text()
  assert page == shelf.written(page), 'run: python -m tests.shelf --write'


def test_every_class_of_cards_is_proved():
  """By a case of the same class of cards, or by a twin."""
  for family in registry.FAMILIES:
    proved = {type(registry.card_from_hf(shelf._config(case))).__name__ for case in shelf.cases(family)}
    twin = family.__name__.rsplit('.', 1)[-1] in golden.TWINS
    assert proved >= set(shelf.classes(family)) or twin, family.__name__


def test_what_is_listed_is_there():
  table = shelf.text()
  assert all(f'`{name}`' in table for name in registry.names())
  assert all(case in table for case in golden.CASES)
  for twin in golden.TWINS.values():
    assert (pathlib.Path(shelf.__file__).parent / f'{twin}.py').is_file()
  row = next(line for line in table.splitlines() if line.startswith('| Qwen3Moe |'))
  assert '`qwen3-30b-a3b` 30.5B (3.35B)' in row and 'transformers 5.24.0' in row and row.endswith('| 0.0001 |')


def test_digits():
  assert doctest.testmod(shelf).failed == 0
