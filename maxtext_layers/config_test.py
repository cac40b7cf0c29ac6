import dataclasses
import enum
import pathlib

import pytest

from maxtext_layers import config


class Kind(enum.StrEnum):
  PLAIN = 'plain'
  FANCY = 'fancy'


@config.spec
class Scaling:
  factor: float = 8.0
  name: str = 'x'


@config.config
class Model:
  layers: int = 2
  shape: tuple[int, ...] = (1, 2)
  scaling: Scaling | None = None

  def check(self):
    if self.layers < 1:
      raise config.Error(f'layers={self.layers} is not positive')


@config.config
class Wide(Model):
  width: int = 4


@config.config
class Lora:
  rank: int = 8


@config.config
class Run:
  steps: int = 10
  rate: float = 0.5
  name: str = 'run'
  note: str | None = None
  limit: int | None = 3
  kind: Kind = Kind.PLAIN
  verbose: bool = False
  model: Model = dataclasses.field(default_factory=Wide)
  lora: Lora | None = None
  parts: tuple[Scaling, ...] = ()


FILE = """
from maxtext_layers import config_test as t

def get_config(size='3'):
  value = t.Run(model=t.Wide(layers=int(size)))
  {line}
  return value
"""


@pytest.fixture
def file(tmp_path):
  def write(line='pass'):
    path = tmp_path / 'given.py'
    path.write_text(FILE.format(line=line).replace('config_test as t', f'{__name__.rsplit(".", 1)[-1]} as t'))
    return str(path)

  return write


@pytest.fixture(autouse=True)
def importable(monkeypatch):
  """The config file of a test imports the classes above, whatever name this module was loaded under."""
  import sys

  import maxtext_layers

  monkeypatch.setitem(sys.modules, 'maxtext_layers.config_test', sys.modules[__name__])
  monkeypatch.setattr(maxtext_layers, 'config_test', sys.modules[__name__], raising=False)


def parsed(file, *overrides):
  return config.parse(list(overrides), file)[0]


def error(file, *overrides):
  with pytest.raises(config.Error) as caught:
    parsed(file, *overrides)
  text = str(caught.value)
  assert '\n' not in text and 'Traceback' not in text
  return text


def test_file_argument_overrides_and_rest(file):
  path = file('value.steps = 7')
  value, rest = config.parse(
    ['--config.rate=2', '--workdir=/x', f'--config={path}:5', '--config.model.width', '9', 'more'], None
  )
  assert (value.steps, value.rate, value.model.layers, value.model.width) == (7, 2.0, 5, 9)
  assert rest == ['--workdir=/x', 'more']


def test_resolve_knows_packaged_names(file):
  path = file()
  asked = []
  value, _ = config.parse(['--config=quick:4'], None, lambda name: asked.append(name) or path)
  assert asked == ['quick'] and value.model.layers == 4


def test_values_of_every_kind(file):
  value = parsed(
    file(),
    '--config.steps=3',
    '--config.rate=1e-3',
    '--config.name=none',
    '--config.note=hi',
    '--config.limit=none',
    '--config.kind=fancy',
    '--config.verbose',
    '--config.model.shape=3,4',
    '--config.lora=build',
    '--config.lora.rank=2',
  )
  assert (value.steps, value.rate, value.name, value.note, value.limit) == (3, 1e-3, 'none', 'hi', None)
  assert value.kind is Kind.FANCY and value.verbose is True and value.model.shape == (3, 4) and value.lora.rank == 2
  assert parsed(file(), '--config.note=x', '--config.note=none').note is None
  assert parsed(file(), '--config.verbose=false').verbose is False
  assert parsed(file('value.lora = t.Lora()'), '--config.lora=none').lora is None


def test_unknown_name_on_the_command_line(file):
  """J1: an unknown key at any depth is an error with the path and the nearest names."""
  assert error(file(), '--config.stepz=3') == "no setting config.stepz; did you mean 'config.steps'?"
  assert 'config.model.layres' in (text := error(file(), '--config.model.layres=3')) and "'config.model.layers'" in text
  assert "'config.model.width'" in error(file(), '--config.width=3')
  assert 'config.steps.x' in error(file(), '--config.steps.x=3')
  assert (
    error(file(), '--config.lora.rank=2') == 'config.lora.rank: config.lora is none; --config.lora=build comes first'
  )


def test_unknown_name_in_a_file(file):
  """J1: so is one that a config file sets, reads or passes; the line is named."""
  path = file('value.stepz = 3')
  assert error(path) == f"{path}:6: Run has no field 'stepz'; did you mean 'steps'?"
  assert "Wide has no field 'layerz'; did you mean 'layers'?" in error(file('value.model.layerz = 3'))
  assert "Run has no field 'modle'; did you mean 'model'?" in error(file('value.modle.layers = 3'))
  assert "Lora has no field 'rnk'; did you mean 'rank'?" in error(file('t.Lora(rnk=3)'))


def test_wrong_types(file):
  """J1: a value of the wrong type names its setting, on the command line and in a file."""
  assert error(file(), '--config.steps=abc') == "config.steps: 'abc' is not an integer"
  assert error(file(), '--config.steps=1e3') == "config.steps: '1e3' is not an integer"
  assert error(file(), '--config.steps=none') == "config.steps: 'none' is not an integer"
  assert error(file(), '--config.kind=odd') == "config.kind: 'odd' is not one of plain, fancy"
  assert error(file(), '--config.verbose=7') == "config.verbose: '7' is not true or false"
  assert error(file(), '--config.steps') == 'config.steps needs a value: an integer'
  assert error(file("value.steps = '3'")) == "config.steps: '3' is not an integer"
  assert error(file('value.model.shape = (1, 2.5)')).startswith('config.model.shape: (1, 2.5) is not')
  assert error(file('value.steps = True')) == 'config.steps: True is not an integer'
  assert 'fixed spec' in error(file('value.model.scaling = t.Scaling()'), '--config.model.scaling.factor=2')


def test_broken_files(file, tmp_path):
  assert 'no file' in error(str(tmp_path / 'missing.py'))
  assert error(file('raise KeyError("gone")')).endswith(":6: KeyError: 'gone'")
  assert error(file('1 +')).endswith(':6: invalid syntax')
  assert 'returned int' in error(file('return 3'))
  assert '--config=FILE is needed' == error(None)


def test_check_runs_everywhere_and_names_the_place(file):
  assert error(file(), '--config.model.layers=0') == 'config.model: layers=0 is not positive'


def test_dump_is_complete_deterministic_and_round_trips(file):
  """J1: every field is in the dump, in order, and setting each dumped value again gives the same config."""
  path = file('value.parts = (t.Scaling(2.0), t.Scaling(3.0, "y")); value.note = "a b"; value.kind = t.Kind.FANCY')
  value = parsed(path)
  text = config.dump(value)
  assert text == config.dump(parsed(path))
  lines = dict(line.split(' = ', 1) for line in text.splitlines())
  assert [name for name in lines if name in list(config.fields(value))] == list(config.fields(value))
  assert lines['kind'] == "'fancy'" and lines['note'] == "'a b'" and lines['parts.1.factor'] == '3.0'
  assert lines['model'].endswith('Wide') and lines['lora'] == 'None'
  skip = ('model', 'lora', 'parts', 'config')
  overrides = [
    f'--config.{n}={t.strip(chr(39))}' for n, t in lines.items() if n not in skip and not n.startswith('parts')
  ]
  again = parsed(file('value.parts = (t.Scaling(2.0), t.Scaling(3.0, "y"))'), *overrides)
  assert again == value and config.dump(again) == text


def test_a_set_dumps_sorted():
  @config.config
  class Bag:
    items: frozenset[str] = frozenset({'b', 'a', 'c'})
    where: pathlib.Path = pathlib.Path('x')

  assert config.dump(Bag()).splitlines()[1:] == ["items = {'a', 'b', 'c'}", "where = 'x'"]


def test_nearest():
  assert config.nearest('fsdq', ['fsdp', 'tensor']) == "; did you mean 'fsdp'?"
  assert config.nearest('zzz', ['fsdp']) == ''
