"""Logits of given ids, row by row: what the programs score and verify share.

Reading order: `scorer`, `compare`; the files: `read_tokens`, `check_tokens`, `create`.
"""

import errno
import functools
import os
from typing import NamedTuple
import zipfile

from flax import nnx
import jax
import numpy as np

from maxtext_layers import config


def scorer(model):
  """A compiled function: int32 [B, T] -> float32 [B, T, V] as numpy. Models of equal build share the compilation."""
  graph, state = nnx.split(model)
  return lambda tokens: np.asarray(_forward(graph, state, np.asarray(tokens, np.int32)))


@functools.partial(jax.jit, static_argnames='graph')
def _forward(graph, state, tokens):
  model = nnx.merge(graph, state)
  return model.logits(model.hidden(tokens)[0])


class Difference(NamedTuple):
  """How one row of logits differs from its reference, at every position; each [T]."""

  absolute: np.ndarray  # the largest of the vocabulary
  worst: np.ndarray  # the id that it is at
  kl: np.ndarray  # of the distributions, reference first, nats
  agree: np.ndarray  # whether the likeliest id is the same


def compare(logits: np.ndarray, reference: np.ndarray) -> Difference:
  """logits, reference [T, V] -> Difference, computed in float64; what is not finite differs by infinity."""
  a, b = logits.astype(np.float64), reference.astype(np.float64)
  delta = np.abs(a - b)
  delta[~np.isfinite(delta)] = np.inf
  worst = delta.argmax(-1)
  with np.errstate(all='ignore'):
    p, q = (x - x.max(-1, keepdims=True) for x in (b, a))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    kl = (np.exp(p) * (p - q)).sum(-1)
  kl = np.where(np.isfinite(kl), np.maximum(kl, 0.0), np.inf)  # it is 0 or more but for rounding
  return Difference(np.take_along_axis(delta, worst[:, None], -1)[:, 0], worst, kl, a.argmax(-1) == b.argmax(-1))


def read_tokens(path) -> np.ndarray:
  """The array of a .npy file, not yet in memory."""
  try:
    return np.load(path, mmap_mode='r', allow_pickle=False)
  except OSError as error:
    raise config.Error(f'cannot read {path}: {error.strerror or error}') from None
  except (ValueError, EOFError, zipfile.BadZipFile) as error:
    raise config.Error(f'{path} is not a .npy file of numbers: {error}') from None


def check_tokens(tokens, vocab: int, path) -> np.ndarray:
  """`tokens` if they are ids [B, T] of a vocabulary; config.Error names the first that is none."""
  if not isinstance(tokens, np.ndarray) or tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
    what = f'{tokens.dtype}{list(tokens.shape)}' if isinstance(tokens, np.ndarray) else type(tokens).__name__
    raise config.Error(f'{path} holds {what}, not integers [B, T]')
  if not tokens.size:
    raise config.Error(f'{path} holds no ids: its shape is {list(tokens.shape)}')
  for row, ids in enumerate(tokens):
    if (wrong := np.flatnonzero((ids < 0) | (ids >= vocab))).size:
      raise config.Error(f'{path}: id {ids[wrong[0]]} at [{row}, {wrong[0]}] is outside of the vocabulary of {vocab}')
  return tokens


def create(path, shape) -> np.memmap:
  """A float32 .npy file whose space is taken on the disk now; config.Failure if there is too little."""
  try:
    target = np.lib.format.open_memmap(path, mode='w+', dtype=np.float32, shape=shape)
    with open(path, 'r+b') as file:
      if hasattr(os, 'posix_fallocate'):  # else a full disk would be a bus error in the middle
        os.posix_fallocate(file.fileno(), 0, os.path.getsize(path))
  except OSError as error:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
      raise config.Failure(f'disk full: {path} needs {4 * int(np.prod(shape)):,} bytes') from None
    raise config.Error(f'cannot write {path}: {error.strerror}') from None
  return target
