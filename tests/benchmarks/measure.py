"""Runs one program at a time from outside and tells how fast it was and how busy the machine was with other things.

Reading order: `ours` and `twin` (a training run of each), `Process` (what they rest on), `interleaved`, `against` (the
whole of a comparison of training), `print_line`.

Wall time on a shared machine is worth little by itself. So every figure comes with the processor seconds a step took
and with `others`, the share of the machine that everybody else used meanwhile; a comparison is made of ratios of rounds
in which the sides took turns.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

from maxtext_models import allocator

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PEERS = HERE / 'peers'
WARMUP = 2  # steps that do not count, as in the peers' programs
TICK = os.sysconf('SC_CLK_TCK')
CPUS = len(os.sched_getaffinity(0))
ALLOCATORS = ('system', 'huge_pages', 'jemalloc', 'tcmalloc')
# The hand-written step's best switches, of all that it has (twin_sweep.py).
BEST = {
  'W0': '--layers unroll --attn chunk --ce fused --opt hand --ce_chunks 4',
  'W1': '--layers unroll --attn chunk --ce fused --opt optax --ce_chunks 2',
  'W2': '--layers scan --attn chunk --ce fused --opt hand --ce_chunks 2',
  'W3': '--layers unroll --attn chunk --ce fused --opt hand --ce_chunks 4 --moe blocked --moe_block 64',
}


class Process:
  """A finished command: out, err, seconds, cpu (seconds), faults (minor), rss_mb (peak), others (a share)."""

  def __init__(self, command, *, environment=None, watch=None, folder=ROOT, timeout=1800):
    """Runs it to its end; `watch(pid)` is called every 5 ms. Raises RuntimeError with its last lines if it fails."""
    clean = {n: v for n, v in os.environ.items() if not n.startswith(('MALLOC', 'GLIBC', 'LD_PRELOAD', 'TCMALLOC'))}
    clean |= {
      'JAX_PLATFORMS': 'cpu',
      'PYTHONUNBUFFERED': '1',
      'PYTHONPATH': os.pathsep.join(map(os.path.abspath, sys.path)),
    }
    clean |= environment or {}
    begin, busy = time.perf_counter(), busy_seconds()
    out, err = (os.memfd_create(name) for name in ('out', 'err'))
    child = subprocess.Popen(command, env=clean, stdout=out, stderr=err, stdin=subprocess.DEVNULL, cwd=folder)
    while True:
      pid, status, usage = os.wait4(child.pid, os.WNOHANG)
      if watch:
        watch(child.pid)
      if pid:
        break
      if time.perf_counter() - begin > timeout:
        child.kill()
      time.sleep(0.005)
    child.returncode = os.waitstatus_to_exitcode(status)
    self.seconds = time.perf_counter() - begin
    self.cpu = usage.ru_utime + usage.ru_stime
    self.faults, self.rss_mb = usage.ru_minflt, round(usage.ru_maxrss / 1024)
    self.others = max(0.0, (busy_seconds() - busy - self.cpu) / (self.seconds * CPUS))
    self.out, self.err = (self._read(number) for number in (out, err))
    if child.returncode:
      tail = '\n'.join((self.out + self.err).splitlines()[-15:])
      raise RuntimeError(f'{" ".join(map(str, command))} ended with {child.returncode}\n{tail}')

  @staticmethod
  def _read(number):
    with open(number, 'rb') as file:
      file.seek(0)
      return file.read().decode(errors='replace')


def ours(workload, name, folder, *, steps, cache=None, extra=(), python=sys.executable):
  """A run of `maxtext_train.pretrain`: dict of figures.

  Args:
    workload: of workloads.py.
    name: allocator.
    folder: a fresh run directory.
    steps: of which WARMUP do not count.
    cache: compilation cache; None compiles.
    extra: more arguments.
    python: interpreter.
  """
  if steps < WARMUP + 3:
    raise ValueError(f'{steps} steps are too few: {WARMUP} do not count, and two more are needed to take a difference')
  folder = pathlib.Path(folder)
  seen = []  # (seconds since the start, processor seconds, machine's busy seconds) at each finished step
  begin = time.perf_counter()

  def watch(pid):
    try:
      lines = (folder / 'metrics.jsonl').read_bytes().count(b'\n')
    except OSError:
      return
    while len(seen) < lines:
      seen.append((time.perf_counter() - begin, cpu_seconds(pid), busy_seconds()))

  command = [python, '-m', 'maxtext_train.pretrain', f'--config={HERE / "workloads.py"}:{workload}']
  command += [f'--config.steps={steps}', f'--config.cache={cache or "none"}', f'--workdir={folder}']
  process = Process([*command, f'--allocator={name}', *extra], watch=watch)
  rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
  seconds = [row['step_seconds'] for row in rows][WARMUP:]
  # the last step is left out: after it the process saves, and may end before it is looked at
  counted = seen[WARMUP - 1 : -1]
  first, last = counted[0], counted[-1]
  return {
    'tokens_per_s': _tokens(workload) / statistics.median(seconds),
    'step_ms': 1e3 * statistics.median(seconds),
    'cpu_s_per_step': (last[1] - first[1]) / (len(counted) - 1),
    'first_step_s': seen[0][0],
    'first_step_cpu_s': seen[0][1],
    'rss_mb': process.rss_mb,
    'faults_per_step': process.faults / len(rows),
    'loss_first': rows[0]['loss'],
    'loss_last': rows[-1]['loss'],
    'others': process.others,
  }


def twin(workload, name, *, steps, switches=None, python=sys.executable):
  """A run of the hand-written step, in the same terms."""
  switches = BEST[workload] if switches is None else switches
  command = [python, str(PEERS / 'bench_jax_min.py'), '--workload', workload, '--steps', str(steps)]
  process = Process(
    [*command, '--warmup', str(WARMUP), *switches.split()], environment=allocator.environment(name), folder=PEERS
  )
  return peer(process, steps)


def peer(process, steps):
  """The figures a peer's program printed, in our terms."""
  shown = json.loads(process.out.strip().splitlines()[-1])
  return {
    'tokens_per_s': shown['tokens_per_s'],
    'step_ms': shown['step_ms_median'],
    'cpu_s_per_step': shown['cpu_s_per_step'],
    'first_step_s': shown['first_step_s'],
    'first_step_cpu_s': shown.get('cpu_s_to_first'),  # MaxText's program knows it
    'rss_mb': shown['peak_rss_mb'],
    'faults_per_step': process.faults / steps,
    'loss_first': shown['loss_first'],
    'loss_last': shown['loss_last'],
    'others': process.others,
  }


def interleaved(sides, rounds):
  """Calls the functions of `sides` in turn, in every other round backwards: {name: [figures of each round]}."""
  rows = {name: [] for name in sides}
  for index in range(rounds):
    names = list(sides) if index % 2 == 0 else list(sides)[::-1]
    for name in names:
      rows[name].append(sides[name]())
      print(f'{name} {index + 1}/{rounds}: {shown(rows[name][-1])}', file=sys.stderr, flush=True)
  return rows


def arguments(description, *, allocator='auto', rounds=7, steps=12):
  """A parser of the flags that a comparison of training has; `steps` None: it has no such flag."""
  parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--workload', default='W1')
  names = ALLOCATORS if allocator in ALLOCATORS else (allocator, *ALLOCATORS)
  parser.add_argument('--allocator', default=allocator, choices=names)
  parser.add_argument('--rounds', type=int, default=rounds)
  if steps is not None:
    parser.add_argument('--steps', type=int, default=steps)
  return parser


def against(name, theirs, flags, *, extra=(), **values):
  """Compares training by ours with `theirs()`, called `name`; prints one JSON line, `values` in it.

  Args:
    name: of the other side, in the line.
    theirs: runs it once; returns its figures.
    flags: of `arguments`.
    extra: more arguments for ours.
    **values: `benchmark` and what else belongs to the line.
  """
  with tempfile.TemporaryDirectory() as folder:
    names = (str(pathlib.Path(folder) / f'run{i}') for i in range(flags.rounds))
    run = lambda: ours(flags.workload, flags.allocator, next(names), steps=flags.steps, extra=extra)
    rows = interleaved({name: theirs, 'ours': run}, flags.rounds)
  print_line(
    **{'workload': flags.workload, 'allocator': flags.allocator} | values,
    rounds=flags.rounds,
    steps=flags.steps,
    **compared(rows, 'ours', name),
    **compared(rows, name, 'ours', 'cpu_s_per_step', 'cpu_'),
    **medians(rows),
  )


def compared(rows, upper, lower, field='tokens_per_s', prefix=''):
  """Of `upper` over `lower`, round by round: the median and the range."""
  ratios = [a[field] / b[field] for a, b in zip(rows[upper], rows[lower], strict=True)]
  return {f'{prefix}ratio': statistics.median(ratios), f'{prefix}range': [min(ratios), max(ratios)]}


def median(rows, field):
  """Of a field, for each side."""
  return {name: statistics.median(row[field] for row in of) for name, of in rows.items()}


def medians(rows):
  """Of all that a report of training shows."""
  fields = ('tokens_per_s', 'cpu_s_per_step', 'first_step_s', 'rss_mb', 'faults_per_step', 'loss_first', 'loss_last')
  return {field: median(rows, field) for field in (*fields, 'others')}


def print_line(**values):
  """One JSON line, with what it was measured on."""
  values |= {'cpus': CPUS, 'python': platform.python_version()}
  print(json.dumps(rounded(values)), flush=True)


def rounded(value):
  """Floats with four digits that mean something."""
  if isinstance(value, float):
    return float(f'{value:.4g}')
  if isinstance(value, dict):
    return {name: rounded(inner) for name, inner in value.items()}
  return [rounded(inner) for inner in value] if isinstance(value, list | tuple) else value


def shown(row):
  """One side's figures for a reader."""
  return ' '.join(f'{name}={value}' for name, value in rounded(row).items())


def cpu_seconds(pid):
  """That a running process has used, to the microsecond; NaN when it has ended."""
  try:
    return time.clock_gettime(~pid << 3 | 2)  # what clock_getcpuclockid(3) makes of a pid
  except OSError:
    return float('nan')


def busy_seconds():
  """That all processors have spent on anything."""
  with open('/proc/stat') as file:
    fields = [int(field) for field in file.readline().split()[1:9]]
  return (sum(fields) - fields[3] - fields[4]) / TICK


def _tokens(workload):
  from tests.benchmarks import workloads

  return workloads.tokens(workload)
