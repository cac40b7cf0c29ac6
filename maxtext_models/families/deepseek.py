"""DeepSeek V2 (arXiv 2405.04434), V3 and V3.1 (arXiv 2412.19437) and R1 (arXiv 2501.12948).

Latent attention; the first layers dense, all others with shared and routed experts. V2 scores experts by a softmax and
picks from groups by their best one, V3 by sigmoids with a bias that selects only, and groups by their two best.
Numbers are those of each model's published config.json (`source`). kimi.py has further models of this class.
"""

import dataclasses

from maxtext_layers import ahead
from maxtext_layers import block
from maxtext_layers import config
from maxtext_layers import mla
from maxtext_layers import mlp
from maxtext_layers import moe
from maxtext_layers import norm
from maxtext_layers import rope
from maxtext_layers import router
from maxtext_models import card
from maxtext_models import config_json

KINDS = {'deepseek_v2': 'DeepseekV2ForCausalLM', 'deepseek_v3': 'DeepseekV3ForCausalLM'}
LATENT_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps is
SCORES = {'deepseek_v2': 'softmax', 'deepseek_v3': 'sigmoid'}


@config.config
class DeepSeek(card.Mixture):
  """Numbers of a DeepSeek. heads are those of queries, keys and values alike; head_dim = nope_dim + rope_dim.

  balance_loss counts as in the papers, for each layer and over each sequence (V3, section 4.2).
  """

  dense_layers: int  # the first ones; d_ff is theirs
  q_rank: int | None
  kv_rank: int
  nope_dim: int
  rope_dim: int
  value_dim: int
  shared: int  # shared experts, held as one of shared * d_expert
  score: str  # softmax (V2) or sigmoid, with a selection bias (V3)
  groups: int = 1
  top_groups: int = 1
  normalize: bool = True  # the weights of the chosen
  route_scale: float = 1.0
  theta: float = 10000.0
  scaling: rope.Yarn | None = None
  pairs: str = 'neighbours'
  attention_bias: bool = False  # of q_down, kv_down and o
  balance_loss: float = 0.0001
  balance_scope: str = 'sequence'
  mtp: int = 0  # modules of multi-token prediction, each with a block like the last one

  def check(self):
    self.whole('kv_rank', 'nope_dim', 'rope_dim', 'value_dim', 'shared', 'groups', 'top_groups')
    if self.mtp < 0 or (self.mtp and self.score == 'softmax'):
      raise config.Error(f'mtp={self.mtp} is negative, or score=softmax, which goes without')
    if self.rope_dim % 2:
      raise config.Error(f'rope_dim={self.rope_dim} is odd; rotary positions turn pairs')
    if self.head_dim != self.nope_dim + self.rope_dim:
      raise config.Error(f'head_dim={self.head_dim} is not nope_dim={self.nope_dim} + rope_dim={self.rope_dim}')
    if self.kv_heads != self.heads:
      raise config.Error(f'kv_heads={self.kv_heads} differs from heads={self.heads}; latent attention has no groups')
    if not 0 <= self.dense_layers <= self.layers:
      raise config.Error(f'dense_layers={self.dense_layers} is not between 0 and layers={self.layers}')
    if self.score not in SCORES.values():
      raise config.Error(f'score={self.score!r} is not one of {", ".join(SCORES.values())}')
    if self.score == 'softmax' and self.normalize:
      raise config.Error('normalize=True is not supported with score=softmax')
    card.Mixture.check(self)

  def blocks(self):
    turn = rope.Spec(self.rope_dim, self.theta, self.scaling, pairs=self.pairs)
    mixer = mla.Spec(
      self.heads,
      self.kv_rank,
      self.nope_dim,
      self.value_dim,
      turn,
      self.q_rank,
      norm.Spec(LATENT_EPS),
      scale=self.head_dim**-0.5 * rope.sharpness(turn),
      bias=('q_down', 'kv_down', 'o') if self.attention_bias else (),
    )
    sigmoid = self.score == 'sigmoid'
    route = router.Spec(
      self.experts,
      self.top_k,
      self.score,
      normalize=self.normalize,
      scale=self.route_scale,
      groups=self.groups,
      top_groups=self.top_groups,
      group_score='top2' if sigmoid else 'max',
      correction=sigmoid,
      balance=router.Balance(self.balance_loss, self.balance_scope, self.router_z_loss),
    )
    shared = mlp.Spec(self.shared * self.d_expert)
    routed = moe.Spec(route, self.d_expert, shared=shared, dispatch=self.dispatch, capacity=self.capacity)
    dense, sparse = (block.Spec(mixer, ffn, norm.Spec(self.eps)) for ffn in (mlp.Spec(self.d_ff), routed))
    return [dense] * self.dense_layers + [sparse] * (self.layers - self.dense_layers)

  def ahead(self):
    return [ahead.Spec(self.blocks()[-1], norm.Spec(self.eps))] * self.mtp

  def layer_rows(self):
    """Of every layer, without its feed-forward."""
    rows = [*LAYER, *(Q_LATENT if self.q_rank else Q_STRAIGHT)]
    return rows + ([*(Q_BIAS if self.q_rank else []), *BIAS] if self.attention_bias else [])

  def rows(self):
    every = self.layer_rows()
    sparse = [*SPARSE, *(CORRECTION if self.score == 'sigmoid' else [])]
    rows = [*ROWS, *([] if self.tied else [HEAD]), *every]
    rows += (DENSE if self.dense_layers else []) + (sparse if self.dense_layers < self.layers else [])
    last = sparse if self.dense_layers < self.layers else DENSE
    for k in range(self.mtp):
      here, there = f'ahead.{k}.', f'model.layers.{self.layers + k}.'
      rows += card.moved(every + last, f'{here}block.', there)
      rows += [(here + ours, there + theirs, pattern) for ours, theirs, pattern in AHEAD]
    return rows

  def settled(self, tensors):
    """Directories that were saved without their modules of multi-token prediction still promise them."""
    there = any(name.startswith(f'model.layers.{self.layers}.') for name in tensors)
    return self if there else dataclasses.replace(self, mtp=0)

  def passed_over(self):
    """Also the copies of the token table and of the head that modules of multi-token prediction are published with."""
    copies = '|'.join(str(self.layers + k) for k in range(self.mtp))
    return (
      r'model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq',
      *([rf'model\.layers\.({copies})\.(embed_tokens|shared_head\.head)\.weight'] if copies else []),
    )

  def hf_config(self):
    kind = next(k for k, score in SCORES.items() if score == self.score)
    v2 = {'topk_method': 'greedy' if self.groups == 1 else 'group_limited_greedy', 'mlp_bias': False}
    v3 = {
      'topk_method': 'noaux_tc',
      'rope_interleave': self.pairs == 'neighbours',
      'num_nextn_predict_layers': self.mtp,
    }
    return {
      'architectures': [KINDS[kind]],
      'model_type': kind,
      **config_json.shape_fields(self),
      **{theirs: getattr(self, ours) for ours, theirs in FIELDS.items()},
      'hidden_act': 'silu',
      'attention_dropout': 0.0,
      'scoring_func': self.score,
      'moe_layer_freq': 1,
      **(v3 if self.score == 'sigmoid' else v2),
      **config_json.rope_fields(self.theta, self.scaling, self.context),
    }


FIELDS = {
  'd_ff': 'intermediate_size',
  'dense_layers': 'first_k_dense_replace',
  'q_rank': 'q_lora_rank',
  'kv_rank': 'kv_lora_rank',
  'nope_dim': 'qk_nope_head_dim',
  'rope_dim': 'qk_rope_head_dim',
  'value_dim': 'v_head_dim',
  'experts': 'n_routed_experts',
  'top_k': 'num_experts_per_tok',
  'd_expert': 'moe_intermediate_size',
  'shared': 'n_shared_experts',
  'groups': 'n_group',
  'top_groups': 'topk_group',
  'normalize': 'norm_topk_prob',
  'route_scale': 'routed_scaling_factor',
  'attention_bias': 'attention_bias',
}


def from_hf(source):
  """config.json -> DeepSeek."""
  fields = config_json.Fields(source)
  fields.absent('quantization_config', 'mlp_bias', 'sliding_window')
  fields.only('hidden_act', 'silu')
  fields.only('moe_layer_freq', 1)
  score = SCORES.get(source['model_type'], 'sigmoid')
  fields.only('scoring_func', score)
  if score == 'softmax':
    grouped = fields.only('topk_method', 'greedy', 'group_limited_greedy') == 'group_limited_greedy'
    fields.only('norm_topk_prob', False)
    fields.only('rope_interleave', True)
  else:
    grouped = fields.only('topk_method', 'noaux_tc') == 'noaux_tc'
  whole = lambda name: fields.need(name, int)
  numbers = config_json.shape(fields)
  nope, turned = whole('qk_nope_head_dim'), whole('qk_rope_head_dim')
  theta, scaling = config_json.rope_of(source)
  if scaling is not None and not isinstance(scaling, rope.Yarn):
    raise config.Error('config.json: rope_type of this architecture can only be yarn or default')
  return DeepSeek(
    **numbers,
    **{ours: whole(FIELDS[ours]) for ours in WHOLE},
    kv_heads=fields.get('num_key_value_heads', numbers['heads'], int),
    head_dim=nope + turned,
    nope_dim=nope,
    rope_dim=turned,
    dense_layers=fields.count('first_k_dense_replace'),
    q_rank=fields.given('q_lora_rank', int),
    score=score,
    groups=fields.need('n_group', int) if grouped else 1,
    top_groups=fields.need('topk_group', int) if grouped else 1,
    normalize=fields.get('norm_topk_prob', score == 'sigmoid', bool),
    route_scale=float(fields.need('routed_scaling_factor', float)),
    theta=theta,
    scaling=scaling,
    pairs='neighbours' if fields.get('rope_interleave', True, bool) else 'halves',
    attention_bias=fields.get('attention_bias', False, bool),
    mtp=fields.count('num_nextn_predict_layers', 0) if score == 'sigmoid' else 0,
  )


WHOLE = 'd_ff kv_rank value_dim experts top_k d_expert shared'.split()

_OURS, _ATTENTION, _MLP = 'layers.{l}.', 'model.layers.{l}.self_attn.', 'model.layers.{l}.mlp.'
HEAD = ('head', 'lm_head.weight', 'v d -> v d')
ROWS = [
  ('embed', 'model.embed_tokens.weight', 'v d -> v d'),
  ('norm', 'model.norm.weight', 'd -> d'),
]
LAYER = [
  (_OURS + 'mixer_norm', 'model.layers.{l}.input_layernorm.weight', 'd -> d'),
  (_OURS + 'mixer.kv_down', _ATTENTION + 'kv_a_proj_with_mqa.weight', 'r d -> d r'),
  (_OURS + 'mixer.kv_norm', _ATTENTION + 'kv_a_layernorm.weight', 'r -> r'),
  (_OURS + 'mixer.kv_up', _ATTENTION + 'kv_b_proj.weight', '(n h) r -> r n h'),
  (_OURS + 'mixer.o', _ATTENTION + 'o_proj.weight', 'd (n h) -> n h d'),
  (_OURS + 'ffn_norm', 'model.layers.{l}.post_attention_layernorm.weight', 'd -> d'),
]
Q_STRAIGHT = [(_OURS + 'mixer.q', _ATTENTION + 'q_proj.weight', '(n h) d -> d n h')]
Q_LATENT = [
  (_OURS + 'mixer.q_down', _ATTENTION + 'q_a_proj.weight', 'r d -> d r'),
  (_OURS + 'mixer.q_norm', _ATTENTION + 'q_a_layernorm.weight', 'r -> r'),
  (_OURS + 'mixer.q_up', _ATTENTION + 'q_b_proj.weight', '(n h) r -> r n h'),
]
Q_BIAS = [(_OURS + 'mixer.q_down.b', _ATTENTION + 'q_a_proj.bias', 'r -> r')]
BIAS = [
  (_OURS + 'mixer.kv_down.b', _ATTENTION + 'kv_a_proj_with_mqa.bias', 'r -> r'),
  (_OURS + 'mixer.o.b', _ATTENTION + 'o_proj.bias', 'd -> d'),
]
DENSE = [
  (_OURS + 'ffn.gate', _MLP + 'gate_proj.weight', 'f d -> d f'),
  (_OURS + 'ffn.up', _MLP + 'up_proj.weight', 'f d -> d f'),
  (_OURS + 'ffn.down', _MLP + 'down_proj.weight', 'd f -> f d'),
]
SPARSE = [
  (_OURS + 'ffn.router', _MLP + 'gate.weight', 'e d -> d e'),
  (_OURS + 'ffn.experts.gate', _MLP + 'experts.{e}.gate_proj.weight', 'f d -> d f'),
  (_OURS + 'ffn.experts.up', _MLP + 'experts.{e}.up_proj.weight', 'f d -> d f'),
  (_OURS + 'ffn.experts.down', _MLP + 'experts.{e}.down_proj.weight', 'd f -> f d'),
  (_OURS + 'ffn.shared.gate', _MLP + 'shared_experts.gate_proj.weight', 'f d -> d f'),
  (_OURS + 'ffn.shared.up', _MLP + 'shared_experts.up_proj.weight', 'f d -> d f'),
  (_OURS + 'ffn.shared.down', _MLP + 'shared_experts.down_proj.weight', 'd f -> f d'),
]
AHEAD = [
  ('embed_norm', 'enorm.weight', 'd -> d'),
  ('hidden_norm', 'hnorm.weight', 'd -> d'),
  ('merge', 'eh_proj.weight', 'd e -> e d'),
  ('norm', 'shared_head.norm.weight', 'd -> d'),
]
CORRECTION = [(_OURS + 'ffn.router.correction', _MLP + 'gate.e_score_correction_bias', 'e -> e')]


def _v2(page, mscale=0.707, **numbers):
  """The mscale of the base models is the paper's: sqrt(t) = 0.0707 ln s + 1 (section 3.1.4)."""
  return DeepSeek(
    source=f'https://huggingface.co/deepseek-ai/{page}', vocab=102400, context=163840, eps=1e-6, dense_layers=1,
    head_dim=192, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, top_k=6, shared=2, score='softmax',
    normalize=False, scaling=rope.Yarn(40.0, 4096, 32.0, 1.0, mscale=mscale, mscale_all_dim=mscale), **numbers,
  )  # fmt: skip


def v3(page, *, vocab=129280, context=163840, eps=1e-6, theta=10000.0, dense_layers=3, heads=128, experts=256, groups=8,
       top_groups=4, route_scale=2.5, factor=40.0, beta_fast=32.0, mtp=1):  # fmt: skip
  """A card of V3's shape."""
  return DeepSeek(
    source=f'https://huggingface.co/{page}', layers=61, d_model=7168, d_ff=18432, heads=heads, kv_heads=heads,
    head_dim=192, vocab=vocab, context=context, eps=eps, dense_layers=dense_layers, q_rank=1536, kv_rank=512,
    nope_dim=128, rope_dim=64, value_dim=128, experts=experts, top_k=8, d_expert=2048, shared=1, score='sigmoid',
    groups=groups, top_groups=top_groups, route_scale=route_scale, theta=theta,
    scaling=rope.Yarn(factor, 4096, beta_fast, 1.0, mscale=1.0, mscale_all_dim=1.0), mtp=mtp,
  )  # fmt: skip


CARDS = {
  'deepseek2-16b': _v2(
    'DeepSeek-V2-Lite', layers=27, d_model=2048, d_ff=10944, heads=16, kv_heads=16, q_rank=None, experts=64,
    d_expert=1408,
  ),
  'deepseek2-236b': _v2(
    'DeepSeek-V2', layers=60, d_model=5120, d_ff=12288, heads=128, kv_heads=128, q_rank=1536, experts=160,
    d_expert=1536, groups=8, top_groups=3, route_scale=16.0,
  ),
  'deepseek3-671b': v3('deepseek-ai/DeepSeek-V3'),
  'deepseek3.1-671b': v3('deepseek-ai/DeepSeek-V3.1'),
  'deepseek-r1-671b': v3('deepseek-ai/DeepSeek-R1'),
}  # fmt: skip
ALIASES = {
  'deepseek2-lite': 'deepseek2-16b',
  'deepseek-v2-lite-chat': 'deepseek2-16b',
  'deepseek-v3-base': 'deepseek3-671b',
  'deepseek-v3-0324': 'deepseek3-671b',
  'deepseek3-671b-2dfsdp': 'deepseek3-671b',
  'deepseek3-671b-batchsplit': 'deepseek3-671b',
  'deepseek-v3.1-base': 'deepseek3.1-671b',
  'deepseek-v3.1-terminus': 'deepseek3.1-671b',
  'deepseek-r1-0528': 'deepseek-r1-671b',
  'deepseek-r1-zero': 'deepseek-r1-671b',
}
