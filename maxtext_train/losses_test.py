import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import config
from maxtext_train import losses

B, T, D, V = 2, 6, 4, 11
CHUNKS = [losses.Chunk.TOKENS, losses.Chunk.VOCABULARY]


class Model:
  """A decoder whose layers do nothing, so that every number can be computed by hand."""

  def __init__(self, x, w, terms=None, cap=None):
    self.x, self.w, self.terms, self.cap = x, w, terms or {}, cap

  def hidden(self, tokens, **options):
    return self.x, None, self.terms

  def output(self):
    return self.w


def numbers(seed=0):
  rng = np.random.default_rng(seed)
  x, w = rng.normal(size=(B, T, D)).astype(np.float32), rng.normal(size=(V, D)).astype(np.float32)
  weights = np.asarray([[1, 0, 2, 0.5, 1, 0], [0, 1, 1, 1, 0, 0]], np.float32)
  batch = {
    'tokens': np.zeros((B, T), np.int32),
    'targets': rng.integers(0, V, (B, T), dtype=np.int32),
    'weights': weights,
  }
  return x, w, batch


def dense(x, w, batch, z_loss):
  """(weighted sum with z-loss, without) in float64."""
  y = x.astype(np.float64) @ w.astype(np.float64).T
  lse = np.log(np.exp(y).sum(-1))
  nats = lse - np.take_along_axis(y, batch['targets'][..., None], -1)[..., 0]
  return ((nats + z_loss * lse**2) * batch['weights']).sum(), (nats * batch['weights']).sum()


@pytest.mark.parametrize('chunk', CHUNKS)
@pytest.mark.parametrize('z_loss', [0.0, 0.1])
@pytest.mark.parametrize('chunks', [1, 4])
def test_against_dense(chunk, z_loss, chunks):
  """C6: the loss core returns sums: total with z-loss, lm_loss without, and the weight to divide by."""
  x, w, batch = numbers()
  out = losses.next_token(Model(x, w), batch, chunk=chunk, chunks=chunks, z_loss=z_loss)
  total, nats = dense(x, w, batch, z_loss)
  assert float(out.total) == pytest.approx(total, rel=1e-6)
  assert float(out.aux['lm_loss']) == pytest.approx(nats, rel=1e-6)
  assert float(out.weight) == 7.5


@pytest.mark.parametrize('chunk', CHUNKS)
def test_the_cap_of_logits_is_the_models(chunk):
  x, w, batch = numbers()
  out = losses.next_token(Model(x, w, cap=0.7), batch, chunk=chunk, chunks=2)
  y = 0.7 * np.tanh(x.astype(np.float64) @ w.astype(np.float64).T / 0.7)
  nats = np.log(np.exp(y).sum(-1)) - np.take_along_axis(y, batch['targets'][..., None], -1)[..., 0]
  assert float(out.total) == pytest.approx((nats * batch['weights']).sum(), rel=1e-6)
  assert abs(out.total - dense(x, w, batch, 0.0)[0]) > 0.1


@pytest.mark.parametrize('chunk', CHUNKS)
def test_what_has_no_weight_is_selected_out(chunk):
  """B5: NaN and infinity at positions of weight 0 reach neither the loss nor any gradient."""
  x, w, batch = numbers()
  call = jax.jit(jax.value_and_grad(
    lambda x, w: losses.next_token(Model(x, w), batch, chunk=chunk, chunks=2, z_loss=0.1).total, (0, 1)))  # fmt: skip
  hidden = batch['weights'] == 0
  clean = np.where(hidden[..., None], 0, x).astype(np.float32)
  expected = call(clean, w)
  for poison in (np.nan, np.inf, -np.inf, 1e38):
    value, (dx, dw) = call(np.where(hidden[..., None], np.float32(poison), x), w)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    np.testing.assert_allclose(dw, expected[1][1], rtol=1e-5, atol=1e-6)
    assert not np.asarray(dx)[hidden].any()


@pytest.mark.parametrize('chunk', CHUNKS)
def test_no_weight_at_all(chunk):
  """B16: every implementation returns 0 and gradients that are zero, also where hidden states are NaN."""
  x, w, batch = numbers()
  batch['weights'] = np.zeros((B, T), np.float32)
  for value in (x, x * np.nan):
    out, grads = jax.value_and_grad(
      lambda x, w: losses.next_token(Model(x, w), batch, chunk=chunk, chunks=2).total, (0, 1))(value, w)  # fmt: skip
    assert float(out) == 0.0
    assert all(not np.asarray(g).any() for g in grads)


@pytest.mark.parametrize('chunk', CHUNKS)
def test_auxiliary_terms(chunk):
  """A term of 0.25 adds 0.25 to the mean loss, is reported by its name, and is not in lm_loss."""
  x, w, batch = numbers()
  plain = losses.next_token(Model(x, w), batch, chunk=chunk)
  more = losses.next_token(Model(x, w, {'balance': jnp.float32(0.25)}), batch, chunk=chunk)
  assert float((more.total - plain.total) / plain.weight) == pytest.approx(0.25, rel=1e-5)
  assert float(more.aux['balance'] / more.weight) == pytest.approx(0.25)
  assert float(more.aux['lm_loss']) == float(plain.aux['lm_loss'])


def test_resolve():
  assert losses.resolve(losses.Chunk.AUTO, 1) == 'tokens'
  assert losses.resolve(losses.Chunk.AUTO, 8) == 'vocabulary'
  assert losses.resolve(losses.Chunk.TOKENS, 8) == 'tokens'


@pytest.mark.parametrize('settings', [{'chunks': 0}, {'z_loss': -1.0}])
def test_check_names_the_field(settings):
  with pytest.raises(config.Error, match=f'{next(iter(settings))}='):
    losses.Config(**settings).check()


@pytest.mark.parametrize('chunk', CHUNKS)
def test_logits_are_never_whole(chunk):
  """B18: temporary memory of loss and gradients stays below a quarter of the logits, for B x T = 4096 and V = 32768."""
  rows, length, width, vocab = 4, 1024, 256, 32768
  shapes = jax.ShapeDtypeStruct((rows, length, width), jnp.float32), jax.ShapeDtypeStruct((vocab, width), jnp.float32)
  ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
  batch = {'tokens': ids, 'targets': ids, 'weights': jax.ShapeDtypeStruct((rows, length), jnp.float32)}

  def total(x, w, batch):
    return losses.next_token(
      Model(x, w), batch, chunk=chunk, chunks=losses.pieces(losses.Config(), chunk, rows * length)
    ).total

  for function in (total, jax.grad(total, (0, 1))):
    memory = jax.jit(function).lower(*shapes, batch).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.25 * rows * length * vocab * 4
