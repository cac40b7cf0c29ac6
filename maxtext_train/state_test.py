import functools

from flax import nnx
import jax
import numpy as np
import pytest

from maxtext_layers import config
from maxtext_layers import param
from maxtext_layers import sharding
from maxtext_train import optimizer
from maxtext_train import state

RULES = sharding.PRESETS['fsdp']


class Model(nnx.Module):
  def __init__(self, width=8, rngs=None):
    self.w = param.normal((width, 4), ('embed', 'mlp'), sigma=width**-0.5, rngs=rngs)
    self.norm = param.constant((width,), ('embed',), value=1.0)


def plan(mesh, width=8):
  build = lambda: Model(width, rngs=nnx.Rngs(3))
  return state.plan(build, functools.partial(optimizer.build, optimizer.Config()), mesh, RULES)


def test_plan_holds_no_array_and_create_fills_it():
  mesh = sharding.mesh(jax.devices()[:1])
  planned = plan(mesh)
  assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(planned.abstract))
  assert sum(leaf.size for leaf in jax.tree.leaves(planned.abstract.params)) == 40
  with sharding.use(mesh, RULES):
    made = state.create(planned)
  assert jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), made) == jax.tree.map(
    lambda a: (a.shape, a.dtype, a.sharding), planned.abstract
  )
  assert int(made.step) == 0 and not any(np.any(leaf) for leaf in jax.tree.leaves(made.optimizer))
  expected = Model(rngs=nnx.Rngs(3))
  np.testing.assert_array_equal(nnx.merge(planned.graph, made.params).w[...], expected.w[...])


def test_create_from_weights():
  mesh = sharding.mesh(jax.devices()[:1])
  weights = jax.tree.map(lambda a: np.full(a.shape, 0.5, a.dtype), nnx.state(Model(rngs=nnx.Rngs(0))))
  with sharding.use(mesh, RULES):
    made = state.create(plan(mesh), weights)
  assert all((np.asarray(leaf) == 0.5).all() for leaf in jax.tree.leaves(made.params))
  assert int(made.step) == 0


def test_moments_carry_the_words_of_the_weights():
  planned = plan(sharding.mesh(jax.devices()[:1]))
  assert planned.abstract.optimizer[0].mu['w'].get_metadata('axes') == ('embed', 'mlp')
  assert planned.abstract.optimizer[0].nu['norm'].get_metadata('axes') == ('embed',)


def test_large_weight_left_whole_is_an_error():
  """On a mesh of eight, an axis of 2**21 + 1 divides by nothing: the weight is named before any array exists."""
  mesh = jax.sharding.AbstractMesh((1, 8, 1), sharding.MESH)
  with pytest.raises(config.Error, match=r'weight params\.norm \(embed=2097153\) stays whole.*fsdp=8'):
    plan(mesh, 2**21 + 1)
