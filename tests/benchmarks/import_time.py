"""What `import maxtext_train.pretrain` costs, against the libraries that no training program here can do without.

    python -m tests.benchmarks.import_time --rounds=9

`--list` shows instead which modules take longest, each without what it imports itself.
"""

import argparse
import re
import sys

from tests.benchmarks import measure

OURS = 'import maxtext_train.pretrain'
THEIRS = 'import jax, flax, optax, orbax.checkpoint, grain'
# The program imports what is heavy when it runs; importing all that a run needs is what is compared.
WHOLE = 'import ' + ', '.join(f'maxtext_train.{name}' for name in ('pretrain', 'assembly', 'session', 'hooks', 'loop'))


def imported(statement):
  """Seconds and processor seconds of an interpreter that does nothing else."""
  process = measure.Process([sys.executable, '-c', statement])
  return {'seconds': process.seconds, 'cpu': process.cpu, 'others': process.others}


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--rounds', type=int, default=9)
  parser.add_argument('--list', action='store_true')
  flags = parser.parse_args()
  if flags.list:
    lines = measure.Process([sys.executable, '-X', 'importtime', '-c', WHOLE]).err.splitlines()
    found = [match.groups() for line in lines if (match := re.match(r'import time: +(\d+) \| +(\d+) \| +(\S+)', line))]
    for own, total, name in sorted(found, key=lambda row: -int(row[0]))[:40]:
      print(f'{int(own) / 1e3:8.1f} ms  {int(total) / 1e3:8.1f} ms with its own imports  {name}')
    return
  imported(WHOLE)  # compiles modules and fills the page cache
  imported(THEIRS)
  sides = {'ours': OURS, 'whole': WHOLE, 'theirs': THEIRS, 'nothing': 'pass'}
  rows = measure.interleaved({name: lambda s=statement: imported(s) for name, statement in sides.items()}, flags.rounds)
  measure.print_line(
    benchmark='import_time',
    rounds=flags.rounds,
    **measure.compared(rows, 'ours', 'theirs', 'cpu'),
    whole=measure.compared(rows, 'whole', 'theirs', 'cpu'),
    wall=measure.compared(rows, 'whole', 'theirs', 'seconds'),
    cpu_s=measure.median(rows, 'cpu'),
    seconds=measure.median(rows, 'seconds'),
    others=measure.median(rows, 'others'),
  )


if __name__ == '__main__':
  main()
