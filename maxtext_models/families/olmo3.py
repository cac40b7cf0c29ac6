"""OLMo 3 (arXiv 2512.13961): Llama with norms after its layers, and on queries and keys, over all heads at once.

Three layers with a window, then one without, whose positions alone are stretched (yarn). Numbers are those of each
model's published config.json (`source`).
"""

import dataclasses

from maxtext_layers import config
from maxtext_layers import norm
from maxtext_layers import residual
from maxtext_layers import rope
from maxtext_models import config_json
from maxtext_models.families import llama

MODEL_TYPE = 'olmo3'
ARCHITECTURE = 'Olmo3ForCausalLM'


@config.config
class Olmo3(llama.Llama):
  """Numbers of an OLMo 3. `scaling` is that of the layers without window."""

  window: int = 4096
  full_every: int = 4

  def check(self):
    llama.Llama.check(self)
    llama.has_none(self, 'mlp_bias')
    llama.check_window(self.window)
    if not isinstance(self.full_every, int) or self.full_every < 1:
      raise config.Error(f'full_every={self.full_every!r} is not a positive whole number')

  def blocks(self):
    plain = llama.Llama.blocks(self)[0]
    where = residual.post(norm.Spec(self.eps))
    mixer = dataclasses.replace(plain.mixer, qk_norm=norm.Spec(self.eps), qk_norm_over='heads')
    sliding = dataclasses.replace(mixer, window=self.window, rope=rope.Spec(self.head_dim, self.theta))
    local, full = (dataclasses.replace(plain, mixer=m, norm=where) for m in (sliding, mixer))
    return [local if (i + 1) % self.full_every else full for i in range(self.layers)]

  def rows(self):
    return [row for row in llama.Llama.rows(self) if '_norm' not in row[0]] + NORMS

  def hf_config(self):
    return {
      'architectures': [ARCHITECTURE],
      'model_type': MODEL_TYPE,
      **llama.dense_fields(self),
      'sliding_window': self.window,
      'layer_types': config_json.layer_types(self.layers, self.full_every),
      **config_json.rope_fields_by_kind(self.theta, self.scaling, self.theta, self.context, local='rope_theta'),
    }


def from_hf(source):
  """config.json -> Olmo3."""
  fields = config_json.Fields(source)
  theta, scaling, local = config_json.rope_by_kind(source, local='rope_theta')
  if local != theta:
    raise config.Error(f'config.json: rope_theta={local} of sliding layers is not supported; the others have {theta}')
  kv_heads = fields.get('num_key_value_heads', fields.need('num_attention_heads', int), int)
  numbers = llama.dense(source, kv_heads=kv_heads, turn=(theta, scaling))
  return Olmo3(
    **numbers,
    window=fields.need('sliding_window', int),
    full_every=fields.full_every(numbers['layers'], 4),
  )


NORMS = [
  ('layers.{l}.mixer_out', 'model.layers.{l}.post_attention_layernorm.weight', 'd -> d'),
  ('layers.{l}.ffn_out', 'model.layers.{l}.post_feedforward_layernorm.weight', 'd -> d'),
  ('layers.{l}.mixer.q_norm', 'model.layers.{l}.self_attn.q_norm.weight', '(n h) -> n h'),
  ('layers.{l}.mixer.k_norm', 'model.layers.{l}.self_attn.k_norm.weight', '(n h) -> n h'),
]


def _card(source, layers, d_model, d_ff, heads, kv_heads, *, stretched=True):
  return Olmo3(
    source=f'https://{source}', layers=layers, d_model=d_model, d_ff=d_ff, heads=heads,
    kv_heads=kv_heads, head_dim=128, vocab=100278, context=65536 if stretched else 8192, eps=1e-6, theta=500000.0,
    scaling=rope.Yarn(factor=8.0, trained=8192, attention=1.2079441541679836) if stretched else None,
  )  # fmt: skip


CARDS = {
  'olmo3-7b': _card('huggingface.co/allenai/Olmo-3-1025-7B', 32, 4096, 11008, 32, 32),
  'olmo3-7b-pt': _card('arxiv.org/abs/2512.13961', 32, 4096, 11008, 32, 32, stretched=False),  # before long contexts
  'olmo3-32b': _card('huggingface.co/allenai/Olmo-3-1125-32B', 64, 5120, 27648, 40, 8),
}
ALIASES = {
  'olmo-3-7b-instruct': 'olmo3-7b',
  'olmo-3-7b-think': 'olmo3-7b',
  'olmo-3-32b-think': 'olmo3-32b',
}
