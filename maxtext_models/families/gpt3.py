"""GPT-3 (arXiv 2005.14165), and GPT-2, which has its equations: layer norms with biases, learned positions, plain gelu.

Norms stand before each layer and before the head; every linear map has a bias; the table is tied. Sizes are those of
table 2.1 of the paper, with 16 heads for the 1.3B and a width of 5120 for the 13B: the 24 heads of 128 and the 5140
that are printed there do not multiply to each other's width. Every second layer of the paper's models is locally banded
in a way that it does not describe; here, as wherever these sizes are trained, all are dense. The weights were never
published; config.json and files are those of a GPT-2.
"""

from maxtext_layers import attention
from maxtext_layers import block
from maxtext_layers import config
from maxtext_layers import mlp
from maxtext_layers import norm
from maxtext_models import card
from maxtext_models import config_json

MODEL_TYPE = 'gpt2'
ARCHITECTURE = 'GPT2LMHeadModel'


@config.config
class Gpt3(card.Card):
  """Numbers of a GPT-3; `context` is the number of learned positions."""

  eps: float = 1e-5
  tied: bool = True

  def check(self):
    card.Card.check(self)
    if self.heads != self.kv_heads or self.heads * self.head_dim != self.d_model:
      raise config.Error(
        f'heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}: heads * head_dim is d_model='
        f'{self.d_model}, and keys have as many heads'
      )

  def learned_positions(self):
    return self.context

  def final_norm(self):
    return norm.Layer(self.eps)

  def blocks(self):
    mixer = attention.Spec(self.heads, self.kv_heads, self.head_dim, rope=None, bias=('q', 'k', 'v', 'o'))
    ffn = mlp.Plain(self.d_ff, 'gelu', bias=('up', 'down'))
    return [block.Spec(mixer, ffn, norm.Layer(self.eps))] * self.layers

  def rows(self):
    return ROWS + ([] if self.tied else [('head', 'lm_head.weight', 'v d -> v d')])

  def passed_over(self):
    return (r'transformer\.h\.\d+\.attn\.(masked_)?bias',)  # the causal mask, in files saved before transformers 4.26

  def hf_config(self):
    return {
      'architectures': [ARCHITECTURE],
      'model_type': MODEL_TYPE,
      'n_layer': self.layers,
      'n_embd': self.d_model,
      'n_inner': self.d_ff,
      'n_head': self.heads,
      'n_positions': self.context,
      'vocab_size': self.vocab,
      'layer_norm_epsilon': self.eps,
      'activation_function': 'gelu_new',
      'tie_word_embeddings': self.tied,
      'scale_attn_weights': True,
      **config_json.dtype_fields(self),
    }


def from_hf(source):
  """config.json -> Gpt3."""
  fields = config_json.Fields(source)
  fields.absent('scale_attn_by_inverse_layer_idx', 'add_cross_attention', 'quantization_config')
  fields.only('scale_attn_weights', True)
  fields.need('activation_function', str)
  fields.only('activation_function', 'gelu_new', 'gelu_pytorch_tanh')
  d_model, heads = fields.need('n_embd', int), fields.need('n_head', int)
  return Gpt3(
    layers=fields.need('n_layer', int),
    d_model=d_model,
    d_ff=fields.get('n_inner', 4 * d_model, int),
    heads=heads,
    kv_heads=heads,
    head_dim=d_model // heads,
    vocab=fields.need('vocab_size', int),
    context=fields.need('n_positions', int),
    eps=fields.need('layer_norm_epsilon', float),
    tied=fields.tied(default=True),
    dtype=fields.dtype(),
  )


# Their maps hold weights as [in, out]; queries, keys and values lie side by side.
ROWS = [
  ('embed', 'transformer.wte.weight', 'v d -> v d'),
  ('position_embed', 'transformer.wpe.weight', 'p d -> p d'),
  ('norm', 'transformer.ln_f.weight', 'd -> d'),
  ('norm.b', 'transformer.ln_f.bias', 'd -> d'),
  ('layers.{l}.mixer_norm', 'transformer.h.{l}.ln_1.weight', 'd -> d'),
  ('layers.{l}.mixer_norm.b', 'transformer.h.{l}.ln_1.bias', 'd -> d'),
  (
    ('layers.{l}.mixer.q', 'layers.{l}.mixer.k', 'layers.{l}.mixer.v'),
    'transformer.h.{l}.attn.c_attn.weight',
    'd (three n h) -> three d n h',
  ),
  (
    ('layers.{l}.mixer.q.b', 'layers.{l}.mixer.k.b', 'layers.{l}.mixer.v.b'),
    'transformer.h.{l}.attn.c_attn.bias',
    '(three n h) -> three n h',
  ),
  ('layers.{l}.mixer.o', 'transformer.h.{l}.attn.c_proj.weight', '(n h) d -> n h d'),
  ('layers.{l}.mixer.o.b', 'transformer.h.{l}.attn.c_proj.bias', 'd -> d'),
  ('layers.{l}.ffn_norm', 'transformer.h.{l}.ln_2.weight', 'd -> d'),
  ('layers.{l}.ffn_norm.b', 'transformer.h.{l}.ln_2.bias', 'd -> d'),
  ('layers.{l}.ffn.up', 'transformer.h.{l}.mlp.c_fc.weight', 'd f -> d f'),
  ('layers.{l}.ffn.up.b', 'transformer.h.{l}.mlp.c_fc.bias', 'f -> f'),
  ('layers.{l}.ffn.down', 'transformer.h.{l}.mlp.c_proj.weight', 'f d -> f d'),
  ('layers.{l}.ffn.down.b', 'transformer.h.{l}.mlp.c_proj.bias', 'd -> d'),
]


def _card(layers, d_model, heads, *, vocab=50257, context=2048, source='https://arxiv.org/abs/2005.14165'):
  return Gpt3(
    source=source, layers=layers, d_model=d_model, d_ff=4 * d_model, heads=heads, kv_heads=heads,
    head_dim=d_model // heads, vocab=vocab, context=context,
  )  # fmt: skip


def _maxtext(name, layers, d_model, heads, *, vocab=32768, context=16384):
  source = f'https://github.com/AI-Hypercomputer/maxtext/blob/main/src/maxtext/configs/models/{name}.yml'
  return _card(layers, d_model, heads, vocab=vocab, context=context, source=source)


CARDS = {
  'gpt3-125m': _card(12, 768, 12),
  'gpt3-350m': _card(24, 1024, 16),
  'gpt3-760m': _card(24, 1536, 16),
  'gpt3-1.3b': _card(24, 2048, 16),
  'gpt3-2.7b': _card(32, 2560, 32),
  'gpt3-6.7b': _card(32, 4096, 32),
  'gpt3-13b': _card(40, 5120, 40),
  'gpt3-175b': _card(96, 12288, 96),
  'gpt3-52k': _maxtext('gpt3-52k', 1, 16, 2, vocab=1024, context=2048),
  'gpt3-6b': _maxtext('gpt3-6b', 48, 3072, 12),
  'gpt3-22b': _maxtext('gpt3-22b', 48, 6144, 24),
}
ALIASES: dict[str, str] = {}
