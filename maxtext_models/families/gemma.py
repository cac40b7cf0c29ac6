"""Gemma (arXiv 2403.08295).

Embeddings are multiplied by sqrt(d_model), norms stored as differences from one, the feed-forward layer is gated by the
tanh form of gelu (which the published config.json calls gelu), the table is tied. Numbers are those of each model's
published config.json (`source`).
"""

from maxtext_layers import attention
from maxtext_layers import block
from maxtext_layers import config
from maxtext_layers import mlp
from maxtext_layers import norm
from maxtext_layers import rope
from maxtext_models import card
from maxtext_models import config_json
from maxtext_models.families import llama

MODEL_TYPE = 'gemma'
ARCHITECTURE = 'GemmaForCausalLM'


@config.config
class Gemma(card.Card):
  """Numbers of a Gemma, and what all that are called so have in common."""

  tied: bool = True
  theta: float = 10000.0
  scaling: rope.Linear | rope.Llama3 | rope.Yarn | None = None

  def check(self):
    card.Card.check(self)
    rope.Spec(self.head_dim, self.theta, self.scaling)  # refuses what is no base

  def embed_scale(self):
    return self.d_model**0.5

  def final_norm(self):
    return self.norm()

  def norm(self):
    """Every norm of the model."""
    return norm.Spec(self.eps, offset=1.0)

  def blocks(self):
    mixer = attention.Spec(self.heads, self.kv_heads, self.head_dim, rope.Spec(self.head_dim, self.theta, self.scaling))
    return [block.Spec(mixer, mlp.Spec(self.d_ff, 'gelu'), self.norm())] * self.layers

  def rows(self):
    return llama.ROWS + ([] if self.tied else [llama.HEAD])

  def hf_config(self):
    return {
      'architectures': [ARCHITECTURE],
      'model_type': MODEL_TYPE,
      **numbers_fields(self),
      'hidden_act': ACTIVATIONS[0],  # read by transformers here, hidden_activation by everyone else
      **config_json.rope_fields(self.theta, self.scaling, self.context),
    }


def from_hf(source):
  """config.json -> Gemma."""
  fields = config_json.Fields(source)
  fields.need('hidden_act', str)
  for name in ('hidden_act', 'hidden_activation'):
    fields.only(name, *ACTIVATIONS)  # whichever it says, the tanh form is meant
  theta, scaling = config_json.rope_of(source)
  return Gemma(**numbers(fields), theta=theta, scaling=scaling)


ACTIVATIONS = ('gelu_pytorch_tanh', 'gelu')


def numbers(fields, bidirectional=(None, False)):
  """What config.json says of every Gemma alike, as arguments of its card."""
  fields.absent('attention_bias', 'quantization_config')
  fields.only('use_bidirectional_attention', *bidirectional)
  return dict(
    **config_json.shape(fields, tied=True),
    d_ff=fields.need('intermediate_size', int),
    kv_heads=fields.need('num_key_value_heads', int),
    head_dim=fields.need('head_dim', int),
  )


def numbers_fields(c):
  """The inverse of `numbers`."""
  return {
    **config_json.shape_fields(c),
    'intermediate_size': c.d_ff,
    'head_dim': c.head_dim,
    'hidden_activation': ACTIVATIONS[0],
    'attention_bias': False,
    'attention_dropout': 0.0,
  }


def _card(page, layers, d_model, d_ff, heads, kv_heads):
  return Gemma(
    source=f'https://huggingface.co/google/{page}', layers=layers, d_model=d_model, d_ff=d_ff, heads=heads,
    kv_heads=kv_heads, head_dim=256, vocab=256000, context=8192, eps=1e-6,
  )  # fmt: skip


CARDS = {
  'gemma-2b': _card('gemma-2b', 18, 2048, 16384, 8, 1),
  'gemma-7b': _card('gemma-7b', 28, 3072, 24576, 16, 16),
}
ALIASES = {
  'gemma-2b-it': 'gemma-2b',
  'gemma-7b-it': 'gemma-7b',
}
