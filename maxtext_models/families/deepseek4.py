"""DeepSeek V4: attention to a window and to compressed entries, residual streams on a manifold, hashed first experts.

Layers take turns: `light` ones see a few of many small entries that an indexer picks (4 tokens each), `heavy` ones all
of few large ones (128 tokens each); the first see their window only. See maxtext_layers/compressed.py and hyper.py. The
first layers' experts are looked up by the token's id. Names of tensors are those of the published files, which
`transformers` renames on the way in and out; numbers are those of the published config.json (`source`).
"""

from maxtext_layers import block
from maxtext_layers import compressed
from maxtext_layers import config
from maxtext_layers import hyper
from maxtext_layers import indexer
from maxtext_layers import mlp
from maxtext_layers import moe
from maxtext_layers import norm
from maxtext_layers import rope
from maxtext_layers import router
from maxtext_models import card
from maxtext_models import config_json

KINDS = {'deepseek_v4': 'DeepseekV4ForCausalLM'}
LAYER_TYPES = {
  'window': 'sliding_attention',
  'light': 'compressed_sparse_attention',
  'heavy': 'heavily_compressed_attention',
}


@config.config
class DeepSeek4(card.Mixture):
  """Numbers of a DeepSeek V4. d_ff is d_expert: no layer is dense. balance_loss counts as that of V3 does."""

  kinds: tuple[str, ...]  # of each layer: window, light or heavy
  light: int = 4  # tokens an entry
  heavy: int = 128
  window: int
  q_rank: int
  rope_dim: int
  out_groups: int  # of heads, on the way out
  out_rank: int
  index_heads: int
  index_dim: int
  index_top_k: int
  streams: int
  sinkhorn: int  # iterations
  streams_eps: float
  hashed: int  # the first layers whose experts are looked up
  route_scale: float
  limit: float  # of what goes into an expert's product
  theta: float  # of window layers
  far_theta: float  # of the others
  scaling: rope.Yarn | None = None  # of the others
  balance_loss: float = 0.0001
  balance_scope: str = 'sequence'

  def check(self):
    self.whole('light', 'heavy', 'window', 'q_rank', 'rope_dim', 'out_groups', 'out_rank', 'index_heads', 'index_dim')
    self.whole('index_top_k', 'streams', 'sinkhorn')
    if len(self.kinds) != self.layers or set(self.kinds) - LAYER_TYPES.keys():
      raise config.Error(f'kinds={self.kinds} are not {self.layers} of {", ".join(LAYER_TYPES)}')
    if self.kv_heads != 1 or self.tied:
      raise config.Error(f'kv_heads={self.kv_heads}, tied={self.tied}: this model has 1 and False')
    if self.rope_dim % 2 or self.rope_dim > min(self.head_dim, self.index_dim):
      raise config.Error(f'rope_dim={self.rope_dim} is odd or larger than head_dim or index_dim')
    if self.d_ff != self.d_expert:
      raise config.Error(f'd_ff={self.d_ff} is not d_expert={self.d_expert}')
    if not 0 <= self.hashed <= self.layers:
      raise config.Error(f'hashed={self.hashed} is not between 0 and layers={self.layers}')
    if not self.limit > 0:
      raise config.Error(f'limit={self.limit} is not positive')
    card.Mixture.check(self)

  def blocks(self):
    near, far = rope.Spec(self.rope_dim, self.theta), rope.Spec(self.rope_dim, self.far_theta, self.scaling)
    index = indexer.Spec(self.index_heads, self.index_dim, self.index_top_k)
    compress = {
      'window': None,
      'light': compressed.Compress(self.light, overlap=True, index=index),
      'heavy': compressed.Compress(self.heavy),
    }
    mixers = {
      kind: compressed.Spec(
        self.heads, self.head_dim, self.q_rank, self.out_groups, self.out_rank, near if kind == 'window' else far,
        self.window, norm.Spec(self.eps), compress[kind],
      )
      for kind in LAYER_TYPES
    }  # fmt: skip
    streams = hyper.Manifold(self.streams, self.sinkhorn, eps=self.streams_eps, norm_eps=self.eps)
    bent = mlp.Clipped(self.limit)

    def ffn(hashed):
      loss = 0.0 if hashed else self.balance_loss  # no score chooses there
      balance = router.Balance(loss, self.balance_scope, self.router_z_loss)
      route = router.Spec(
        self.experts, self.top_k, 'sqrt_softplus', normalize=True, scale=self.route_scale, correction=not hashed,
        table=self.vocab if hashed else None, balance=balance,
      )  # fmt: skip
      shared = mlp.Spec(self.d_expert, bent)
      return moe.Spec(route, self.d_expert, bent, shared=shared, dispatch=self.dispatch, capacity=self.capacity)

    hashed, scored = ffn(True), ffn(False)
    return [
      block.Spec(mixers[kind], hashed if l < self.hashed else scored, norm.Spec(self.eps), streams=streams)
      for l, kind in enumerate(self.kinds)
    ]

  def rows(self):
    rows = [*ROWS]
    rows += _pool('mixer.pool.', 'attn.compressor.') if set(self.kinds) != {'window'} else []
    rows += INDEXER if 'light' in self.kinds else []
    rows += [TABLE] if self.hashed else []
    return rows + ([CORRECTION] if self.hashed < self.layers else [])

  def passed_over(self):
    return (r'mtp\..*',)  # modules of multi-token prediction

  def hf_config(self):
    ((kind, architecture),) = KINDS.items()
    form = config_json.rope_fields(self.far_theta, self.scaling, self.context)
    far = {k: v for k, v in form['rope_parameters'].items() if k != 'rope_theta'}
    share = self.rope_dim / self.head_dim
    return {
      'architectures': [architecture],
      'model_type': kind,
      **{theirs: getattr(self, ours) for ours, theirs in FIELDS.items()},
      'max_position_embeddings': self.context,
      'n_shared_experts': 1,
      'norm_topk_prob': True,
      'scoring_func': 'sqrtsoftplus',
      'hidden_act': 'silu',
      'tie_word_embeddings': False,
      'attention_bias': False,
      'mlp_bias': False,
      'attention_dropout': 0.0,
      'partial_rotary_factor': share,
      'layer_types': [LAYER_TYPES[kind] for kind in self.kinds],
      'mlp_layer_types': ['hash_moe'] * self.hashed + ['moe'] * (self.layers - self.hashed),
      'compress_rates': {LAYER_TYPES['light']: self.light, LAYER_TYPES['heavy']: self.heavy},
      'rope_parameters': {
        'main': {'rope_type': 'default', 'rope_theta': self.theta, 'partial_rotary_factor': share},
        'compress': {**far, 'rope_theta': self.far_theta, 'partial_rotary_factor': share},
      },
      **config_json.dtype_fields(self),
    }


FIELDS = {
  'layers': 'num_hidden_layers',
  'd_model': 'hidden_size',
  'heads': 'num_attention_heads',
  'kv_heads': 'num_key_value_heads',
  'head_dim': 'head_dim',
  'vocab': 'vocab_size',
  'eps': 'rms_norm_eps',
  'window': 'sliding_window',
  'q_rank': 'q_lora_rank',
  'out_groups': 'o_groups',
  'out_rank': 'o_lora_rank',
  'index_heads': 'index_n_heads',
  'index_dim': 'index_head_dim',
  'index_top_k': 'index_topk',
  'streams': 'hc_mult',
  'sinkhorn': 'hc_sinkhorn_iters',
  'streams_eps': 'hc_eps',
  'experts': 'n_routed_experts',
  'top_k': 'num_experts_per_tok',
  'd_expert': 'moe_intermediate_size',
  'route_scale': 'routed_scaling_factor',
  'limit': 'swiglu_limit',
  'theta': 'rope_theta',
  'far_theta': 'compress_rope_theta',
}
SHARE = 'partial_rotary_factor'
_FLOATS = ('eps', 'streams_eps', 'route_scale', 'limit', 'theta', 'far_theta')


def from_hf(source):
  """config.json -> DeepSeek4; the published form (compress_ratios, num_hash_layers) and that of `transformers`."""
  fields = config_json.Fields(source)
  fields.absent('quantization_config', 'attention_bias', 'mlp_bias', 'tie_word_embeddings')
  fields.only('hidden_act', 'silu')
  fields.only('scoring_func', 'sqrtsoftplus')
  fields.only('norm_topk_prob', True)
  fields.only('n_shared_experts', 1)
  fields.only('num_key_value_heads', 1)
  theta, far_theta, scaling = _turns(source)
  known = {'theta': theta, 'far_theta': far_theta}
  numbers = {o: fields.need(t, float if o in _FLOATS else int) for o, t in FIELDS.items() if o not in known} | known
  numbers |= {name: float(numbers[name]) for name in _FLOATS}
  head_dim = numbers['head_dim']
  turned = fields.get('qk_rope_head_dim', int(head_dim * fields.get('partial_rotary_factor', 64 / 512)), int)
  if not isinstance(rates := fields.get('compress_rates', {}), dict):
    raise config.Error(f'config.json: compress_rates={rates!r} is not an object')
  names = {theirs: ours for ours, theirs in LAYER_TYPES.items()}
  return DeepSeek4(
    **numbers,
    context=fields.need('max_position_embeddings', int),
    kinds=_kinds(source, names),
    hashed=_hashed(source, numbers['layers']),
    light=rates.get(LAYER_TYPES['light'], 4),
    heavy=rates.get(LAYER_TYPES['heavy'], 128),
    rope_dim=turned,
    d_ff=numbers['d_expert'],
    scaling=scaling,
    dtype=fields.dtype(),
  )


def _turns(source):
  """(base of window layers, base of the others, scaling of the others)."""
  turns = source.get('rope_parameters') or source.get('rope_scaling') or {}
  if not isinstance(turns, dict):
    raise config.Error(f'config.json: rope_parameters={turns!r} is not an object')
  if {'main', 'compress'} & turns.keys():
    if not all(isinstance(turns.get(one), dict) for one in ('main', 'compress')):
      raise config.Error('config.json: rope_parameters.main and rope_parameters.compress are not two objects')
    near, far = ({k: v for k, v in turns[one].items() if k != SHARE} for one in ('main', 'compress'))
  else:
    far = {k: v for k, v in turns.items() if k not in ('rope_theta', SHARE)}
    if far.get('rope_type', far.get('type')) == 'yarn':
      far.setdefault('attention_factor', 1.0)  # the released code multiplies cos and sin with nothing
    need = config_json.Fields(source).need
    near, far = {'rope_theta': need('rope_theta')}, {**far, 'rope_theta': need('compress_rope_theta')}
  theta, stretched = config_json.rope_of({'rope_parameters': near})
  if stretched is not None:
    raise config.Error('config.json: rope_parameters.main.rope_type can only be default for this architecture')
  return theta, *config_json.rope_of({'rope_parameters': far})


def _kinds(source, names):
  if types := source.get('layer_types'):
    if unknown := [t for t in types if t not in names]:
      raise config.Error(f'config.json: layer_types holds {unknown[0]!r}; known: {", ".join(names)}')
    return tuple(names[t] for t in types)
  if source.get('compress_ratios') is None:
    raise config.Error('config.json lacks layer_types, or compress_ratios')
  ratios, of = config_json.Fields(source).need('compress_ratios', list), {0: 'window', 4: 'light', 128: 'heavy'}
  if unknown := [r for r in ratios if r not in of]:
    raise config.Error(f'config.json: compress_ratios holds {unknown[0]!r}; known: {", ".join(map(str, of))}')
  return tuple(of[r] for r in ratios[: source['num_hidden_layers']])  # more are of modules that look ahead


def _hashed(source, layers):
  if types := source.get('mlp_layer_types'):
    count = sum(t == 'hash_moe' for t in types)
    if list(types) != ['hash_moe'] * count + ['moe'] * (layers - count):
      raise config.Error(f'config.json: mlp_layer_types={types} is not some hash_moe and then moe')
    return count
  if source.get('num_hash_layers') is None:
    raise config.Error('config.json lacks mlp_layer_types, or num_hash_layers')
  count = source['num_hash_layers']
  if not isinstance(count, int) or isinstance(count, bool) or count < 0:
    raise config.Error(f'config.json: num_hash_layers={count!r} is not a whole number')
  return count


def _pool(ours, theirs):
  ours, theirs = 'layers.{l}.' + ours, 'layers.{l}.' + theirs
  return [
    (ours + 'kv', theirs + 'wkv.weight', '(c h) d -> d c h'),
    (ours + 'gate', theirs + 'wgate.weight', '(c h) d -> d c h'),
    (ours + 'b', theirs + 'ape', 'r (c h) -> r c h'),
    (ours + 'norm', theirs + 'norm.weight', 'h -> h'),
  ]


def _streams(ours, theirs):
  return [
    (ours + '.project', theirs + '_fn', 'm (s d) -> s d m'),
    (ours + '.b', theirs + '_base', 'm -> m'),
    (ours + '.scale', theirs + '_scale', 'k -> k'),
  ]


ROWS = [
  ('embed', 'embed.weight', 'v d -> v d'),
  ('norm', 'norm.weight', 'd -> d'),
  ('head', 'head.weight', 'v d -> v d'),
  *_streams('collapse', 'hc_head'),
  *_streams('layers.{l}.mixer_path', 'layers.{l}.hc_attn'),
  *_streams('layers.{l}.ffn_path', 'layers.{l}.hc_ffn'),
  ('layers.{l}.mixer_norm', 'layers.{l}.attn_norm.weight', 'd -> d'),
  ('layers.{l}.mixer.q_down', 'layers.{l}.attn.wq_a.weight', 'r d -> d r'),
  ('layers.{l}.mixer.q_norm', 'layers.{l}.attn.q_norm.weight', 'r -> r'),
  ('layers.{l}.mixer.q_up', 'layers.{l}.attn.wq_b.weight', '(n h) r -> r n h'),
  ('layers.{l}.mixer.kv', 'layers.{l}.attn.wkv.weight', 'h d -> d h'),
  ('layers.{l}.mixer.kv_norm', 'layers.{l}.attn.kv_norm.weight', 'h -> h'),
  ('layers.{l}.mixer.sinks', 'layers.{l}.attn.attn_sink', 'n -> n'),
  ('layers.{l}.mixer.o_down', 'layers.{l}.attn.wo_a.weight', '(g r) (n h) -> g n h r'),
  ('layers.{l}.mixer.o_up', 'layers.{l}.attn.wo_b.weight', 'd (g r) -> g r d'),
  ('layers.{l}.ffn_norm', 'layers.{l}.ffn_norm.weight', 'd -> d'),
  ('layers.{l}.ffn.router', 'layers.{l}.ffn.gate.weight', 'e d -> d e'),
  ('layers.{l}.ffn.experts.gate', 'layers.{l}.ffn.experts.{e}.w1.weight', 'f d -> d f'),
  ('layers.{l}.ffn.experts.up', 'layers.{l}.ffn.experts.{e}.w3.weight', 'f d -> d f'),
  ('layers.{l}.ffn.experts.down', 'layers.{l}.ffn.experts.{e}.w2.weight', 'd f -> f d'),
  ('layers.{l}.ffn.shared.gate', 'layers.{l}.ffn.shared_experts.w1.weight', 'f d -> d f'),
  ('layers.{l}.ffn.shared.up', 'layers.{l}.ffn.shared_experts.w3.weight', 'f d -> d f'),
  ('layers.{l}.ffn.shared.down', 'layers.{l}.ffn.shared_experts.w2.weight', 'd f -> f d'),
]
INDEXER = [
  ('layers.{l}.mixer.indexer.q', 'layers.{l}.attn.indexer.wq_b.weight', '(j i) r -> r j i'),
  ('layers.{l}.mixer.indexer.weights', 'layers.{l}.attn.indexer.weights_proj.weight', 'j d -> d j'),
  *_pool('mixer.indexer.pool.', 'attn.indexer.compressor.'),
]
CORRECTION = ('layers.{l}.ffn.router.correction', 'layers.{l}.ffn.gate.bias', 'e -> e')
TABLE = ('layers.{l}.ffn.router.table', 'layers.{l}.ffn.gate.tid2eid', 'v k -> v k')

CARDS = {
  'deepseek4-284b': DeepSeek4(
    source='https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash', layers=43, d_model=4096, d_ff=2048, heads=64,
    kv_heads=1, head_dim=512, vocab=129280, context=1048576, eps=1e-6,
    kinds=('window',) * 2 + ('light', 'heavy') * 20 + ('light',), window=128, q_rank=1024, rope_dim=64, out_groups=8,
    out_rank=1024, index_heads=64, index_dim=128, index_top_k=512, streams=4, sinkhorn=20, streams_eps=1e-6,
    experts=256, top_k=6, d_expert=2048, hashed=3, route_scale=1.5, limit=10.0, theta=10000.0, far_theta=160000.0,
    scaling=rope.Yarn(16.0, 65536, 32.0, 1.0, attention=1.0),
  ),
}  # fmt: skip
ALIASES = {'deepseek-v4-flash-base': 'deepseek4-284b'}
