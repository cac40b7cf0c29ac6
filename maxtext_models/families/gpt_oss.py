"""GPT-OSS (arXiv 2508.10925): experts with biases and a bounded gate, attention with sinks, every second layer local.

Numbers are those of each model's published config.json (`source`), activation and sinks those of the paper's section
2. Positions are stretched from 4096 by YaRN whose bounds are not rounded. Published experts are quantised (mxfp4).
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
from maxtext_models.families import mixtral

MODEL_TYPE = 'gpt_oss'
ARCHITECTURE = 'GptOssForCausalLM'


@config.config
class GptOss(card.Mixture):
  """Numbers of a GPT-OSS. Every feed-forward layer is a mixture: d_ff is d_expert."""

  theta: float = 150000.0
  scaling: rope.Linear | rope.Llama3 | rope.Yarn | None = None
  window: int = 128  # of the first layer, the third, ..
  attention_bias: bool = True
  limit: float = 7.0  # of the gate and of what it multiplies
  alpha: float = 1.702

  def check(self):
    if self.window < 1:
      raise config.Error(f'window={self.window} is not positive')
    if self.d_ff != self.d_expert:
      raise config.Error(f'd_ff={self.d_ff} is not d_expert={self.d_expert}, which has the one field of both')
    card.Mixture.check(self)

  @property
  def activation(self):
    """What config.json names; that of the experts is made of it, limit and alpha, and named nowhere."""
    return 'silu'

  def blocks(self):
    turn = rope.Spec(self.head_dim, self.theta, self.scaling)
    bias = ('q', 'k', 'v', 'o') if self.attention_bias else ()
    mixers = [
      attention.Spec(self.heads, self.kv_heads, self.head_dim, turn, window=window, bias=bias, sinks=True)
      for window in (self.window, None)
    ]
    experts = self.mixture(
      {'normalize': True, 'bias': True},
      activation=mlp.Clipped(self.limit, self.alpha, offset=1.0),
      bias=('gate', 'up', 'down'),
    )
    return [block.Spec(mixers[i % 2], experts, norm.Spec(self.eps)) for i in range(self.layers)]

  def rows(self):
    return [
      *mixtral.ATTENTION,
      *([] if self.tied else [llama.HEAD]),
      *(llama.ATTENTION_BIAS if self.attention_bias else []),
      *ROWS,
    ]

  def hf_config(self):
    return {
      'architectures': [ARCHITECTURE],
      'model_type': MODEL_TYPE,
      **llama.dense_fields(self),
      'sliding_window': self.window,
      'layer_types': _layer_types(self.layers),
      'num_local_experts': self.experts,
      'num_experts_per_tok': self.top_k,
      'experts_per_token': self.top_k,
      'swiglu_limit': self.limit,
      'swiglu_alpha': self.alpha,
      'router_aux_loss_coef': self.balance_loss,
      'output_router_logits': False,
    }


def _layer_types(layers):
  return ['full_attention' if i % 2 else 'sliding_attention' for i in range(layers)]


def from_hf(source):
  """config.json -> GptOss."""
  fields = config_json.Fields(source)
  fields.only('hidden_act', 'silu')
  numbers = llama.dense(
    {k: v for k, v in source.items() if k != 'sliding_window'},
    head_dim=fields.need('head_dim', int),
  )
  kinds = fields.get('layer_types', None, list)
  if kinds is not None and kinds != _layer_types(numbers['layers']):
    raise config.Error("config.json: layer_types is not 'sliding_attention', 'full_attention', and so on by turns")
  del numbers['activation']
  return GptOss(
    **numbers | {'attention_bias': fields.get('attention_bias', True, bool)},
    d_expert=numbers['d_ff'],
    experts=fields.need('num_local_experts', int),
    top_k=fields.need('num_experts_per_tok', int),
    window=fields.need('sliding_window', int),
    limit=fields.get('swiglu_limit', 7.0, float),
    alpha=fields.get('swiglu_alpha', 1.702, float),
    balance_loss=mixtral.coefficient(fields),
  )


_EXPERTS = 'model.layers.{l}.mlp.experts.'
ROWS = [
  ('layers.{l}.mixer.sinks', 'model.layers.{l}.self_attn.sinks', 'n -> n'),
  ('layers.{l}.ffn.router', 'model.layers.{l}.mlp.router.weight', 'e d -> d e'),
  ('layers.{l}.ffn.router.b', 'model.layers.{l}.mlp.router.bias', 'e -> e'),
  (
    ('layers.{l}.ffn.experts.gate', 'layers.{l}.ffn.experts.up'),
    _EXPERTS + 'gate_up_proj',
    'e d (f two) -> two e d f',
  ),
  (
    ('layers.{l}.ffn.experts.gate_b', 'layers.{l}.ffn.experts.up_b'),
    _EXPERTS + 'gate_up_proj_bias',
    'e (f two) -> two e f',
  ),
  ('layers.{l}.ffn.experts.down', _EXPERTS + 'down_proj', 'e f d -> e f d'),
  ('layers.{l}.ffn.experts.down_b', _EXPERTS + 'down_proj_bias', 'e d -> e d'),
]


def _card(page, layers, experts):
  return GptOss(
    source=f'https://huggingface.co/openai/{page}', layers=layers, d_model=2880, d_ff=2880, d_expert=2880, heads=64,
    kv_heads=8, head_dim=64, vocab=201088, context=131072, eps=1e-5, experts=experts, top_k=4, balance_loss=0.9,
    scaling=rope.Yarn(32.0, 4096, 32.0, 1.0, truncate=False),
  )  # fmt: skip


CARDS = {'gpt-oss-20b': _card('gpt-oss-20b', 24, 32), 'gpt-oss-120b': _card('gpt-oss-120b', 36, 128)}
ALIASES: dict[str, str] = {}
