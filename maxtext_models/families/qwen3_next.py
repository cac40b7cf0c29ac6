"""Qwen 3 Next: three gated delta nets (arXiv 2412.06464), then one attention whose output is gated (arXiv 2505.06708),
and so on; every layer has routed experts and a shared one behind a gate.

Norms store their weight as a difference from one, but for the one inside a delta net. A quarter of each attention head
carries positions. Numbers are those of the published config.json (`source`).
"""

import abc
import dataclasses

from maxtext_layers import ahead
from maxtext_layers import attention
from maxtext_layers import block
from maxtext_layers import config
from maxtext_layers import delta
from maxtext_layers import mlp
from maxtext_layers import norm
from maxtext_layers import rope
from maxtext_models import card
from maxtext_models import config_json
from maxtext_models.families import llama
from maxtext_models.families import mixtral

MODEL_TYPE = 'qwen3_next'
ARCHITECTURE = 'Qwen3NextForCausalLM'


@dataclasses.dataclass(kw_only=True)
class Hybrid(card.Card):
  """What cards of these mixers have in common, with experts or without.

  It adds no slots to those of a card, so that a class may have it and card.Mixture as bases.
  """

  __slots__ = ()
  theta: float = 10000000.0
  scaling: rope.Linear | rope.Yarn | None = None
  rotary: float = 0.25  # the share of a head that turns
  full_every: int = 4  # every so manyth layer is attention, the others are delta nets
  key_heads: int  # of a delta net, like the next three
  value_heads: int
  key_dim: int = 128
  value_dim: int = 128
  taps: int = 4  # of its convolution
  mtp: int = 0  # modules of multi-token prediction: one, whose mixer is attention, or none

  def check_mixers(self):
    """Raises config.Error naming the field and its value."""
    self.whole('full_every', 'key_heads', 'value_heads', 'key_dim', 'value_dim', 'taps')
    if self.value_heads % self.key_heads:
      raise config.Error(f'value_heads={self.value_heads} is no multiple of key_heads={self.key_heads}')
    turned = self.head_dim * self.rotary
    if not 0 < self.rotary <= 1 or turned != int(turned) or turned % 2:
      raise config.Error(
        f'rotary={self.rotary!r} (partial_rotary_factor) of head_dim={self.head_dim} is {turned:g} elements, '
        'which is no even whole number'
      )
    if self.mtp not in (0, 1):
      raise config.Error(f'mtp={self.mtp!r} is neither 0 nor 1')

  def full(self):
    """The layers that are attention."""
    return [l for l in range(self.layers) if (l + 1) % self.full_every == 0]

  @abc.abstractmethod
  def ffn(self):
    """What follows the mixer in every layer."""

  def final_norm(self):
    return norm.Spec(self.eps, offset=1.0)

  @abc.abstractmethod
  def ffn_rows(self):
    """Rows of what follows the mixer."""

  def ffn_rows_ahead(self):
    """The same in the module of multi-token prediction."""
    return self.ffn_rows()

  def blocks(self):
    full = self.full()
    return [self._block(l in full) for l in range(self.layers)]

  def ahead(self):
    return [ahead.Spec(self._block(True), self.final_norm())] * self.mtp

  def _block(self, full):
    near = self.final_norm()
    turn = rope.Spec(self.head_dim, self.theta, self.scaling, rotary=int(self.head_dim * self.rotary))
    mixer = (
      attention.Spec(self.heads, self.kv_heads, self.head_dim, turn, qk_norm=near, gate=True)
      if full
      else delta.Spec(
        self.key_heads, self.value_heads, self.key_dim, self.value_dim, norm.Spec(self.eps), taps=self.taps
      )
    )
    return block.Spec(mixer, self.ffn(), near)

  def all_rows(self, projections):
    """All rows; `projections` are those of a delta net."""
    full = self.full()
    nets = [l for l in range(self.layers) if l not in full]
    head = [] if self.tied else [llama.HEAD]
    rows = [*TABLES, *head, *NORMS, *_at(full, ATTENTION), *_at(nets, [*DELTA, *projections]), *self.ffn_rows()]
    if self.mtp:
      rows += [*AHEAD, *card.moved([*NORMS, *ATTENTION, *self.ffn_rows_ahead()], 'ahead.0.block.', 'mtp.layers.0.')]
    return rows

  def settled(self, tensors):
    """Directories are published with the module of multi-token prediction, and saved again without."""
    return dataclasses.replace(self, mtp=int(any(name.startswith('mtp.') for name in tensors)))


@config.config
class Qwen3Next(Hybrid, card.Mixture):
  """Numbers of a Qwen 3 Next; `d_ff` is published, though no layer is dense."""

  d_shared: int
  normalize: bool = True  # weights of the chosen experts add up to 1

  def check(self):
    self.check_mixers()
    card.Mixture.check(self)
    self.whole('d_shared')

  def ffn(self):
    return self.mixture({'normalize': self.normalize}, shared=mlp.Spec(self.d_shared), shared_gate=True)

  def ffn_rows(self):
    return [*EXPERTS, *ROUTED]

  def rows(self):
    return self.all_rows(FUSED)

  def hf_config(self):
    return {
      'architectures': [ARCHITECTURE],
      'model_type': MODEL_TYPE,
      **hybrid_fields(self),
      **expert_fields(self),
      'intermediate_size': self.d_ff,
      'norm_topk_prob': self.normalize,
      'num_nextn_predict_layers': self.mtp,
      'decoder_sparse_step': 1,
      'mlp_only_layers': [],
    }


def from_hf(source):
  """config.json -> Qwen3Next."""
  fields = config_json.Fields(source)
  fields.only('decoder_sparse_step', 1)
  fields.absent('mlp_only_layers')
  return Qwen3Next(
    **hybrid(source),
    **experts(source),
    d_ff=fields.need('intermediate_size', int),
    normalize=fields.get('norm_topk_prob', True, bool),
    mtp=fields.count('num_nextn_predict_layers', 0),
  )


def hybrid(source):
  """What config.json says of any decoder of these mixers, as arguments of its card."""
  fields = config_json.Fields(source)
  fields.absent('quantization_config', 'attention_bias')
  fields.only('hidden_act', 'silu')
  theta, scaling, rotary = _turning(source)
  numbers = config_json.shape(fields)
  return dict(
    **numbers,
    kv_heads=fields.need('num_key_value_heads', int),
    head_dim=fields.need('head_dim', int),
    theta=theta,
    scaling=scaling,
    rotary=rotary,
    full_every=_full_every(source, numbers['layers']),
    key_heads=fields.need('linear_num_key_heads', int),
    value_heads=fields.need('linear_num_value_heads', int),
    key_dim=fields.need('linear_key_head_dim', int),
    value_dim=fields.need('linear_value_head_dim', int),
    taps=fields.need('linear_conv_kernel_dim', int),
  )


def hybrid_fields(c):
  """The inverse of `hybrid`."""
  turning = config_json.rope_fields(c.theta, c.scaling, c.context)
  turning['rope_parameters']['partial_rotary_factor'] = c.rotary
  return {
    **config_json.shape_fields(c),
    'head_dim': c.head_dim,
    'hidden_act': 'silu',
    'attention_bias': False,
    'attention_dropout': 0.0,
    'layer_types': ['full_attention' if l in c.full() else 'linear_attention' for l in range(c.layers)],
    'full_attention_interval': c.full_every,
    'linear_num_key_heads': c.key_heads,
    'linear_num_value_heads': c.value_heads,
    'linear_key_head_dim': c.key_dim,
    'linear_value_head_dim': c.value_dim,
    'linear_conv_kernel_dim': c.taps,
    'partial_rotary_factor': c.rotary,
    **turning,
  }


def experts(source):
  """What config.json says of the experts, as arguments of a card."""
  fields = config_json.Fields(source)
  return dict(
    experts=fields.need('num_experts', int),
    top_k=fields.need('num_experts_per_tok', int),
    d_expert=fields.need('moe_intermediate_size', int),
    d_shared=fields.need('shared_expert_intermediate_size', int),
    balance_loss=mixtral.coefficient(fields),
  )


def expert_fields(c):
  """The inverse of `experts`."""
  return {
    'num_experts': c.experts,
    'num_experts_per_tok': c.top_k,
    'moe_intermediate_size': c.d_expert,
    'shared_expert_intermediate_size': c.d_shared,
    'router_aux_loss_coef': c.balance_loss,
    'output_router_logits': False,
  }


def _turning(source):
  """(theta, scaling, share of a head that turns) of a config.json."""
  share = lambda form: config_json.Fields(form).get('partial_rotary_factor', None, float)
  shares = {'partial_rotary_factor': share(source)}
  forms = {}
  for where in ('rope_parameters', 'rope_scaling'):
    form = source.get(where)
    if isinstance(form, dict):
      shares[f'{where}.partial_rotary_factor'] = share(form)
      # how positions of images are mixed: text has the same position three times over
      form = {k: v for k, v in form.items() if k not in ('partial_rotary_factor', 'mrope_section', 'mrope_interleaved')}
    forms[where] = form
  shares = {where: share for where, share in shares.items() if share is not None}
  if len(set(shares.values())) > 1:
    raise config.Error('config.json contradicts itself: ' + ', '.join(f'{k}={v}' for k, v in shares.items()))
  theta, scaling = config_json.rope_of({'rope_theta': source.get('rope_theta'), **forms})
  return theta, scaling, float(next(iter(shares.values()), 0.25))  # 0.25 where it is left out, as Hugging Face has it


def _full_every(source, layers):
  """Every how manyth layer is attention."""
  fields = config_json.Fields(source)
  every, kinds = fields.get('full_attention_interval', 4, int), fields.get('layer_types', None, list)
  if kinds is None:
    return every
  for kind in kinds:
    if kind not in ('linear_attention', 'full_attention'):
      raise config.Error(
        f'config.json: layer_types holds {kind!r}, which is not supported; known: linear_attention, full_attention'
      )
  first = kinds.index('full_attention') + 1 if 'full_attention' in kinds else layers + 1
  if kinds != ['linear_attention' if (l + 1) % first else 'full_attention' for l in range(layers)]:
    raise config.Error('config.json: layer_types is not supported where full_attention comes at no fixed interval')
  return first


def _at(layers, rows):
  """Rows of these layers only: mixers of different kinds have parameters of the same names."""
  return [row for l in layers for row in card.moved(rows, f'layers.{l}.', f'model.layers.{l}.')]


_LAYER, _MIXER, _FFN = 'model.layers.{l}.', 'layers.{l}.mixer.', 'layers.{l}.ffn.'
TABLES = [
  ('embed', 'model.embed_tokens.weight', 'v d -> v d'),
  ('norm', 'model.norm.weight', 'd -> d'),
]
NORMS = [
  ('layers.{l}.mixer_norm', _LAYER + 'input_layernorm.weight', 'd -> d'),
  ('layers.{l}.ffn_norm', _LAYER + 'post_attention_layernorm.weight', 'd -> d'),
]
ATTENTION = [
  ((_MIXER + 'q', _MIXER + 'gate'), _LAYER + 'self_attn.q_proj.weight', '(n two h) d -> two d n h'),
  (_MIXER + 'k', _LAYER + 'self_attn.k_proj.weight', '(n h) d -> d n h'),
  (_MIXER + 'v', _LAYER + 'self_attn.v_proj.weight', '(n h) d -> d n h'),
  (_MIXER + 'o', _LAYER + 'self_attn.o_proj.weight', 'd (n h) -> n h d'),
  (_MIXER + 'q_norm', _LAYER + 'self_attn.q_norm.weight', 'h -> h'),
  (_MIXER + 'k_norm', _LAYER + 'self_attn.k_norm.weight', 'h -> h'),
]
DELTA = [
  (
    (_MIXER + 'conv_q', _MIXER + 'conv_k', _MIXER + 'conv_v'),
    _LAYER + 'linear_attn.conv1d.weight',
    ('(+ g h) () c -> g h c', '(+ g h) () c -> g h c', '(+ g r w) () c -> g r w c'),
  ),
  (_MIXER + 'a_log', _LAYER + 'linear_attn.A_log', '(g r) -> g r'),
  (_MIXER + 'dt_bias', _LAYER + 'linear_attn.dt_bias', '(g r) -> g r'),
  (_MIXER + 'norm', _LAYER + 'linear_attn.norm.weight', 'w -> w'),
  (_MIXER + 'o', _LAYER + 'linear_attn.out_proj.weight', 'd (g r w) -> g r w d'),
]
FUSED = [  # within each group of heads side by side
  (
    (_MIXER + 'q', _MIXER + 'k', _MIXER + 'v', _MIXER + 'gate'),
    _LAYER + 'linear_attn.in_proj_qkvz.weight',
    ('(g + h) d -> d g h', '(g + h) d -> d g h', '(g + r w) d -> d g r w', '(g + r w) d -> d g r w'),
  ),
  (
    (_MIXER + 'beta', _MIXER + 'decay'),
    _LAYER + 'linear_attn.in_proj_ba.weight',
    ('(g + r) d -> d g r', '(g + r) d -> d g r'),
  ),
]
ROUTED = [
  (_FFN + 'router', _LAYER + 'mlp.gate.weight', 'e d -> d e'),
  (_FFN + 'shared.gate', _LAYER + 'mlp.shared_expert.gate_proj.weight', 'f d -> d f'),
  (_FFN + 'shared.up', _LAYER + 'mlp.shared_expert.up_proj.weight', 'f d -> d f'),
  (_FFN + 'shared.down', _LAYER + 'mlp.shared_expert.down_proj.weight', 'd f -> f d'),
  (_FFN + 'shared_gate', _LAYER + 'mlp.shared_expert_gate.weight', 'one d -> d one'),
]
EXPERTS = [
  (_FFN + 'experts.gate', _LAYER + 'mlp.experts.{e}.gate_proj.weight', 'f d -> d f'),
  (_FFN + 'experts.up', _LAYER + 'mlp.experts.{e}.up_proj.weight', 'f d -> d f'),
  (_FFN + 'experts.down', _LAYER + 'mlp.experts.{e}.down_proj.weight', 'd f -> f d'),
]
AHEAD = [
  ('ahead.0.embed_norm', 'mtp.pre_fc_norm_embedding.weight', 'd -> d'),
  ('ahead.0.hidden_norm', 'mtp.pre_fc_norm_hidden.weight', 'd -> d'),
  ('ahead.0.merge', 'mtp.fc.weight', 'd e -> e d'),
  ('ahead.0.norm', 'mtp.norm.weight', 'd -> d'),
]

CARDS = {
  'qwen3-next-80b-a3b': Qwen3Next(
    source='https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct', layers=48, d_model=2048, d_ff=5120, heads=16,
    kv_heads=2, head_dim=256, vocab=151936, context=262144, key_heads=16, value_heads=32, experts=512, top_k=10,
    d_expert=512, d_shared=512, mtp=1,
  ),
}  # fmt: skip
ALIASES = {'qwen3-next-80b-a3b-thinking': 'qwen3-next-80b-a3b'}
