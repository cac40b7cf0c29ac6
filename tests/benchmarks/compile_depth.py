"""Trace and compile of the step of a scanned model of 16 layers, against one of 4: it must not grow with depth.

python -m tests.benchmarks.compile_depth --rounds=5
"""

import argparse
import dataclasses
import time

import jax

from maxtext_layers import sharding
from maxtext_train import assembly
from maxtext_train import run
from tests.benchmarks import measure
from tests.benchmarks import workloads


def compiled(layers):
  """Seconds and processor seconds of tracing and compiling W1's step with so many scanned layers."""
  settings = workloads.get_config('W1')
  settings.model = dataclasses.replace(settings.model, layers=layers)
  settings.scan = run.Scan.YES
  jax.clear_caches()
  parts = assembly.build(settings, settings.model)
  with sharding.use(parts.mesh, parts.rules):
    begin, cpu, busy = time.perf_counter(), time.process_time(), measure.busy_seconds()
    lowered = parts.step.lower(parts.plan.abstract, parts.batch)
    traced = time.perf_counter() - begin
    lowered.compile()
  seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
  others = max(0.0, (measure.busy_seconds() - busy - cpu) / (seconds * measure.CPUS))
  return {'seconds': seconds, 'trace_s': traced, 'cpu': cpu, 'others': others}


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--layers', type=int, nargs=2, default=[4, 16])
  flags = parser.parse_args()
  few, many = flags.layers
  compiled(few)
  rows = measure.interleaved({'few': lambda: compiled(few), 'many': lambda: compiled(many)}, flags.rounds)
  measure.print_line(
    benchmark='compile_depth',
    layers=flags.layers,
    rounds=flags.rounds,
    **measure.compared(rows, 'many', 'few', 'seconds'),
    **measure.compared(rows, 'many', 'few', 'cpu', 'cpu_'),
    **{field: measure.median(rows, field) for field in ('seconds', 'trace_s', 'cpu', 'others')},
  )


if __name__ == '__main__':
  main()
