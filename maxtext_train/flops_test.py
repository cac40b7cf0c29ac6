import dataclasses
import types

import pytest

from maxtext_layers import attention
from maxtext_models.families import llama
from maxtext_train import flops

W1 = llama.Llama(layers=4, d_model=256, d_ff=1024, heads=8, kv_heads=4, head_dim=32, vocab=32000, context=512)
W2 = llama.Llama(
  layers=30, d_model=576, d_ff=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152, context=256, tied=True
)


@pytest.mark.parametrize('card, batch, length, expected', [(W1, 4, 512, 155.4), (W2, 2, 256, 426.7)])
def test_known_workloads(card, batch, length, expected):
  """In GFLOP, as two other programs count them for the same shapes."""
  assert flops.step(card, batch, length) / 1e9 == pytest.approx(expected, abs=0.05)


def test_by_hand():
  """One layer, one head: q, k, v, o are 8x8, the feed-forward layer 3 of 8x16, the head 10x8; 2 rows of 4 tokens."""
  card = llama.Llama(layers=1, d_model=8, d_ff=16, heads=1, kv_heads=1, head_dim=8, vocab=10, context=4)
  matrices = 4 * 8 * 8 + 3 * 8 * 16 + 10 * 8
  attention = 12 * 4 * 4 * 8 // 2  # scores and values, 3 times, of half a 4x4 square
  assert flops.step(card, 2, 4) == 6 * matrices * 8 + 2 * attention


def test_window():
  """Of length 8 and window 2: a triangle of 2 x 2 / 2 and 6 further queries with 2 keys each."""
  mixer = attention.Spec(1, 1, 1, None, window=2)
  assert mixer.flops(8) == 4 * (2 * 2 / 2 + 6 * 2)
  assert dataclasses.replace(mixer, window=8).flops(8) == dataclasses.replace(mixer, window=None).flops(8)


@pytest.mark.parametrize(
  'kind, expected',
  [
    ('TPU v4', 275e12),
    ('TPU v5 lite', 197e12),
    ('TPU v5', 459e12),
    ('TPU v5p', 459e12),
    ('TPU v6 lite', 918e12),
    ('TPU7x', 1153.5e12),
    ('NVIDIA A100-SXM4-80GB', 312e12),
    ('NVIDIA H100 80GB HBM3', 989.5e12),
    ('NVIDIA H100 PCIe', 756.5e12),
    ('NVIDIA H200', 989.5e12),
    ('NVIDIA B200', 2250e12),
    ('NVIDIA GB200', 2500e12),
    ('cpu', None),
    ('NVIDIA GeForce RTX 3090', None),
  ],
)
def test_peak(kind, expected):
  """What the vendors' pages say, dense: their figures with sparsity are twice that."""
  assert flops.peak(types.SimpleNamespace(device_kind=kind)) == expected


def test_every_peak_has_a_source_and_can_be_reached():
  for index, (name, value, source) in enumerate(flops.PEAKS):
    assert 1e13 < value < 1e16 and source
    assert not any(name.startswith(before) for before, _, _ in flops.PEAKS[:index]), name


def test_mfu():
  assert flops.mfu(1e12, 2.0, 1e12, 4) == pytest.approx(0.125)
  assert flops.mfu(1e12, 2.0, None, 4) is None
