"""Which experts a token goes to, with what weight, and what is asked of their loads.

A router turns x into scores, one an expert, chooses `top_k` of them and weighs the chosen by their scores. All of it is
float32, whatever x is: rounding must not choose experts. Weights that are normalised over the chosen are computed from
the logarithms of the scores, so that they sum to 1 however small the scores are, and the softmax of the chosen logits
(arXiv 2401.04088) and the renormalised softmax of all are one and the same `score='softmax', normalize=True`.

Padding (segment 0) goes nowhere: expert E, weight 0, and it is in no load and no loss.

Reading order: `Spec`, `Router`, `Balance`, `balance_loss`, `z_loss`.
"""

from typing import Any
from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from maxtext_layers import auxiliary
from maxtext_layers import config
from maxtext_layers import param

SCORES = ('softmax', 'sigmoid', 'sqrt_softplus')
GROUP_SCORES = ('max', 'top2')
SCOPES = ('micro', 'sequence', 'batch')


@config.spec
class Balance:
  """Coefficients of the losses that keep experts in use; 0 leaves one out.

  scope: what `balance_loss` takes its means over. 'micro': the tokens of a micro-batch, on all devices. 'sequence':
    each row by itself. 'batch': the tokens of an update; who trains with it must not cut that into micro-batches.
  """

  loss: float = 0.0
  scope: str = 'micro'
  z_loss: float = 0.0

  def __post_init__(self):
    if self.scope not in SCOPES:
      raise config.Error(f'balance scope {self.scope!r} is none of {", ".join(SCOPES)}')


@config.spec
class Spec:
  """What a router is."""

  experts: int
  top_k: int
  score: str = 'softmax'  # or 'sigmoid' (arXiv 2412.19437), 'sqrt_softplus': the square root of log(1 + e^x)
  normalize: bool = False  # the weights of the chosen sum to 1
  scale: float = 1.0  # of the weights, at last
  groups: int = 1  # experts stand in so many groups of neighbours, of which
  top_groups: int = 1  # so many are open to a token (arXiv 2405.04434, section 2.2.2):
  group_score: str = 'max'  # those with the best expert, or 'top2': with the largest sum of their two best
  bias: bool = False  # logits have one
  correction: bool = False  # a bias that counts in the choice only, see optimizer.py for what moves it
  table: int | None = None  # of how many token ids: experts are looked up by id (arXiv 2106.04426), scores only weigh
  balance: Balance = Balance()

  def __post_init__(self):
    if self.score not in SCORES:
      raise config.Error(f'score {self.score!r} is none of {", ".join(SCORES)}')
    if self.group_score not in GROUP_SCORES:
      raise config.Error(f'group_score {self.group_score!r} is none of {", ".join(GROUP_SCORES)}')
    if not 1 <= self.top_k <= self.experts:
      raise config.Error(f'top_k={self.top_k} does not lie between 1 and experts={self.experts}')
    if self.groups < 1 or self.experts % self.groups or not 1 <= self.top_groups <= self.groups:
      raise config.Error(f'groups={self.groups}, top_groups={self.top_groups} do not fit experts={self.experts}')
    if self.group_score == 'top2' and self.top_groups < self.groups == self.experts:
      raise config.Error(f'groups={self.groups} of experts={self.experts} hold one each, and no two best to choose by')
    if self.top_k > self.top_groups * (self.experts // self.groups):
      raise config.Error(f'top_k={self.top_k} is more than top_groups={self.top_groups} of groups={self.groups} hold')


class Routing(NamedTuple):
  """Where tokens go.

  experts: int32 [B, T, K], the best first; E: nowhere.
  weights: float32 [B, T, K]; 0 where experts is E.
  aux: see auxiliary.py; `balance_loss` and `router_z_loss` if the spec has them, and the loads of `correction`.
  """

  experts: jax.Array
  weights: jax.Array
  aux: dict[str, Any]


class Router(nnx.Module):
  """Parameters w [D, E]; by the spec also b [E], correction [E], table [V, K], int32."""

  maps = ('w',)

  def __init__(self, spec: Spec, d_model: int, *, rngs: nnx.Rngs):
    self.spec = spec
    self.w = param.normal((d_model, spec.experts), ('embed', None), sigma=d_model**-0.5, rngs=rngs)
    self.b = param.constant((spec.experts,), (None,), value=0.0) if spec.bias else None
    self.correction = param.fixed((spec.experts,), (None,)) if spec.correction else None
    if spec.table is None:
      self.table = None
    else:  # neighbours in turn, until a table is read
      turn = np.arange(spec.table * spec.top_k) % spec.experts
      self.table = param.numbers(turn.reshape(spec.table, spec.top_k), (None, None), below=spec.experts)

  def __call__(self, x: jax.Array, context) -> Routing:
    """x [B, T, D] -> Routing; of the context, segments are read and, with a table, tokens."""
    spec = self.spec
    logits = jnp.einsum(
      'BTD,DE->BTE', x.astype(jnp.float32), self.w[...].astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    if self.b is not None:
      logits = logits + self.b[...].astype(jnp.float32)
    scores = log_scores(logits, spec.score)
    chosen = self._choose(logits, scores, context)
    weights = jnp.take_along_axis(scores, chosen, -1)
    weights = spec.scale * (jax.nn.softmax(weights, -1) if spec.normalize else jnp.exp(weights))
    real = None if context.segments is None else context.segments != 0
    if real is not None:
      chosen = jnp.where(real[..., None], chosen, spec.experts)
      weights = jnp.where(real[..., None], weights, 0.0)
    return Routing(chosen, weights, self._aux(logits, scores, chosen, real))

  def _choose(self, logits, scores, context):
    """int32 [B, T, K]."""
    spec = self.spec
    if self.table is not None:
      if context.tokens is None:
        raise ValueError('a router with a table needs the token ids')
      return self.table[...][context.tokens]
    ranks = jax.lax.stop_gradient(logits)  # in the order of the scores, but where these are 0 or 1 all alike
    if self.correction is not None or spec.group_score == 'top2':
      ranks = jnp.exp(jax.lax.stop_gradient(scores))
    if self.correction is not None:
      ranks = ranks + jax.lax.stop_gradient(self.correction[...]).astype(jnp.float32)
    if spec.top_groups < spec.groups:
      inside = ranks.reshape(*ranks.shape[:-1], spec.groups, -1)
      best = jax.lax.top_k(inside, 2)[0].sum(-1) if spec.group_score == 'top2' else inside.max(-1)
      open_ = jax.lax.top_k(best, spec.top_groups)[1]
      seen = (open_[..., None] == np.arange(spec.groups)).any(-2)
      ranks = jnp.where(seen[..., None], inside, -jnp.inf).reshape(ranks.shape)
    return jax.lax.top_k(ranks, spec.top_k)[1].astype(jnp.int32)

  def _aux(self, logits, scores, chosen, real):
    spec, aux = self.spec, {}
    if spec.balance.loss or spec.correction:
      counts = (chosen[..., None] == np.arange(spec.experts)).sum(-2, dtype=jnp.float32)  # [B, T, E], 0 for padding
    if spec.balance.loss:
      shares = jnp.exp(scores) if spec.score == 'softmax' else jax.nn.softmax(scores, -1)
      by_row = spec.balance.scope == 'sequence'
      aux['balance_loss'] = spec.balance.loss * balance_loss(shares, counts, real, spec.top_k, by_row)
    if spec.balance.z_loss:
      aux['router_z_loss'] = spec.balance.z_loss * z_loss(logits, real)
    if spec.correction:
      aux[auxiliary.LOADS] = {'correction': jax.lax.stop_gradient(counts.sum((0, 1)))}
    return aux


def log_scores(logits: jax.Array, score: str) -> jax.Array:
  """Logarithms of scores, finite with finite gradients for every finite logit."""
  if score == 'softmax':
    return jax.nn.log_softmax(logits, -1)
  if score == 'sigmoid':
    return jax.nn.log_sigmoid(logits)
  small = logits < -15.0  # there log(1 + e^x) is e^x to the last bit
  return 0.5 * jnp.where(small, logits, jnp.log(jax.nn.softplus(jnp.where(small, 0.0, logits))))


def balance_loss(
  shares: jax.Array, counts: jax.Array, real: jax.Array | None, top_k: int, by_row: bool = False
) -> jax.Array:
  """E * sum over experts of f * P (arXiv 2101.03961, equation 4, without its coefficient).

  f is the fraction of choices that fell on an expert, its tokens / (K * tokens), so that f sums to 1 for every K, as in
  arXiv 2412.19437, equations 17 to 20 (whose f carries the factor E); P is the mean share of the router's scores that
  an expert got, where a token's shares sum to 1. Equal loads give 1, all tokens on one expert with all of the scores E.
  `transformers` does not divide by K: its coefficient c is c * K here. It also takes the means over all layers at once;
  here, as in the papers, each layer has a loss and they are added.

  Args:
    shares: float32 [B, T, E], each token's sum to 1.
    counts: float32 [B, T, E], 1 for the K experts that a token goes to; 0 for padding.
    real: bool [B, T], False for padding; None: no padding.
    top_k: K.
    by_row: the means are taken over each row (arXiv 2412.19437: over each sequence), and the loss is the mean of those
      of the rows that hold tokens.

  Returns:
    Float32 scalar; gradients flow through P only.
  """
  axes = (1,) if by_row else (0, 1)
  if real is None:
    real = jnp.ones(shares.shape[:2], bool)
  tokens = real.sum(axes, dtype=jnp.float32)[..., None]
  safe = jnp.maximum(tokens, 1.0)
  f = jax.lax.stop_gradient(counts).sum(axes) / (top_k * safe)
  p = jnp.where(real[..., None], shares, 0.0).sum(axes) / safe
  losses = shares.shape[-1] * (f * p).sum(-1)
  return losses.sum() / jnp.maximum((tokens > 0).sum(), 1) if by_row else losses


def z_loss(logits: jax.Array, real: jax.Array | None) -> jax.Array:
  """The mean over tokens of logsumexp(logits)² (arXiv 2202.08906, equation 5), float32; logits [B, T, E]."""
  squares = jax.nn.logsumexp(logits, -1) ** 2
  if real is None:
    return squares.mean()
  return jnp.where(real, squares, 0.0).sum() / jnp.maximum(real.sum(), 1)
