"""Mistakes that were made somewhere, made here on purpose: the references must miss them by 100 times the tolerance."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import norm
from maxtext_layers import rope
from maxtext_models import checkpoint
from maxtext_models.families import gemma
from tests import wrong


@pytest.fixture(name='folder', scope='module')
def _folder(tmp_path_factory):
  return wrong.folders(tmp_path_factory.mktemp('golden'))


@pytest.fixture(name='loaded', scope='module')
def _loaded(tmp_path_factory):
  return wrong.loader(tmp_path_factory.mktemp('golden'))


def mixer(**changes):
  """A change of all mixers."""
  return lambda spec: dataclasses.replace(spec, mixer=dataclasses.replace(spec.mixer, **changes))


def window(by):
  """Windows that are longer by so many."""
  return lambda spec: mixer(window=spec.mixer.window + by)(spec) if spec.mixer.window else spec


def turn(where, **changes):
  """Another rotation of the layers with a window, or of those without."""
  chosen = lambda spec: (spec.mixer.window is None) == (where == 'full')
  change = lambda spec: wrong.replaced(spec, 'mixer', rope=dataclasses.replace(spec.mixer.rope, **changes))
  return lambda spec: change(spec) if chosen(spec) else spec


MUTATIONS = {  # what is wrong: (case, change of its blocks)
  'qwen2 window + 1': ('qwen2', window(1)),
  'qwen2 window - 1': ('qwen2', window(-1)),
  'qwen2 a window in the first layer, too': ('qwen2', mixer(window=50)),
  'mistral window + 1': ('mistral', window(1)),
  'mistral window - 1': ('mistral', window(-1)),
  'mistral no window': ('mistral', mixer(window=None)),
  'mistral a window of 3 for one of 2': ('mistral_2', window(1)),
  'mistral a window of 2 for one of 1': ('mistral_1', window(1)),
  'gemma norms without 1 +': ('gemma', lambda spec: wrong.replaced(spec, 'norm', offset=0.0)),
  'gemma silu': ('gemma', lambda spec: wrong.replaced(spec, 'ffn', activation='silu')),
  'gemma2 window + 1': ('gemma2', window(1)),
  'gemma2 window - 1': ('gemma2', window(-1)),
  'gemma2 the other layers slide': ('gemma2', lambda spec: mixer(window=None if spec.mixer.window else 50)(spec)),
  'gemma2 no soft cap of scores': ('gemma2', mixer(cap=None)),
  'gemma2 scores over the root of head_dim': ('gemma2', mixer(scale=None)),
  'gemma3 window + 1': ('gemma3', window(1)),
  'gemma3 window - 1': ('gemma3', window(-1)),
  'gemma3 one rope base for all': ('gemma3', turn('sliding', theta=1000000.0)),
  'gemma3 no stretch': ('gemma3', turn('full', scaling=None)),
  'gemma3 sliding layers stretched, too': ('gemma3', turn('sliding', scaling=rope.Linear(8.0))),
  'gemma3 norms of queries and keys without 1 +': ('gemma3', mixer(qk_norm=norm.Spec(1e-6))),
  'gemma3 scores over the root of head_dim': ('gemma3', mixer(scale=None)),
  'olmo3 window + 1': ('olmo3', window(1)),
  'olmo3 window - 1': ('olmo3', window(-1)),
  'olmo3 sliding layers stretched, too': ('olmo3', turn('sliding', scaling=rope.Yarn(factor=8.0, trained=64))),
  'olmo3 no temperature of yarn': ('olmo3', turn('full', scaling=rope.Yarn(factor=8.0, trained=64, attention=1.0))),
}


@pytest.mark.parametrize('name', MUTATIONS)
def test_a_wrong_block_is_seen(loaded, monkeypatch, name):
  """A4, A5, A6, A9, A15, A16: windows, caps, scales, stretches and norms, wrong in one way each."""
  case, change = MUTATIONS[name]
  assert wrong.other_blocks(monkeypatch, case, *loaded(case), change).max() > wrong.SEEN


def test_interleaved_rope_pairing_is_seen(folder, monkeypatch):
  """A12: the first token is right, then nonsense."""

  def rotate(x, table, pairs):
    del pairs
    cos, sin = table
    a, b = x[..., 0::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)

  monkeypatch.setattr(rope, 'rotate', rotate)
  d = wrong.distance('llama', checkpoint.load(folder('llama'))[1], wrong.changed)
  assert d[:, 0].max() <= wrong.TOLERANCE
  assert d[:, 4:].max() > wrong.SEEN


@pytest.mark.parametrize(
  'case, scaling',
  [
    ('llama3_factor8', rope.Llama3(factor=32.0, low=1.0, high=4.0, trained=128)),
    ('llama3_factor8', None),
    ('llama3_factor32', rope.Llama3(factor=8.0, low=1.0, high=4.0, trained=64)),
    ('llama3_factor8', rope.Llama3(factor=8.0, low=1.0, high=2.0, trained=128)),
    ('llama_linear', rope.Linear(2.0)),
    ('llama_yarn', rope.Yarn(factor=4.0, trained=64, attention=1.0)),
    ('llama_yarn', rope.Yarn(factor=2.0, trained=64)),
  ],
)
def test_another_rope_scaling_is_seen(folder, case, scaling):
  """A12: factor, bands and temperature."""
  assert wrong.other_card(folder, case, scaling=scaling).max() > wrong.SEEN


@pytest.mark.parametrize(
  'case, changes', [('gemma2', {'logit_cap': None}), ('gemma2', {'logit_cap': 6.0}), ('mistral', {'theta': 1000000.0})]
)
def test_another_number_on_the_card_is_seen(folder, case, changes):
  """A15: the cap of logits; the rope base of another version."""
  assert wrong.other_card(folder, case, **changes).max() > wrong.SEEN


@pytest.mark.parametrize('case', ['gemma', 'gemma2'])
def test_an_embedding_that_is_not_scaled_is_seen(folder, monkeypatch, case):
  """A16."""
  monkeypatch.setattr(gemma.Gemma, 'embed_scale', lambda self: 1.0)
  assert wrong.other_card(folder, case).max() > wrong.SEEN


def test_a_norm_of_each_head_is_not_a_norm_of_all(folder, monkeypatch):
  """A7."""
  single = lambda self, x: norm._scaled(x, self.w[...][:, None], self.spec, -1)
  monkeypatch.setattr(norm.Heads, '__call__', single)
  assert wrong.distance('olmo3', checkpoint.load(folder('olmo3'))[1], wrong.changed).max() > wrong.SEEN


def test_a_layer_norm_that_leaves_the_mean_is_seen(folder, monkeypatch):
  root = lambda self, x: norm._scaled(x, self.w[...], norm.Spec(self.spec.eps), -1) + self.b[...]
  monkeypatch.setattr(norm.LayerNorm, '__call__', root)
  assert wrong.distance('gpt2', checkpoint.load(folder('gpt2'))[1], wrong.changed).max() > wrong.SEEN


def test_another_rope_base_is_seen_far_out(folder):
  """A10: the base that is assumed where it is missing."""
  assert wrong.other_card(folder, 'llama_tied', theta=10000.0)[:, 1000:].max() > wrong.SEEN


def test_norm_after_rotation_is_seen(folder, monkeypatch):
  """A7: the norm of queries and keys comes before the rotation."""
  waiting, normed, rotate = [], norm.Norm.__call__, rope.rotate

  def later(self, x):
    if x.ndim == 3:
      return normed(self, x)
    waiting.append(self)
    return x

  monkeypatch.setattr(norm.Norm, '__call__', later)
  monkeypatch.setattr(rope, 'rotate', lambda *given: normed(waiting.pop(0), rotate(*given)))
  assert wrong.distance('qwen3', checkpoint.load(folder('qwen3'))[1], wrong.changed).max() > wrong.SEEN
  assert not waiting


def swap(first, second, rows=None):
  """Of two kinds of tensor in layer 0."""
  return wrong.swap(*(f'model.layers.0.{name}.weight' for name in (first, second)), rows)


@pytest.mark.parametrize(
  'case, edit',
  [
    ('llama', swap('self_attn.q_proj', 'self_attn.k_proj', rows=32)),
    ('qwen3', swap('self_attn.q_proj', 'self_attn.k_proj', rows=48)),
    ('qwen3', swap('self_attn.q_norm', 'self_attn.k_norm')),
    ('qwen2', swap('self_attn.q_proj', 'self_attn.k_proj', rows=32)),
    ('mistral', swap('self_attn.q_proj', 'self_attn.k_proj', rows=32)),
    ('gemma', swap('self_attn.k_proj', 'self_attn.v_proj')),
    ('gemma', swap('mlp.gate_proj', 'mlp.up_proj')),
    ('gemma2', swap('post_attention_layernorm', 'pre_feedforward_layernorm')),
    ('gemma2', swap('pre_feedforward_layernorm', 'post_feedforward_layernorm')),
    ('gemma3', swap('self_attn.q_norm', 'self_attn.k_norm')),
    ('olmo3', swap('self_attn.q_proj', 'self_attn.k_proj', rows=32)),
    ('olmo3', swap('self_attn.q_norm', 'self_attn.k_norm', rows=32)),
    ('olmo3', swap('post_attention_layernorm', 'post_feedforward_layernorm')),
    ('llama', swap('self_attn.k_proj', 'self_attn.v_proj')),
    ('llama', swap('mlp.gate_proj', 'mlp.up_proj')),
    ('llama', swap('input_layernorm', 'post_attention_layernorm')),
  ],
)
def test_swapped_tensors_are_seen(folder, case, edit):
  assert wrong.edited(folder, case, edit).max() > wrong.SEEN


@pytest.mark.parametrize(
  'case, name',
  [
    *[('llama_bias', f'self_attn.{name}_proj') for name in 'qkvo'],
    *[('llama_bias', f'mlp.{name}_proj') for name in ('gate', 'up', 'down')],
    *[('qwen2', f'self_attn.{name}_proj') for name in 'qkv'],
  ],
)
def test_a_dropped_bias_is_seen(folder, case, name):
  """A8: in one layer. A key's bias moves all scores of a query alike but for the rotation, which is enough."""
  assert wrong.edited(folder, case, lambda t: t[f'model.layers.0.{name}.bias'].fill(0)).max() > wrong.SEEN


def roll(name, axis):
  """Moves the parts of a tensor by one along an axis of three, or its rows by one."""

  def edit(tensors):
    x = tensors[name]
    tensors[name] = np.roll(x, x.shape[axis] // 3 if axis else 1, axis)

  return edit


@pytest.mark.parametrize(
  'edit',
  [
    roll('transformer.h.0.attn.c_attn.weight', 1),  # q, k, v become v, q, k
    roll('transformer.wpe.weight', 0),  # positions begin at one
    lambda t: t['transformer.h.0.attn.c_attn.bias'][:60].fill(0),
    lambda t: t['transformer.h.1.ln_2.bias'].fill(0),
    lambda t: t['transformer.h.0.mlp.c_fc.bias'].fill(0),
    lambda t: t['transformer.ln_f.bias'].fill(0),
  ],
)
def test_what_only_gpt_has_is_seen(folder, edit):
  assert wrong.edited(folder, 'gpt2', edit).max() > wrong.SEEN
