"""Directories that are there whole or not at all: written beside their place, flushed to disk, renamed."""

import contextlib
import errno
import os
import shutil
import tempfile

from maxtext_layers import config


def refuse_filled(target):
  """config.Error unless nothing, or an empty directory that another may replace, is at `target`."""
  if os.path.exists(target) and (not os.path.isdir(target) or os.listdir(target)):
    raise config.Error(f'{target} exists and is not an empty directory; nothing was written')
  if os.path.ismount(target):
    raise config.Error(f'{target} is a mount point, which no directory can replace; name one inside it')


@contextlib.contextmanager
def directory(target, size=0):
  """Yields a temporary directory that becomes `target`, or disappears if the block raises.

  Args:
    target: path; behind a symbolic link, the place that it points to.
    size: bytes that will be written, as far as they are known.

  Raises:
    config.Error: `target` is there already, or its place cannot be written to.
    config.Failure: the disk is full, or `size` will not fit on it.
  """
  target = os.path.realpath(target)
  refuse_filled(target)
  try:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if (free := shutil.disk_usage(os.path.dirname(target)).free) < size:
      raise config.Failure(f'disk full: {target} needs {size:,} bytes, {free:,} are free; nothing was written')
    temporary = tempfile.mkdtemp(prefix=f'.{os.path.basename(target)}.tmp-', dir=os.path.dirname(target))
  except OSError as error:
    _full(error, target)
    raise config.Error(f'cannot write to {target}: {error.strerror}') from None
  try:
    os.chmod(temporary, 0o777 & ~_umask())
    yield temporary
    flush(temporary)
    if os.path.isdir(target):
      os.rmdir(target)  # empty, as checked
    os.rename(temporary, target)
    flush_one(os.path.dirname(target))
  except Exception as error:
    _full(error, target)
    raise
  finally:
    shutil.rmtree(temporary, ignore_errors=True)


def flush(root):
  """Asks the disk to hold every file and directory below `root`."""
  for folder, _, files in os.walk(root):
    for name in files:
      flush_one(os.path.join(folder, name))
    flush_one(folder)


def flush_one(path):
  """Asks the disk to hold one file, or the names in one directory."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def _full(error, target):
  """Says a full disk in one line, however the writer put it."""
  text = str(error)
  if getattr(error, 'errno', None) in (errno.ENOSPC, errno.EDQUOT) or 'No space left' in text or 'ENOSPC' in text:
    raise config.Failure(f'disk full while writing {target}; nothing was left there') from None


def _umask():
  mask = os.umask(0)
  os.umask(mask)
  return mask
