"""Gemma 3 (arXiv 2503.19786), text: Gemma 2 with norms of queries and keys for its soft caps.

Five layers with a window, then one without. Sliding layers have a rope base of their own, which is never stretched;
that of the full ones is, by 8, from 4B up. The 4B, 12B and 27B were published as image-text models, whose text part
this is. Numbers are those of each model's published config.json (`source`), and where that leaves them out, the
defaults of Gemma3TextConfig in transformers.
"""

import dataclasses

from maxtext_layers import config
from maxtext_layers import rope
from maxtext_models import card
from maxtext_models import config_json
from maxtext_models.families import gemma
from maxtext_models.families import gemma2
from maxtext_models.families import llama

MODEL_TYPE = 'gemma3_text'
ARCHITECTURE = 'Gemma3ForCausalLM'
WRAPPERS = {
  'gemma3': card.Wrapper(
    architectures=('Gemma3ForConditionalGeneration',),
    text=MODEL_TYPE,
    towers=(r'(model\.)?(vision_tower|multi_modal_projector)\..*',),
  )
}


@config.config
class Gemma3(gemma2.Gemma2):
  """Numbers of the text part of a Gemma 3. `theta` and `scaling` are the full layers'."""

  theta: float = 1000000.0
  local_theta: float = 10000.0
  full_every: int = 6
  attention_cap: float | None = None
  logit_cap: float | None = None

  def check(self):
    gemma2.Gemma2.check(self)
    llama.has_none(self, 'attention_cap')
    if not isinstance(self.local_theta, float) or not self.local_theta > 0:
      raise config.Error(f'local_theta={self.local_theta!r} is not positive')

  def mixer(self, window):
    plain = gemma2.Gemma2.mixer(self, window)
    turn = plain.rope if window is None else rope.Spec(self.head_dim, self.local_theta)
    return dataclasses.replace(plain, rope=turn, qk_norm=self.norm())

  def rows(self):
    return gemma2.Gemma2.rows(self) + QK_NORM

  def hf_config(self):
    return {
      'architectures': [ARCHITECTURE],
      'model_type': MODEL_TYPE,
      **gemma2.window_fields(self),
      'attn_logit_softcapping': None,
      'use_bidirectional_attention': False,
      **config_json.rope_fields_by_kind(
        self.theta, self.scaling, self.local_theta, self.context, local='rope_local_base_freq'
      ),
    }


# What Gemma3TextConfig documents; the published config.json of the larger models leaves out what is equal.
DEFAULTS = {
  'num_attention_heads': 8, 'num_key_value_heads': 4, 'head_dim': 256, 'vocab_size': 262208, 'rms_norm_eps': 1e-6,
  'max_position_embeddings': 131072, 'query_pre_attn_scalar': 256, 'rope_theta': 1e6, 'rope_local_base_freq': 1e4,
}  # fmt: skip


def from_hf(source):
  """config.json -> Gemma3."""
  fields = config_json.Fields(source, DEFAULTS)
  fields.only('hidden_activation', gemma.ACTIVATIONS[0])
  fields.absent('attn_logit_softcapping')
  theta, scaling, local = config_json.rope_by_kind(source, local='rope_local_base_freq', defaults=DEFAULTS)
  layers = fields.need('num_hidden_layers', int)
  every = fields.get('sliding_window_pattern', fields.get('_sliding_window_pattern', 6, int), int)
  return Gemma3(
    **gemma.numbers(fields),
    theta=theta,
    scaling=scaling,
    local_theta=local,
    window=fields.need('sliding_window', int),
    full_every=fields.full_every(layers, every),
    query_scalar=fields.need('query_pre_attn_scalar', int),
    logit_cap=fields.get('final_logit_softcapping', None, float),
  )


QK_NORM = [
  ('layers.{l}.mixer.q_norm', 'model.layers.{l}.self_attn.q_norm.weight', 'h -> h'),
  ('layers.{l}.mixer.k_norm', 'model.layers.{l}.self_attn.k_norm.weight', 'h -> h'),
]


def _small(page, layers, d_model, d_ff):
  return Gemma3(
    source=f'https://huggingface.co/google/{page}', layers=layers, d_model=d_model, d_ff=d_ff, heads=4, kv_heads=1,
    head_dim=256, vocab=262144, context=32768, window=512,
  )  # fmt: skip


def _card(page, layers, d_model, d_ff, heads, *, head_dim=256, query_scalar=256):
  return Gemma3(
    source=f'https://huggingface.co/google/{page}', layers=layers, d_model=d_model, d_ff=d_ff, heads=heads,
    kv_heads=heads // 2, head_dim=head_dim, vocab=262208, context=131072, window=1024, scaling=rope.Linear(8.0),
    query_scalar=query_scalar,
  )  # fmt: skip


CARDS = {
  'gemma3-270m': _small('gemma-3-270m', 18, 640, 2048),
  'gemma3-1b': _small('gemma-3-1b-pt', 26, 1152, 6912),
  'gemma3-4b': _card('gemma-3-4b-pt', 34, 2560, 10240, 8),
  'gemma3-12b': _card('gemma-3-12b-pt', 48, 3840, 15360, 16),
  'gemma3-27b': _card('gemma-3-27b-pt', 62, 5376, 21504, 32, head_dim=128, query_scalar=168),
}
TEXT_PARTS = ('gemma3-4b', 'gemma3-12b', 'gemma3-27b')
ALIASES = {f'gemma-3-{name.partition("-")[2]}-it': name for name in CARDS}
