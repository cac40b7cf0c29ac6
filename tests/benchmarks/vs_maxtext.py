"""Training against MaxText 0.2.5, in float32, without rematerialisation, otherwise its defaults: tokens/s ratio.

    python -m tests.benchmarks.vs_maxtext --maxtext_python=MAXTEXT/bin/python --workload=W1 --rounds=7

Any of its settings can be changed: `--maxtext_set=scan_layers=false`.
"""

import functools
import sys

from maxtext_models import allocator
from tests.benchmarks import measure


def maxtext(python, workload, name, steps, settings=()):
  """One run of peers/bench_maxtext.py, which drives MaxText's own command line; its compilation cache is off."""
  command = [sys.executable, str(measure.PEERS / 'bench_maxtext.py'), '--python', python, '--workload', workload]
  command += ['--steps', str(steps), '--warmup', str(measure.WARMUP), '--remat', 'none', '--dtype', 'float32']
  environment = {**allocator.environment(name), 'PYTHONPATH': ''}
  return measure.peer(measure.Process([*command, *settings], environment=environment, folder=measure.PEERS), steps)


def main():
  parser = measure.arguments(__doc__)
  parser.add_argument('--maxtext_python', required=True, help='an interpreter that has maxtext 0.2.5')
  parser.add_argument('--maxtext_allocator', default='system', choices=measure.ALLOCATORS)
  parser.add_argument('--maxtext_set', action='append', default=[], metavar='KEY=VALUE')
  flags = parser.parse_args()
  measure.against(
    'maxtext',
    functools.partial(
      maxtext, flags.maxtext_python, flags.workload, flags.maxtext_allocator, flags.steps, flags.maxtext_set
    ),
    flags,
    benchmark='vs_maxtext',
    allocator={'ours': flags.allocator, 'maxtext': flags.maxtext_allocator},
    settings=flags.maxtext_set,
  )


if __name__ == '__main__':
  main()
