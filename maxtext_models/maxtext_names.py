"""Where the parameters of a model are in a checkpoint of the public MaxText, and in what they differ from ours.

Its kernels have our axes. What else is to be known, a family at a time:

- scan_layers=true stacks layers along the second axis, also behind the axis of experts; gemma 3 and gpt-oss stack a
  block of 6 or 2 layers, gemma 2 counts a pair of layers as one, deepseek stacks dense and routed layers apart.
- Where it does not normalise queries, it has no scale for scores: that is part of the query's kernel.
- Llama with the long positions of 3.1 turns neighbours, see PAIRS; all others turn as ours do.
- Norms of gemma are stored as they multiply, 1 + w; its table is stored times sqrt(d_model), by which its logits are
  divided.

Nothing of this is said in the checkpoint. Changes keep what the model computes: converted, it has the same logits.

Reading order: `of`, `Source`, FAMILIES.
"""

from collections.abc import Callable
import re
from typing import NamedTuple

import numpy as np

from maxtext_layers import config
from maxtext_layers import rope
from maxtext_models.families import deepseek
from maxtext_models.families import gemma2
from maxtext_models.families import gemma3
from maxtext_models.families import gpt_oss
from maxtext_models.families import llama
from maxtext_models.families import mixtral
from maxtext_models.families import qwen3
from maxtext_models.families import qwen3_moe


class Source(NamedTuple):
  """Where a parameter is: the array `theirs`, of which it is `layer` of `layers` along `axis` (None: all of it).

  `change` makes our values of theirs.
  """

  theirs: str
  layer: int | None = None
  layers: int = 1
  axis: int = 1
  change: Callable[[np.ndarray], np.ndarray] | None = None
  transposed: bool = False

  def their_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the array, if ours has this one."""
    shape = shape[::-1] if self.transposed else shape
    return shape if self.layer is None else (*shape[: self.axis], self.layers, *shape[self.axis :])

  def take(self, array: np.ndarray) -> np.ndarray:
    """Our parameter, from the whole array."""
    part = array if self.layer is None else array.take(self.layer, self.axis)
    part = part.T if self.transposed else part
    return part if self.change is None else self.change(part.astype(np.float32)).astype(part.dtype)


class Family(NamedTuple):
  """names: ours in a layer -> theirs in a layer; place: (card, layer) -> Place; changes: card -> {ours: change}."""

  names: dict[str, str]
  place: Callable
  changes: Callable = lambda card: {}


class Place(NamedTuple):
  """Of a layer: the folder of its stack and which one of that it is (None: not in a stack), and its own, unstacked."""

  stack: str
  layer: int | None
  alone: str
  side: str = ''  # which of the two of a pair it is, where names say that


def of(card, names, stacked: bool, pairs: str = 'auto') -> dict[str, Source]:
  """ours -> Source for all `names` of a model's parameters; pairs: see PAIRS.

  Raises:
    config.Error: this class of cards, or one of the parameters, is nothing that is read from MaxText.
  """
  family = FAMILIES.get(type(card))
  if family is None:
    known = ', '.join(sorted(one.__name__ for one in FAMILIES))
    raise config.Error(f'a {type(card).__name__} is not read from a checkpoint of MaxText; what is: {known}')
  places = [family.place(card, layer) for layer in range(card.layers)]
  stacks: dict[str, set[int | None]] = {}
  for place in places:
    stacks.setdefault(place.stack, set()).add(place.layer)
  changes = family.changes(card)
  if turned(card, pairs):
    changes = changes | {ours: _after(_halves, changes.get(ours)) for ours in ('mixer.q', 'mixer.k')}
  found = {}
  for name in names:
    if name in OUTSIDE:
      theirs = OUTSIDE[name]
      found[name] = Source(theirs, change=changes.get(name), transposed=name == 'head')
      continue
    match = re.fullmatch(r'layers\.(\d+)\.(.*)', name)
    ours = match and match[2]
    if ours not in family.names:
      raise config.Error(f'{name}, which this {type(card).__name__} has, is nothing that MaxText has a name for')
    place = places[int(match[1])]
    inner = family.names[ours].format(side=place.side)
    if stacked and place.layer is not None:
      layers = len(stacks[place.stack])
      found[name] = Source(f'decoder/{place.stack}/{inner}', place.layer, layers, change=changes.get(ours))
    else:
      folder = place.stack if stacked else place.alone
      found[name] = Source(f'decoder/{folder}/{inner}', change=changes.get(ours))
  return found


# What MaxText's Llama turns at a position: neighbours with rope_type=llama3.1 and with model names that begin so, else
# halves. auto: neighbours where the card stretches positions as Llama 3.1 does.
PAIRS = ('auto', 'halves', 'neighbours')


def turned(card, pairs: str) -> bool:
  """Whether rotary pairs are neighbours in MaxText and halves apart here."""
  if type(card) is not llama.Llama:
    if pairs != 'auto':
      raise config.Error(f'--rope_pairs={pairs} is for a Llama; this is a {type(card).__name__}')
    return False
  return pairs == 'neighbours' or (pairs == 'auto' and isinstance(card.scaling, rope.Llama3))


OUTSIDE = {
  'embed': 'token_embedder/embedding',
  'norm': 'decoder/decoder_norm/scale',
  'head': 'decoder/logits_dense/kernel',
}
STACKS = ('layers', 'dense_layers', 'moe_layers')


def _one(card, layer):
  return Place('layers', layer, f'layers_{layer}')


def _blocks(period):
  """Stacks of every so manyth layer; what is left over after the last whole block is in none."""

  def place(card, layer):
    if getattr(card, 'full_every', period) != period:
      raise config.Error(f'full_every={card.full_every}, where the {type(card).__name__} of MaxText has {period}')
    whole = card.layers // period * period
    if layer >= whole:
      return Place(f'layers_remainder/layers_{layer - whole}', None, f'layers_{layer}')
    return Place(f'layers/layers_{layer % period}', layer // period, f'layers_{layer}')

  return place


def _pair(card, layer):
  if card.full_every != 2:
    raise config.Error(f'full_every={card.full_every}, where the {type(card).__name__} of MaxText has 2')
  return Place('layers', layer // 2, f'layers_{layer // 2}', ('local', 'global')[layer % 2])


def _dense_first(card, layer):
  kind, index = ('dense', layer) if layer < card.dense_layers else ('moe', layer - card.dense_layers)
  return Place(f'{kind}_layers', index, f'{kind}_layers_{index}')


def _halves(array):
  """Rotary pairs that are neighbours -> pairs that are halves apart."""
  return array.reshape(*array.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(array.shape)


def _after(first, then):
  return first if then is None else lambda array: then(first(array))


def _scaled(card):
  """Queries whose kernel holds the scale of scores -> queries as they are."""
  return lambda array: array * np.float32(card.head_dim**0.5)


def _gemma3(card):
  """Norms hold 1 + w, the table is times sqrt(d_model)."""
  down = lambda array: array - np.float32(1)
  norms = ('mixer_norm', 'mixer_out', 'ffn_norm', 'ffn_out', 'mixer.q_norm', 'mixer.k_norm', 'norm')
  return {'embed': lambda array: array / np.float32(card.d_model**0.5), **dict.fromkeys(norms, down)}


def _gemma2(card):
  changes = _gemma3(card) | {'mixer.q': lambda array: array * np.float32(card.query_scalar**0.5)}
  return {ours: change for ours, change in changes.items() if ours not in ('mixer.q_norm', 'mixer.k_norm')}


_ATTENTION = {
  'mixer_norm': 'pre_self_attention_layer_norm/scale',
  'mixer.q': 'self_attention/query/kernel',
  'mixer.k': 'self_attention/key/kernel',
  'mixer.v': 'self_attention/value/kernel',
  'mixer.o': 'self_attention/out/kernel',
  'ffn_norm': 'post_self_attention_layer_norm/scale',
}
_DENSE = {'ffn.gate': 'mlp/wi_0/kernel', 'ffn.up': 'mlp/wi_1/kernel', 'ffn.down': 'mlp/wo/kernel'}


def _experts(folder):
  theirs = {'ffn.router': 'gate/kernel', 'ffn.experts.gate': 'wi_0', 'ffn.experts.up': 'wi_1', 'ffn.experts.down': 'wo'}
  return {ours: f'{folder}/{name}' for ours, name in theirs.items()}


_QK_NORM = {'mixer.q_norm': 'self_attention/query_norm/scale', 'mixer.k_norm': 'self_attention/key_norm/scale'}

_LATENT = {
  'mixer_norm': 'pre_self_attention_layer_norm/scale',
  'mixer.q': 'self_attention/query/kernel',
  'mixer.q_down': 'self_attention/wq_a/kernel',
  'mixer.q_norm': 'self_attention/q_norm/scale',
  'mixer.q_up': 'self_attention/wq_b/kernel',
  'mixer.kv_down': 'self_attention/wkv_a/kernel',
  'mixer.kv_norm': 'self_attention/kv_norm/scale',
  'mixer.kv_up': 'self_attention/wkv_b/kernel',
  'mixer.o': 'self_attention/out/kernel',
  'ffn_norm': 'post_self_attention_layer_norm/scale',
}
_MOE = 'DeepSeekMoeBlock_0'
_SHARED = {
  'ffn.shared.gate': f'{_MOE}/shared_experts/wi_0/kernel',
  'ffn.shared.up': f'{_MOE}/shared_experts/wi_1/kernel',
  'ffn.shared.down': f'{_MOE}/shared_experts/wo/kernel',
  'ffn.router.correction': f'{_MOE}/MoeBlock_0/gate/bias',
}
_WITH_BIASES = {
  **{ours: theirs.replace('self_attention/', 'GptOssAttention/') for ours, theirs in _ATTENTION.items()},
  **{
    f'mixer.{ours}.b': f'GptOssAttention/{theirs}/bias'
    for ours, theirs in {'q': 'query', 'k': 'key', 'v': 'value', 'o': 'out'}.items()
  },
  'mixer.sinks': 'GptOssAttention/sinks',
  'ffn.router.b': 'GptOssMlp/gate/bias',
  'ffn.experts.gate_b': 'GptOssMlp/wi_0_bias',
  'ffn.experts.up_b': 'GptOssMlp/wi_1_bias',
  'ffn.experts.down_b': 'GptOssMlp/wo_bias',
}
_SANDWICH = {
  'mixer_norm': 'pre_self_attention_norm/scale',
  'mixer.q': 'self_attention/query/kernel',
  'mixer.k': 'self_attention/key/kernel',
  'mixer.v': 'self_attention/value/kernel',
  'mixer.o': 'self_attention/out/kernel',
  'mixer_out': 'post_self_attention_norm/scale',
  'ffn_norm': 'pre_ffw_norm/scale',
  **_DENSE,
  'ffn_out': 'post_ffw_norm/scale',
}

FAMILIES: dict[type, Family] = {
  llama.Llama: Family(_ATTENTION | _DENSE, _one, lambda card: {'mixer.q': _scaled(card)}),
  qwen3.Qwen3: Family(_ATTENTION | _QK_NORM | _DENSE, _one),
  qwen3_moe.Qwen3Moe: Family(_ATTENTION | _QK_NORM | _experts('moe_block'), _one),
  mixtral.Mixtral: Family(_ATTENTION | _experts('MoeBlock_0'), _one, lambda card: {'mixer.q': _scaled(card)}),
  deepseek.DeepSeek: Family(_LATENT | _DENSE | _SHARED | _experts(f'{_MOE}/MoeBlock_0'), _dense_first),
  gemma2.Gemma2: Family(
    {ours: theirs.replace('/', '_{side}/', 1) for ours, theirs in _SANDWICH.items()}, _pair, _gemma2
  ),
  gemma3.Gemma3: Family(_SANDWICH | _QK_NORM, _blocks(6), _gemma3),
  gpt_oss.GptOss: Family(_WITH_BIASES | _experts('GptOssMlp'), _blocks(2)),
}
