"""Gemma 2 (arXiv 2408.00118): Gemma with norms on both sides of a layer, soft caps, and a window in every second layer.

The first layer slides, the second sees everything, and so on. Scores are divided by the root of `query_scalar`, which
is not head_dim in the 27B. Numbers are those of each model's published config.json (`source`).
"""

from maxtext_layers import attention
from maxtext_layers import block
from maxtext_layers import config
from maxtext_layers import mlp
from maxtext_layers import residual
from maxtext_layers import rope
from maxtext_models import config_json
from maxtext_models.families import gemma
from maxtext_models.families import llama

MODEL_TYPE = 'gemma2'
ARCHITECTURE = 'Gemma2ForCausalLM'


@config.config
class Gemma2(gemma.Gemma):
  """Numbers of a Gemma 2."""

  window: int = 4096
  full_every: int = 2  # the second layer sees everything, and every second one from there
  query_scalar: int = 256  # scores are multiplied with its ** -0.5
  attention_cap: float | None = 50.0
  logit_cap: float | None = 30.0

  def check(self):
    gemma.Gemma.check(self)
    llama.check_window(self.window)
    if not isinstance(self.full_every, int) or self.full_every < 1:
      raise config.Error(f'full_every={self.full_every!r} is not a positive whole number')
    for name in ('query_scalar', 'attention_cap', 'logit_cap'):
      value = getattr(self, name)
      if value is not None and (not isinstance(value, (int, float)) or value <= 0):
        raise config.Error(f'{name}={value!r} is not positive')

  def final_cap(self):
    return self.logit_cap

  def blocks(self):
    local, full = (self.block(self.mixer(window)) for window in (self.window, None))
    return [local if (i + 1) % self.full_every else full for i in range(self.layers)]

  def mixer(self, window):
    """Attention of a layer with a window, or with None."""
    return attention.Spec(
      self.heads, self.kv_heads, self.head_dim, rope.Spec(self.head_dim, self.theta, self.scaling), window=window,
      scale=self.query_scalar**-0.5, cap=self.attention_cap,
    )  # fmt: skip

  def block(self, mixer):
    """A layer around its attention."""
    return block.Spec(mixer, mlp.Spec(self.d_ff, 'gelu'), residual.sandwich(self.norm()))

  def rows(self):
    return ROWS + ([] if self.tied else [llama.HEAD])

  def hf_config(self):
    return {
      'architectures': [ARCHITECTURE],
      'model_type': MODEL_TYPE,
      **window_fields(self),
      'hidden_act': gemma.ACTIVATIONS[0],
      **config_json.rope_fields(self.theta, self.scaling, self.context),
      'attn_logit_softcapping': self.attention_cap,
    }


def from_hf(source):
  """config.json -> Gemma2."""
  fields = config_json.Fields(source)
  fields.only('hidden_activation', gemma.ACTIVATIONS[0])
  theta, scaling = config_json.rope_of(source)
  layers = fields.need('num_hidden_layers', int)
  return Gemma2(
    **gemma.numbers(fields),
    theta=theta,
    scaling=scaling,
    window=fields.need('sliding_window', int),
    full_every=fields.full_every(layers, 2),
    query_scalar=fields.need('query_pre_attn_scalar', int),
    attention_cap=fields.given('attn_logit_softcapping', float),
    logit_cap=fields.given('final_logit_softcapping', float),
  )


def window_fields(c):
  """What a card with a window, a scalar of queries and a cap of logits says in config.json."""
  return {
    **gemma.numbers_fields(c),
    'sliding_window': c.window,
    'layer_types': config_json.layer_types(c.layers, c.full_every),
    'query_pre_attn_scalar': c.query_scalar,
    'final_logit_softcapping': c.logit_cap,
  }


ROWS = [row for row in llama.ROWS if 'ffn_norm' not in row[0]] + [
  ('layers.{l}.mixer_out', 'model.layers.{l}.post_attention_layernorm.weight', 'd -> d'),
  ('layers.{l}.ffn_norm', 'model.layers.{l}.pre_feedforward_layernorm.weight', 'd -> d'),
  ('layers.{l}.ffn_out', 'model.layers.{l}.post_feedforward_layernorm.weight', 'd -> d'),
]


def _card(page, layers, d_model, d_ff, heads, *, head_dim=256, query_scalar=256):
  return Gemma2(
    source=f'https://huggingface.co/google/{page}', layers=layers, d_model=d_model, d_ff=d_ff, heads=heads,
    kv_heads=heads // 2, head_dim=head_dim, vocab=256000, context=8192, eps=1e-6, query_scalar=query_scalar,
  )  # fmt: skip


CARDS = {
  'gemma2-2b': _card('gemma-2-2b', 26, 2304, 9216, 8),
  'gemma2-9b': _card('gemma-2-9b', 42, 3584, 14336, 16),
  'gemma2-27b': _card('gemma-2-27b', 46, 4608, 36864, 32, head_dim=128, query_scalar=144),
}
ALIASES = {f'gemma-2-{size}-it': f'gemma2-{size}' for size in ('2b', '9b', '27b')}
