"""Models with experts, padded, packed and decoded token by token, against what transformers computes for whole rows."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_models import checkpoint
from tests.golden import golden

TOLERANCE = 1e-4
CASES = ('mixtral', 'mixtral_window', 'qwen3_moe', 'qwen3_moe_plain', 'gpt_oss')


@pytest.fixture(name='model', scope='module')
def _model(tmp_path_factory):
  """case -> the model of its Hugging Face directory, read once."""
  parent = tmp_path_factory.mktemp('golden')
  return functools.cache(lambda case: checkpoint.load(golden.directory(case, parent), scan=True)[1])


@functools.partial(jax.jit, static_argnames='graph')
def packed(graph, state, tokens, positions, segments):
  model = nnx.merge(graph, state)
  return model.logits(model.hidden(tokens, positions=positions, segments=segments)[0])


@pytest.mark.parametrize('case', CASES)
def test_neither_padding_nor_a_second_document_changes_a_logit(model, case):
  """A row with padding on the right, which no expert sees, and a row of two documents: each as it is alone."""
  reference = golden.reference(case)
  ids, expected = reference.tokens[0], reference.logits[0]
  length, first, padding = len(ids), len(ids) // 3, 7
  tokens = np.stack([ids, np.concatenate([ids[:first], ids[: length - first]])])
  positions = np.stack([np.arange(length), np.concatenate([np.arange(first), np.arange(length - first)])])
  segments = np.ones_like(tokens)
  segments[0, -padding:], segments[1, first:] = 0, 2
  got = packed(*nnx.split(model(case)), tokens, positions, segments)
  assert np.isfinite(got).all()
  assert np.abs(got[0] - expected)[:-padding].max() <= TOLERANCE
  assert np.abs(got[1, :first] - expected[:first]).max() <= TOLERANCE
  assert np.abs(got[1, first:] - expected[: length - first]).max() <= TOLERANCE


@functools.partial(jax.jit, static_argnames=('graph', 'length'))
def prefill(graph, state, tokens, length):
  model = nnx.merge(graph, state)
  x, caches, _ = model.hidden(tokens, caches=model.stack.caches(tokens.shape[0], length))
  return model.logits(x), caches


@functools.partial(jax.jit, static_argnames='graph')
def step(graph, state, token, start, caches):
  model = nnx.merge(graph, state)
  x, caches, _ = model.hidden(token, start=start, caches=caches)
  return model.logits(x), caches


@pytest.mark.parametrize('case', ['mixtral', 'qwen3_moe', 'gpt_oss'])
def test_decoding_equals_transformers(model, case):
  """A prompt, longer than any window, then six steps of one token: a single block of rows an expert."""
  reference = golden.reference(case)
  length = reference.tokens.shape[1]
  graph, state = nnx.split(model(case))
  logits, caches = prefill(graph, state, reference.tokens[:, :-6], length)
  parts = [logits]
  for t in range(length - 6, length):
    logits, caches = step(graph, state, reference.tokens[:, t : t + 1], jnp.int32(t), caches)
    parts.append(logits)
  assert np.abs(np.concatenate(parts, 1) - reference.logits).max() <= TOLERANCE
