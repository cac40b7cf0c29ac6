"""Training against MaxText 0.2.5, in float32, without rematerialisation, otherwise its defaults: tokens/s ratio.

    python -m tests.benchmarks.vs_maxtext --maxtext_python=MAXTEXT/bin/python --workload=W1 --rounds=7

Any of its settings can be changed: `--maxtext_set=scan_layers=false`.
"""

import argparse
import functools
import pathlib
import sys
import tempfile

from maxtext_models import allocator
from tests.benchmarks import measure


def maxtext(python, workload, name, steps, settings=()):
  """One run of peers/bench_maxtext.py, which drives MaxText's own command line; its compilation cache is off."""
  command = [sys.executable, str(measure.PEERS / 'bench_maxtext.py'), '--python', python, '--workload', workload]
  command += ['--steps', str(steps), '--warmup', str(measure.WARMUP), '--remat', 'none', '--dtype', 'float32']
  environment = {**allocator.environment(name), 'PYTHONPATH': ''}
  return measure.peer(measure.Process([*command, *settings], environment=environment, folder=measure.PEERS), steps)


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--maxtext_python', required=True, help='an interpreter that has maxtext 0.2.5')
  parser.add_argument('--workload', default='W1')
  parser.add_argument('--allocator', default='auto', choices=['auto', *measure.ALLOCATORS])
  parser.add_argument('--maxtext_allocator', default='system', choices=measure.ALLOCATORS)
  parser.add_argument('--maxtext_set', action='append', default=[], metavar='KEY=VALUE')
  parser.add_argument('--rounds', type=int, default=7)
  parser.add_argument('--steps', type=int, default=12)
  flags = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    names = (str(pathlib.Path(folder) / f'run{i}') for i in range(flags.rounds))
    rows = measure.interleaved(
      {
        'maxtext': functools.partial(
          maxtext, flags.maxtext_python, flags.workload, flags.maxtext_allocator, flags.steps, flags.maxtext_set
        ),
        'ours': lambda: measure.ours(flags.workload, flags.allocator, next(names), steps=flags.steps),
      },
      flags.rounds,
    )
  cpu = measure.compared(rows, 'maxtext', 'ours', 'cpu_s_per_step')
  measure.print_line(
    benchmark='vs_maxtext',
    workload=flags.workload,
    allocator={'ours': flags.allocator, 'maxtext': flags.maxtext_allocator},
    settings=flags.maxtext_set,
    rounds=flags.rounds,
    steps=flags.steps,
    **measure.compared(rows, 'ours', 'maxtext'),
    cpu_ratio=cpu['ratio'],
    cpu_range=cpu['range'],
    **measure.medians(rows),
  )


if __name__ == '__main__':
  main()
