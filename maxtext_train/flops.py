"""Floating-point operations of a step, from the card, and their share of the machine's peak (MFU, arXiv 2204.02311).

They are the model's operations, whatever the program really does: recomputation does not count, and a causal query
counts the half of its row of keys that it sees.
"""

from typing import Any

import jax

# bfloat16, dense, FLOP/s of one jax device. A device is a chip, but on v2, v3 and 7x, where it is one of its two cores.
# First match by prefix wins, so longer names stand first.
_TPU = 'https://cloud.google.com/tpu/docs/'
_NVIDIA = 'https://www.nvidia.com/en-us/data-center/'
_AMD = 'https://www.amd.com/en/products/accelerators/instinct/'
PEAKS: tuple[tuple[str, float, str], ...] = (
  ('TPU v2', 22.5e12, _TPU + 'v2'),
  ('TPU v3', 61.5e12, _TPU + 'v3'),
  ('TPU v4 lite', 138e12, 'arXiv 2304.01433, table 4'),
  ('TPU v4', 275e12, _TPU + 'v4'),
  ('TPU v5 lite', 197e12, _TPU + 'v5e'),
  ('TPU v5e', 197e12, _TPU + 'v5e'),
  ('TPU v5', 459e12, _TPU + 'v5p'),
  ('TPU v6', 918e12, _TPU + 'v6e'),
  ('TPU7x', 2307e12 / 2, _TPU + 'tpu7x'),
  ('TPU 7x', 2307e12 / 2, _TPU + 'tpu7x'),
  ('NVIDIA A100', 312e12, _NVIDIA + 'a100/'),
  ('NVIDIA H100 PCIe', 1513e12 / 2, _NVIDIA + 'h100/'),
  ('NVIDIA H100 NVL', 1671e12 / 2, _NVIDIA + 'h100/'),
  ('NVIDIA H100', 1979e12 / 2, _NVIDIA + 'h100/'),
  ('NVIDIA H200 NVL', 1671e12 / 2, _NVIDIA + 'h200/'),
  ('NVIDIA H200', 1979e12 / 2, _NVIDIA + 'h200/'),
  ('NVIDIA GH200', 1979e12 / 2, _NVIDIA + 'grace-hopper-superchip/'),
  ('NVIDIA GB200', 5000e12 / 2, _NVIDIA + 'gb200-nvl72/'),
  ('NVIDIA B200', 4500e12 / 2, _NVIDIA + 'hgx/'),
  ('NVIDIA L40S', 362e12, _NVIDIA + 'l40s/'),
  ('NVIDIA L4', 121e12, _NVIDIA + 'l4/'),
  ('AMD Instinct MI300X', 1307e12, _AMD + 'mi300/mi300x.html'),
  ('AMD Instinct MI325X', 1307e12, _AMD + 'mi300/mi325x.html'),
)


def step(card: Any, batch: int, length: int) -> int:
  """FLOPs of forward and backward pass of one update on `batch` rows of `length` tokens.

  Three times those of the forward pass: a product has two gradients, each as large as itself. A token costs 6 a
  parameter it is multiplied with, of a mixture's experts only those that it visits, and in attention 12 × heads ×
  head_dim a key it sees.
  """
  return 3 * card.forward_flops(length) * batch


def peak(device: jax.Device) -> float | None:
  """The bfloat16 peak of a device in FLOP/s, or None where it is not known (any CPU).

  It is the denominator whatever the run computes in, so that MFU compares between runs.
  """
  kind = device.device_kind
  return next((value for name, value, _ in PEAKS if kind.startswith(name)), None)


def mfu(flops: float, seconds: float, peak: float | None, devices: int) -> float | None:
  """The share of the peak of so many devices, or None where the peak is not known."""
  return None if peak is None or seconds <= 0 else flops / seconds / (peak * devices)
