"""Mistral 7B (arXiv 2310.06825): Llama, of which version 0.1 has a window in every layer.

Numbers are those of each model's published config.json (`source`). Version 0.2 dropped the window and took another rope
base; version 0.3 has a larger vocabulary.
"""

import dataclasses

from maxtext_layers import config
from maxtext_models import config_json
from maxtext_models.families import llama

MODEL_TYPE = 'mistral'
ARCHITECTURE = 'MistralForCausalLM'


@config.config
class Mistral(llama.Llama):
  """Numbers of a Mistral."""

  theta: float = 1000000.0
  window: int | None = None

  def check(self):
    llama.Llama.check(self)
    llama.has_none(self, 'attention_bias', 'mlp_bias')
    llama.check_window(self.window)

  def blocks(self):
    plain = llama.Llama.blocks(self)[0]
    return [dataclasses.replace(plain, mixer=dataclasses.replace(plain.mixer, window=self.window))] * self.layers

  def hf_config(self):
    fields = llama.dense_fields(self)
    del fields['attention_bias']
    return {'architectures': [ARCHITECTURE], 'model_type': MODEL_TYPE, **fields, 'sliding_window': self.window}


def from_hf(source):
  """config.json -> Mistral."""
  fields = config_json.Fields(source)
  fields.absent('layer_types')
  return Mistral(**llama.dense(source), window=fields.given('sliding_window', int))


def _card(page, vocab=32000, theta=1000000.0, window=None):
  return Mistral(
    source=f'https://huggingface.co/mistralai/{page}', layers=32, d_model=4096, d_ff=14336, heads=32, kv_heads=8,
    head_dim=128, vocab=vocab, context=32768, eps=1e-5, theta=theta, window=window,
  )  # fmt: skip


CARDS = {
  'mistral-7b-v0.1': _card('Mistral-7B-v0.1', theta=10000.0, window=4096),
  'mistral-7b-v0.2': _card('Mistral-7B-Instruct-v0.2'),  # no base model of it is on that site
  'mistral-7b-v0.3': _card('Mistral-7B-v0.3', vocab=32768),
}
ALIASES = {
  'mistral-7b': 'mistral-7b-v0.1',
  'mistral-7b-instruct-v0.1': 'mistral-7b-v0.1',
  'mistral-7b-instruct-v0.3': 'mistral-7b-v0.3',
}
