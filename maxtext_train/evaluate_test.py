import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import sharding
from maxtext_models import decoder
from maxtext_models.families import llama
from maxtext_train import evaluate
from maxtext_train import losses


@pytest.fixture(scope='module')
def model():
  card = llama.Llama(layers=1, d_model=8, d_ff=16, heads=2, kv_heads=1, head_dim=4, vocab=11, context=32)
  return decoder.Decoder(card, rngs=nnx.Rngs(0))


@pytest.fixture(scope='module')
def sums(model):
  graph, params = nnx.split(model)
  mesh = sharding.mesh(jax.devices()[:1])
  core = lambda model, batch, key: losses.next_token(model, batch, key, chunk=losses.Chunk.TOKENS, kernel='chunked')
  with sharding.use(mesh, sharding.PRESETS['fsdp']):
    shardings = sharding.shardings_of(params, mesh, sharding.PRESETS['fsdp'])
  return evaluate.compiled(graph, core, shardings), params


def rows():
  draw = np.random.default_rng(0)
  tokens = draw.integers(0, 11, (5, 9), dtype=np.int32)
  weights = (draw.random((5, 8)) < 0.6).astype(np.float32) * 2
  weights[3] = 0
  return tokens[:, :-1], tokens[:, 1:], weights


def batches(size):
  tokens, targets, weights = rows()
  for at in range(0, 5, size):
    part = [a[at : at + size] for a in (tokens, targets, weights)]
    part = [np.concatenate([a, np.zeros((size - len(a), 8), a.dtype)]) for a in part]
    yield dict(zip(('tokens', 'targets', 'weights'), part, strict=True))


@pytest.mark.parametrize('size', [1, 2, 5])
def test_the_batch_size_does_not_matter(model, sums, size):
  """I7: sum of losses over sum of weights, the last partial batch included; I8: unlabelled rows count nothing."""
  tokens, targets, weights = rows()
  logits = model.logits(model.hidden(jnp.asarray(tokens), kernel='xla')[0])
  nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(targets)[..., None], -1)[..., 0]
  found = evaluate.evaluate(*sums, batches(size), lambda: True)
  assert found.tokens == weights.sum()
  assert found.loss == pytest.approx(float((nats * weights).sum() / weights.sum()), rel=1e-5)


def test_no_label_at_all_has_no_loss(sums):
  """I8: None, not NaN."""
  empty = [{**batch, 'weights': np.zeros((5, 8), np.float32)} for batch in batches(5)]
  assert evaluate.evaluate(*sums, empty, lambda: True) == evaluate.Result(None, 0.0)
  assert not math.isnan(evaluate.evaluate(*sums, empty, lambda: True).tokens)


def test_it_can_be_given_up(sums):
  answers = iter([True, True, False])
  assert evaluate.evaluate(*sums, batches(1), lambda: next(answers)) is None
