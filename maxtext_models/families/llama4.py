"""Llama 4 Scout and Maverick, the text model (Meta's model card; no paper).

Three of four layers attend within chunks and turn neighbours; every fourth sees everything, does not turn, and raises
its queries' temperature with their position. A routed expert gets its input times the sigmoid of its logit, beside a
shared expert that everybody passes. Maverick has experts in every second layer, Scout in all.

Reading order: `Llama4`, `from_hf`, the tables, `CARDS`. Numbers are those of each model's published config.json.
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

MODEL_TYPE = 'llama4_text'
ARCHITECTURE = 'Llama4ForCausalLM'
WRAPPERS = {
  'llama4': card.Wrapper(
    architectures=('Llama4ForConditionalGeneration',),
    text=MODEL_TYPE,
    towers=(r'vision_model\..*', r'multi_modal_projector\..*'),
  )
}


@config.config
class Llama4(card.Mixture):
  """Numbers of a Llama 4. d_ff is that of layers without experts, d_expert also that of the shared expert."""

  top_k: int = 1
  routed_every: int = 1  # every so manyth layer has experts
  whole_every: int = 4  # every so manyth layer sees beyond its chunk, and does not turn
  chunk: int | None = 8192
  qk_norm: bool = True  # without a weight, after the rotation
  temperature: attention.Temperature | None = attention.Temperature(8192, 0.1)
  theta: float = 500000.0
  scaling: rope.Linear | rope.Llama3 | rope.Yarn | None = None
  attention_bias: bool = False  # on q, k, v and o

  def check(self):
    for name in ('routed_every', 'whole_every', 'chunk'):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise config.Error(f'{name}={value} is not positive')
    card.Mixture.check(self)

  def blocks(self):
    shape = (self.heads, self.kv_heads, self.head_dim)
    biases = ('q', 'k', 'v', 'o') if self.attention_bias else ()
    local = attention.Spec(
      *shape,
      rope.Spec(self.head_dim, self.theta, self.scaling, pairs='neighbours'),
      chunk=self.chunk,
      turned_norm=norm.Spec(self.eps, weight=False) if self.qk_norm else None,
      bias=biases,
    )
    whole = attention.Spec(*shape, None, temperature=self.temperature, bias=biases)
    dense = mlp.Spec(self.d_ff)
    routed = self.mixture({'score': 'sigmoid'}, shared=mlp.Spec(self.d_expert), weigh='input')
    every = lambda period, there, other: [other if (l + 1) % period else there for l in range(self.layers)]
    mixers, ffns = every(self.whole_every, whole, local), every(self.routed_every, routed, dense)
    return [block.Spec(mixer, ffn, norm.Spec(self.eps)) for mixer, ffn in zip(mixers, ffns)]

  def rows(self):
    return [
      *(row for row in llama.ROWS if '.mlp.' not in row[1]),
      *([] if self.tied else [llama.HEAD]),
      *(llama.ATTENTION_BIAS if self.attention_bias else []),
      *(DENSE if self.routed_every > 1 else []),
      *(ROUTED if self.routed_every <= self.layers else []),
    ]

  def hf_config(self):
    turns = _turns(self.layers, self.whole_every)
    return {
      'architectures': [ARCHITECTURE],
      'model_type': MODEL_TYPE,
      **config_json.shape_fields(self),
      'intermediate_size': self.d_expert,
      'intermediate_size_mlp': self.d_ff,
      'head_dim': self.head_dim,
      'hidden_act': 'silu',
      'attention_bias': self.attention_bias,
      'attention_dropout': 0.0,
      'num_local_experts': self.experts,
      'num_experts_per_tok': self.top_k,
      'interleave_moe_layer_step': self.routed_every,
      'moe_layers': _routed(self.layers, self.routed_every),
      'router_aux_loss_coef': self.balance_loss,
      'no_rope_layer_interval': self.whole_every,
      'no_rope_layers': turns,
      'layer_types': _kinds(turns, self.chunk),
      'attention_chunk_size': self.chunk,
      'use_qk_norm': self.qk_norm,
      'attn_temperature_tuning': self.temperature is not None,
      **({'floor_scale': self.temperature.floor, 'attn_scale': self.temperature.scale} if self.temperature else {}),
      **config_json.rope_fields(self.theta, self.scaling, self.context),
    }


def from_hf(source):
  """config.json -> Llama4."""
  fields = config_json.Fields(source)
  fields.absent('quantization_config')
  fields.only('hidden_act', 'silu')
  numbers = config_json.shape(fields)
  layers = numbers['layers']
  chunk = fields.get('attention_chunk_size', 8192, int) if source.get('attention_chunk_size', 8192) else None
  turns = fields.get('no_rope_layers', None, list) or None  # an empty list says nothing, either
  whole_every = _every('no_rope_layers', turns, layers, _turns, fields.get('no_rope_layer_interval', 4, int))
  routed = fields.get('moe_layers', None, list)
  kinds = _kinds(_turns(layers, whole_every), chunk)
  given = fields.get('layer_types', kinds, list)
  if wrong := [i for i, kind in enumerate(kinds) if i >= len(given) or given[i] != kind]:
    found = given[wrong[0]] if wrong[0] < len(given) else None
    raise config.Error(f'config.json: layer_types[{wrong[0]}]={found!r} does not go with no_rope_layers')
  tuned = fields.get('attn_temperature_tuning', True)  # true, or in files of 2025 a number that says as much
  floor, scale = fields.get('floor_scale', 8192, int), fields.get('attn_scale', 0.1, float)
  theta, scaling = config_json.rope_of(source)
  return Llama4(
    **numbers,
    d_ff=fields.need('intermediate_size_mlp', int),
    d_expert=fields.need('intermediate_size', int),
    kv_heads=fields.need('num_key_value_heads', int),
    head_dim=fields.get('head_dim', 128, int),
    experts=fields.need('num_local_experts', int),
    top_k=fields.get('num_experts_per_tok', 1, int),
    routed_every=_every('moe_layers', routed, layers, _routed, fields.get('interleave_moe_layer_step', 1, int)),
    balance_loss=mixtral.coefficient(fields),
    whole_every=whole_every,
    chunk=chunk,
    qk_norm=fields.get('use_qk_norm', True, bool),
    temperature=attention.Temperature(floor, float(scale)) if tuned else None,
    theta=theta,
    scaling=scaling,
    attention_bias=fields.get('attention_bias', False, bool),
  )


def _turns(layers, every):
  """1 for each layer that turns, as config.json writes it."""
  return [int((l + 1) % every != 0) for l in range(layers)]


def _routed(layers, every):
  """The layers with experts."""
  return list(range(every - 1, layers, every))


def _kinds(turns, chunk):
  return ['chunked_attention' if turn and chunk else 'full_attention' for turn in turns]


def _every(name, given, layers, rule, default):
  """The period that makes `rule` say what the field `name` does; `default` where that is absent."""
  if given is None:
    return default
  for every in (default, *range(1, layers + 2)):
    if rule(layers, every) == given:
      return every
  raise config.Error(f'config.json: {name}={given} is not supported: no period of layers makes it')


DENSE = [
  ('layers.{l}.ffn.gate', 'model.layers.{l}.feed_forward.gate_proj.weight', 'f d -> d f'),
  ('layers.{l}.ffn.up', 'model.layers.{l}.feed_forward.up_proj.weight', 'f d -> d f'),
  ('layers.{l}.ffn.down', 'model.layers.{l}.feed_forward.down_proj.weight', 'd f -> f d'),
]
ROUTED = [
  ('layers.{l}.ffn.router', 'model.layers.{l}.feed_forward.router.weight', 'e d -> d e'),
  (
    ('layers.{l}.ffn.experts.gate', 'layers.{l}.ffn.experts.up'),
    'model.layers.{l}.feed_forward.experts.gate_up_proj',
    'e d (two f) -> two e d f',
  ),
  ('layers.{l}.ffn.experts.down', 'model.layers.{l}.feed_forward.experts.down_proj', 'e f d -> e f d'),
  ('layers.{l}.ffn.shared.gate', 'model.layers.{l}.feed_forward.shared_expert.gate_proj.weight', 'f d -> d f'),
  ('layers.{l}.ffn.shared.up', 'model.layers.{l}.feed_forward.shared_expert.up_proj.weight', 'f d -> d f'),
  ('layers.{l}.ffn.shared.down', 'model.layers.{l}.feed_forward.shared_expert.down_proj.weight', 'd f -> f d'),
]


def _card(page, **numbers):
  return Llama4(
    source=f'https://huggingface.co/meta-llama/{page}', layers=48, d_model=5120, d_ff=16384, heads=40, kv_heads=8,
    head_dim=128, vocab=202048, eps=1e-5, d_expert=8192, **numbers,
  )  # fmt: skip


_SCOUT = dict(experts=16, scaling=rope.Llama3(factor=16.0, low=1.0, high=1.0, trained=8192))
_MAVERICK = dict(experts=128, routed_every=2, qk_norm=False)
CARDS = {
  'llama4-17b-16e': _card('Llama-4-Scout-17B-16E', context=262144, **_SCOUT),
  'llama4-17b-16e-instruct': _card('Llama-4-Scout-17B-16E-Instruct', context=10485760, **_SCOUT),
  'llama4-17b-128e': _card('Llama-4-Maverick-17B-128E', context=262144, **_MAVERICK),
  'llama4-17b-128e-instruct': _card('Llama-4-Maverick-17B-128E-Instruct', context=1048576, **_MAVERICK),
}
TEXT_PARTS = tuple(CARDS)
ALIASES = {
  'llama4-scout': 'llama4-17b-16e',
  'llama4-maverick': 'llama4-17b-128e',
}
