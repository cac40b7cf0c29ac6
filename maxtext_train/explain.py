"""What a run will do, resolved: the plan that `--explain` prints and that the manifest keeps.

Reading order: `plan` (facts as a dict), `room` (the memory that there is), `text` (facts for a reader), `manifest`.
"""

import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

import jax

from maxtext_models import allocator
from maxtext_train import optimizer

_VERSIONS = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'numpy', 'tensorboardX', 'plotly')


def plan(settings: Any, assembly: Any, data: dict[str, Any], compiled: Any) -> dict[str, Any]:
  """Everything that was decided for the user, as JSON.

  Args:
    settings: the run.Pretrain.
    assembly: its parts.
    data: what the loader says of itself.
    compiled: the compiled step, whose memory is reported in bytes a device.
  """
  card, params = assembly.card, assembly.plan.abstract.params
  decays, exempt = optimizer.decayed(settings.optimizer, params)
  out = {
    'model': {
      'name': card.name,
      'family': type(card).__name__,
      'parameters': card.parameters(),
      'layers': card.layers,
      'd_model': card.d_model,
      'vocab': card.vocab,
      'padded_vocab': card.padded_vocab,
    },
    'devices': {'platform': jax.default_backend(), 'kind': jax.devices()[0].device_kind, 'count': jax.device_count()},
    'mesh': {'preset': settings.mesh.preset, **dict(assembly.mesh.shape)},
    'kernels': {'attention': assembly.kernel},
    'masks': 'causal' if settings.data.artificial else 'causal; documents are isolated, padding is masked',
    'data': data,
    'loss': f'cross-entropy in {assembly.chunks} chunk(s) along the {assembly.chunk}, z-loss {settings.loss.z_loss}',
    'scan': [f'{len(s.specs)} block(s) x {s.count} from layer {s.start}' for s in assembly.segments],
    'remat': settings.remat,
    'dtype': {'compute': str(settings.dtype), 'parameters': 'float32', 'moments': 'float32'},
    'batch': {
      'rows': settings.batch,
      'length': settings.length,
      'accumulate': settings.accumulate,
      'tokens_per_step': settings.batch * settings.length,
    },
    'schedule': {
      'kind': str(settings.schedule.kind),
      'updates': settings.steps,
      'first': float(assembly.schedule(0)),
      'peak': settings.schedule.peak,
      'last': float(assembly.schedule(settings.steps - 1)),
    },
    'flops_per_step': assembly.flops,
    'peak_flops_per_device': assembly.peak,
    'decays': decays,
    'does_not_decay': exempt,
    'allocator': allocator.current(),
  }
  if settings.optimizer.only:
    names, moved = optimizer.paths(params), jax.tree.leaves(optimizer.trained(params, settings.optimizer.only))
    out['trained'] = [name for name, moves in zip(names, moved, strict=True) if moves]
  memory = compiled.memory_analysis()
  there, whose = room()
  out['memory'] = {
    'state_and_batch': memory.argument_size_in_bytes,
    'temporary': memory.temp_size_in_bytes,
    'code': memory.generated_code_size_in_bytes,
  }
  if (needed := sum(out['memory'].values())) > there:
    out['warning'] = f'a step needs {needed / 2**30:,.2f} GiB on each device; {whose} {there / 2**30:,.2f} GiB'
  return out


def room() -> tuple[int, str]:
  """Bytes that a device has for a step, and whose they are; devices that are a host's processors share its memory."""
  device = jax.local_devices()[0]
  if limit := (device.memory_stats() or {}).get('bytes_limit'):
    return limit, f'{device.device_kind} has'
  whole = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  share = 'this host has' if jax.local_device_count() == 1 else 'its share of this host is'
  return whole // jax.local_device_count(), share


def text(value: dict[str, Any]) -> str:
  """The plan, a fact a line."""
  lines = []
  for name, inner in value.items():
    if name in ('decays', 'does_not_decay', 'trained'):
      lines.append(f'{name}: {len(inner)} parameters')
      lines += [f'  {path}' for path in inner]
    elif name == 'memory':
      lines.append('memory of a device: ' + ', '.join(f'{k} {v / 2**20:,.1f} MiB' for k, v in inner.items()))
    elif isinstance(inner, dict):
      lines.append(f'{name}: ' + ', '.join(f'{k} {_number(v)}' for k, v in inner.items()))
    elif isinstance(inner, list):
      lines.append(f'{name}: ' + '; '.join(inner))
    else:
      lines.append(f'{name}: {_number(inner)}')
  return '\n'.join(lines)


def manifest(settings: Any, resolved: dict[str, Any], **more: Any) -> str:
  """manifest.json: what was run, with what, on what."""
  return json.dumps(
    {
      'name': settings.name,
      'command': sys.argv,
      'python': platform.python_version(),
      'system': platform.platform(),
      'host': {'cpus': os.cpu_count(), 'processes': jax.process_count()},
      'versions': {name: _version(name) for name in _VERSIONS},
      'commit': _commit(),
      'plan': resolved,
      **more,
    },
    indent=1,
    default=str,
  )


def _version(name: str) -> str | None:
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None


def _commit() -> str | None:
  """The commit of the checkout that this file belongs to; None for an installed wheel."""
  root = pathlib.Path(__file__).resolve().parents[1]
  if not (root / '.git').exists():
    return None
  try:
    done = subprocess.run(['git', '-C', str(root), 'rev-parse', 'HEAD'], capture_output=True, text=True, check=False)
  except OSError:  # a checkout without git, as in an image
    return None
  return done.stdout.strip() or None


def _number(value: Any) -> str:
  if isinstance(value, float):
    return f'{value:.6g}'
  return f'{value:,}' if isinstance(value, int) else str(value)
