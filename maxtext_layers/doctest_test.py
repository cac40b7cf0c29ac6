import doctest
import importlib

import pytest


@pytest.mark.parametrize('name', ['auxiliary', 'config', 'dispatch', 'engram', 'mask', 'plan', 'rope'])
def test_examples_of(name):
  module = importlib.import_module(f'maxtext_layers.{name}')
  result = doctest.testmod(module)
  assert result.attempted > 0 and result.failed == 0
