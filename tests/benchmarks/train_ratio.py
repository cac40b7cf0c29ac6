"""Training against the hand-written step, under the same allocator: ours / twin, tokens a second.

python -m tests.benchmarks.train_ratio --workload=W1 --allocator=jemalloc --rounds=7
"""

import argparse
import functools
import pathlib
import tempfile

from tests.benchmarks import measure


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--workload', default='W1')
  parser.add_argument('--allocator', default='jemalloc', choices=measure.ALLOCATORS)
  parser.add_argument('--rounds', type=int, default=7)
  parser.add_argument('--steps', type=int, default=12)
  parser.add_argument('--switches', help='of the twin; the best ones if not given')
  parser.add_argument('--set', action='append', default=[], metavar='FIELD=VALUE', help='a field of our configuration')
  flags = parser.parse_args()
  extra = [f'--config.{setting}' for setting in flags.set]
  with tempfile.TemporaryDirectory() as folder:
    names = (str(pathlib.Path(folder) / f'run{i}') for i in range(flags.rounds))
    rows = measure.interleaved(
      {
        'twin': functools.partial(
          measure.twin, flags.workload, flags.allocator, steps=flags.steps, switches=flags.switches
        ),
        'ours': lambda: measure.ours(flags.workload, flags.allocator, next(names), steps=flags.steps, extra=extra),
      },
      flags.rounds,
    )
  cpu = measure.compared(rows, 'twin', 'ours', 'cpu_s_per_step')
  measure.print_line(
    benchmark='train_ratio',
    workload=flags.workload,
    allocator=flags.allocator,
    switches=flags.switches or measure.BEST[flags.workload],
    rounds=flags.rounds,
    steps=flags.steps,
    **measure.compared(rows, 'ours', 'twin'),
    cpu_ratio=cpu['ratio'],
    cpu_range=cpu['range'],
    **measure.medians(rows),
  )


if __name__ == '__main__':
  main()
