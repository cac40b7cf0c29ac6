"""Files of one JSON object: config.json and what lies beside weights."""

import json
import os

from maxtext_layers import config


def read(path) -> dict:
  """The object in a file; config.Error, one line with the path, where there is none."""
  try:
    with open(path, encoding='utf-8') as file:
      value = json.load(file)
  except OSError as error:
    raise config.Error(f'cannot read {path}: {error.strerror}') from None
  except ValueError as error:
    raise config.Error(f'{path} is not JSON: {error}') from None
  if not isinstance(value, dict):
    raise config.Error(f'{path} holds no JSON object')
  return value


def read_if_there(path) -> dict:
  """The same; {} where there is no file."""
  return read(path) if os.path.exists(path) else {}


def write(path, value):
  """Writes indented JSON that ends in a newline."""
  with open(path, 'w', encoding='utf-8') as file:
    json.dump(value, file, indent=2)
    file.write('\n')
