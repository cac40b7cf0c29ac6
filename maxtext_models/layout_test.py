import doctest

from flax import nnx
import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from maxtext_layers import plan
from maxtext_models import decoder
from maxtext_models import layout
from maxtext_models import registry


def test_doctests():
  assert doctest.testmod(layout).failed == 0


@pytest.mark.parametrize('scan', [True, False])
def test_every_plan_has_the_same_names(scan):
  card = registry.card('qwen3-0.6b')
  card.layers = 10
  model = decoder.abstract(card, scan=scan)
  names = layout.slots(layout.leaves(nnx.state(model, nnx.Param)), model.stack.plan)
  inner = ['mixer_norm', 'ffn_norm', 'mixer.q_norm', 'mixer.k_norm']
  inner += [f'mixer.{n}' for n in 'qkvo'] + [f'ffn.{n}' for n in ('gate', 'up', 'down')]
  assert set(names) == {'embed', 'norm'} | {f'layers.{l}.{n}' for l in range(10) for n in inner}


def test_a_period_of_several_blocks_counts_layers_one_by_one():
  """Segment [L L G] x 2 from layer 1: position 2 holds layers 3 and 6."""
  segments = plan.plan('dLLGLLG')
  path = ('stack', 'segments', '1', 'blocks', '2', 'mixer', 'q', 'w')
  assert layout.names_of(path, segments) == ['layers.3.mixer.q', 'layers.6.mixer.q']


def test_place_reads_only_the_parts_that_the_sharding_asks_for():
  values = np.arange(12, dtype=np.float32).reshape(4, 3)
  sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ('x',)), PartitionSpec('x'))
  asked = []

  def read(index):
    asked.append(index)
    return values[index]

  got = layout.place(jax.ShapeDtypeStruct((4, 3), np.float32, sharding=sharding), read)
  np.testing.assert_array_equal(got, values)
  assert got.sharding == sharding
  assert len(asked) == 1
