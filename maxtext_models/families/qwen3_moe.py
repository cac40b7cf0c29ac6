"""Qwen 3 with experts (arXiv 2505.09388) and Qwen3-Coder: Qwen 3's attention, and 8 of 128 or 160 experts a token.

Numbers are those of each model's published config.json (`source`): positions as for the dense sizes, 262144 for the
2507 and Coder ones. The weights of a token's experts are those of a softmax over all, renormalised.
"""

import dataclasses

from maxtext_layers import block
from maxtext_layers import config
from maxtext_layers import mlp
from maxtext_layers import norm
from maxtext_models import config_json
from maxtext_models.families import llama
from maxtext_models.families import mixtral
from maxtext_models.families import qwen3

MODEL_TYPE = 'qwen3_moe'
ARCHITECTURE = 'Qwen3MoeForCausalLM'


@config.config
class Qwen3Moe(mixtral.Mixtral):
  """Numbers of a Qwen 3 with experts. d_ff is for the layers without experts, of which no published size has any."""

  normalize: bool = True
  dense_layers: tuple[int, ...] = ()  # layers without experts, by index
  step: int = 1  # and of the others only every so manyth, the last of each run, has them

  def check_own(self):
    if self.step < 1:
      raise config.Error(f'step={self.step} is not positive')
    for layer in self.dense_layers:
      if isinstance(layer, bool) or not 0 <= layer < self.layers:
        raise config.Error(
          f'dense_layers={self.dense_layers} (mlp_only_layers): {layer!r} is none of {self.layers} layers'
        )

  def blocks(self):
    mixer = dataclasses.replace(self.mixer(), qk_norm=norm.Spec(self.eps))
    experts = self.mixture({'normalize': self.normalize}, activation=self.activation)
    dense = mlp.Spec(self.d_ff, self.activation)
    sparse = lambda layer: layer not in self.dense_layers and (layer + 1) % self.step == 0
    return [block.Spec(mixer, experts if sparse(i) else dense, norm.Spec(self.eps)) for i in range(self.layers)]

  def rows(self):
    kinds = {type(spec.ffn) for spec in self.blocks()}
    return [
      *mixtral.ATTENTION,
      *qwen3.QK_NORM,
      *([] if self.tied else [llama.HEAD]),
      *(llama.ATTENTION_BIAS if self.attention_bias else []),
      *(ROWS if kinds != {mlp.Spec} else []),
      *([row for row in llama.ROWS if '.ffn.' in row[0]] if mlp.Spec in kinds else []),
    ]

  def hf_config(self):
    return {
      'architectures': [ARCHITECTURE],
      'model_type': MODEL_TYPE,
      **llama.dense_fields(self),
      'use_sliding_window': self.window is not None,
      'sliding_window': self.window,
      'max_window_layers': self.layers,
      'num_experts': self.experts,
      'num_experts_per_tok': self.top_k,
      'moe_intermediate_size': self.d_expert,
      'norm_topk_prob': self.normalize,
      'mlp_only_layers': list(self.dense_layers),
      'decoder_sparse_step': self.step,
      'router_aux_loss_coef': self.balance_loss,
      'output_router_logits': False,
    }


def from_hf(source):
  """config.json -> Qwen3Moe."""
  fields = config_json.Fields(source)
  slides = fields.get('use_sliding_window', False, bool)  # if not, sliding_window says nothing
  dense_layers = fields.get('mlp_only_layers', [], list)
  if not all(isinstance(i, int) for i in dense_layers):
    raise config.Error(f'config.json: mlp_only_layers={dense_layers!r} is not a list of whole numbers')
  return Qwen3Moe(
    **llama.dense(
      {k: v for k, v in source.items() if k != 'sliding_window'},
      head_dim=fields.need('head_dim', int),
    ),
    d_expert=fields.need('moe_intermediate_size', int),
    experts=fields.need('num_experts' if source.get('num_local_experts') is None else 'num_local_experts', int),
    top_k=fields.need('num_experts_per_tok', int),
    window=fields.need('sliding_window', int) if slides else None,
    normalize=fields.need('norm_topk_prob', bool),
    dense_layers=tuple(dense_layers),
    step=fields.get('decoder_sparse_step', 1, int),
    balance_loss=mixtral.coefficient(fields),
  )


_MLP = 'model.layers.{l}.mlp.'
ROWS = [
  ('layers.{l}.ffn.router', _MLP + 'gate.weight', 'e d -> d e'),
  ('layers.{l}.ffn.experts.gate', _MLP + 'experts.{e}.gate_proj.weight', 'f d -> d f'),
  ('layers.{l}.ffn.experts.up', _MLP + 'experts.{e}.up_proj.weight', 'f d -> d f'),
  ('layers.{l}.ffn.experts.down', _MLP + 'experts.{e}.down_proj.weight', 'd f -> f d'),
]


def _card(page, numbers, *, context=40960, theta=1000000.0, **changed):
  shared = dict(head_dim=128, vocab=151936, eps=1e-6, top_k=8, balance_loss=0.001)
  return Qwen3Moe(
    source=f'https://huggingface.co/Qwen/{page}', context=context, theta=theta, **shared | numbers | changed
  )


_30B = dict(layers=48, d_model=2048, d_ff=6144, d_expert=768, heads=32, kv_heads=4, experts=128)
_235B = dict(layers=94, d_model=4096, d_ff=12288, d_expert=1536, heads=64, kv_heads=4, experts=128)
_480B = dict(layers=62, d_model=6144, d_ff=8192, d_expert=2560, heads=96, kv_heads=8, experts=160)
_LONG = dict(context=262144, theta=10000000.0)
_LONG_235B = dict(context=262144, theta=5000000.0)
CARDS = {
  'qwen3-30b-a3b': _card('Qwen3-30B-A3B', _30B),
  'qwen3-30b-a3b-base': _card('Qwen3-30B-A3B-Base', _30B, context=32768),
  'qwen3-30b-a3b-thinking-2507': _card('Qwen3-30B-A3B-Thinking-2507', _30B, **_LONG),
  'qwen3-30b-a3b-instruct-2507': _card('Qwen3-30B-A3B-Instruct-2507', _30B, **_LONG),
  'qwen3-235b-a22b': _card('Qwen3-235B-A22B', _235B),
  'qwen3-235b-a22b-thinking-2507': _card('Qwen3-235B-A22B-Thinking-2507', _235B, **_LONG_235B),
  'qwen3-235b-a22b-instruct-2507': _card('Qwen3-235B-A22B-Instruct-2507', _235B, **_LONG_235B),
  'qwen3-coder-30b-a3b': _card('Qwen3-Coder-30B-A3B-Instruct', _30B, d_ff=5472, **_LONG),
  'qwen3-coder-480b-a35b': _card('Qwen3-Coder-480B-A35B-Instruct', _480B, **_LONG),
  'qwen3-vl-30b-a3b': _card('Qwen3-VL-30B-A3B-Instruct', _30B, **_LONG_235B),
  'qwen3-omni-30b-a3b': _card('Qwen3-Omni-30B-A3B-Instruct', _30B, context=65536, vocab=152064),
}
TEXT_PARTS = ('qwen3-vl-30b-a3b', 'qwen3-omni-30b-a3b')
ALIASES = {
  'qwen3-480b-a35b': 'qwen3-coder-480b-a35b',
  'qwen3-coder-30b-a3b-instruct': 'qwen3-coder-30b-a3b',
  'qwen3-coder-480b-a35b-instruct': 'qwen3-coder-480b-a35b',
}
