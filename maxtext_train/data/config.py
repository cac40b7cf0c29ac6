"""What a run reads and how: one flat class, so that every choice about the data is one line of the printed config."""

import enum

from maxtext_layers import config


class Source(enum.StrEnum):
  """Where records come from."""

  TEXT = 'text'  # files; a record is a file, or a piece of a long one
  JSONL = 'jsonl'  # files; a record is a line, its text in `field`
  STDLIB = 'stdlib'  # the .py sources of the running interpreter's standard library
  SYNTHETIC = 'synthetic'  # one random batch, over and over: for measuring speed
  RANDOM = 'random'  # random rows, new ones each step


class Packing(enum.StrEnum):
  """How documents become rows."""

  DOCUMENTS = 'documents'  # concatenated, then split; documents cannot see each other
  NONE = 'none'  # one document a row, padded or cut


class AtEnd(enum.StrEnum):
  """What happens when every record has been read."""

  REPEAT = 'repeat'  # again, in another order
  STOP = 'stop'  # training ends after `epochs`


class OnBadRecord(enum.StrEnum):
  """What a record that cannot be read does."""

  FAIL = 'fail'  # ends the run with the file and the place
  SKIP = 'skip'  # is left out and counted


class Weighting(enum.StrEnum):
  """What counts alike in the loss."""

  TOKEN = 'token'
  SAMPLE = 'sample'  # every document weighs 1, whatever its length


@config.config
class Config:
  """The data of a run."""

  source: Source = Source.STDLIB
  paths: tuple[str, ...] = ()  # files, folders or globs, for text and jsonl
  field: str = 'text'  # of a JSON line
  piece: int | None = None  # bytes; a longer text file is cut at line ends into records; none: 16 a token of a row
  tokenizer: str = 'byte'  # 'byte' or a directory with tokenizer files
  bos: bool = True  # a document begins with the begin token, where the tokenizer has one
  eos: bool = True  # a document ends with the end token, where the tokenizer has one
  shuffle: bool = True  # in another order each epoch
  seed: int = 1  # of the order, of the held-out choice and of synthetic tokens
  at_end: AtEnd = AtEnd.REPEAT
  epochs: int | None = None  # with at_end=stop; none is one
  packing: Packing = Packing.DOCUMENTS
  weighting: Weighting = Weighting.TOKEN
  holdout: float = 0.01  # part of the files (of the records, where files are few) kept for evaluation; 0 keeps none
  on_bad_record: OnBadRecord = OnBadRecord.FAIL
  workers: int = 0  # processes that read and tokenize; 0 does it in a thread. Batches are the same for any number
  vocab: int | None = None  # synthetic and random draw ids below it; none takes the model's

  @property
  def artificial(self) -> bool:
    """Whether there are no records: no packing, no epochs, no held-out files."""
    return self.source in (Source.SYNTHETIC, Source.RANDOM)

  def check(self) -> None:
    """Raises config.Error for a value that cannot work, before anything is read."""
    for name, kind in (('source', Source), ('at_end', AtEnd), ('packing', Packing), ('weighting', Weighting),
                       ('on_bad_record', OnBadRecord)):  # fmt: skip
      value, known = getattr(self, name), [str(k) for k in kind]
      if str(value) not in known:
        raise config.Error(f'{name}={value!r} is not one of {", ".join(known)}{config.nearest(str(value), known)}')
    paths: object = self.paths
    if not isinstance(paths, tuple | list) or not all(isinstance(p, str) and p for p in paths):
      raise config.Error(f'paths={paths!r} is not a tuple of paths')
    if self.source in (Source.TEXT, Source.JSONL):
      if not self.paths:
        raise config.Error(f'paths is empty; source={self.source} needs files, folders or globs')
    elif self.paths:
      raise config.Error(f'paths={self.paths!r} is given, but source={self.source} reads no files')
    if self.source == Source.JSONL and not self.field:
      raise config.Error('field is empty; source=jsonl needs the name of the text field')
    if self.piece is not None and self.piece < 1024:
      raise config.Error(f'piece={self.piece} is below 1024 bytes')
    if not 0 <= self.seed < 2**31:
      raise config.Error(f'seed={self.seed} is not in 0 .. 2**31 - 1')
    if self.epochs is not None:
      if self.at_end != AtEnd.STOP:
        raise config.Error(f'epochs={self.epochs} needs at_end=stop; at_end={self.at_end} has no last epoch')
      if self.epochs < 1:
        raise config.Error(f'epochs={self.epochs} is not positive')
    if self.artificial and self.at_end == AtEnd.STOP:
      raise config.Error(f'at_end=stop: source={self.source} has no end')
    if not 0.0 <= self.holdout < 1.0:
      raise config.Error(f'holdout={self.holdout} is not in [0, 1)')
    if not 0 <= self.workers <= 256:
      raise config.Error(f'workers={self.workers} is not in 0 .. 256')
    if self.vocab is not None and self.vocab < 2:
      raise config.Error(f'vocab={self.vocab} is below 2')
