"""Multi-token prediction (arXiv 2412.19437, section 2.2): modules behind the last layer that look further ahead.

Module k = 1, 2, .. sees, at token i, what module k - 1 made of it (module 0: the model, after its last norm) and the
embedding of token i + k. Read by the model's own head, what it makes says what token i + k + 1 is (equations 21 to 23):

  h_k[i] = norm(block(M [norm(embedding of token i + k); norm(h_{k-1}[i])]))

As in the released weights, the embedding comes first in the product, and the last norm is the module's own.
"""

from flax import nnx
import jax
import jax.numpy as jnp

from maxtext_layers import auxiliary
from maxtext_layers import block
from maxtext_layers import config
from maxtext_layers import linear
from maxtext_layers import norm
from maxtext_layers import sharding


@config.spec
class Spec:
  """A block, and the norm of what goes in and what comes out."""

  block: block.Spec
  norm: norm.Spec

  def build(self, d_model: int, rngs: nnx.Rngs) -> 'Ahead':
    """The module."""
    return Ahead(self, d_model, rngs=rngs)


class Ahead(nnx.Module):
  """Parameters embed_norm, hidden_norm, norm [D], merge [2 D, D] and the block's."""

  def __init__(self, spec: Spec, d_model: int, *, rngs: nnx.Rngs):
    self.spec = spec
    self.embed_norm = norm.Norm(spec.norm, d_model)
    self.hidden_norm = norm.Norm(spec.norm, d_model)
    self.merge = linear.Linear('BTE,ED->BTD', (2 * d_model, d_model), ('embed', 'embed'), rngs=rngs)
    self.block = block.Block(spec.block, d_model, rngs=rngs)
    self.norm = norm.Norm(spec.norm, d_model)

  def __call__(self, hidden: jax.Array, embedded: jax.Array, context: block.Context):
    """hidden [B, T, D] and the embeddings of the tokens ahead [B, T, D] -> (hidden [B, T, D], aux)."""
    x = self.merge(jnp.concatenate([self.embed_norm(embedded), self.hidden_norm(hidden)], -1))
    x, _, aux = self.block(sharding.shard(x, 'batch', 'seq', 'embed'), context)
    return self.norm(x), auxiliary.joined({'block': aux})


def shifted(x: jax.Array, places: int) -> jax.Array:
  """x [B, T], so many places to the left: at i stands what stood at i + places; zeros come in at the end."""
  return jnp.pad(x[:, places:], ((0, 0), (0, min(places, x.shape[1]))))
