"""GPT-3 as a GPT-2's config.json describes it; what it computes is tests/parity_test.py's and gpt3_twin_test.py's."""

import dataclasses

from flax import nnx
import jax
import numpy as np
import pytest

from maxtext_layers import config
from maxtext_models import decoder
from maxtext_models import registry
from maxtext_models.families import gpt3

# openai-community/gpt2, config.json
GPT2 = {
  'activation_function': 'gelu_new', 'architectures': ['GPT2LMHeadModel'], 'attn_pdrop': 0.1, 'bos_token_id': 50256,
  'embd_pdrop': 0.1, 'eos_token_id': 50256, 'initializer_range': 0.02, 'layer_norm_epsilon': 1e-05,
  'model_type': 'gpt2', 'n_ctx': 1024, 'n_embd': 768, 'n_head': 12, 'n_layer': 12, 'n_positions': 1024,
  'resid_pdrop': 0.1, 'summary_activation': None, 'summary_first_dropout': 0.1, 'vocab_size': 50257,
}  # fmt: skip
CARD = gpt3.Gpt3(layers=2, d_model=24, d_ff=40, heads=3, kv_heads=3, head_dim=8, vocab=31, context=20)


def test_a_row_that_is_longer_than_the_table_is_refused():
  graph, state = nnx.split(decoder.abstract(CARD))
  run = lambda state, tokens: nnx.merge(graph, state).hidden(tokens)[0]
  assert jax.eval_shape(run, state, np.zeros((1, 20), np.int32)).shape == (1, 20, 24)
  with pytest.raises(config.Error, match='21 positions, but the model has learned 20'):
    jax.eval_shape(run, state, np.zeros((1, 21), np.int32))


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
