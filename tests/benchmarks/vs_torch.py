"""Training against transformers and PyTorch, eager: ours / theirs, tokens a second.

    python -m tests.benchmarks.vs_torch --torch_python=TORCH/bin/python --workload=W1 --rounds=7

Torch runs as it comes; `--torch_allocator=tcmalloc` gives it the allocator that helps it most. On a shared machine add
`--passive`: its idle threads spin, which doubles the processor seconds it takes while others are at work. Ours runs as
it comes too: `--allocator=auto` takes what is installed.
"""

import argparse
import functools
import pathlib
import tempfile

from maxtext_models import allocator
from tests.benchmarks import measure


def torch(python, workload, name, steps, passive=False):
  """One run of peers/bench_torch.py."""
  command = [python, str(measure.PEERS / 'bench_torch.py'), '--workload', workload, '--steps', str(steps)]
  environment = {**allocator.environment(name), 'PYTHONPATH': ''} | ({'OMP_WAIT_POLICY': 'PASSIVE'} if passive else {})
  return measure.peer(
    measure.Process([*command, '--warmup', str(measure.WARMUP)], environment=environment, folder=measure.PEERS), steps
  )


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--torch_python', required=True, help='an interpreter that has torch and transformers')
  parser.add_argument('--workload', default='W1')
  parser.add_argument('--allocator', default='auto', choices=['auto', *measure.ALLOCATORS])
  parser.add_argument('--torch_allocator', default='system', choices=measure.ALLOCATORS)
  parser.add_argument('--passive', action='store_true', help='its idle threads sleep instead of spinning')
  parser.add_argument('--rounds', type=int, default=7)
  parser.add_argument('--steps', type=int, default=12)
  flags = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    names = (str(pathlib.Path(folder) / f'run{i}') for i in range(flags.rounds))
    rows = measure.interleaved(
      {
        'torch': functools.partial(
          torch, flags.torch_python, flags.workload, flags.torch_allocator, flags.steps, flags.passive
        ),
        'ours': lambda: measure.ours(flags.workload, flags.allocator, next(names), steps=flags.steps),
      },
      flags.rounds,
    )
  cpu = measure.compared(rows, 'torch', 'ours', 'cpu_s_per_step')
  measure.print_line(
    benchmark='vs_torch',
    workload=flags.workload,
    allocator={'ours': flags.allocator, 'torch': flags.torch_allocator},
    passive=flags.passive,
    rounds=flags.rounds,
    steps=flags.steps,
    **measure.compared(rows, 'ours', 'torch'),
    cpu_ratio=cpu['ratio'],
    cpu_range=cpu['range'],
    **measure.medians(rows),
  )


if __name__ == '__main__':
  main()
