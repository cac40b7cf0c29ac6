"""GPT-3 against its papers' equations (twins/gpt3.py)."""

from flax import nnx
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_models import decoder
from maxtext_models import layout
from maxtext_models import scoring
from maxtext_models.families import gpt3
from tests.twins import gpt3 as twin

TOLERANCE = 2e-5  # logits of size 1 in float32, three layers deep
LAYERS, HEADS, T = 3, 4, 33
CARD = gpt3.Gpt3(
  layers=LAYERS, d_model=24, d_ff=96, heads=HEADS, kv_heads=HEADS, head_dim=6, vocab=37, context=40, eps=1e-5
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 37, (2, T))
THEIRS = {'mixer_norm': 'ln_1', 'ffn_norm': 'ln_2', 'norm': 'ln_f', 'embed': 'wte', 'position_embed': 'wpe'}
THEIRS |= {'mixer': 'attn', 'ffn.up': 'mlp.in', 'ffn.down': 'mlp.out', 'layers': 'h'}


@pytest.fixture(name='model', scope='module')
def _model():
  """Every parameter drawn at random, the biases and the norms' weights away from 0 and 1."""
  graph, state = nnx.split(decoder.abstract(CARD))
  rng, drawn = np.random.default_rng(1), []
  for path, leaf in nnx.to_flat_state(state):
    name = '.'.join(map(str, path))
    small = name.endswith('.b') or 'norm' in name or 'embed' in name
    value = (0.5 if small else 0.3) * rng.standard_normal(leaf.get_value().shape)
    value += 'norm' in name and not name.endswith('.b')
    drawn.append((path, leaf.replace(jnp.asarray(value, jnp.float32))))
  return nnx.merge(graph, nnx.from_flat_state(drawn))


@pytest.fixture(name='weights', scope='module')
def _weights(model):
  """The model's parameters under GPT's names, float64."""
  leaves, found = layout.leaves(nnx.state(model, nnx.Param)), {}
  for name, slot in layout.slots(leaves, model.stack.plan).items():
    value = np.asarray(leaves[slot.path].get_value(), np.float64)
    for ours, theirs in THEIRS.items():
      name = '.'.join(['', *name.split('.'), '']).replace(f'.{ours}.', f'.{theirs}.').strip('.')
    name += '.g' if name.split('.')[-1].startswith('ln_') else ''
    found[name] = value if slot.repeat is None else value[slot.repeat]
  return found


@pytest.fixture(name='scores', scope='module')
def _scores(model):
  return scoring.scorer(model)(TOKENS)


def theirs(weights, row=0, **changes):
  return twin.logits(TOKENS[row], weights | changes, LAYERS, HEADS, CARD.eps)


def test_logits_equal_the_equations(scores, weights):
  for row in range(2):
    expected = theirs(weights, row)
    assert expected.std() > 1
    np.testing.assert_allclose(scores[row], expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_mistake_is_far_away(scores, weights, monkeypatch):
  far = lambda **changes: np.abs(scores[0] - theirs(weights, **changes)).max() > 100 * TOLERANCE
  assert far(wpe=np.roll(weights['wpe'], 1, 0))
  assert far(**{'h.1.ln_2.b': 0 * weights['h.1.ln_2.b']})
  assert far(**{'h.2.attn.v.b': 0 * weights['h.2.attn.v.b']})
  assert far(**{'h.0.attn.q': weights['h.0.attn.k'], 'h.0.attn.k': weights['h.0.attn.q']})
  banded = twin.logits(TOKENS[0], weights, LAYERS, HEADS, CARD.eps, bands=[None, 8, None])
  assert np.abs(scores[0] - banded).max() > 100 * TOLERANCE
  with monkeypatch.context() as patch:
    patch.setattr(twin, 'gelu', lambda x: x / (1 + np.exp(-1.702 * x)))  # the sigmoid form of the same paper
    assert far()
  with monkeypatch.context() as patch:
    rms = lambda x, gain, bias, eps: x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * gain + bias
    patch.setattr(twin, 'layer_norm', rms)
    assert far()
