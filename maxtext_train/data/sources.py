"""Records by number: text files, JSON lines, the standard library. All are grain RandomAccessDataSources.

`open_source` finds the files and looks at their sizes (and, for JSON lines, at the line ends), so that a wrong path, an
empty folder or an unreadable file is an error before training. Records are read when they are asked for.

A text file longer than `piece` bytes is several records, cut behind a line end (or, in a line longer than a piece,
between two characters). So a corpus of one file still gives every row of a batch a place of its own to read, and a row
does not stay in one file for many steps. By default a piece has 16 bytes for each token of a row: some rows.
"""

import abc
import glob
import hashlib
import json
import os
import sysconfig
from typing import Any
from typing import NamedTuple

import numpy as np

from maxtext_layers import config
from maxtext_train.data import config as data_config

_PIECE, _SMALLEST = 16, 1024  # bytes a token of a row; of a piece
_SCAN = 1 << 24  # bytes read at once while looking for line ends
_FILES_TO_SPLIT = 20  # with fewer files, single records are held out instead of whole files


class BadRecord(config.Error):
  """A record that cannot be read; the message names file and place."""


class Record(NamedTuple):
  """One record."""

  name: str  # file, or file:place
  value: Any  # the text; of a JSON line, if no field is asked for, the whole object
  begins: bool = True  # whether its document begins here: false for all but the first piece of a file
  ends: bool = True  # whether it ends here


class Source(abc.ABC):
  """Pieces of files. Subclasses say what a piece means."""

  kind = 'records'

  def __init__(self, files: list[str], file: np.ndarray, start: np.ndarray, stop: np.ndarray):
    """Record i is bytes start[i] to stop[i] of files[file[i]]; int64 [n] each, sorted by file and start."""
    self.files, self.file, self.start, self.stop = files, file, start, stop

  def __len__(self) -> int:
    return len(self.file)

  @abc.abstractmethod
  def __getitem__(self, index: int) -> Record:
    """Reads record `index`."""

  def __repr__(self) -> str:
    return f'{type(self).__name__}({len(self)} {self.kind} in {len(self.files)} files)'

  @abc.abstractmethod
  def name(self, index: int) -> str:
    """Where record `index` lies."""

  def identity(self) -> str:
    """Changes with the number, names, sizes or cuts of the files, not with the folder they lie in."""
    digest = hashlib.sha256()
    root = os.path.commonpath([os.path.dirname(os.path.abspath(f)) for f in self.files])
    for path in self.files:
      digest.update(f'{os.path.relpath(os.path.abspath(path), root)}\0'.encode(errors='surrogateescape'))
    for array in (self.file, self.start, self.stop):
      digest.update(np.ascontiguousarray(array, np.int64).tobytes())
    return digest.hexdigest()[:16]

  def _read(self, index: int) -> str:
    """The text of record `index`."""
    start, stop = int(self.start[index]), int(self.stop[index])
    try:
      with open(self.files[self.file[index]], 'rb') as file:
        file.seek(start)
        data = file.read(stop - start)
    except OSError as error:
      raise BadRecord(f'{self.name(index)}: {error.strerror}') from None
    if len(data) != stop - start:
      raise BadRecord(f'{self.name(index)}: the file became shorter while it was read')
    try:
      return data.decode()
    except UnicodeDecodeError as error:
      raise BadRecord(f'{self.name(index)}: byte {start + error.start} is not UTF-8') from None


class Text(Source):
  """Text files in UTF-8."""

  def __init__(self, files: list[str], piece: int):
    kept: list[str] = []
    file: list[int] = []
    start: list[int] = []
    stop: list[int] = []
    for path in files:
      if size := _size(path):
        cuts = _cuts(path, size, piece)
        file += [len(kept)] * (len(cuts) - 1)
        start += cuts[:-1]
        stop += cuts[1:]
        kept.append(path)
    super().__init__(kept, np.array(file, np.int64), np.array(start, np.int64), np.array(stop, np.int64))

  def __getitem__(self, index: int) -> Record:
    ends = index + 1 == len(self.file) or self.file[index + 1] != self.file[index]
    return Record(self.name(index), self._read(index), bool(self.start[index] == 0), bool(ends))

  def name(self, index: int) -> str:
    """file, or file@byte for a later piece."""
    path = self.files[self.file[index]]
    return f'{path}@{self.start[index]}' if self.start[index] else path


class Lines(Source):
  """Files of JSON lines; empty lines are no records."""

  kind = 'lines'

  def __init__(self, files: list[str], field: str | None):
    found = [_lines(path) for path in files]
    counts = [len(start) for start, _, _ in found]
    start, stop, self.line = (np.concatenate(arrays) if arrays else np.zeros(0, np.int64) for arrays in zip(*found))
    super().__init__(files, np.repeat(np.arange(len(files)), counts), start, stop)
    self.field = field

  def __getitem__(self, index: int) -> Record:
    name = self.name(index)
    try:
      value = json.loads(self._read(index))
    except (ValueError, RecursionError) as error:  # a number of 5000 digits is a plain ValueError
      raise BadRecord(f'{name}: not JSON: {error}') from None
    if not isinstance(value, dict):
      raise BadRecord(f'{name}: not a JSON object but {type(value).__name__}')
    if self.field is None:
      return Record(name, value)
    if not isinstance(text := value.get(self.field), str):
      known = ', '.join(sorted(value)[:8])
      what = 'is not text' if self.field in value else f'is missing; the line has {known or "no field"}'
      raise BadRecord(f'{name}: field {self.field!r} {what}')
    return Record(name, text)

  def name(self, index: int) -> str:
    """file:line, lines counted from 1."""
    return f'{self.files[self.file[index]]}:{self.line[index]}'


def open_source(settings: data_config.Config, length: int, *, field: bool = True) -> Source:
  """The source that `settings` name, with at least one record, for rows of `length` tokens.

  `field=False` gives JSON lines as whole objects.
  """
  piece = max(_SMALLEST, _PIECE * length) if settings.piece is None else settings.piece
  if settings.source == data_config.Source.STDLIB:
    return standard_library(piece)
  files = find(settings.paths, '.jsonl' if settings.source == data_config.Source.JSONL else None)
  if settings.source == data_config.Source.JSONL:
    source: Source = Lines(files, settings.field if field else None)
  else:
    source = Text(files, piece)
  if not len(source):
    raise config.Error(f'paths={settings.paths}: {len(files)} files, all empty')
  return source


def find(paths: tuple[str, ...], suffix: str | None = None) -> list[str]:
  """The files that paths, folders (searched through, hidden names left out) and globs name: sorted, each once.

  Args:
    paths: what to look for; each must name at least one file.
    suffix: of the files that a folder stands for, or None for all.
  """
  found: set[str] = set()
  for path in paths:
    path = os.path.expanduser(path)
    if os.path.exists(path):
      matches = [path]
    elif not (matches := glob.glob(path, recursive=True)):
      raise config.Error(f'paths: {path} does not exist' + (' (no match)' if glob.has_magic(path) else ''))
    files = {f for match in matches for f in (_below(match, suffix) if os.path.isdir(match) else [match])}
    if not files:
      raise config.Error(f'paths: {path} holds no {suffix or ""} file'.replace('  ', ' '))
    found |= files
  for path in found:
    if path.endswith(('.gz', '.zst', '.bz2', '.xz', '.zip')):
      raise config.Error(f'paths: {path} is compressed and has no random access; unpack it first')
  return sorted(found)


def standard_library(piece: int) -> Text:
  """The .py sources of the running interpreter's standard library, tests included, installed packages not.

  It looks into each file: three tests of the interpreter are not UTF-8, on purpose, and are no part of the corpus.
  """
  root = sysconfig.get_paths()['stdlib']
  files = []
  for folder, folders, names in os.walk(root):
    folders[:] = sorted(f for f in folders if f not in ('site-packages', 'dist-packages', '__pycache__'))
    files += [os.path.join(folder, n) for n in names if n.endswith('.py')]
  source = Text(sorted(filter(_readable, files)), piece)
  if not len(source):
    raise config.Error(f'source=stdlib: {root} holds no .py files; use source=text with paths')
  return source


def split(source: Source, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
  """Numbers of the records to train on and of the held-out ones: int64, sorted, disjoint, together all.

  Whole files are held out, so that no held-out text continues one that is trained on; with fewer than 20 files, or JSON
  lines, single records are. At least one on either side. The choice depends on the seed and the number of units only.
  """
  n = len(source)
  if fraction == 0.0:
    return np.arange(n), np.zeros(0, np.int64)
  whole = len(source.files) >= _FILES_TO_SPLIT and not isinstance(source, Lines)
  units = len(source.files) if whole else n
  if units < 2:
    raise config.Error(f'holdout={fraction}: {source.name(0)} is the only record; set holdout=0 or a smaller piece')
  count = min(max(1, round(units * fraction)), units - 1)
  held: np.ndarray = np.zeros(units, bool)
  held[np.random.default_rng(seed).permutation(units)[:count]] = True
  held = held[source.file] if whole else held
  return np.flatnonzero(~held), np.flatnonzero(held)


def _below(folder: str, suffix: str | None) -> list[str]:
  """The files in `folder` and the folders in it, without hidden ones."""
  found = []
  for here, folders, names in os.walk(folder):
    folders[:] = [f for f in folders if not f.startswith('.')]
    found += [os.path.join(here, n) for n in names if not n.startswith('.') and (suffix is None or n.endswith(suffix))]
  return found


def _readable(path: str) -> bool:
  try:
    with open(path, encoding='utf-8') as file:
      file.read()
    return True
  except (OSError, UnicodeDecodeError):
    return False


def _size(path: str) -> int:
  """Bytes of a file that can be read."""
  try:
    with open(path, 'rb') as file:
      return os.fstat(file.fileno()).st_size
  except OSError as error:
    raise config.Error(f'paths: {path} cannot be read: {error.strerror}') from None


def _cuts(path: str, size: int, piece: int) -> list[int]:
  """0, …, size: at most `piece` bytes apart, each behind a line end where a piece has one."""
  cuts = [0]
  if size > piece:
    with open(path, 'rb') as file:
      while size - cuts[-1] > piece:
        file.seek(cuts[-1])
        data = file.read(piece)
        cut = data.rfind(b'\n') + 1
        if not cut:
          file.seek(cuts[-1] + piece)
          cut = piece
          following = file.read(1)
          while cut > piece - 4 and following and following[0] & 0xC0 == 0x80:  # inside a UTF-8 character
            cut -= 1
            following = data[cut : cut + 1]
        cuts.append(cuts[-1] + cut)
  return cuts + [size]


def _lines(path: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Start, stop (without the line end) and number (from 1) of the non-empty lines of a file; int64 each."""
  size, at = _size(path), 0
  ends: list[np.ndarray] = []
  with open(path, 'rb') as file:
    while data := file.read(_SCAN):
      ends.append(np.flatnonzero(np.frombuffer(data, np.uint8) == 10) + at)
      at += len(data)
  stop = np.concatenate([*ends, np.array([at], np.int64)]) if size else np.zeros(0, np.int64)
  start = np.concatenate([np.zeros(1, np.int64), stop[:-1] + 1]) if size else stop
  filled = stop - start > 1  # one byte is '\r' or no JSON object
  return start[filled], stop[filled], np.flatnonzero(filled) + 1
