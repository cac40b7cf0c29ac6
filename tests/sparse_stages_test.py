"""The two stages in which sparse attention is taught (arXiv 2512.02556, section 2.1.1): what learns, and from what."""

import functools
import types

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import config
from maxtext_layers import sharding
from maxtext_models import checkpoint
from maxtext_models import decoder
from maxtext_models.families import deepseek32
from maxtext_train import inputs
from maxtext_train import losses
from maxtext_train import optimizer
from maxtext_train import state
from maxtext_train import step

B, T, V = 2, 24, 31
RULES = sharding.PRESETS['fsdp']
QUICK = {'xla_backend_optimization_level': 0}  # compiles faster, for what runs once
WARM = {'index_stage': 'dense', 'index_loss': 0.5}


def card(**changes):
  made = deepseek32.DeepSeek32(
    layers=1, d_model=16, d_ff=20, heads=2, kv_heads=2, head_dim=10, vocab=V, context=64, dense_layers=0, q_rank=9,
    kv_rank=8, nope_dim=6, rope_dim=4, value_dim=5, experts=3, top_k=2, d_expert=8, shared=1, score='sigmoid',
    index_heads=3, index_dim=6, index_top_k=5, **changes,
  )  # fmt: skip
  made.check()
  return made


def plan(made, settings):
  mesh = sharding.mesh(jax.devices()[:1])
  build = lambda: decoder.Decoder(made, rngs=nnx.Rngs(0), scan=True)
  with sharding.use(mesh, RULES):
    return state.plan(build, functools.partial(optimizer.build, settings), mesh, RULES)


def batch():
  tokens = np.random.default_rng(0).integers(0, V, (B, T + 1), dtype=np.int32)
  return {'tokens': tokens[:, :-1], 'targets': tokens[:, 1:], 'weights': np.ones((B, T), np.float32)}


LOSS = functools.partial(losses.next_token, chunk=losses.Chunk.TOKENS, chunks=1, kernel='xla')


@functools.cache
def first():
  """First values; they are the same in every stage."""
  return state.create(plan(card(), optimizer.Config())).params


def gradients(made, only=()):
  """path -> gradient, and the sums of losses."""
  parts = plan(made, optimizer.Config())
  run = lambda params: step.summed(parts.graph, LOSS, params, batch(), None, 1, None, only)
  grads, out = jax.jit(run, compiler_options=QUICK)(first())
  return dict(zip(optimizer.paths(grads), map(np.asarray, jax.tree.leaves(grads)), strict=True)), out


def of_indexer(path):
  return '.indexer.' in path


def test_warm_up_trains_the_indexer_and_nothing_else():
  """An update with weight decay and balanced experts: all else is bit-equal, of the indexer every parameter moves."""
  settings = optimizer.Config(only=('indexer',))
  parts = plan(card(**WARM), settings)
  before = state.create(parts, jax.tree.map(jnp.array, first()))  # a copy, which the step takes away
  names, old = optimizer.paths(before.params), list(map(np.asarray, jax.tree.leaves(before.params)))
  run = step.Step(parts, LOSS, 0.01, clip=1.0, balance_rate=settings.balance_rate, only=settings.only)
  after, metrics = run(before, batch())
  for name, a, b in zip(names, old, jax.tree.leaves(after.params), strict=True):
    assert (a.tobytes() != np.asarray(b).tobytes()) == of_indexer(name), name
  assert metrics['indexer_loss'] > 0 and metrics['grad_norm'] > 0
  assert sum(map(of_indexer, names)) == 5  # q, k, weights, and a norm's weight and bias
  decays, _ = optimizer.decayed(settings, parts.abstract.params)
  assert decays and all(map(of_indexer, decays))


def test_warm_up_has_no_gradient_outside_of_the_indexer():
  found, _ = gradients(card(**WARM), only=('indexer',))
  assert all(bool(grad.any()) == of_indexer(path) for path, grad in found.items())


@pytest.mark.parametrize('stage', ['dense', 'sparse'])
def test_the_indexer_learns_from_its_loss_only(stage):
  """Without that loss it has no gradient, with twice the loss twice as much; all else has the same with and without."""
  none, _ = gradients(card(index_stage='sparse') if stage == 'sparse' else card(index_stage='dense', index_loss=0.0))
  once, out = gradients(card(index_stage=stage, index_loss=0.5))
  twice, more = gradients(card(index_stage=stage, index_loss=1.0))
  np.testing.assert_allclose(more.aux['indexer_loss'], 2 * out.aux['indexer_loss'], rtol=1e-5)
  for path, grad in once.items():
    if of_indexer(path):
      assert grad.any() and not none[path].any(), path
      np.testing.assert_allclose(twice[path], 2 * grad, rtol=1e-4, atol=1e-7)
    else:
      np.testing.assert_allclose(grad, none[path], rtol=1e-4, atol=1e-5)


def test_the_second_stage_starts_from_the_first(tmp_path):
  """Stage and loss are the run's, not the weights'; what the model is must be the same."""
  warm = card(**WARM)
  checkpoint.save(tmp_path / 'warm', warm, decoder.Decoder(warm, rngs=nnx.Rngs(0)))
  settings = types.SimpleNamespace(model=card(index_loss=1.0), init_from=str(tmp_path / 'warm'))
  assert inputs.card(settings).index_stage == 'sparse'
  settings.model.index_top_k = 6
  with pytest.raises(config.Error, match='index_top_k=5, the config says 6'):
    inputs.card(settings)


def test_what_cannot_be_is_said():
  with pytest.raises(config.Error, match="only: 'indexr' matches no parameter; did you mean 'indexer'"):
    plan(card(), optimizer.Config(only=('indexr',)))
  with pytest.raises(config.Error, match=r'index_loss=-1\.0 is negative'):
    card(index_loss=-1.0)
  with pytest.raises(config.Error, match="stage='warm' is none of sparse, dense"):
    card(index_stage='warm')
