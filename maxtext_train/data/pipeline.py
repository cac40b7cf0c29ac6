"""Batches with an exact place in the data. Reading order: `build`, `Loader`, `HeldOut`, `restore`.

The global batch has B rows, and each row is a stream of its own. Records in the (shuffled) order i = 0, 1, 2, … of all
epochs, epoch i // n, belong to stream i mod B; a stream tokenizes and packs its records by itself. So the place of a
stream is one cursor (next record, offset in it) and the state of a run is B cursors. They do not change with the number
of worker processes, nor with the number of processes that each feed a part of the batch; neither do the batches.

A row travels together with the cursor behind it. The state is therefore that of the batches handed out, however many
more are read ahead.

Held-out records go through one stream, once, in one order: the rows do not depend on the batch size, and no row is
counted twice.
"""

from collections.abc import Iterator
import contextlib
import hashlib
from typing import Any

from absl import logging
import grain
import numpy as np

from maxtext_layers import config
from maxtext_train.data import config as data_config
from maxtext_train.data import packing
from maxtext_train.data import sources
from maxtext_train.data import streams
from maxtext_train.data import synthetic
from maxtext_train.data import worker

FORMAT = 1


def build(
    settings: data_config.Config, *, batch: int, length: int, tokenizer: Any = None,
    state: dict[str, Any] | None = None, split: str = 'train', process: int = 0, processes: int = 1,
    vocab: int | None = None, batches: int | None = None, encode: streams.Encode | None = None,
) -> 'Loader | HeldOut':  # fmt: skip
  """The batches that one process feeds.

  Args:
    settings: checked here too.
    batch: rows of the global batch, B.
    length: tokens of a row, T.
    tokenizer: see maxtext_models.tokenizer; None for artificial data.
    state: of a Loader, to go on behind it (for several processes, of `merge`); for split='train' only.
    split: 'train', or 'heldout' for the same batches each time it is iterated.
    process: which of `processes` this is; it feeds rows process · B / processes onwards.
    processes: how many processes feed the batch.
    vocab: ids of artificial data are below it, unless the settings say.
    batches: at most so many held-out batches; None takes every held-out record once.
    encode: picklable record -> (ids, weights), instead of the tokenizer. JSON lines are then whole objects.

  Raises:
    config.Error: bad settings, unreadable or empty data, a state that belongs to other data or to another batch.
  """
  settings.check()
  if batch < 1 or length < 1:
    raise config.Error(f'batch={batch} and length={length} must be positive')
  if batch % processes:
    raise config.Error(f'batch={batch} is not divisible by the {processes} processes that feed it')
  if split not in ('train', 'heldout'):
    raise config.Error(f'split={split!r} is not one of train, heldout')
  share = batch // processes
  slots = slice(process * share, (process + 1) * share, 1)
  if settings.artificial:
    return _artificial(settings, batch, length, settings.vocab or vocab, state, split, slots, batches)
  source = sources.open_source(settings, length, field=encode is None)
  members, held = sources.split(source, settings.holdout, settings.seed)
  if split == 'heldout' and not len(held):
    raise config.Error('holdout=0 leaves nothing to evaluate on; evaluate.every=0 does not')
  encode = encode or Tokenize(tokenizer, settings.bos, settings.eos)
  common: dict[str, Any] = {
      'source': source, 'encode': encode, 'length': length, 'shuffle': settings.seed if settings.shuffle else None,
      'whole': settings.packing == data_config.Packing.NONE,
      'sample': settings.weighting == data_config.Weighting.SAMPLE,
      'skip': settings.on_bad_record == data_config.OnBadRecord.SKIP,
  }  # fmt: skip
  if split == 'heldout':
    rows = streams.Rows(members=held, batch=1, slots=slice(0, 1, 1), epochs=1, **common)
    rows.probe()
    return HeldOut(rows, batch=batch, slots=slots, batches=batches)
  if len(members) < batch:
    logging.warning('data: %d records for %d rows: rows of a batch read the same records', len(members), batch)
  epochs = (settings.epochs or 1) if settings.at_end == data_config.AtEnd.STOP else None
  rows = streams.Rows(members=members, batch=batch, slots=slots, epochs=epochs, **common)
  rows.probe()
  facts = {
      'source': str(settings.source), 'files': source.identity(), 'records': len(source), 'holdout': settings.holdout,
      'shuffle': settings.shuffle, 'seed': settings.seed, 'packing': str(settings.packing),
      'weighting': str(settings.weighting), 'tokenizer': encode.identity() if isinstance(encode, Tokenize) else 'own',
      'batch': batch, 'length': length,
  }  # fmt: skip
  return Loader(rows, facts=facts, slots=slots, state=state, workers=settings.workers, held=len(held))


class Tokenize:
  """Record -> ids, with the begin and end tokens that the tokenizer has, where its document begins and ends."""

  def __init__(self, tokenizer: Any, bos: bool, eos: bool):
    if tokenizer is None:
      raise config.Error('data of text needs a tokenizer')
    self.tokenizer = tokenizer
    self.bos = bos and tokenizer.bos_id is not None
    self.eos = eos and tokenizer.eos_id is not None

  def __call__(self, record: sources.Record) -> tuple[np.ndarray, np.ndarray | None]:
    """Int32 [n], and no weights."""
    if not record.value:
      return np.zeros(0, np.int32), None
    bos, eos = self.bos and record.begins, self.eos and record.ends
    return np.array(self.tokenizer.encode(record.value, bos=bos, eos=eos), np.int32), None

  def identity(self) -> str:
    """Changes with the ids that text becomes, not with where the tokenizer's files lie."""
    text = 'The quick brown fox — naïve façade, 北京, 1234567890!\n\tdef f(x):\n    return x ** 2\n'
    ids = self.tokenizer.encode(text, bos=self.bos, eos=self.eos)
    return hashlib.sha256(f'{self.tokenizer.vocab} {list(map(int, ids))}'.encode()).hexdigest()[:16]


class Loader:
  """Iterates over local batches: dicts of tokens, targets, positions, segments int32 and weights float32, [b, T] each.

  `state()` and `report()` speak of the batches handed out so far. Close it, or use it as a context, if it has workers.
  """

  def __init__(
      self, rows: streams.Rows | synthetic.Rows, *, facts: dict[str, Any], slots: slice, state: dict[str, Any] | None,
      workers: int, held: int = 0,
  ):  # fmt: skip
    self.rows, self.facts, self.slots, self.held = rows, facts, slots, held
    self.finite = isinstance(rows, streams.Rows) and rows.epochs is not None
    self._batches = 0
    if state is not None:
      self._batches = restore(state, facts, rows, slots)
    self._cursor = rows.cursor.copy()
    self._warned: dict[str, int] = {}
    self._workers = min(workers, slots.stop - slots.start)
    dataset: grain.IterDataset = rows
    if self._workers:
      dataset = worker.spawn(rows, self._workers, (slots.stop - slots.start) * rows.length)
    self._iterators = worker.closing(self, dataset.__iter__())
    self._started = self._over = False

  def __iter__(self) -> 'Loader':
    return self

  def __next__(self) -> packing.Batch:
    if self._over:
      raise StopIteration
    parts = self._parts()
    batch = parts[0]
    if self._workers:
      batch = {k: np.empty((sum(len(p[k]) for p in parts), *v.shape[1:]), v.dtype) for k, v in parts[0].items()}
      for w, part in enumerate(parts):
        for name, value in part.items():
          batch[name][w :: len(parts)] = value
    if self.finite and not batch['segments'].any():  # every stream has ended
      self._over = True
      raise StopIteration
    self._cursor = batch.pop('cursor')
    self._batches += 1
    self._warn()
    return batch

  def _parts(self) -> list[packing.Batch]:
    """One part a worker, in order: worker w has the rows w, w + W, …"""
    first, self._started = not self._started, True
    try:
      with worker.starting() if self._workers and first else contextlib.nullcontext():
        return [next(self._iterators[0]) for _ in range(max(1, self._workers))]
    except RuntimeError as error:
      if 'Worker process was terminated' in str(error):  # grain's words
        raise config.Failure(f'a data worker died: {str(error).splitlines()[0]}') from None
      raise

  def position(self) -> tuple[int, np.ndarray]:
    """Batches handed out and the cursors behind them: what `state` and `report` are made from."""
    return self._batches, self._cursor

  def state(self, position: tuple[int, np.ndarray] | None = None) -> dict[str, Any]:
    """The place in the data, for JSON; of several processes, `merge` puts it together."""
    batches, cursor = position or self.position()
    place = {'batches': batches, 'first_row': self.slots.start, 'cursors': cursor.tolist()}
    return {'format': FORMAT, 'data': self.facts, **place}

  def report(self, position: tuple[int, np.ndarray] | None = None) -> dict[str, Any]:
    """Batches, records, epoch, next record, tokens and what was dropped, of this process's rows."""
    batches, cursor = position or self.position()
    if not isinstance(self.rows, streams.Rows):
      tokens = len(cursor) * batches * self.rows.length
      nothing: dict[str, Any] = {'records': 0, 'epoch': 0, 'next_record': None, 'dropped': {}, 'truncated': 0}
      return {'batches': batches, 'tokens': tokens, **nothing}
    rows = self.rows
    slots = np.arange(rows.batch)[self.slots]
    following = int(cursor[:, streams.RECORD].min())
    total = None if rows.epochs is None else rows.epochs * len(rows.members)
    return {
        'batches': batches,
        'records': int(((cursor[:, streams.RECORD] - slots) // rows.batch).sum()),
        'epoch': min(following, total - 1 if total else following) // len(rows.members),
        'next_record': None if total is not None and following >= total else rows.name(following),
        'tokens': int(cursor[:, streams.TOKENS].sum()),
        'dropped': {why: int(n) for why, n in zip(streams.REASONS, cursor[:, streams.DROPPED:].sum(0)) if n},
        'truncated': int(cursor[:, streams.TRUNCATED].sum()),
    }  # fmt: skip

  def ended(self) -> bool:
    """Whether no batch is left: derived from the place in the data, and so true of a loader that was just restored."""
    return isinstance(self.rows, streams.Rows) and self.rows.exhausted(self._cursor)

  def describe(self) -> dict[str, Any]:
    """What is decided about the data, for the printed plan and the manifest."""
    if not isinstance(self.rows, streams.Rows):
      return {'source': self.facts['source'], 'documents': 'none: every row is one run of random tokens'}
    rows = self.rows
    if rows.whole:
      policy = 'one document a row, padded or cut; padding is masked'
    else:
      policy = 'concatenated, then split; documents are isolated by segment ids and positions restart at 0'
    end = 'repeats, in another order each epoch' if rows.shuffle is not None else 'repeats'
    return {
        'source': repr(rows.source), 'train_records': len(rows.members), 'heldout_records': self.held,
        'documents': policy, 'weighting': 'every document weighs 1' if rows.sample else 'every token weighs 1',
        'at_end': end if rows.epochs is None else f'stops after {rows.epochs} epochs', 'workers': self._workers,
    }  # fmt: skip

  def close(self) -> None:
    """Ends the workers. No further batch can be asked for."""
    self._over = True
    worker.close(self._iterators)

  def __enter__(self) -> 'Loader':
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _warn(self) -> None:
    """Says what is dropped, when its number passes 1, 10, 100, …"""
    if self._cursor.shape[1] == streams.WIDTH and self._cursor[:, streams.DROPPED :].any():
      for why, count in self.report()['dropped'].items():
        if count >= self._warned.get(why, 1):
          self._warned[why] = 10 ** len(str(count))
          logging.warning(
            'data: %d of %d records so far %s (%s): dropped', count, self.report()['records'], streams.WHY[why], why
          )


class HeldOut:
  """The held-out records as batches: each iteration begins anew and hands out the same. Rows left over are padding."""

  def __init__(self, rows: Any, *, batch: int, slots: slice, batches: int | None):
    self.rows, self.batch, self.slots, self.batches = rows, batch, slots, batches

  def __iter__(self) -> Iterator[packing.Batch]:
    iterator = iter(self.rows)
    for _ in range(self.batches) if self.batches is not None else iter(int, 1):
      rows = [row for _ in range(self.batch) if (row := next(iterator))['segments'].any()]
      if not rows:
        return
      rows += [packing.empty(1, self.rows.length)] * (self.batch - len(rows))
      yield {name: np.concatenate([row[name] for row in rows[self.slots]]) for name in packing.empty(0, 0)}


def merge(states: list[dict[str, Any]]) -> dict[str, Any]:
  """The state of the whole batch from those of all the processes that feed it, in any order.

  Raises:
    config.Error: a part is missing, or they are not of the same run and batch.
  """
  states = sorted(states, key=lambda s: s['first_row'])
  first = states[0]
  cursors: list[list[int]] = []
  for state in states:
    for name in ('format', 'data', 'batches'):
      if state[name] != first[name]:
        raise config.Error(f'data state: {name} differs between processes: {first[name]} and {state[name]}')
    if state['first_row'] != len(cursors):
      raise config.Error(f'data state: row {len(cursors)} of {first["data"]["batch"]} is missing or there twice')
    cursors += state['cursors']
  return {**first, 'first_row': 0, 'cursors': cursors}


def restore(state: dict[str, Any], facts: dict[str, Any], rows: Any, slots: slice) -> int:
  """Moves `rows` to where `state` says and returns the batches before. Raises config.Error if it is of other data."""
  if state.get('format') != FORMAT:
    raise config.Error(f'data state: format {state.get("format")!r} is not {FORMAT}')
  before = state['data']
  names = [name for name in (facts | before) if facts.get(name) != before.get(name)]
  if names:
    changes = ', '.join(f'{name} was {before.get(name)!r} and is {facts.get(name)!r}' for name in names)
    raise config.Error(f'the data is not that of the checkpoint, its place has no meaning: {changes}')
  cursors = np.array(state['cursors'], np.int64)
  if state['first_row'] != 0 or cursors.shape != (facts['batch'], rows.cursor.shape[1]):
    raise config.Error(
      f'data state: it holds rows {state["first_row"]} .. {state["first_row"] + len(cursors) - 1} of {facts["batch"]};'
      ' the parts of all processes must be merged first'
    )
  rows.cursor = cursors[slots]
  return int(state['batches'])


def _artificial(
    settings: data_config.Config, batch: int, length: int, vocab: int | None, state: dict[str, Any] | None, split: str,
    slots: slice, batches: int | None,
) -> Loader | HeldOut:  # fmt: skip
  if vocab is None:
    raise config.Error(f'vocab: source={settings.source} needs the number of token ids')
  seed = settings.seed + (split == 'heldout')
  fixed = settings.source == data_config.Source.SYNTHETIC
  cursor = np.zeros((slots.stop - slots.start, 1), np.int64)
  rows = synthetic.Rows(vocab=vocab, batch=batch, length=length, seed=seed, fixed=fixed, cursor=cursor, slots=slots)
  if split == 'heldout':
    return _Artificial(rows, batches=1 if batches is None else batches)
  facts = {'source': str(settings.source), 'seed': settings.seed, 'vocab': vocab, 'batch': batch, 'length': length}
  return Loader(rows, facts=facts, slots=slots, state=state, workers=settings.workers)


class _Artificial(HeldOut):
  def __init__(self, rows: synthetic.Rows, *, batches: int):
    super().__init__(rows, batch=rows.batch, slots=rows.slots, batches=batches)

  def __iter__(self) -> Iterator[packing.Batch]:
    for _, part in zip(range(self.batches or 0), self.rows):
      yield {name: value for name, value in part.items() if name != 'cursor'}
