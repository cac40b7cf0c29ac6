"""Documents through packing and a whole model: together in a row they have the losses that each has alone."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_models import decoder
from maxtext_models.families import llama
from maxtext_train import losses
from maxtext_train.data import packing

T, V = 48, 40
CARD = llama.Llama(layers=2, d_model=16, d_ff=24, heads=2, kv_heads=1, head_dim=8, vocab=V, context=T)
DRAW = np.random.default_rng(0)
SAMPLES = [DRAW.integers(0, V, n).tolist() for n in (11, 3, 17, 2, 9)]


@pytest.fixture(scope='module')
def model():
  """Structure, and weights large enough that a token which is seen by mistake shows. Nothing is computed one by one."""
  graph, shapes = nnx.split(decoder.abstract(CARD, scan=False))
  draw = np.random.default_rng(1)
  return graph, jax.tree.map(lambda p: jnp.asarray(draw.normal(0.0, 0.3, p.shape), p.dtype), shapes)


@pytest.fixture(scope='module', params=['xla', 'chunked'])
def per_token(model, request):
  """Batch -> nats of each token [B, T]."""
  graph, params = model

  @jax.jit
  def nats(batch):
    whole = nnx.merge(graph, params)
    x, _, _ = whole.hidden(
      batch['tokens'], positions=batch['positions'], segments=batch['segments'], kernel=request.param
    )
    return whole.losses(x, batch['targets'], chunks=2)

  return lambda batch: np.asarray(nats(batch))


def _row(samples):
  return packing.pack(samples, T)


def _documents(batch, values):
  """Values of each document's targets, row by row."""
  found = []
  for row in range(len(values)):
    for segment in range(1, batch['segments'][row].max() + 1):
      own = (batch['segments'][row] == segment) & (batch['weights'][row] > 0)
      found.append(values[row][own])
  return found


def test_five_samples_in_a_row_have_the_losses_of_each_alone(per_token):
  """B6: per-token losses, packed == unpacked."""
  packed = _row(SAMPLES)
  assert packed['tokens'].shape == (1, T) and packed['segments'].max() == 5
  together = _documents(packed, per_token(packed))
  for sample, nats in zip(SAMPLES, together, strict=True):
    alone = _row([sample])
    (expected,) = _documents(alone, per_token(alone))
    assert (len(expected) == len(sample) - 1 and expected.std() > 0.01) or len(sample) == 2
    np.testing.assert_allclose(nats, expected, atol=1e-5)


def test_neither_content_nor_length_before_a_document_matters(per_token):
  """B7: (a) another document A leaves B's losses; (b) so does a shift of B in the row."""
  b = SAMPLES[2]
  reference = None
  for before in ([5, 6, 7, 8], [9, 1, 2, 3], [4] * 23, [1, 2]):
    batch = _row([before, b])
    nats = _documents(batch, per_token(batch))[1]
    reference = nats if reference is None else reference
    np.testing.assert_allclose(nats, reference, atol=1e-5)


def test_without_segments_they_would_see_each_other(per_token):
  """The tolerance above means something: one segment for both documents changes the losses a hundred times as much."""
  batch = _row([SAMPLES[0], SAMPLES[2]])
  trained = (batch['segments'] == 2) & (batch['weights'] > 0)
  mixed = per_token(batch | {'segments': (batch['segments'] > 0).astype(np.int32)})
  assert np.abs(mixed - per_token(batch))[trained].max() > 1e-3


@pytest.mark.parametrize('chunk', [losses.Chunk.TOKENS, losses.Chunk.VOCABULARY])
def test_the_loss_of_padded_rows_is_that_of_packed_rows(model, chunk):
  """B12, B13: by token, the loss of five padded rows equals that of one packed row, and padding counts nothing."""
  graph, params = model
  loss = jax.jit(lambda b: losses.next_token(nnx.merge(graph, params), b, chunk=chunk, chunks=3, kernel='xla'))
  packed = _row(SAMPLES)
  rows = [_row([sample]) for sample in SAMPLES]
  padded = {name: np.concatenate([row[name] for row in rows]) for name in packed}
  values = []
  for batch in (packed, padded):
    out = loss(batch)
    assert out.weight == sum(len(s) - 1 for s in SAMPLES)
    values.append(out.total / out.weight)
  np.testing.assert_allclose(*values, rtol=1e-6)
