"""Checkpoints of a run: FOLDER/STEP, written in the background and listed only when whole.

A save copies the arrays to the host (after that the step may donate its buffers), writes them in the background into a
hidden folder that says of itself that it is temporary, then writes `commit.json`, the names and sizes of all files, and
renames. What has no commit.json, or lacks a file it names, is not listed. The marker is an ordinary file, so a copy
of a checkpoint is a checkpoint.

What failed in the background is raised by the next `save`, `check` or `wait`.

Reading order: `Checkpoints.save`, `_write`, `models.committed`, `Checkpoints.restore`, `flatten`.
"""

import functools
import json
import logging
import os
import pathlib
import re
import shutil
import threading
from typing import NamedTuple
import uuid

import jax
import orbax.checkpoint as ocp

from maxtext_layers import config
from maxtext_layers import plan
from maxtext_models import atomic
from maxtext_models import checkpoint as models
from maxtext_models import layout
from maxtext_models import orbax_files

TEMPORARY = 'temporary'  # marks a folder that a save of ours may leave behind and a later one may delete
_SHOWN = 10


class Checkpoints:
  """The checkpoints below `folder`. Keeps the newest `keep` and every step that is a multiple of `keep_period`."""

  def __init__(self, folder, *, keep=None, keep_period=None):
    logging.getLogger('absl').addFilter(_not_orbax)
    logging.getLogger('asyncio').addFilter(_not_orbax)
    self.folder = pathlib.Path(folder)
    self._keep, self._keep_period = keep, keep_period
    self._writers = {}
    self._lock = threading.RLock()  # the watcher of SIGTERM may save while the main thread does
    self._thread, self._error = None, None

  def steps(self):
    """The committed steps, ascending."""
    return sorted(int(p.name) for p in _children(self.folder) if p.name.isdigit() and models.committed(p))

  def newest(self):
    """The newest committed step, or None."""
    return max(self.steps(), default=None)

  def damaged(self):
    """Folders named like a step that are no whole checkpoint, and that no save or deletion of ours left behind."""
    numbered = [p for p in _children(self.folder) if p.name.isdigit() and not models.committed(p)]
    return sorted((p for p in numbered if not (p / TEMPORARY).exists()), key=lambda p: int(p.name))

  def path(self, step):
    """Where a step is, or will be."""
    return self.folder / str(step)

  def tidy(self):
    """Deletes what interrupted saves of ours left behind, and nothing else."""
    for path in _children(self.folder):
      if path.name.isdigit() and (path / TEMPORARY).exists() and not models.committed(path):
        _delete(path)  # a deletion that was interrupted
      elif re.fullmatch(r'\.\d+\.[0-9a-f]{8}', path.name):
        names = {p.name for p in _children(path)}
        if not names or names & {TEMPORARY, models.COMMIT}:  # complete but not renamed is an unfinished save, too
          _delete(path)

  def save(self, step, trees, files, *, wait=False):
    """Starts to save. Returns when the arrays may be donated; with `wait`, when the checkpoint is listed.

    Args:
      step: its name. A step that is committed already is left alone.
      trees: {item: tree of arrays}. Typed PRNG keys are welcome. An item becomes the folder STEP/item.
      files: {name: text}, small files beside them.
    """
    with self._lock:
      self.wait()
      if models.committed(self.path(step)):
        return
      try:
        temporary = self.folder / f'.{step}.{uuid.uuid4().hex[:8]}'
        temporary.mkdir(parents=True)
        (temporary / TEMPORARY).write_text(f'a save of step {step}, unfinished\n')
        self._room(step, trees)
        leaves = {}
        for item, tree in trees.items():
          flat, leaves[item] = flatten(tree)
          if item not in self._writers:
            self._writers[item] = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
          self._writers[item].save((temporary / item).absolute(), args=ocp.args.PyTreeSave(flat))
      except Exception as error:
        self._finish(list(trees))
        _delete(temporary)
        self._error = None
        if (told := _told(error, step, self.folder)) is error:
          raise
        raise told from error
      self._thread = threading.Thread(
        target=self._write, args=(step, temporary, list(trees), leaves, files), name='save'
      )
      self._thread.start()
      if wait:
        self.wait()

  def check(self):
    """Raises what a save in the background failed with."""
    with self._lock:
      if self._error is not None:
        error, self._error = self._error, None
        raise error

  def wait(self):
    """Until nothing is being written any more."""
    with self._lock:
      if self._thread is not None:
        self._thread.join()
        self._thread = None
      self.check()

  def restore(self, step, like, *, segments=None, only=None, allow_missing=()):
    """-> {item: tree like `like[item]`}, arrays placed as its shardings say.

    Neither devices nor scan plan need be those of the writer.

    Args:
      step: a committed step; a save under way is waited for.
      like: {item: tree of jax.ShapeDtypeStruct or arrays}.
      segments: the scan plan of `like`; None: that of the checkpoint.
      only: the items to read; None: all of `like`.
      allow_missing: items that an older checkpoint need not have; they are left out of the answer.

    Raises:
      config.Error: names what is missing, extra or of another shape or type.
    """
    self.wait()
    path = self.path(step)
    stored = models.committed(path)
    if stored is None:
      raise config.Error(f'{path} is no complete checkpoint; complete steps: {self.steps() or "none"}')
    out = {}
    for item in like if only is None else only:
      if item not in stored['leaves']:
        if item in allow_missing:
          continue
        raise config.Error(f'{path} holds no {item}; it holds {", ".join(stored["leaves"])}')
      out[item] = _read(
        path / item, stored['leaves'][item], like[item], (_segments(path), segments) if segments else (None, None)
      )
    return out

  def _room(self, step, trees):
    """Raises config.Failure where the disk cannot hold what this process will write: now, for writers are noisy."""
    leaves = [leaf for leaf in jax.tree.leaves(trees) if not _is_key(leaf)]
    size = sum(leaf.nbytes for leaf in leaves) // jax.process_count() + 2**20
    if (free := shutil.disk_usage(self.folder).free) < size:
      raise config.Failure(
        f'the checkpoint of step {step} could not be written to {self.folder}: no space left: it takes '
        f'{size / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB are free'
      )

  def _write(self, step, temporary, items, leaves, files):
    try:
      if error := self._finish(items):
        raise error
      for name, text in files.items():
        (temporary / name).write_text(text)
      self._commit(step, temporary, leaves)
      self._prune()
    except Exception as error:  # handed to the main thread  pylint: disable=broad-except
      _delete(temporary)
      self._error = _told(error, step, self.folder)

  def _finish(self, items):
    """Waits for the writers. -> the first error."""
    first = None
    for item in items:
      if item in self._writers:
        try:
          self._writers[item].wait_until_finished()
        except Exception as error:  # pylint: disable=broad-except
          del self._writers[item]  # orbax raises an old error again at the next save
          first = first or error
    return first

  def _commit(self, step, temporary, leaves):
    sizes = {}
    for path in sorted(p for p in temporary.rglob('*') if p.is_file() and p != temporary / TEMPORARY):
      with open(path, 'rb') as file:
        os.fsync(file.fileno())
      sizes[str(path.relative_to(temporary))] = path.stat().st_size
    text = json.dumps({'step': step, 'leaves': leaves, 'files': sizes}, indent=1)
    with open(temporary / models.COMMIT, 'w') as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    target = self.path(step)
    if target.exists():  # part of a checkpoint: `save` would have left a whole one alone
      _discard(target)
    (temporary / TEMPORARY).unlink()
    atomic.flush(temporary)
    os.rename(temporary, target)
    atomic.flush_one(self.folder)  # the name, too, before an older step is deleted

  def _prune(self):
    steps = self.steps()
    for step in steps[: -self._keep] if self._keep else []:
      if not (self._keep_period and step % self._keep_period == 0):
        _discard(self.path(step))


def named(tree):
  """-> (names of the leaves in their order, {name: [shape, type]})."""
  leaves = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    name = jax.tree_util.keystr(path, simple=True, separator='.').removesuffix('.value')
    leaves[name] = [list(leaf.shape), str(leaf.dtype)]
  return list(leaves), leaves


def flatten(tree):
  """-> ({name: array}, {name: [shape, type]}). Typed PRNG keys become their data and are remembered by their type."""
  names, leaves = named(tree)
  data = [jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in jax.tree.leaves(tree)]
  return dict(zip(names, data, strict=True)), leaves


def differences(there, here):
  """{name: [shape, type]} twice -> '' or one line: what `there` lacks, what it has besides, what differs."""
  missing, extra = [n for n in here if n not in there], [n for n in there if n not in here]
  other = [f'{n} is {_shape(there[n])}, not {_shape(here[n])}' for n in here if n in there and there[n] != here[n]]
  parts = []
  for word, names in (('missing', missing), ('extra', extra), ('mismatched', other)):
    if names:
      parts.append(f'{len(names)} {word}: {", ".join(names[:_SHOWN])}{", ..." if len(names) > _SHOWN else ""}')
  return '; '.join(parts)


class _Entry(NamedTuple):
  kind: list  # [shape, type]
  slot: layout.Slot


def _read(path, stored, like, plans):
  """The item at `path`, as `like`, slice by slice into its shardings."""
  names, leaves = named(like)
  there, here = _by_layer(stored, plans[0]), _by_layer(leaves, plans[1])
  if text := differences({n: e.kind for n, e in there.items()}, {n: e.kind for n, e in here.items()}):
    raise config.Error(f'{path} does not fit this run: {text}')
  reader, values = orbax_files.Reader(path), []
  for name, leaf in zip(names, jax.tree.leaves(like), strict=True):
    slots = [there[n].slot for n in _by_layer({name: leaves[name]}, plans[1])]
    data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    sharding = None if _is_key(leaf) else getattr(leaf, 'sharding', None)
    wanted = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)
    array = layout.place(wanted, functools.partial(models.gather, reader, slots, wanted))
    values.append(jax.random.wrap_key_data(array, impl=leaf.dtype) if _is_key(leaf) else array)
  return jax.tree.unflatten(jax.tree.structure(like), values)


def _by_layer(leaves, segments):
  """{name: [shape, type]} -> {name by layer: _Entry}: under every scan plan the same names."""
  out = {}
  for name, (shape, kind) in leaves.items():
    words = tuple(name.split('.'))
    at = words.index('stack') if 'stack' in words else len(words)
    if segments is None or words[at + 1 : at + 2] != ('segments',):
      out[name] = _Entry([shape, kind], layout.Slot(words, None))
      continue
    for inner, slot in layout.slots([words[at:]], segments).items():
      out['.'.join([*words[:at], inner])] = _Entry(
        [shape[1:], kind], layout.Slot((*words[:at], *slot.path), slot.repeat)
      )
  return out


def _is_key(leaf):
  return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _shape(leaf):
  return f'{leaf[1]}{leaf[0]}'


def _segments(path):
  return [plan.Segment((None,) * s['period'], s['count'], s['start']) for s in models.read_manifest(path)['plan']]


def _not_orbax(record):
  """Orbax and its event loops log an error with its traceback, several times, before they raise it; once is enough."""
  told = record.levelno >= logging.ERROR and record.name in ('absl', 'asyncio')
  return not (told and 'orbax' in f'{record.pathname} {record.getMessage()}')


def _children(folder):
  return list(folder.iterdir()) if folder.is_dir() else []


def _discard(path):
  """Takes a checkpoint off the list at once, then deletes it."""
  (path / TEMPORARY).write_text('being deleted\n')
  (path / models.COMMIT).unlink(missing_ok=True)
  aside = path.parent / f'.{path.name}.{uuid.uuid4().hex[:8]}'
  os.rename(path, aside)
  _delete(aside)


def _delete(path):
  """Deletes a temporary folder, its mark last, so that what an interruption leaves is still marked."""
  for child in _children(path):
    if child.is_dir():
      shutil.rmtree(child, ignore_errors=True)
    elif child.name != TEMPORARY:
      child.unlink(missing_ok=True)
  shutil.rmtree(path, ignore_errors=True)


def _told(error, step, folder):
  """A full or broken disk becomes one line; what else went wrong stays what it is."""
  if isinstance(error, config.Failure):
    return error
  reason = ' '.join(str(error).split())
  for text in ('No space left', 'File too large', 'Disk quota', 'Read-only file system', 'Input/output error'):
    if text in reason:
      return config.Failure(f'the checkpoint of step {step} could not be written to {folder}: {text.lower()}')
  if isinstance(error, OSError):
    return config.Failure(f'the checkpoint of step {step} could not be written to {folder}: {reason}')
  return error
