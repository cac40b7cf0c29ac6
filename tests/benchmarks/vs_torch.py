"""Training against transformers and PyTorch, eager: ours / theirs, tokens a second.

    python -m tests.benchmarks.vs_torch --torch_python=TORCH/bin/python --workload=W1 --rounds=7

Torch runs as it comes; `--torch_allocator=tcmalloc` gives it the allocator that helps it most. On a shared machine add
`--passive`: its idle threads spin, which doubles the processor seconds it takes while others are at work. Ours runs as
it comes too: `--allocator=auto` takes what is installed.
"""

import functools

from maxtext_models import allocator
from tests.benchmarks import measure


def torch(python, workload, name, steps, passive=False):
  """One run of peers/bench_torch.py."""
  command = [python, str(measure.PEERS / 'bench_torch.py'), '--workload', workload, '--steps', str(steps)]
  environment = {**allocator.environment(name), 'PYTHONPATH': ''} | ({'OMP_WAIT_POLICY': 'PASSIVE'} if passive else {})
  return measure.peer(
    measure.Process([*command, '--warmup', str(measure.WARMUP)], environment=environment, folder=measure.PEERS), steps
  )


def main():
  parser = measure.arguments(__doc__)
  parser.add_argument('--torch_python', required=True, help='an interpreter that has torch and transformers')
  parser.add_argument('--torch_allocator', default='system', choices=measure.ALLOCATORS)
  parser.add_argument('--passive', action='store_true', help='its idle threads sleep instead of spinning')
  flags = parser.parse_args()
  measure.against(
    'torch',
    functools.partial(torch, flags.torch_python, flags.workload, flags.torch_allocator, flags.steps, flags.passive),
    flags,
    benchmark='vs_torch',
    allocator={'ours': flags.allocator, 'torch': flags.torch_allocator},
    passive=flags.passive,
  )


if __name__ == '__main__':
  main()
