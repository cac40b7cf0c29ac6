"""Loading a Hugging Face directory of 135M numbers into a model, against reading its file and putting it on the device.

    python -m tests.benchmarks.loading --source=HF_DIR --rounds=7

Theirs is `safetensors.numpy.load_file` and a `jax.device_put` of every tensor: names and shapes stay as published. Ours
is `checkpoint.load`, which checks them against the model and changes the order of axes. Each round is a process of its
own; imports and the start of jax do not count. Without `--source` SmolLM2-135M is made from its package
(tests/smollm2.py), in float32.
"""

import argparse
import json
import os
import sys
import time

from tests.benchmarks import measure


def ours(directory):
  """A function that loads it as a model and waits until it is there."""
  from flax import nnx
  import jax

  from maxtext_models import checkpoint

  return lambda: jax.block_until_ready(nnx.state(checkpoint.load(directory)[1]))


def theirs(directory):
  """A function that puts its tensors on the device."""
  import jax
  import safetensors.numpy

  def load():
    held = safetensors.numpy.load_file(os.path.join(directory, 'model.safetensors'))
    jax.block_until_ready([jax.device_put(value) for value in held.values()])

  return load


def timed(side, directory):
  """Seconds and processor seconds of one load, in this process."""
  import jax
  import numpy as np

  load = {'ours': ours, 'theirs': theirs}[side](directory)
  jax.block_until_ready(jax.device_put(np.zeros(8)))
  begin, cpu = time.perf_counter(), time.process_time()
  load()
  return {'seconds': time.perf_counter() - begin, 'cpu': time.process_time() - cpu}


def child(side, directory):
  """`timed` in a process of its own."""
  command = [sys.executable, '-m', 'tests.benchmarks.loading', f'--source={directory}', f'--side={side}']
  process = measure.Process(command)
  return json.loads(process.out) | {'others': process.others, 'rss_mb': process.rss_mb}


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--source', help='a Hugging Face directory with one file of weights')
  parser.add_argument('--rounds', type=int, default=7)
  parser.add_argument('--side', choices=['ours', 'theirs'], help='only this one, once, in this process')
  flags = parser.parse_args()
  if flags.source is None:
    from tests import smollm2

    flags.source = smollm2.directory()
  if flags.side:
    print(json.dumps(timed(flags.side, flags.source)))
    return
  child('theirs', flags.source)  # fills the page cache
  sides = {side: lambda side=side: child(side, flags.source) for side in ('ours', 'theirs')}
  rows = measure.interleaved(sides, flags.rounds)
  measure.print_line(
    benchmark='loading',
    rounds=flags.rounds,
    **measure.compared(rows, 'ours', 'theirs', 'seconds'),
    **measure.compared(rows, 'ours', 'theirs', 'cpu', 'cpu_'),
    **{field: measure.median(rows, field) for field in ('seconds', 'cpu', 'rss_mb', 'others')},
  )


if __name__ == '__main__':
  main()
