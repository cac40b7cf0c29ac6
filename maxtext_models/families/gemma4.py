"""Gemma 4, text: 31B dense, 26B-A4B with experts beside a dense layer, E2B and E4B with per-layer inputs.

A few layers with a window, then one that sees everything, with wider heads of which the fast quarter turns and whose
values are, in the larger models, the keys before their norm. Queries, keys and values are normed, scores are not
scaled. In the small models the last layers read keys and values of the last layer of their kind before them, and every
layer gets an input of its own. There is no paper; numbers are those of each model's published config.json (`source`),
equations those of `transformers` 5.24.

Reading order: `Gemma4`, `from_hf`, the tables, `CARDS`.
"""

from maxtext_layers import attention
from maxtext_layers import beside
from maxtext_layers import block
from maxtext_layers import config
from maxtext_layers import mlp
from maxtext_layers import moe
from maxtext_layers import norm
from maxtext_layers import per_layer
from maxtext_layers import residual
from maxtext_layers import rope
from maxtext_layers import router
from maxtext_models import card
from maxtext_models import config_json
from maxtext_models.families import gemma
from maxtext_models.families import gemma2
from maxtext_models.families import llama

MODEL_TYPE = 'gemma4_text'
ARCHITECTURE = 'Gemma4ForCausalLM'
WRAPPERS = {
  'gemma4': card.Wrapper(
    architectures=('Gemma4ForConditionalGeneration',),
    text=MODEL_TYPE,
    towers=(r'(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\..*',),
  )
}


@config.config
class Gemma4(card.Card):
  """Numbers of the text part of a Gemma 4. `head_dim` and `kv_heads` are those of layers with a window."""

  tied: bool = True
  window: int
  full_every: int = 6  # every so manyth layer sees everything, and the last
  full_head_dim: int = 512
  full_kv_heads: int
  tied_values: bool = False  # values of full layers are their keys
  theta: float = 1000000.0  # of full layers
  scaling: rope.Linear | rope.Llama3 | rope.Yarn | rope.Proportional | None = rope.Proportional(0.25)
  local_theta: float = 10000.0
  logit_cap: float | None = 30.0
  shared_layers: int = 0  # so many last layers read keys and values of a layer before them
  wide: bool = False  # and have feed-forward layers of 2 * d_ff
  layer_input: int | None = None  # size of what each layer is given
  layer_vocab: int = 262144  # rows of its table
  experts: int | None = None
  top_k: int | None = None
  d_expert: int | None = None

  def check(self):
    card.Card.check(self)
    llama.check_window(self.window)
    for name in ('full_every', 'full_head_dim', 'full_kv_heads', 'layer_vocab'):
      if not isinstance(value := getattr(self, name), int) or value < 1:
        raise config.Error(f'{name}={value!r} is not a positive whole number')
    if self.heads % self.full_kv_heads:
      raise config.Error(f'heads={self.heads} is no multiple of full_kv_heads={self.full_kv_heads}')
    if self.full_kv_heads != self.kv_heads and not self.tied_values:
      raise config.Error(f'full_kv_heads={self.full_kv_heads} without tied_values is nothing that a Gemma4 has')
    if self.shared_layers and set(self._full()[: self.layers - self.shared_layers]) != set(self._full()):
      raise config.Error(f'shared_layers={self.shared_layers} leaves no layer of each kind to read from')
    if len({value is None for value in (self.experts, self.top_k, self.d_expert)}) > 1:
      raise config.Error(f'experts={self.experts}, top_k={self.top_k}, d_expert={self.d_expert}: all or none')
    for name in ('theta', 'local_theta', 'logit_cap'):
      if (value := getattr(self, name)) is not None and (not isinstance(value, float) or value <= 0):
        raise config.Error(f'{name}={value!r} is not positive')

  def embed_scale(self):
    return self.d_model**0.5

  def final_cap(self):
    return self.logit_cap

  def layer_inputs(self):
    if self.layer_input is None:
      return None
    return per_layer.Inputs(self.layer_vocab, self.layers, self.layer_input, norm.Spec(self.eps))

  def blocks(self):
    full, own = self._full(), self.layers - self.shared_layers
    last = {kind: max(i for i in range(own) if full[i] == kind) for kind in set(full)} if self.shared_layers else {}
    return [self._block(kind, keeps=last.get(kind) == layer, shares=layer >= own) for layer, kind in enumerate(full)]

  def _block(self, full, keeps, shares):
    plain = norm.Spec(self.eps)
    name = 'full' if full else 'sliding'
    head_dim, kv_heads = (self.full_head_dim, self.full_kv_heads) if full else (self.head_dim, self.kv_heads)
    turn = rope.Spec(head_dim, self.theta, self.scaling) if full else rope.Spec(head_dim, self.local_theta)
    mixer = attention.Spec(
      self.heads, kv_heads, head_dim, turn,
      window=None if full else self.window,
      qk_norm=plain,
      value_norm=norm.Spec(self.eps, weight=False),
      tied_values=full and self.tied_values,
      keep=name if keeps else None,
      reuse=name if shares else None,
      scale=1.0,
    )  # fmt: skip
    ffn: mlp.Spec | beside.Spec
    ffn = dense = mlp.Spec(2 * self.d_ff if shares and self.wide else self.d_ff, 'gelu')
    if self.experts:
      choice = router.Spec(self.experts, self.top_k, normalize=True)
      ffn = beside.Spec(dense, moe.Spec(choice, self.d_expert, activation='gelu'), plain)
    around = residual.sandwich(plain)
    return block.Spec(
      mixer, ffn, (around, residual.Spec(None, plain)) if self.experts else around,
      given=per_layer.Spec(self.layer_input, plain) if self.layer_input else None,
      scaled=True,
    )  # fmt: skip

  def _full(self):
    """Whether each layer sees everything."""
    return [kind == 'full_attention' for kind in _kinds(self.layers, self.full_every)]

  def rows(self):
    dense = [(ours.replace('ffn.', 'ffn.dense.'), theirs, pattern) for ours, theirs, pattern in MLP]
    before = [('layers.{l}.ffn.dense_norm', *NORM[0][1:])]
    return [
      *(row for row in gemma2.ROWS if '.mlp.' not in row[1] and 'ffn_norm' not in row[0]),
      *([] if self.tied else [llama.HEAD]),
      *ATTENTION,
      *(before + dense + EXPERTS if self.experts else NORM + MLP),
      *(GIVEN if self.layer_input else []),
    ]

  def passed_over(self):
    shared = '|'.join(map(str, range(self.layers - self.shared_layers, self.layers)))
    names = r'\.self_attn\.(k_proj|v_proj|k_norm)\.weight'
    return (rf'model\.layers\.({shared}){names}',) if shared else ()  # published, though nothing reads them

  def hf_config(self):
    return {
      'architectures': [ARCHITECTURE],
      'model_type': MODEL_TYPE,
      **gemma.numbers_fields(self),
      'max_position_embeddings': self.context,
      'global_head_dim': self.full_head_dim,
      'num_global_key_value_heads': self.full_kv_heads if self.tied_values else None,
      'attention_k_eq_v': self.tied_values,
      'sliding_window': self.window,
      'layer_types': _kinds(self.layers, self.full_every),
      'rope_parameters': config_json.rope_fields_by_kind(
        self.theta, self.scaling, self.local_theta, self.context, local='rope_local_base_freq'
      )['rope_parameters'],
      'final_logit_softcapping': self.logit_cap,
      'num_kv_shared_layers': self.shared_layers,
      'use_double_wide_mlp': self.wide,
      'hidden_size_per_layer_input': self.layer_input or 0,
      'vocab_size_per_layer_input': self.layer_vocab,
      'enable_moe_block': self.experts is not None,
      'num_experts': self.experts,
      'top_k_experts': self.top_k,
      'moe_intermediate_size': self.d_expert,
      'use_bidirectional_attention': None,
    }


def from_hf(source):
  """config.json -> Gemma4."""
  fields = config_json.Fields(source)
  fields.only('hidden_activation', gemma.ACTIVATIONS[0])
  numbers = gemma.numbers(fields, bidirectional=(None, 'vision'))  # among images alone
  theta, scaling, local = config_json.rope_by_kind({'rope_parameters': source.get('rope_parameters') or ROPE}, local='')
  tied_values, experts = fields.get('attention_k_eq_v', False, bool), fields.get('enable_moe_block', False, bool)
  every = _full_every(source.get('layer_types'), numbers['layers'])
  head_dim, kv_heads = _full_heads(source, fields, _kinds(numbers['layers'], every), numbers, tied_values)
  size = source.get('hidden_size_per_layer_input', 256)
  return Gemma4(
    **numbers,
    window=fields.need('sliding_window', int),
    full_every=every,
    full_head_dim=head_dim,
    full_kv_heads=kv_heads,
    tied_values=tied_values,
    theta=theta,
    scaling=scaling,
    local_theta=local,
    logit_cap=fields.get('final_logit_softcapping', None, float),
    shared_layers=source.get('num_kv_shared_layers') or 0,
    wide=fields.get('use_double_wide_mlp', False, bool),
    layer_input=fields.get('hidden_size_per_layer_input', 256, int) if size else None,
    layer_vocab=fields.get('vocab_size_per_layer_input', 262144, int),
    experts=fields.need('num_experts', int) if experts else None,
    top_k=fields.need('top_k_experts', int) if experts else None,
    d_expert=fields.need('moe_intermediate_size', int) if experts else None,
  )


# what Gemma4TextConfig documents for a file without rope_parameters
ROPE = {
  'full_attention': {'rope_type': 'proportional', 'partial_rotary_factor': 0.25, 'rope_theta': 1000000.0},
  'sliding_attention': {'rope_type': 'default', 'rope_theta': 10000.0},
}


def _kinds(layers, every):
  """layer_types: every n-th layer sees everything, and the last."""
  return config_json.layer_types(layers, every)[:-1] + ['full_attention']


def _full_every(given, layers):
  for every in (6, *range(1, layers + 1)):
    if given is None or given == _kinds(layers, every):
      return every
  raise config.Error(
    "config.json: layer_types is not supported; known: 'full_attention' for every n-th layer and the last, "
    "'sliding_attention' for the others"
  )


def _full_heads(source, fields, kinds, numbers, tied_values):
  """(head_dim, kv_heads) of full layers: fields of their own, as published, or per_layer_config, as saved since."""
  if (each := source.get('per_layer_config')) is None:
    kv_heads = (
      fields.get('num_global_key_value_heads', numbers['kv_heads'], int) if tied_values else numbers['kv_heads']
    )
    return fields.get('global_head_dim', 512, int), kv_heads
  found = {'full_attention': set(), 'sliding_attention': set()}
  for layer, kind in enumerate(kinds):
    own = each.get(str(layer), {})
    found[kind].add((own.get('head_dim', numbers['head_dim']), own.get('num_key_value_heads', numbers['kv_heads'])))
  if len(found['full_attention']) > 1 or found['sliding_attention'] - {(numbers['head_dim'], numbers['kv_heads'])}:
    raise config.Error('config.json: per_layer_config is not supported where layers of one kind differ')
  return found['full_attention'].pop()


ATTENTION = [
  ('layers.{l}.mixer.q_norm', 'model.layers.{l}.self_attn.q_norm.weight', 'h -> h'),
  ('layers.{l}.mixer.k_norm', 'model.layers.{l}.self_attn.k_norm.weight', 'h -> h'),
  ('layers.{l}.scale', 'model.layers.{l}.layer_scalar', 'one -> one'),
]
NORM = [('layers.{l}.ffn_norm', 'model.layers.{l}.pre_feedforward_layernorm.weight', 'd -> d')]
MLP = [row for row in llama.ROWS if '.mlp.' in row[1]]
EXPERTS = [
  ('layers.{l}.ffn.dense_out', 'model.layers.{l}.post_feedforward_layernorm_1.weight', 'd -> d'),
  ('layers.{l}.ffn.router_norm', 'model.layers.{l}.router.scale', 'd -> d'),
  ('layers.{l}.ffn.router', 'model.layers.{l}.router.proj.weight', 'e d -> d e'),
  ('layers.{l}.ffn.expert_scale', 'model.layers.{l}.router.per_expert_scale', 'e -> e'),
  ('layers.{l}.ffn.experts_norm', 'model.layers.{l}.pre_feedforward_layernorm_2.weight', 'd -> d'),
  (
    ('layers.{l}.ffn.experts.gate', 'layers.{l}.ffn.experts.up'),
    'model.layers.{l}.experts.gate_up_proj',
    'e (two f) d -> two e d f',
  ),
  ('layers.{l}.ffn.experts.down', 'model.layers.{l}.experts.down_proj', 'e d f -> e f d'),
  ('layers.{l}.ffn.experts_out', 'model.layers.{l}.post_feedforward_layernorm_2.weight', 'd -> d'),
]
GIVEN = [
  ('inputs.embed', 'model.embed_tokens_per_layer.weight', 'u p -> u p'),
  ('inputs.project', 'model.per_layer_model_projection.weight', '(l p) d -> d l p'),
  ('inputs.norm', 'model.per_layer_projection_norm.weight', 'p -> p'),
  ('layers.{l}.given.gate', 'model.layers.{l}.per_layer_input_gate.weight', 'p d -> d p'),
  ('layers.{l}.given.out', 'model.layers.{l}.per_layer_projection.weight', 'd p -> p d'),
  ('layers.{l}.given.norm', 'model.layers.{l}.post_per_layer_input_norm.weight', 'd -> d'),
]


def _card(page, layers, d_model, d_ff, heads, kv_heads, **numbers):
  numbers = dict(full_kv_heads=kv_heads, context=131072, window=512) | numbers
  return Gemma4(
    source=f'https://huggingface.co/google/{page}', layers=layers, d_model=d_model, d_ff=d_ff, heads=heads,
    kv_heads=kv_heads, head_dim=256, vocab=262144, **numbers,
  )  # fmt: skip


_LARGE = dict(context=262144, window=1024, tied_values=True)
CARDS = {
  'gemma4-e2b': _card('gemma-4-E2B', 35, 1536, 6144, 8, 1, full_every=5, shared_layers=20, wide=True, layer_input=256),
  'gemma4-e4b': _card('gemma-4-E4B', 42, 2560, 10240, 8, 2, shared_layers=18, layer_input=256),
  'gemma4-26b': _card(
    'gemma-4-26B-A4B', 30, 2816, 2112, 16, 8, **_LARGE, full_kv_heads=2, experts=128, top_k=8, d_expert=704
  ),
  'gemma4-31b': _card('gemma-4-31B', 60, 5376, 21504, 32, 16, **_LARGE, full_kv_heads=4),
}
TEXT_PARTS = tuple(CARDS)
ALIASES = {
  **{f'{c.source.rsplit("/", 1)[-1].lower()}-it': name for name, c in CARDS.items()},
  'gemma4-26b-a4b': 'gemma4-26b',
}
