"""Training against the hand-written step, under the same allocator: ours / twin, tokens a second.

python -m tests.benchmarks.train_ratio --workload=W1 --allocator=jemalloc --rounds=7
"""

import functools

from tests.benchmarks import measure


def main():
  parser = measure.arguments(__doc__, allocator='jemalloc')
  parser.add_argument('--switches', help='of the twin; the best ones if not given')
  parser.add_argument('--set', action='append', default=[], metavar='FIELD=VALUE', help='a field of our configuration')
  flags = parser.parse_args()
  measure.against(
    'twin',
    functools.partial(measure.twin, flags.workload, flags.allocator, steps=flags.steps, switches=flags.switches),
    flags,
    extra=[f'--config.{setting}' for setting in flags.set],
    benchmark='train_ratio',
    switches=flags.switches or measure.BEST[flags.workload],
  )


if __name__ == '__main__':
  main()
