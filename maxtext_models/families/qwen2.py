"""Qwen 2.5 (arXiv 2412.15115) and Qwen 2 (arXiv 2407.10671), dense: Llama with biases on queries, keys and values.

Numbers are those of each model's published config.json (`source`). Base models of 14B and more have another eps than
the instruct models made of them, and most were published for more positions. No published model slides its windows
(`use_sliding_window`), but one may: then all layers but the first `full_layers` do.
"""

import dataclasses

from maxtext_layers import config
from maxtext_models import config_json
from maxtext_models.families import llama

MODEL_TYPE = 'qwen2'
ARCHITECTURE = 'Qwen2ForCausalLM'


@config.config
class Qwen2(llama.Llama):
  """Numbers of a Qwen 2 or 2.5."""

  theta: float = 1000000.0
  window: int | None = None
  full_layers: int = 0  # with a window: so many first layers have none

  def check(self):
    llama.Llama.check(self)
    llama.has_none(self, 'attention_bias', 'mlp_bias')  # q, k and v always have one, the others never
    llama.check_window(self.window)
    if not isinstance(self.full_layers, int) or self.full_layers < 0 or (self.full_layers and self.window is None):
      raise config.Error(f'full_layers={self.full_layers!r} with window={self.window}: a count of layers, for a window')

  def blocks(self):
    plain = llama.Llama.blocks(self)[0]
    of = lambda window: dataclasses.replace(
      plain, mixer=dataclasses.replace(plain.mixer, bias=('q', 'k', 'v'), window=window)
    )
    first = self.layers if self.window is None else min(self.full_layers, self.layers)
    return [of(None)] * first + [of(self.window)] * (self.layers - first)

  def rows(self):
    return llama.Llama.rows(self) + [row for row in llama.ATTENTION_BIAS if '.o.' not in row[0]]

  def hf_config(self):
    fields = llama.dense_fields(self)
    del fields['attention_bias']
    return {
      'architectures': [ARCHITECTURE],
      'model_type': MODEL_TYPE,
      **fields,
      'use_sliding_window': self.window is not None,
      'sliding_window': self.window,
      'max_window_layers': self.layers if self.window is None else self.full_layers,
    }


def from_hf(source):
  """config.json -> Qwen2."""
  fields = config_json.Fields(source)
  numbers = llama.dense(source)
  window, full = None, 0
  if fields.get('use_sliding_window', False, bool):  # without it, sliding_window says nothing
    window, full = fields.need('sliding_window', int), fields.need('max_window_layers')
  found = Qwen2(**numbers | dict(attention_bias=False, window=window, full_layers=full))
  found.check()
  fields.layer_types(['sliding_attention' if spec.mixer.window else 'full_attention' for spec in found.blocks()])
  return found


def _card(page, layers, d_model, d_ff, heads, kv_heads, *, head_dim=128, tied=False, context=32768, eps=1e-6):
  vocab = 151936 if tied else 152064
  return Qwen2(
    source=f'https://huggingface.co/Qwen/{page}', layers=layers, d_model=d_model, d_ff=d_ff, heads=heads,
    kv_heads=kv_heads, head_dim=head_dim, vocab=vocab, context=context, eps=eps, tied=tied,
  )  # fmt: skip


_SIZES = {
  '0.5B': dict(layers=24, d_model=896, d_ff=4864, heads=14, kv_heads=2, head_dim=64, tied=True),
  '1.5B': dict(layers=28, d_model=1536, d_ff=8960, heads=12, kv_heads=2, tied=True),
  '3B': dict(layers=36, d_model=2048, d_ff=11008, heads=16, kv_heads=2, tied=True),
  '7B': dict(layers=28, d_model=3584, d_ff=18944, heads=28, kv_heads=4),
  '14B': dict(layers=48, d_model=5120, d_ff=13824, heads=40, kv_heads=8),
  '32B': dict(layers=64, d_model=5120, d_ff=27648, heads=40, kv_heads=8),
  '72B': dict(layers=80, d_model=8192, d_ff=29568, heads=64, kv_heads=8),
}
_LONG = ('1.5B', '7B', '14B', '32B', '72B')  # base models that were published for 131072 positions
_COARSE = ('14B', '32B', '72B')  # and those with an eps of 1e-5
CARDS = {
  **{
    f'qwen2.5-{size.lower()}': _card(
      f'Qwen2.5-{size}', **numbers, context=131072 if size in _LONG else 32768, eps=1e-5 if size in _COARSE else 1e-6
    )
    for size, numbers in _SIZES.items()
  },
  **{
    f'qwen2.5-{size.lower()}-instruct': _card(f'Qwen2.5-{size}-Instruct', **numbers) for size, numbers in _SIZES.items()
  },
}
ALIASES: dict[str, str] = {}
