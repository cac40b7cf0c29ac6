"""Trace and lowering of the train steps of large models, at full depth and at half: they must not grow with depth.

    python -m tests.benchmarks.depth --models deepseek3-671b qwen3.5-397b-a17b

Shapes only: no array is made and nothing is compiled. Half has half as many repeats of the scan plan's longest segment.
"""

import argparse
import dataclasses
import time

import jax

from maxtext_layers import plan
from maxtext_layers import sharding
from maxtext_models import registry
from maxtext_train import assembly
from maxtext_train import run
from tests.benchmarks import measure
from tests.benchmarks import workloads

LENGTH = 4096


def halved(card):
  """The card with half as many repeats of its longest segment."""
  longest = max(plan.plan(card.blocks()), key=lambda s: s.count * len(s.specs))
  less = (longest.count - longest.count // 2) * len(longest.specs)
  return dataclasses.replace(card, layers=card.layers - less)


def lowered(card):
  """Seconds and processor seconds: of the abstract state, of trace and lowering of the step, of both."""
  settings = workloads.get_config('W1')
  settings.model, settings.length, settings.batch, settings.loss.chunks = card, LENGTH, 1, None
  settings.scan = run.Scan.YES
  settings.remat = 'full'
  jax.clear_caches()
  begin, cpu, busy = time.perf_counter(), time.process_time(), measure.busy_seconds()
  parts = assembly.build(settings, card)
  built = time.perf_counter()
  with sharding.use(parts.mesh, parts.rules):
    text = parts.step.lower(parts.plan.abstract, parts.batch)
  seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
  others = max(0.0, (measure.busy_seconds() - busy - cpu) / (seconds * measure.CPUS))
  del text
  return {
    'seconds': seconds,
    'step_s': seconds - (built - begin),
    'cpu': cpu,
    'others': others,
    'layers': card.layers,
    'blocks': sum(len(segment.specs) for segment in parts.segments),
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--models', nargs='+', default=['deepseek3-671b', 'qwen3.5-397b-a17b'])
  parser.add_argument('--rounds', type=int, default=3)
  flags = parser.parse_args()
  for name in flags.models:
    card = registry.card(name)
    half = halved(card)
    lowered(half)
    rows = measure.interleaved({'half': lambda c=half: lowered(c), 'full': lambda c=card: lowered(c)}, flags.rounds)
    measure.print_line(
      benchmark='depth',
      model=name,
      length=LENGTH,
      rounds=flags.rounds,
      **measure.compared(rows, 'full', 'half', 'seconds'),
      **measure.compared(rows, 'full', 'half', 'step_s', 'step_'),
      **measure.compared(rows, 'full', 'half', 'cpu', 'cpu_'),
      **{field: measure.median(rows, field) for field in ('seconds', 'step_s', 'cpu', 'others', 'layers', 'blocks')},
    )


if __name__ == '__main__':
  main()
