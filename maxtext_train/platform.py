"""Where a run happens. What a cloud needs beyond this is a class of its own, named in `config.platform`.

`local` is this machine. `package.module:Class` is loaded by name, so nothing here imports a cloud.
"""

import importlib
from typing import Any
from typing import Protocol

from maxtext_layers import config


class Platform(Protocol):
  """What a run asks of the place where it happens."""

  def start(self) -> None:
    """Before the first look at devices, e.g. to join the processes of a job."""
    ...

  def hooks(self, settings: Any) -> list[Any]:
    """More hooks (loop.Hook), called after the others."""
    ...

  def stop(self) -> None:
    """After the run, however it ended."""
    ...


class Local:
  """This process on this machine."""

  def start(self) -> None:
    pass

  def hooks(self, settings: Any) -> list[Any]:
    return []

  def stop(self) -> None:
    pass


def load(name: str) -> Platform:
  """'local' or 'module:Class' -> an instance."""
  if name == 'local':
    return Local()
  module, colon, cls = name.partition(':')
  try:
    if not colon:
      raise ImportError('it is neither local nor module:Class')
    return getattr(importlib.import_module(module), cls)()
  except (ImportError, AttributeError) as error:
    raise config.Error(f'platform={name!r}: {error}') from error
