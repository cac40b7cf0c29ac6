"""Qwen 3.5, the text part: the layers of Qwen 3 Next under other names of tensors, with routed experts or dense.

Published directories are wrappers around a vision tower (model types qwen3_5_moe and qwen3_5). Positions of images have
three coordinates; those of text have the same one three times over, which is the plain rotation. Those directories
hold a layer's experts in two tensors, what transformers saves of the text model has three for each expert. Numbers are
those of the published config.json (`source`).
"""

import dataclasses

from maxtext_layers import config
from maxtext_layers import mlp
from maxtext_models import card
from maxtext_models import config_json
from maxtext_models.families import qwen3_next

KINDS = {'qwen3_5_moe_text': 'Qwen3_5MoeForCausalLM', 'qwen3_5_text': 'Qwen3_5ForCausalLM'}
TOWER = (r'model\.visual\..*',)
WRAPPERS = {
  'qwen3_5_moe': card.Wrapper(('Qwen3_5MoeForConditionalGeneration',), text='qwen3_5_moe_text', towers=TOWER),
  'qwen3_5': card.Wrapper(('Qwen3_5ForConditionalGeneration',), text='qwen3_5_text', towers=TOWER),
}


@config.config
class Qwen35Moe(qwen3_next.Qwen3Next):
  """Numbers of a Qwen 3.5 with experts."""

  apart: bool = False  # the files have tensors for each expert
  apart_ahead: bool = False  # the same in the module of multi-token prediction

  def check(self):
    qwen3_next.Qwen3Next.check(self)
    if not self.normalize:
      raise config.Error(f'normalize={self.normalize!r} is nothing that a Qwen 3.5 has')
    if self.d_ff != self.d_expert:
      raise config.Error(f'd_ff={self.d_ff} is not d_expert={self.d_expert}, though no layer is dense')

  def ffn_rows(self):
    return [*(qwen3_next.EXPERTS if self.apart else EXPERTS), *qwen3_next.ROUTED]

  def ffn_rows_ahead(self):
    return [*(qwen3_next.EXPERTS if self.apart_ahead else EXPERTS), *qwen3_next.ROUTED]

  def rows(self):
    return self.all_rows(SPLIT)

  def settled(self, tensors):
    found = [name for name in tensors if '.mlp.experts.0.' in name]
    ahead = any(name.startswith('mtp.') for name in found)
    apart = any(not name.startswith('mtp.') for name in found)
    return dataclasses.replace(qwen3_next.Hybrid.settled(self, tensors), apart=apart, apart_ahead=ahead)

  def hf_config(self):
    fields = {**qwen3_next.hybrid_fields(self), **qwen3_next.expert_fields(self)}
    return {**_kind('qwen3_5_moe_text'), **fields, 'mtp_num_hidden_layers': self.mtp}


@config.config
class Qwen35(qwen3_next.Hybrid):
  """Numbers of a dense Qwen 3.5."""

  def check(self):
    self.check_mixers()
    card.Card.check(self)

  def ffn(self):
    return mlp.Spec(self.d_ff)

  def ffn_rows(self):
    return DENSE

  def rows(self):
    return self.all_rows(SPLIT)

  def hf_config(self):
    fields = {**qwen3_next.hybrid_fields(self), 'intermediate_size': self.d_ff}
    return {**_kind('qwen3_5_text'), **fields, 'mtp_num_hidden_layers': self.mtp}


def _kind(model_type):
  return {'architectures': [KINDS[model_type]], 'model_type': model_type}


def from_hf(source):
  """config.json, or the text_config of a wrapper, -> Qwen35Moe or Qwen35."""
  return _READERS[source['model_type']](source)


def _read_moe(source):
  experts = qwen3_next.experts(source)
  return Qwen35Moe(
    **qwen3_next.hybrid(source),
    **experts,
    d_ff=experts['d_expert'],
    mtp=config_json.Fields(source).count('mtp_num_hidden_layers', 0),
  )


def _read_dense(source):
  fields = config_json.Fields(source)
  d_ff = fields.need('intermediate_size', int)
  return Qwen35(**qwen3_next.hybrid(source), d_ff=d_ff, mtp=fields.count('mtp_num_hidden_layers', 0))


_READERS = {'qwen3_5_moe_text': _read_moe, 'qwen3_5_text': _read_dense}
_LAYER, _MIXER, _FFN = 'model.layers.{l}.', 'layers.{l}.mixer.', 'layers.{l}.ffn.'
SPLIT = [  # projections of a delta net
  (
    (_MIXER + 'q', _MIXER + 'k', _MIXER + 'v'),
    _LAYER + 'linear_attn.in_proj_qkv.weight',
    ('(+ g h) d -> d g h', '(+ g h) d -> d g h', '(+ g r w) d -> d g r w'),
  ),
  (_MIXER + 'gate', _LAYER + 'linear_attn.in_proj_z.weight', '(g r w) d -> d g r w'),
  (_MIXER + 'beta', _LAYER + 'linear_attn.in_proj_b.weight', '(g r) d -> d g r'),
  (_MIXER + 'decay', _LAYER + 'linear_attn.in_proj_a.weight', '(g r) d -> d g r'),
]
EXPERTS = [
  (
    (_FFN + 'experts.gate', _FFN + 'experts.up'),
    _LAYER + 'mlp.experts.gate_up_proj',
    'e (two f) d -> two e d f',
  ),
  (_FFN + 'experts.down', _LAYER + 'mlp.experts.down_proj', 'e d f -> e f d'),
]
DENSE = [
  (_FFN + 'gate', _LAYER + 'mlp.gate_proj.weight', 'f d -> d f'),
  (_FFN + 'up', _LAYER + 'mlp.up_proj.weight', 'f d -> d f'),
  (_FFN + 'down', _LAYER + 'mlp.down_proj.weight', 'd f -> f d'),
]


def _moe(size, layers, d_model, heads, value_heads, experts, top_k, d_expert):
  return Qwen35Moe(
    source=f'https://huggingface.co/Qwen/Qwen3.5-{size}', layers=layers, d_model=d_model, d_ff=d_expert, heads=heads,
    kv_heads=2, head_dim=256, vocab=248320, context=262144, key_heads=16, value_heads=value_heads, experts=experts,
    top_k=top_k, d_expert=d_expert, d_shared=d_expert, mtp=1,
  )  # fmt: skip


def _dense(size, layers, d_model, d_ff, heads, kv_heads, value_heads, *, tied=False):
  return Qwen35(
    source=f'https://huggingface.co/Qwen/Qwen3.5-{size}', layers=layers, d_model=d_model, d_ff=d_ff, heads=heads,
    kv_heads=kv_heads, head_dim=256, vocab=248320, context=262144, tied=tied, key_heads=16, value_heads=value_heads,
    mtp=1,
  )  # fmt: skip


CARDS = {
  'qwen3.5-0.8b': _dense('0.8B', 24, 1024, 3584, 8, 2, 16, tied=True),
  'qwen3.5-2b': _dense('2B', 24, 2048, 6144, 8, 2, 16, tied=True),
  'qwen3.5-4b': _dense('4B', 32, 2560, 9216, 16, 4, 32, tied=True),
  'qwen3.5-9b': _dense('9B', 32, 4096, 12288, 16, 4, 32),
  'qwen3.5-27b': _dense('27B', 64, 5120, 17408, 24, 4, 48),
  'qwen3.5-35b-a3b': _moe('35B-A3B', 40, 2048, 16, 32, experts=256, top_k=8, d_expert=512),
  'qwen3.5-122b-a10b': _moe('122B-A10B', 48, 3072, 32, 64, experts=256, top_k=8, d_expert=1024),
  'qwen3.5-397b-a17b': _moe('397B-A17B', 60, 4096, 32, 64, experts=512, top_k=10, d_expert=1024),
}
TEXT_PARTS = tuple(CARDS)
ALIASES: dict[str, str] = {}
