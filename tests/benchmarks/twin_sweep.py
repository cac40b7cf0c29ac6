"""Every combination of the hand-written step's switches: which one is its best on this machine.

    python -m tests.benchmarks.twin_sweep --workload=W1 --rounds=3

Combinations are run one after the other, `rounds` times over, and ranked by the median of processor seconds a step,
which what others do on the machine changes least; tokens a second stand beside it. The best few run once more, for
longer (`--finalists`). Values that lost clearly on a smaller workload need not meet every other one again:
`--aside=attn=bhsd` tries that value in one place only, beside the values that are kept for the best so far
(`measure.BEST`).
"""

import itertools
import statistics
import sys

from tests.benchmarks import measure

SWITCHES = {
  'layers': ('scan', 'unroll'),
  'attn': ('manual', 'sdpa', 'chunk', 'bhsd'),
  'ce': ('full', 'chunk_remat', 'fused'),
  'opt': ('hand', 'optax'),
  'ce_chunks': ('2', '4', '8'),
}
EXPERTS = {'moe': ('blocked', 'dense', 'ragged', 'loop'), 'moe_block': ('32', '64', '128')}  # where there are any


def combinations(workload):
  """Command lines; the number of chunks only where there are chunks. Rematerialisation computes more and never wins."""
  switches = SWITCHES | (EXPERTS if workload == 'W3' else {})
  for values in itertools.product(*switches.values()):
    chosen = dict(zip(switches, values))
    if chosen['ce'] == 'full' and chosen['ce_chunks'] != '4':
      continue
    if chosen.get('moe', 'blocked') != 'blocked' and chosen['moe_block'] != '64':
      continue
    yield ' '.join(f'--{name} {value}' for name, value in chosen.items())


def beside_the_best(workload, aside):
  """Combinations without the values of `aside` (names of `switch=value`), and for each of these one that has it."""
  losers = [f'--{name} {value}' for name, _, value in (loser.partition('=') for loser in aside)]
  every = list(combinations(workload))
  unknown = [loser for loser in losers if not any(f'{loser} ' in f'{c} ' for c in every)]
  if unknown:
    raise ValueError(f'no combination has {unknown[0]}')
  has = {c: [loser for loser in losers if f'{loser} ' in f'{c} '] for c in every}
  best = dict(itertools.batched(measure.BEST[workload].split(), 2))

  def distance(combination):
    values = dict(itertools.batched(combination.split(), 2))
    return sum(values[name] != value for name, value in best.items())

  alone = [min((c for c in every if has[c] == [loser]), key=distance) for loser in losers]
  return [c for c in every if not has[c]] + alone


def main():
  parser = measure.arguments(__doc__, allocator='jemalloc', rounds=1, steps=6)
  parser.add_argument('--finalists', type=int, default=4)
  parser.add_argument('--final_rounds', type=int, default=3)
  parser.add_argument('--only', default='', help='run combinations that contain all of these words')
  parser.add_argument('--aside', action='append', default=[], metavar='SWITCH=VALUE')
  flags = parser.parse_args()
  try:
    among = beside_the_best(flags.workload, flags.aside)
  except ValueError as error:
    parser.error(f'--aside: {error}')
  chosen = [c for c in among if all(word in c.split() for word in flags.only.split())]
  if not chosen:
    parser.error(f'--only={flags.only}: no combination has all of these')

  def ranked(candidates, rounds, steps):
    sides = {c: lambda c=c: measure.twin(flags.workload, flags.allocator, steps=steps, switches=c) for c in candidates}
    rows = measure.interleaved(sides, rounds)
    cpu, tokens = measure.median(rows, 'cpu_s_per_step'), measure.median(rows, 'tokens_per_s')
    others = statistics.mean(row['others'] for of in rows.values() for row in of)
    return [(cpu[c], tokens[c], c) for c in sorted(candidates, key=cpu.get)], others

  table, others = ranked(chosen, flags.rounds, flags.steps)
  for cpu, tokens, switches in table:
    print(f'{cpu:8.3f} cpu-s  {tokens:9.1f} tokens/s  {switches}', file=sys.stderr)
  finals, final_others = ranked([row[2] for row in table[: flags.finalists]], flags.final_rounds, 2 * flags.steps)
  measure.print_line(
    benchmark='twin_sweep',
    workload=flags.workload,
    allocator=flags.allocator,
    best=finals[0][2],
    combinations=len(chosen),
    aside=flags.aside,
    finalists=[{'switches': c, 'cpu_s_per_step': cpu, 'tokens_per_s': tokens} for cpu, tokens, c in finals],
    worst=table[-1][2],
    worst_cpu_s_per_step=table[-1][0],
    others={'sweep': others, 'finals': final_others},
  )


if __name__ == '__main__':
  main()
