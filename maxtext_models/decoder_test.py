"""Padded vocabularies, and the two ways to read a model; that it is right is tests/parity_test.py's business."""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_models import decoder
from maxtext_models import registry
from maxtext_models import sampler
from maxtext_models import scoring

TOKENS = np.random.default_rng(0).integers(0, 151, (2, 12)).astype(np.int32)


def build(tied):
  card = dataclasses.replace(
    registry.card('llama3.1-8b'), layers=2, d_model=16, d_ff=24, heads=2, kv_heads=1, head_dim=8, vocab=151,
    vocab_multiple=256, tied=tied,
  )  # fmt: skip
  graph, state = nnx.split(decoder.abstract(card))
  rng = np.random.default_rng(1)
  return graph, jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape).astype(leaf.dtype)), state)


def loss(graph, state):
  model = nnx.merge(graph, state)
  x, _, _ = model.hidden(TOKENS[:, :-1])
  return model.losses(x, TOKENS[:, 1:]).mean()


@pytest.mark.parametrize('tied', [True, False])
def test_padding_rows_are_never_seen(tied):
  """A18: vocab 151 in tables of 256: no logit, no loss, and a gradient of exactly 0."""
  graph, state = build(tied)
  value, gradients = jax.jit(jax.value_and_grad(lambda s: loss(graph, s)))(state)
  table = 'embed' if tied else 'head'
  assert state[table]['w'].get_value().shape == (256, 16)
  g = np.asarray(gradients[table]['w'].get_value())
  assert (g[151:] == 0).all() and (g[:151] != 0).any(-1).all()
  spoilt = jax.tree.map(lambda w: w.at[151:].set(1e4) if w.shape == (256, 16) else w, state)
  assert jax.jit(jax.value_and_grad(lambda s: loss(graph, s)))(spoilt)[0] == value
  logits = scoring.scorer(nnx.merge(graph, spoilt))(TOKENS)
  assert logits.shape == (2, 12, 151) and logits.dtype == np.float32


def test_losses_are_the_log_likelihood_of_the_logits():
  graph, state = build(False)

  @functools.partial(jax.jit, static_argnames='chunks')
  def losses(state, chunks):
    model = nnx.merge(graph, state)
    return model.losses(model.hidden(TOKENS[:, :-1])[0], TOKENS[:, 1:], chunks)

  logits = scoring.scorer(nnx.merge(graph, state))(TOKENS[:, :-1]).astype(np.float64)
  p = np.exp(logits - logits.max(-1, keepdims=True))
  p /= p.sum(-1, keepdims=True)
  expected = -np.log(np.take_along_axis(p, TOKENS[:, 1:, None], -1)[..., 0])
  for chunks in (1, 7):
    np.testing.assert_allclose(losses(state, chunks), expected, atol=1e-5)


def capped():
  card = dataclasses.replace(
    registry.card('gemma2-2b'), layers=2, d_model=16, d_ff=24, heads=2, kv_heads=1, head_dim=8, vocab=151,
    vocab_multiple=256, logit_cap=0.5,
  )  # fmt: skip
  graph, state = nnx.split(decoder.abstract(card))
  rng = np.random.default_rng(1)
  return graph, jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape).astype(leaf.dtype)), state)


def test_capped_logits_in_logits_losses_and_samples():
  """A15, A18: the head says cap * tanh(y / cap) wherever it is read; padding rows stay out."""
  graph, state = capped()
  x = nnx.merge(graph, state).hidden(TOKENS[:, :-1])[0]
  model = nnx.merge(graph, state)
  y = np.einsum('BTD,VD->BTV', np.asarray(x, np.float64), np.asarray(model.embed.w[...], np.float64)[:151])
  y = 0.5 * np.tanh(y / 0.5)
  logits = model.logits(x)
  np.testing.assert_allclose(logits, y, atol=1e-5)
  assert np.abs(logits).max() > 0.49
  expected = np.log(np.exp(y).sum(-1)) - np.take_along_axis(y, TOKENS[:, 1:, None], -1)[..., 0]
  np.testing.assert_allclose(model.losses(x, TOKENS[:, 1:]), expected, atol=1e-5)
  (said,) = sampler.Jax(model, context=64).sample(
    [TOKENS[0].tolist()], sampler.Settings(max_new_tokens=1, temperature=0)
  )
  whole = model.logits(model.hidden(TOKENS[:1])[0])[0, -1]
  np.testing.assert_allclose(said.logprobs[0], jax.nn.log_softmax(whole).max(), atol=1e-5)


def test_auto_scans_deep_models_only():
  card = registry.card('smollm2-135m')
  assert [s.count for s in decoder.abstract(card).stack.plan] == [30]
  card.layers = 8
  assert len(decoder.abstract(card).stack.plan) == 8
  card.layers = 9
  assert len(decoder.abstract(card).stack.plan) == 1


@pytest.mark.parametrize('tied', [True, False])
def test_an_untrained_model_guesses(tied):
  """The loss starts at ln V, though a tied table gives every token the logit of itself."""
  card = dataclasses.replace(
    registry.card('llama3.1-8b'), layers=1, d_model=256, d_ff=32, heads=2, kv_heads=1, head_dim=8, vocab=151, tied=tied
  )
  model = decoder.Decoder(card, rngs=nnx.Rngs(0))
  start = loss(*nnx.split(model))
  assert start == pytest.approx(np.log(151), abs=0.1)
