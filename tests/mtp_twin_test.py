"""Multi-token prediction of a whole model, two depths, against the report's equations (twins/mtp.py).

TRM_k, a block as any other, is the model's own: blocks are proved against transformers. The report says nothing of the
norm before the shared head; that of the published weights, one a depth, stands at the end of TRM_k here.
"""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import block
from maxtext_layers import rope
from maxtext_models import decoder
from maxtext_models.families import deepseek
from maxtext_train import losses
from tests.twins import mtp as twin

TOLERANCE = 2e-5  # logits of size 1 in float32
T, VOCAB, D, DEPTHS, LAMBDA = 23, 41, 24, 2, 0.3
CARD = deepseek.DeepSeek(
  layers=1, dense_layers=0, d_model=D, d_ff=28, d_expert=12, heads=3, kv_heads=3, head_dim=14, q_rank=None, kv_rank=10,
  nope_dim=8, rope_dim=6, value_dim=7, vocab=VOCAB, context=64, eps=1e-5, tied=False, experts=5, top_k=2, shared=1,
  score='sigmoid', balance_loss=0.0, mtp=DEPTHS, dispatch='dense',
)  # fmt: skip
ROWS = np.random.default_rng(0).integers(0, VOCAB, (2, T + 1))
TOKENS, FOLLOWING = ROWS[:, :-1], ROWS[:, 1:]


@pytest.fixture(name='model', scope='module')
def _model():
  """Every parameter drawn at random, the norms' weights away from 1."""
  graph, state = nnx.split(decoder.abstract(CARD))
  rng, drawn = np.random.default_rng(1), []
  for path, leaf in nnx.to_flat_state(state):
    name, shape = '.'.join(map(str, path)), leaf.get_value().shape
    draw = rng.standard_normal(shape)
    if 'norm' in name:
      draw = 1 + 0.4 * draw
    elif 'correction' in name:
      draw *= 0.1
    else:
      draw *= 0.7 if VOCAB in shape else 1.5 * D**-0.5
    drawn.append((path, leaf.replace(jnp.asarray(draw, jnp.float32))))
  return nnx.merge(graph, nnx.from_flat_state(drawn))


@jax.jit
def said(model, tokens):
  """(h^0 [B, T, D], logits of every depth [B, T, V])."""
  x, _, _ = model.hidden(tokens)
  made, _ = model.further(tokens, x)
  return x, [model.logits(y) for y in made]


@jax.jit
def turned(module, h):
  """TRM_k with its norm, of one row of T."""
  turn = CARD.blocks()[-1].mixer.rope
  context = block.Context(tables={turn: rope.table(turn, np.arange(h.shape[0])[None])}, kernel='chunked')
  return module.norm(module.block(h[None], context)[0])[0]


@jax.jit
def taught(model, batch):
  return losses.next_token(model, batch, chunk=losses.Chunk.TOKENS, chunks=4, ahead=LAMBDA)


def ahead_loss(model, weights, positions, segments):
  """(mtp_loss, the whole loss less that of the next token) as sums over both rows, and the weight."""
  rows = {'weights': weights.astype(np.float32), 'positions': positions, 'segments': segments}
  rows = {name: np.broadcast_to(row, TOKENS.shape) for name, row in rows.items()}
  made = taught(model, {'tokens': TOKENS, 'targets': FOLLOWING, **rows})
  return float(made.aux['mtp_loss']), float(made.total - made.aux['lm_loss']), float(made.weight)


def block_of(module, h):
  """The same of a shorter row: what follows is not seen."""
  row = np.zeros((T, D), np.float32)
  row[: len(h)] = h
  return np.asarray(turned(module, row), np.float64)[: len(h)]


def modules_of(model):
  """The parameters in the report's shapes: M_k has the columns of the hidden state first."""
  found = []
  for module in model.ahead:
    merge = np.asarray(module.merge.w[...], np.float64)
    found.append({
      'h_norm': np.asarray(module.hidden_norm.w[...], np.float64),
      'e_norm': np.asarray(module.embed_norm.w[...], np.float64),
      'm': np.concatenate([merge[D:], merge[:D]]).T,
      'block': functools.partial(block_of, module),
    })  # fmt: skip
  return found


def theirs(model, h, tokens=TOKENS[0], change=lambda modules: modules):
  """Log-probabilities [T - k, V] of each depth, of one row."""
  table, out = (np.asarray(w, np.float64) for w in (model.embed.w[...], model.output()))
  modules = change(modules_of(model))
  return twin.depths(np.asarray(h, np.float64), tokens, table, modules, lambda y: y @ out.T, CARD.eps)


@pytest.fixture(name='ours', scope='module')
def _ours(model):
  """(h^0 [B, T, D], log-probabilities of each depth, at all T places)."""
  x, logits = said(model, TOKENS)
  return np.asarray(x), [twin.log_softmax(np.asarray(a, np.float64)) for a in logits]


def test_every_depth_equals_equations_21_to_23(model, ours):
  for row in range(2):
    for k, expected in enumerate(theirs(model, ours[0][row], TOKENS[row]), 1):
      assert expected.std() > 0.5
      np.testing.assert_allclose(ours[1][k - 1][row, : T - k], expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_mistake_is_far_away(model, ours):
  def far(change=lambda modules: modules, tokens=TOKENS[0], k=1):
    return np.abs(ours[1][k - 1][0, : T - k] - theirs(model, ours[0][0], tokens, change)[k - 1]).max() > 100 * TOLERANCE

  halves = lambda m: np.concatenate([m[:, D:], m[:, :D]], 1)
  assert far(lambda modules: [m | {'m': halves(m['m'])} for m in modules])
  assert far(lambda modules: [m | {'h_norm': m['e_norm'], 'e_norm': m['h_norm']} for m in modules])
  assert far(lambda modules: modules[::-1])
  assert far(tokens=np.roll(TOKENS[0], 1))  # Emb(t_{i+k-1})
  # the second depth on the model's own h instead of the first depth's
  skipped = lambda modules: [{**modules[0], 'block': lambda _: ours[0][0, : T - 1].astype(np.float64)}, modules[1]]
  assert far(skipped, k=2)


def test_loss_equals_equations_24_and_25(model, ours):
  found = [theirs(model, ours[0][row], TOKENS[row]) for row in range(2)]
  expected = np.mean([twin.loss(logs, FOLLOWING[row], LAMBDA) for row, logs in enumerate(found)])
  mtp, rest, weight = ahead_loss(model, np.ones(T), np.arange(T), np.ones(T, int))
  assert weight == 2 * T
  assert rest / weight == pytest.approx(expected, rel=TOLERANCE)
  assert mtp / weight == pytest.approx(expected / LAMBDA, rel=TOLERANCE)
  one_sooner = [twin.loss(logs, np.roll(FOLLOWING[row], 1), LAMBDA) for row, logs in enumerate(found)]
  assert abs(rest / weight / np.mean(one_sooner) - 1) > 100 * TOLERANCE


def test_a_packed_document_is_that_document_alone(model):
  """No depth looks over the border: neither at a token to read nor at one to predict."""
  border = 9
  segments = np.where(np.arange(T) < border, 1, 2)
  positions = np.concatenate([np.arange(border), np.arange(T - border)])
  weights = np.ones(T)
  weights[[border - 1, T - 1]] = 0  # there is no next token
  mtp, _, _ = ahead_loss(model, weights, positions, segments)
  total = 0.0
  for part in (slice(0, border), slice(border, T)):
    alone = np.zeros_like(TOKENS)  # what follows is not seen
    length = len(TOKENS[0, part])
    alone[:, :length] = TOKENS[:, part]
    for h, tokens in zip(said(model, alone)[0][:, :length], TOKENS[:, part]):
      for k, logs in enumerate(theirs(model, h, tokens), 1):
        total -= sum(logs[i, tokens[i + k + 1]] for i in range(length - k - 1)) / DEPTHS
  assert mtp == pytest.approx(total, rel=TOLERANCE)
