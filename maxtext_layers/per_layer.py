"""Per-layer inputs: beside the stream that all layers share, each layer has a vector of its own for every token.

`Inputs` makes them once a model, from the ids and from the embedded tokens; a block's `Spec` mixes its layer's in. The
wide table costs memory and a look-up, and no product. Published with Gemma 3n and 4, without a paper; the equations are
those of `transformers` (gemma4, 5.24), which docstrings write out.
"""

from flax import nnx
import jax
import jax.numpy as jnp

from maxtext_layers import config
from maxtext_layers import embed
from maxtext_layers import linear
from maxtext_layers import mlp
from maxtext_layers import norm
from maxtext_layers import sharding


@config.spec
class Inputs:
  """What makes the inputs of all layers: a table of `vocab` rows and a projection of the embedded tokens."""

  vocab: int
  layers: int
  size: int  # of each layer's vector
  norm: norm.Spec

  def build(self, d_model: int, rngs: nnx.Rngs) -> 'Maker':
    """The module."""
    return Maker(self, d_model, rngs=rngs)


class Maker(nnx.Module):
  """p = (norm(x W / sqrt(D)) + sqrt(P) E[id]) / sqrt(2); parameters embed [V, L P], project [D, L, P], norm [P]."""

  def __init__(self, spec: Inputs, d_model: int, *, rngs: nnx.Rngs):
    self.spec, self.scale = spec, d_model**-0.5
    count, size = spec.layers, spec.size
    self.embed = embed.Embed(spec.vocab, count * size, scale=size**0.5, rngs=rngs)
    self.project = linear.Linear('BTD,DLP->BTLP', (d_model, count, size), ('embed', 'layers', None), rngs=rngs)
    self.norm = norm.Norm(spec.norm, size, None)

  def __call__(self, tokens: jax.Array, x: jax.Array) -> jax.Array:
    """Ids [B, T] and what they are embedded as, x [B, T, D] -> [L, B, T, P]."""
    looked = self.embed(tokens, x.dtype).reshape(*tokens.shape, self.spec.layers, self.spec.size)
    seen = self.norm(self.project(x) * jnp.asarray(self.scale, x.dtype))
    return sharding.shard(
      ((seen + looked) * jnp.asarray(2**-0.5, x.dtype)).transpose(2, 0, 1, 3), None, 'batch', 'seq', None
    )


@config.spec
class Spec:
  """norm(W2 (activation(W1 x) * p)) for a layer's input p, added to x after its feed-forward layer."""

  size: int
  norm: norm.Spec
  activation: str = 'gelu'

  def build(self, d_model: int, rngs: nnx.Rngs) -> 'Mixed':
    """The module."""
    return Mixed(self, d_model, rngs=rngs)


class Mixed(nnx.Module):
  """Parameters gate [D, P], out [P, D], norm [D]."""

  def __init__(self, spec: Spec, d_model: int, *, rngs: nnx.Rngs):
    self.spec = spec
    self.gate = linear.Linear('BTD,DP->BTP', (d_model, spec.size), ('embed', None), rngs=rngs)
    self.out = linear.Linear('BTP,PD->BTD', (spec.size, d_model), (None, 'embed'), rngs=rngs)
    self.norm = norm.Norm(spec.norm, d_model)

  def __call__(self, x: jax.Array, given: jax.Array) -> jax.Array:
    """x [B, T, D], the layer's input [B, T, P] -> what is added to x."""
    return self.norm(self.out(mlp.ACTIVATIONS[self.spec.activation](self.gate(x)) * given))
