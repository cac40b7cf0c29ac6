"""Peak memory of converting a directory of many files: Hugging Face -> native -> Hugging Face.

    python -m tests.benchmarks.convert_memory

It must stay below one file plus the largest stacked parameter plus CONSTANT, beyond what imports take. The model is
made of random numbers by default 1.1 GB in files of 128 MB; both conversions are processes of their own.
"""

import argparse
import hashlib
import os
import resource
import sys
import tempfile

from tests.benchmarks import measure

CONSTANT = 128 << 20  # bytes: what is on its way to the disk, and what reading and writing take besides


def card(layers, d_model):
  """A Llama whose feed-forward layers are most of it."""
  from maxtext_models import registry

  made = registry.card('llama3.2-1b')
  made.layers, made.d_model, made.d_ff = layers, d_model, 4 * d_model
  made.heads, made.kv_heads, made.head_dim, made.vocab = d_model // 64, d_model // 128, 64, 4096
  return made


def make(directory, model_card, shard_bytes):
  """Writes the Hugging Face directory, of random numbers that are never all in memory."""
  from flax import nnx
  import numpy as np

  from maxtext_models import decoder
  from maxtext_models import hf
  from maxtext_models import layout

  rng = np.random.default_rng(0)
  graph, state = nnx.split(decoder.abstract(model_card))

  def lazy(path, variable):
    shape = variable.get_value().shape
    one = shape[1:] if path[0] == 'stack' else shape
    rows = lambda: layout.Rows(lambda _: rng.standard_normal(one, np.float32))
    return variable.replace(layout.Lazy(shape, np.dtype(np.float32), rows))

  state = nnx.from_flat_state([(path, lazy(path, variable)) for path, variable in nnx.to_flat_state(state)])
  hf.save(directory, model_card, nnx.merge(graph, state), shard_bytes=shard_bytes)


def convert(source, target, to, shard_bytes):
  """Converts as the program does; bytes that the peak lies above what the process took before."""
  import jax
  import tensorstore  # noqa: F401  what is imported where it is needed first

  from maxtext_models import checkpoint
  from maxtext_models import hf

  jax.devices()
  before = resident()
  model_card, model = checkpoint.load(source, lazy=True)
  if to == 'native':
    checkpoint.save(target, model_card, model)
  else:
    hf.save(target, model_card, model, shard_bytes=shard_bytes)
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def resident():
  """Bytes of memory that this process takes now."""
  with open('/proc/self/statm') as file:
    return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')


def child(source, target, to, shard_bytes):
  """`convert` in a process of its own."""
  command = [sys.executable, '-m', 'tests.benchmarks.convert_memory', f'--source={source}', f'--target={target}']
  return int(measure.Process([*command, f'--to={to}', f'--shard_mb={shard_bytes >> 20}']).out)


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--layers', type=int, default=16)
  parser.add_argument('--d_model', type=int, default=1024)
  parser.add_argument('--shard_mb', type=int, default=128)
  for name in ('source', 'target', 'to'):
    parser.add_argument(f'--{name}', help='for the processes of this program')
  flags = parser.parse_args()
  if flags.to:
    print(convert(flags.source, flags.target, flags.to, flags.shard_mb << 20))
    return
  made = card(flags.layers, flags.d_model)
  size = flags.shard_mb << 20
  with tempfile.TemporaryDirectory() as folder:
    source, native, back = (os.path.join(folder, name) for name in ('source', 'native', 'back'))
    make(source, made, size)
    files = [entry.stat().st_size for entry in os.scandir(source) if entry.name.endswith('.safetensors')]
    peaks = {'native': child(source, native, 'native', size), 'hf': child(native, back, 'hf', size)}
    same = all(_bytes(source, name) == _bytes(back, name) for name in os.listdir(source) if name != 'config.json')
  stacked = 4 * made.layers * made.d_model * made.d_ff
  allowed = max(files) + stacked + CONSTANT
  measure.print_line(
    benchmark='convert_memory',
    bytes=sum(files),
    files=len(files),
    file_mb=max(files) >> 20,
    stacked_mb=stacked >> 20,
    constant_mb=CONSTANT >> 20,
    peak_mb={to: peak >> 20 for to, peak in peaks.items()},
    share={to: peak / allowed for to, peak in peaks.items()},
    same=same,
  )


def _bytes(directory, name):
  with open(os.path.join(directory, name), 'rb') as file:
    return hashlib.file_digest(file, 'sha256').digest()


if __name__ == '__main__':
  main()
