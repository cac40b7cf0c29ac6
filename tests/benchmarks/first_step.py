"""From the command to the first finished step, nothing compiled before: ours / MaxText's, and ours with a warm cache.

python -m tests.benchmarks.first_step --maxtext_python=MAXTEXT/bin/python --workload=W1 --rounds=7
"""

import pathlib
import tempfile

from tests.benchmarks import measure
from tests.benchmarks import vs_maxtext

STEPS = 5  # MaxText's program wants two after the warm-up; the first is what counts here


def main():
  parser = measure.arguments(__doc__, steps=None)
  parser.add_argument('--maxtext_python', help='an interpreter that has maxtext 0.2.5; without it only ours is timed')
  flags = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    names = (str(pathlib.Path(folder) / f'run{i}') for i in range(3 * flags.rounds + 1))
    cache = str(pathlib.Path(folder) / 'cache')

    def ours(cache=None):
      return measure.ours(flags.workload, flags.allocator, next(names), steps=STEPS, cache=cache)

    ours(cache)  # fills it, and the page cache with everything that is read from disk
    sides = {'ours': ours, 'warm': lambda: ours(cache)}
    if flags.maxtext_python:
      sides['maxtext'] = lambda: vs_maxtext.maxtext(flags.maxtext_python, flags.workload, 'system', STEPS)
    rows = measure.interleaved(sides, flags.rounds)
  against = {}
  if flags.maxtext_python:
    against = measure.compared(rows, 'ours', 'maxtext', 'first_step_s')
    against |= measure.compared(rows, 'ours', 'maxtext', 'first_step_cpu_s', 'cpu_')
  measure.print_line(
    benchmark='first_step',
    workload=flags.workload,
    allocator=flags.allocator,
    rounds=flags.rounds,
    **against,
    first_step_s=measure.median(rows, 'first_step_s'),
    first_step_cpu_s=measure.median(rows, 'first_step_cpu_s'),
    first_step_range={n: [min(v), max(v)] for n, v in ((n, [r['first_step_s'] for r in of]) for n, of in rows.items())},
    others=measure.median(rows, 'others'),
  )


if __name__ == '__main__':
  main()
