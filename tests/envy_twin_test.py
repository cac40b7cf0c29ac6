"""Envy-Switch, which no other program publishes, against its equations in NumPy float64; and its mutations."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import block
from maxtext_layers import norm
from maxtext_models import checkpoint
from maxtext_models import decoder
from maxtext_models import hf
from maxtext_models import layout
from maxtext_models.families import envy

TOLERANCE = 1e-4
NUMBERS = dict(
  layers=4, d_model=40, d_ff=28, d_expert=20, heads=6, kv_heads=2, head_dim=16, vocab=97, context=128, eps=1e-5,
  tied=True, experts=5, top_k=1,
)  # fmt: skip
TOKENS = np.random.default_rng(7).integers(0, 97, (2, 96))


def made(**changes):
  """(card, model) with every parameter drawn at random."""
  card = envy.Envy(**NUMBERS | changes)
  card.check()
  graph, state = nnx.split(decoder.Decoder(card, rngs=nnx.Rngs(0), scan=True))
  rng, drawn = np.random.default_rng(1), []
  for path, variable in nnx.to_flat_state(state):
    value = np.asarray(variable.get_value())
    name = '.'.join(map(str, path))
    if 'norm' in name or 'ffn_out' in name:
      value = 1 + 0.3 * rng.standard_normal(value.shape)
    elif 'embed' in name:
      value = 0.4 * rng.standard_normal(value.shape)
    else:
      value = value * (2.0 if 'router' in name or '.q.' in name else 1.3)
    drawn.append((path, variable.replace(jnp.asarray(value, jnp.float32))))
  return card, nnx.merge(graph, nnx.from_flat_state(drawn))


@pytest.fixture(name='model', scope='module')
def _model():
  return made()


def twin(card, model):
  """Logits [B, T, V] in float64: arXiv 2101.03961, equations 1 and 2, in a decoder with norms as the card says."""
  leaves = layout.leaves(nnx.state(model, nnx.Param))
  get = {}
  for name, slot in layout.slots(leaves, model.stack.plan).items():
    value = np.asarray(leaves[slot.path].get_value(), np.float64)
    get[name] = value if slot.repeat is None else value[slot.repeat]

  def rms(x, name):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + card.eps) * get[name]

  def turned(x):  # [B, T, N, H]
    half = card.head_dim // 2
    angle = np.arange(x.shape[1])[:, None] * card.theta ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
    return np.concatenate([z.real, z.imag], -1)

  gated = lambda x, gate, up, down: ((g := x @ gate) / (1 + np.exp(-g)) * (x @ up)) @ down
  x = get['embed'][TOKENS]
  length = x.shape[1]
  for l in range(card.layers):
    of = f'layers.{l}.'
    y = rms(x, of + 'mixer_norm')
    q, k, v = (np.einsum('BTD,DNH->BTNH', y, get[of + 'mixer.' + n]) for n in 'qkv')
    q, k = turned(rms(q, of + 'mixer.q_norm')), turned(rms(k, of + 'mixer.k_norm'))
    k, v = (np.repeat(a, card.heads // card.kv_heads, 2) for a in (k, v))
    scores = np.einsum('BTNH,BSNH->BNTS', q, k) / np.sqrt(card.head_dim)
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    x = x + np.einsum('BNTS,BSNH,NHD->BTD', weights, v, get[of + 'mixer.o'], optimize=True)
    y = rms(x, of + 'ffn_norm')
    if l % 2:
      logits = y @ get[of + 'ffn.router']
      p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
      e = p.argmax(-1)
      out = np.zeros_like(y)
      for b, t in np.ndindex(e.shape):
        experts = (get[f'{of}ffn.experts.{n}'][e[b, t]] for n in ('gate', 'up', 'down'))
        out[b, t] = p[b, t, e[b, t]] * gated(y[b, t], *experts)
    else:
      out = gated(y, *(get[f'{of}ffn.{n}'] for n in ('gate', 'up', 'down')))
    x = x + rms(out, of + 'ffn_out')
  return rms(x, 'norm') @ get['embed'].T


@pytest.fixture(name='expected', scope='module')
def _expected(model):
  return twin(*model)


def distance(model, expected):
  """Compiled anew each time, because tests change functions below it."""
  graph, state = nnx.split(model)
  forward = jax.jit(lambda state: (m := nnx.merge(graph, state)).logits(m.hidden(TOKENS)[0]))
  return np.abs(forward(state) - expected).max()


def test_logits_equal_the_equations(model, expected):
  assert expected.std() >= 1
  assert distance(model[1], expected) <= TOLERANCE


def test_directory_and_native_checkpoint_give_the_same_scores(model, tmp_path):
  """A2: bit-equal there and back, scanned and unrolled."""
  hf.save(tmp_path / 'hf', *model)
  for scan in (True, False):
    card, read = checkpoint.load(tmp_path / 'hf', scan=scan)
    checkpoint.save(tmp_path / f'native{scan}', card, read)
    again = checkpoint.load(tmp_path / f'native{scan}', scan=not scan)
    there, back = dict(hf.tensors(*model)), dict(hf.tensors(*again))
    assert there.keys() == back.keys() and all(there[name].tobytes() == back[name].tobytes() for name in there)


def test_mistakes_are_seen(model, expected, monkeypatch):
  """Experts whose last matrix is the next one's, a norm before only: 100 times the tolerance."""
  card, right = model
  state = nnx.state(right)

  def other(change):
    graph, shapes = nnx.split(decoder.abstract(change, scan=True))
    flat = dict(nnx.to_flat_state(state))
    kept = [(path, flat[path]) for path, _ in nnx.to_flat_state(shapes)]
    return nnx.merge(graph, nnx.from_flat_state(kept))

  rolled = dict(nnx.to_flat_state(state))
  for path, variable in rolled.items():
    if path[-2:] == ('experts', 'down'):
      rolled[path] = variable.replace(jnp.roll(variable.get_value(), 1, 1))
  assert distance(nnx.merge(nnx.split(right)[0], nnx.from_flat_state(list(rolled.items()))), expected) > 100 * TOLERANCE
  with monkeypatch.context() as patch:
    patch.setattr(envy.residual, 'sandwich', envy.residual.pre)
    assert distance(other(card), expected) > 100 * TOLERANCE


def test_the_cards():
  """By hand, for want of a published figure: six layers with 128 experts of 3 x 1536 x 6144, one of which counts."""
  card = envy.CARDS['envy-switch-base']
  expert, attention, norms = 3 * 1536 * 6144, 4 * 1536 * 1536, 3 * 1536 + 2 * 128
  rest = 12 * (attention + norms) + 6 * expert + 6 * 1536 * 128 + 32768 * 1536 + 1536
  assert card.parameters() == rest + 6 * 128 * expert
  assert card.active_parameters() == rest + 6 * expert
  spec = card.blocks()[1]
  assert isinstance(spec, block.Spec) and spec.mixer.qk_norm == norm.Spec(1e-5)
  assert spec.ffn.router.balance.loss == pytest.approx(0.01)
