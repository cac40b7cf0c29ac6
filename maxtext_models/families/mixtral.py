"""Mixtral (arXiv 2401.04088): Llama with experts, two of which see a token, weighed by the softmax of their logits.

Numbers are those of each model's published config.json (`source`).
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

MODEL_TYPE = 'mixtral'
ARCHITECTURE = 'MixtralForCausalLM'


@config.config
class Mixtral(card.Mixture):
  """Numbers of a Mixtral. Every feed-forward layer is a mixture: d_ff is d_expert."""

  theta: float = 1000000.0
  scaling: rope.Linear | rope.Llama3 | rope.Yarn | None = None
  activation: str = 'silu'
  attention_bias: bool = False
  window: int | None = None

  def check(self):
    if not isinstance(self.theta, float) or not self.theta > 0:
      raise config.Error(f'theta={self.theta!r} is not positive')
    if self.activation not in mlp.ACTIVATIONS:
      raise config.Error(f'activation={self.activation!r} is not one of {", ".join(mlp.ACTIVATIONS)}')
    if self.window is not None and self.window < 1:
      raise config.Error(f'window={self.window} is not positive')
    self.check_own()
    card.Mixture.check(self)

  def check_own(self):
    """Refuses what config.json has no field for."""
    if self.attention_bias:
      raise config.Error(f'attention_bias={self.attention_bias} is nothing that a {type(self).__name__} has')
    if self.d_ff != self.d_expert:
      raise config.Error(f'd_ff={self.d_ff} is not d_expert={self.d_expert}, which has the one field of both')

  def mixer(self):
    """The attention of every layer."""
    turn = rope.Spec(self.head_dim, self.theta, self.scaling)
    bias = ('q', 'k', 'v', 'o') if self.attention_bias else ()
    return attention.Spec(self.heads, self.kv_heads, self.head_dim, turn, window=self.window, bias=bias)

  def blocks(self):
    experts = self.mixture({'normalize': True}, activation=self.activation)
    return [block.Spec(self.mixer(), experts, norm.Spec(self.eps))] * self.layers

  def rows(self):
    return [*ATTENTION, *([] if self.tied else [llama.HEAD]), *ROWS]

  def hf_config(self):
    return {
      'architectures': [ARCHITECTURE],
      'model_type': MODEL_TYPE,
      **{name: value for name, value in llama.dense_fields(self).items() if name != 'attention_bias'},
      'sliding_window': self.window,
      'num_local_experts': self.experts,
      'num_experts_per_tok': self.top_k,
      'router_aux_loss_coef': self.balance_loss,
      'router_jitter_noise': 0.0,
      'output_router_logits': False,
    }


def from_hf(source):
  """config.json -> Mixtral."""
  fields = config_json.Fields(source)
  fields.absent('router_jitter_noise')  # noise on the inputs of experts while training
  numbers = llama.dense(source)
  return Mixtral(
    **numbers,
    d_expert=numbers['d_ff'],
    experts=fields.need('num_local_experts', int),
    top_k=fields.need('num_experts_per_tok', int),
    window=fields.get('sliding_window', None, int),
    balance_loss=coefficient(fields),
  )


def coefficient(fields):
  """That of the balance loss; Hugging Face's default is 0.001, and 0 is none."""
  value = fields.get('router_aux_loss_coef', 0.001)
  if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
    raise config.Error(f'config.json: router_aux_loss_coef={value!r} is not a number of 0 or more')
  return float(value)


ATTENTION = [row for row in llama.ROWS if '.ffn.' not in row[0]]
_MOE = 'model.layers.{l}.block_sparse_moe.'
ROWS = [
  ('layers.{l}.ffn.router', _MOE + 'gate.weight', 'e d -> d e'),
  ('layers.{l}.ffn.experts.gate', _MOE + 'experts.{e}.w1.weight', 'f d -> d f'),
  ('layers.{l}.ffn.experts.up', _MOE + 'experts.{e}.w3.weight', 'f d -> d f'),
  ('layers.{l}.ffn.experts.down', _MOE + 'experts.{e}.w2.weight', 'd f -> f d'),
]


def _card(page, layers, d_model, d_ff, heads, *, vocab, balance_loss, context=65536):
  return Mixtral(
    source=f'https://huggingface.co/mistralai/{page}', layers=layers, d_model=d_model, d_ff=d_ff, d_expert=d_ff,
    heads=heads, kv_heads=8, head_dim=128, vocab=vocab, context=context, eps=1e-5, experts=8, top_k=2,
    balance_loss=balance_loss,
  )  # fmt: skip


CARDS = {
  'mixtral-8x7b': _card('Mixtral-8x7B-v0.1', 32, 4096, 14336, 32, vocab=32000, context=32768, balance_loss=0.02),
  'mixtral-8x22b': _card('Mixtral-8x22B-Instruct-v0.1', 56, 6144, 16384, 48, vocab=32768, balance_loss=0.001),
  'mixtral-8x22b-base': _card('Mixtral-8x22B-v0.1', 56, 6144, 16384, 48, vocab=32000, balance_loss=0.001),
}
ALIASES = {'mixtral-8x7b-instruct-v0.1': 'mixtral-8x7b'}
