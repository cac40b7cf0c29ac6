"""A pretraining run as one typed object. What each part means stands beside the code that it configures.

A config file has `get_config()` or `get_config(model)` and returns a `Pretrain`. `config.check` tests every class by
itself; `mesh` tests what can only be known on the machine.
"""

import dataclasses
import enum

from maxtext_layers import config
from maxtext_layers import sharding
from maxtext_layers import stack
from maxtext_models import card
from maxtext_train import evaluate as evaluation
from maxtext_train import losses
from maxtext_train import optimizer as optimizers
from maxtext_train import schedule as schedules
from maxtext_train import stop
from maxtext_train.data import config as data_config


class Dtype(enum.StrEnum):
  """Of the computation. Parameters, moments, sums and the loss are float32 in either case."""

  FLOAT32 = 'float32'
  BFLOAT16 = 'bfloat16'


class Scan(enum.StrEnum):
  """Whether layers of one kind are one traced loop. Auto scans deep models, to compile faster, and unrolls others."""

  AUTO = 'auto'
  YES = 'yes'
  NO = 'no'


@config.config
class Checkpoint:
  """What is kept of a run."""

  every: int = 500  # steps; 0 saves at the end only
  keep: int | None = 3  # the newest; none keeps all
  keep_period: int | None = None  # steps that are a multiple of it stay for good
  on_sigterm: stop.OnSigterm = stop.OnSigterm.save

  def check(self) -> None:
    """Raises config.Error naming the field."""
    if self.every < 0:
      raise config.Error(f'every={self.every} is negative')
    for name in ('keep', 'keep_period'):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise config.Error(f'{name}={value} is not positive; none switches it off')


@config.config
class Profile:
  """Traces the steps first to last into RUN/profile; first=0 does not."""

  first: int = 0
  last: int = 0

  def check(self) -> None:
    """Raises config.Error naming the field."""
    if self.first < 0:
      raise config.Error(f'first={self.first} is negative')
    if self.first and self.last < self.first:
      raise config.Error(f'last={self.last} is before first={self.first}')


@config.config
class Pretrain:
  """One run. `steps` counts updates; `batch` is the number of rows of all devices in one update."""

  name: str
  model: card.Card | None = None  # none takes that of the run to resume or of `init_from`
  steps: int
  batch: int
  length: int  # tokens a row
  accumulate: int = 1  # micro-batches that an update is computed in
  seed: int = 0  # of the first values and of dropout; the data has its own
  dtype: Dtype = Dtype.FLOAT32
  scan: Scan = Scan.AUTO
  remat: str = 'none'  # what the backward pass recomputes, see stack.py
  kernel: str = 'auto'  # of attention, see attention.py
  dropout: float = 0.0
  init_from: str | None = None  # a Hugging Face directory, native checkpoint or run whose weights are the first values
  loss: losses.Config = dataclasses.field(default_factory=losses.Config)
  data: data_config.Config = dataclasses.field(default_factory=data_config.Config)
  optimizer: optimizers.Config = dataclasses.field(default_factory=optimizers.Config)
  schedule: schedules.Config = dataclasses.field(default_factory=schedules.Config)
  mesh: sharding.Config = dataclasses.field(default_factory=sharding.Config)
  checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)
  evaluate: evaluation.Config = dataclasses.field(default_factory=evaluation.Config)
  profile: Profile = dataclasses.field(default_factory=Profile)
  log_every: int = 10  # steps a line, where output is no terminal
  sample: str | None = None  # a prompt to continue when training is complete
  cache: str | None = 'auto'  # folder of compiled programs; auto is one of the user's, none compiles anew each time
  platform: str = 'local'  # or module:Class, see platform.py

  def check(self) -> None:
    """Raises config.Error naming the field."""
    if not self.name or self.name.startswith('.') or '/' in self.name or '\0' in self.name:
      raise config.Error(f'name={self.name!r} is no name of a folder; --workdir takes a path')
    for name in ('steps', 'batch', 'length', 'accumulate', 'log_every'):
      if getattr(self, name) < 1:
        raise config.Error(f'{name}={getattr(self, name)} is not positive')
    if self.batch % self.accumulate:
      raise config.Error(f'batch={self.batch} is not divisible by accumulate={self.accumulate}')
    if not 0.0 <= self.dropout < 1.0:
      raise config.Error(f'dropout={self.dropout} lies outside 0 … 1')
    if self.sample == '':
      raise config.Error('sample is empty; none asks for no sample')
    if self.model is not None and self.length > self.model.context:
      raise config.Error(f'length={self.length} exceeds model.context={self.model.context}')
    stack.remat_policy(self.remat)
    schedules.build(self.schedule, self.steps)


def mesh(settings: Pretrain):
  """The mesh of all devices.

  Raises:
    config.Error: the sizes do not fit the devices, or the batch does not fit the sizes.
  """
  try:
    made = settings.mesh.mesh()
  except config.Error as error:
    raise config.Error(f'config.mesh: {error}') from None
  rows, name = settings.batch, 'config.batch'
  if settings.accumulate > 1:
    rows, name = rows // settings.accumulate, f'config.batch={rows} / config.accumulate'
  sharding.check_rows(rows, made, settings.mesh.rules, name)
  return made
