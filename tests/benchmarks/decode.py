"""Cached decoding against transformers' `generate`: W2's shape, float32, greedy, prompts of 128 tokens, 64 new ones.

    python -m tests.benchmarks.decode --torch_python=TORCH/bin/python --rounds=7

Both sides stay alive, each with its model, and take turns: a round is one prefill with one token and one with all of
them, for each batch size and side. Decoding is their difference: tokens a second after the first; `with_prefill` counts
all of it. Ours is laid out and started as `maxtext_models.generate` would, Torch as it comes. On a shared machine look
at the processor seconds: those of others do not enter them.
"""

import argparse
import json
import os
import subprocess
import sys
import time

from maxtext_models import allocator
from tests.benchmarks import measure


class Side:
  """A process that holds a model and answers `BATCH NEW` with the seconds that took."""

  def __init__(self, command, environment):
    clean = {n: v for n, v in os.environ.items() if not n.startswith(('MALLOC', 'GLIBC', 'LD_PRELOAD', 'TCMALLOC'))}
    self._child = subprocess.Popen(
      command,
      env=clean | {'JAX_PLATFORMS': 'cpu', 'OMP_WAIT_POLICY': 'PASSIVE'} | environment,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      cwd=measure.ROOT,
    )
    while (line := self._child.stdout.readline()) != 'ready\n':
      if not line:
        raise RuntimeError(f'{command[:3]} ended before it was ready')

  def __call__(self, batch, new):
    self._child.stdin.write(f'{batch} {new}\n')
    self._child.stdin.flush()
    return json.loads(self._child.stdout.readline())

  def close(self):
    self._child.stdin.close()
    self._child.wait()


def serve(workload, prompt):
  """Our side of the protocol."""
  from flax import nnx
  import numpy as np

  from maxtext_models import decoder
  from maxtext_models import sampler
  from tests.benchmarks import workloads

  card = workloads.get_config(workload).model
  model = nnx.jit(lambda: decoder.Decoder(card, rngs=nnx.Rngs(0), scan=sampler.scan()))()
  source, rng = sampler.Jax(model, context=card.context), np.random.default_rng(0)
  print('ready', flush=True)
  for line in sys.stdin:
    batch, new = map(int, line.split())
    ids = rng.integers(3, card.vocab, (batch, prompt)).tolist()
    wall, cpu = time.perf_counter(), time.process_time()
    out = source.sample(ids, sampler.Settings(temperature=0.0, max_new_tokens=new))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert all(len(completion.ids) == new for completion in out)
    print(json.dumps({'seconds': wall, 'cpu': cpu}), flush=True)


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--torch_python', help='an interpreter that has torch and transformers; without it, ours alone')
  parser.add_argument('--workload', default='W2')
  parser.add_argument('--batches', type=int, nargs='+', default=[1, 8])
  parser.add_argument('--prompt', type=int, default=128)
  parser.add_argument('--new', type=int, default=64)
  parser.add_argument('--rounds', type=int, default=7)
  parser.add_argument('--allocator', default='auto', choices=['auto', *measure.ALLOCATORS])
  parser.add_argument('--torch_allocator', default='system', choices=measure.ALLOCATORS)
  parser.add_argument('--serve', action='store_true', help=argparse.SUPPRESS)
  flags = parser.parse_args()
  if flags.serve:
    serve(flags.workload, flags.prompt)
    return
  chosen = allocator.best() if flags.allocator == 'auto' else flags.allocator  # what a program would start again under
  own = [sys.executable, '-m', 'tests.benchmarks.decode', '--serve']
  own += [f'--workload={flags.workload}', f'--prompt={flags.prompt}']
  sides = {'ours': Side(own, allocator.environment(chosen))}
  if flags.torch_python:
    from tests.benchmarks import workloads

    program = [flags.torch_python, str(measure.PEERS / 'torch_decode.py'), f'--threads={os.cpu_count()}']
    program += [f'--shape={json.dumps(workloads.SHAPES[flags.workload])}', f'--prompt={flags.prompt}']
    sides['torch'] = Side(program, allocator.environment(flags.torch_allocator) | {'PYTHONPATH': ''})
  for side in sides.values():
    for batch in flags.batches:
      side(batch, 2)  # compiles, and touches every page
  rows = {(name, batch): [] for name in sides for batch in flags.batches}
  began, used = time.perf_counter(), measure.busy_seconds()
  own_cpu = 0.0
  for index in range(flags.rounds):
    for batch in flags.batches:
      for name in list(sides)[:: 1 if index % 2 == 0 else -1]:
        first, whole = sides[name](batch, 1), sides[name](batch, flags.new)
        own_cpu += first['cpu'] + whole['cpu']
        rows[name, batch].append(figures(first, whole, batch, flags.new))
        shown = measure.shown(rows[name, batch][-1])
        print(f'{name} batch {batch} {index + 1}/{flags.rounds}: {shown}', file=sys.stderr, flush=True)
  wall = time.perf_counter() - began
  for side in sides.values():
    side.close()
  result = {}
  for batch in flags.batches:
    of = {name: rows[name, batch] for name in sides}
    entry = {field: measure.median(of, field) for field in of['ours'][0]}
    if 'torch' in sides:
      entry |= measure.compared(of, 'ours', 'torch')
      entry['cpu_ratio'] = measure.compared(of, 'torch', 'ours', 'cpu_s_per_token')['ratio']
      entry['with_prefill_ratio'] = measure.compared(of, 'ours', 'torch', 'with_prefill')['ratio']
    result[f'batch_{batch}'] = entry
  measure.print_line(
    benchmark='decode',
    workload=flags.workload,
    prompt=flags.prompt,
    new=flags.new,
    rounds=flags.rounds,
    allocator={'ours': chosen, 'torch': flags.torch_allocator},
    others=max(0.0, (measure.busy_seconds() - used - own_cpu) / (wall * os.cpu_count())),
    **result,
  )


def figures(first, whole, batch, new):
  """Of one prefill with one token and one with all."""
  tokens = batch * (new - 1)
  return {
    'tokens_per_s': tokens / (whole['seconds'] - first['seconds']),
    'cpu_s_per_token': (whole['cpu'] - first['cpu']) / tokens,
    'with_prefill': batch * new / whole['seconds'],
    'prefill_s': first['seconds'],
  }


if __name__ == '__main__':
  main()
