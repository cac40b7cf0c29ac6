"""DeepSeek V3.2 (arXiv 2512.02556): V3 with attention to the keys that an indexer picks, see maxtext_layers/sparse.py.

The numbers are those of the published config.json (`source`). How the indexer is taught is a run's to say: `index_loss`
weighs its loss, `index_stage` is dense while only it learns.
"""

import dataclasses

from maxtext_layers import config
from maxtext_layers import indexer
from maxtext_layers import sparse
from maxtext_models import config_json
from maxtext_models.families import deepseek

KINDS = {'deepseek_v32': 'DeepseekV32ForCausalLM'}
_NUMBERS = {'index_heads': 'index_n_heads', 'index_dim': 'index_head_dim', 'index_top_k': 'index_topk'}


@config.config
class DeepSeek32(deepseek.DeepSeek):
  """Numbers of a DeepSeek V3.2."""

  index_heads: int
  index_dim: int
  index_top_k: int
  index_loss: float = 0.0
  index_stage: str = 'sparse'

  def check(self):
    deepseek.DeepSeek.check(self)
    self.whole(*_NUMBERS)
    if self.index_dim < self.rope_dim:
      raise config.Error(f'index_dim={self.index_dim} is less than rope_dim={self.rope_dim}')
    if self.q_rank is None or self.score != 'sigmoid' or self.pairs != 'neighbours':
      raise config.Error(
        f'q_rank={self.q_rank}, score={self.score}, pairs={self.pairs}: an indexer needs a q_rank, sigmoid, neighbours'
      )
    if not self.index_loss >= 0:
      raise config.Error(f'index_loss={self.index_loss!r} is negative')

  def choices(self):
    return *deepseek.DeepSeek.choices(self), 'index_loss', 'index_stage'

  def blocks(self):
    index = indexer.Spec(self.index_heads, self.index_dim, self.index_top_k, self.index_loss, self.index_stage)
    return [dataclasses.replace(b, mixer=sparse.Spec(b.mixer, index)) for b in deepseek.DeepSeek.blocks(self)]

  def layer_rows(self):
    return [*deepseek.DeepSeek.layer_rows(self), *INDEXER]

  def hf_config(self):
    fields = deepseek.DeepSeek.hf_config(self)
    del fields['rope_interleave']
    ((kind, architecture),) = KINDS.items()
    numbers = {theirs: getattr(self, ours) for ours, theirs in _NUMBERS.items()}
    return {**fields, 'architectures': [architecture], 'model_type': kind, **numbers}


def from_hf(source):
  """config.json -> DeepSeek32."""
  fields = config_json.Fields(source)
  dense = fields.need('first_k_dense_replace')
  if kinds := [k for k in source.get('layer_types') or () if k != 'indexed_attention']:
    raise config.Error(f'config.json: layer_types holds {kinds[0]!r}, which is not supported; known: indexed_attention')
  layers = source.get('num_hidden_layers')
  if (mlps := source.get('mlp_layer_types')) and list(mlps) != ['dense'] * dense + ['sparse'] * (layers - dense):
    raise config.Error(f'config.json: mlp_layer_types={mlps} is not {dense} dense layers and sparse ones')
  plain = deepseek.from_hf(source)
  index = {ours: fields.need(theirs, int) for ours, theirs in _NUMBERS.items()}
  return _with(plain, **index)


def _with(plain, **index):
  return DeepSeek32(**{f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)}, **index)


_INDEXER = 'model.layers.{l}.self_attn.indexer.'
INDEXER = [
  ('layers.{l}.mixer.indexer.q', _INDEXER + 'wq_b.weight', '(j i) r -> r j i'),
  ('layers.{l}.mixer.indexer.k', _INDEXER + 'wk.weight', 'i d -> d i'),
  ('layers.{l}.mixer.indexer.k_norm', _INDEXER + 'k_norm.weight', 'i -> i'),
  ('layers.{l}.mixer.indexer.k_norm.b', _INDEXER + 'k_norm.bias', 'i -> i'),
  ('layers.{l}.mixer.indexer.weights', _INDEXER + 'weights_proj.weight', 'j d -> d j'),
]
CARDS = {
  'deepseek3.2-671b': _with(deepseek.v3('deepseek-ai/DeepSeek-V3.2'), index_heads=64, index_dim=128, index_top_k=2048),
}
ALIASES = {
  'deepseek-v3.2-exp': 'deepseek3.2-671b',
  'deepseek-v3.2-exp-base': 'deepseek3.2-671b',
  'deepseek-v3.2-speciale': 'deepseek3.2-671b',
}
