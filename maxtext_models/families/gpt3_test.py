"""GPT-3 against its equations, written out in float64; what transformers' GPT-2 computes is tests/parity_test.py's."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import config
from maxtext_models import decoder
from maxtext_models import registry
from maxtext_models import scoring
from maxtext_models.families import gpt3

# openai-community/gpt2, config.json
GPT2 = {
  'activation_function': 'gelu_new', 'architectures': ['GPT2LMHeadModel'], 'attn_pdrop': 0.1, 'bos_token_id': 50256,
  'embd_pdrop': 0.1, 'eos_token_id': 50256, 'initializer_range': 0.02, 'layer_norm_epsilon': 1e-05,
  'model_type': 'gpt2', 'n_ctx': 1024, 'n_embd': 768, 'n_head': 12, 'n_layer': 12, 'n_positions': 1024,
  'resid_pdrop': 0.1, 'summary_activation': None, 'summary_first_dropout': 0.1, 'vocab_size': 50257,
}  # fmt: skip
CARD = gpt3.Gpt3(layers=2, d_model=24, d_ff=40, heads=3, kv_heads=3, head_dim=8, vocab=31, context=20)


@pytest.fixture(name='model', scope='module')
def _model():
  graph, state = nnx.split(decoder.abstract(CARD, scan=True))
  rng = np.random.default_rng(0)
  scale = lambda p: 1.0 if p.ndim < 3 else 24**-0.5
  return nnx.merge(graph, jax.tree.map(lambda p: jnp.asarray(rng.normal(0, scale(p), p.shape), p.dtype), state))


def by_the_paper(model, tokens):
  """Logits [B, T, V] of ids [B, T], float64.

  Section 2.1: the model of GPT-2 with pre-normalization, d_ff by the card. h = W_e[ids] + W_p, then in every layer
  h += attention(norm(h)), h += W_2 gelu(W_1 norm(h) + b_1) + b_2, and logits norm(h) W_e^T (Radford et al. 2018,
  equation 2; 2019, section 2.3). Attention is softmax(Q K^T / sqrt(d_k)) V (arXiv 1706.03762, equation 1), gelu the
  tanh form (arXiv 1606.08415, section 2), the norm that of arXiv 1607.06450, equation 4.
  """
  leaves = {'.'.join(map(str, path)): np.asarray(v[...], np.float64) for path, v in nnx.to_flat_state(nnx.state(model))}
  inside = 'stack.segments.0.blocks.0.'

  def normed(x, w, b):
    return w * (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) + b

  x = leaves['embed.w'][tokens] + leaves['position_embed.w'][: tokens.shape[1]]
  for layer in range(2):
    p = {name.removeprefix(inside): value[layer] for name, value in leaves.items() if name.startswith(inside)}
    y = normed(x, p['mixer_norm.w'], p['mixer_norm.b'])
    for head in range(3):
      q, k, v = (y @ p[f'mixer.{n}.w'][:, head] + p[f'mixer.{n}.b'][head] for n in 'qkv')
      scores = q @ k.swapaxes(1, 2) / np.sqrt(8)
      scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
      weights = np.exp(scores - scores.max(-1, keepdims=True))
      x = x + weights / weights.sum(-1, keepdims=True) @ v @ p['mixer.o.w'][head]
    x = x + p['mixer.o.b']
    h = normed(x, p['ffn_norm.w'], p['ffn_norm.b']) @ p['ffn.up.w'] + p['ffn.up.b']
    h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    x = x + h @ p['ffn.down.w'] + p['ffn.down.b']
  return normed(x, leaves['norm.w'], leaves['norm.b']) @ leaves['embed.w'].T


def test_logits_are_those_of_the_papers(model):
  tokens = np.random.default_rng(1).integers(0, 31, (2, 20))
  expected = by_the_paper(model, tokens)
  assert expected.std() > 1
  np.testing.assert_allclose(scoring.scorer(model)(tokens), expected, atol=1e-4)


def test_positions_count_from_the_start_of_a_document(model):
  """B6: two documents in a row, and padding: each has the logits that it has alone."""
  a, b = np.random.default_rng(2).integers(0, 31, (2, 7))
  row = np.concatenate([a, b, [0, 0]])[None]
  positions = np.concatenate([np.arange(7), np.arange(7), [0, 0]])[None]
  segments = np.repeat([1, 2, 0], [7, 7, 2])[None]
  x, _, _ = model.hidden(row, positions=jnp.asarray(positions), segments=jnp.asarray(segments))
  logits = np.asarray(model.logits(x))[0]
  np.testing.assert_allclose(logits[:7], by_the_paper(model, a[None])[0], atol=1e-4)
  np.testing.assert_allclose(logits[7:14], by_the_paper(model, b[None])[0], atol=1e-4)
  assert np.isfinite(logits).all()


def test_a_row_that_is_longer_than_the_table_is_refused(model):
  with pytest.raises(config.Error, match='21 positions, but the model has learned 20'):
    model.hidden(np.zeros((1, 21), np.int32))


def test_a_gpt2_is_a_small_gpt3():
  """124M, as its model card says."""
  found = registry.card_from_hf(GPT2)
  assert found.parameters() == 124439808 and found.context == 1024 and found.d_ff == 3072
  assert registry.card_from_hf(found.hf_config()) == found
  small = registry.card('gpt3-125m')
  assert dataclasses.replace(small, context=1024, name='', source='') == found


@pytest.mark.parametrize(
  'change, said',
  [
    ({'activation_function': 'gelu'}, "activation_function='gelu'"),
    ({'scale_attn_by_inverse_layer_idx': True}, 'scale_attn_by_inverse_layer_idx=True'),
    ({'scale_attn_weights': False}, 'scale_attn_weights=False'),
    ({'add_cross_attention': True}, 'add_cross_attention=True'),
    ({'n_head': 10}, 'heads * head_dim is d_model=768'),
    ({'n_positions': None}, 'lacks n_positions'),
  ],
)
def test_what_is_not_supported_is_named(change, said):
  with pytest.raises(config.Error) as error:
    registry.card_from_hf(GPT2 | change)
  assert said in str(error.value) and '\n' not in str(error.value)
