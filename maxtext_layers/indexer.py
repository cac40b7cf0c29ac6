"""Which keys a query attends to (the lightning indexer of DeepSeek-V3.2-Exp's report, part 1): pure functions.

A few small heads score every key s that query t may see, I[t, s] = sum_j w[t, j] relu(q[t, j] . k[s]) (equation 1), and
the query attends to the `top_k` best (equation 2). What the heads should have said is what attention then does with the
keys: its weights, summed over heads; the loss is their divergence from softmax(I) (equations 3 and 4).

Reading order: `Spec`, `scores`, `select` and `best`, `divergence`.
"""

import jax
import jax.numpy as jnp

from maxtext_layers import config

STAGES = ('sparse', 'dense')


@config.spec
class Spec:
  """What an indexer is."""

  heads: int
  head_dim: int
  top_k: int  # keys that a query attends to, at most
  loss: float = 0.0  # the mean divergence of a token is multiplied with it and added to the loss; 0: nothing is learned
  stage: str = 'sparse'  # or 'dense': all keys are attended to, while only the indexer learns

  def __post_init__(self):
    if self.stage not in STAGES:
      raise config.Error(f'stage={self.stage!r} is none of {", ".join(STAGES)}')
    if self.heads < 1 or self.head_dim < 1 or self.top_k < 1:
      raise config.Error(f'an indexer with heads={self.heads}, head_dim={self.head_dim}, top_k={self.top_k}')

  @property
  def scale(self) -> float:
    """Of the weights w of `scores`."""
    return (self.heads * self.head_dim) ** -0.5

  def takes_all(self, keys: int) -> bool:
    """Whether there is nothing to choose among so many."""
    return self.stage == 'dense' or keys <= self.top_k

  def flops(self, doubled: int) -> int:
    """Forward operations of scoring half of `doubled` pairs."""
    return self.heads * (self.head_dim + 1) * doubled


def scores(q: jax.Array, k: jax.Array, w: jax.Array) -> jax.Array:
  """q [B, J, T, I], k [B, S, I], w [B, T, J] -> sum_j w relu(q . k), float32 [B, T, S] (equation 1)."""
  products = jnp.einsum('BJTI,BSI->BJTS', q, k, preferred_element_type=jnp.float32)
  return jnp.einsum('BJTS,BTJ->BTS', jax.nn.relu(products), w)


def select(ranks: jax.Array, seen, top_k: int) -> jax.Array:
  """The top_k best of what is seen, or all of it if that is less; of equals, the first (equation 2).

  Args:
    ranks: [.., T, S].
    seen: bool, of a shape that broadcasts to it.
    top_k: how many.

  Returns:
    bool [.., T, S]; without a gradient.
  """
  seen = jnp.broadcast_to(seen, ranks.shape)
  if ranks.shape[-1] <= top_k:
    return seen
  ranks = jnp.where(seen, jax.lax.stop_gradient(ranks), -jnp.inf)
  least = jax.lax.top_k(ranks, top_k)[0][..., -1:]
  above, level = ranks > least, (ranks == least) & seen
  room = top_k - above.sum(-1, keepdims=True)
  return above | (level & (jnp.cumsum(level, -1) <= room))


def best(ranks: jax.Array, seen, top_k: int) -> tuple[jax.Array, jax.Array]:
  """The same of a single query, ranks [B, 1, S]: (indices [B, top_k], which of them were seen, bool [B, top_k])."""
  ranks, which = jax.lax.top_k(jnp.where(seen, ranks, -jnp.inf)[:, 0], top_k)
  return which, ranks > -jnp.inf


def divergence(ranks: jax.Array, weights: jax.Array, chosen) -> jax.Array:
  """KL(p || softmax(ranks)) over what is chosen, float32 nats [B, T] (equations 3 and 4).

  Args:
    ranks: [B, T, S]; they get the gradient.
    weights: of attention, summed over heads, [B, T, S]; p is these over their sum, without a gradient.
    chosen: bool [B, T, S] or what broadcasts to it.
  """
  p = jax.lax.stop_gradient(weights / weights.sum(-1, keepdims=True))
  log_q = jax.nn.log_softmax(jnp.where(chosen, ranks, -1e30), -1)
  held = chosen & (p > 0)
  return jnp.where(held, p * (jnp.log(jnp.where(held, p, 1)) - log_q), 0).sum(-1)
