"""A dense feed-forward layer and routed experts side by side, each between norms of its own; the outputs are added.

All of it reads the stream as it is, not normed: the dense layer, the router and the experts each norm it in their way.
The block around it therefore has no norm before its feed-forward layer.
"""

from flax import nnx
import jax
import jax.numpy as jnp

from maxtext_layers import auxiliary
from maxtext_layers import config
from maxtext_layers import mlp
from maxtext_layers import moe
from maxtext_layers import norm
from maxtext_layers import param
from maxtext_layers import router


@config.spec
class Spec:
  """The two layers, and the norm that stands before and after each and before the router."""

  dense: mlp.Spec
  routed: moe.Spec
  norm: norm.Spec

  def build(self, d_model: int, rngs: nnx.Rngs) -> 'Beside':
    """The module."""
    return Beside(self, d_model, rngs=rngs)


class Beside(nnx.Module):
  """dense_out(dense(dense_norm(x))) + experts_out(experts(experts_norm(x))).

  The router reads router_norm(x) / sqrt(D), and what expert e gives is multiplied with expert_scale[e] once more.
  Parameters: the norms dense_norm, dense_out, experts_norm, experts_out, router_norm [D]; expert_scale [E]; and those
  of dense, router and experts.
  """

  def __init__(self, spec: Spec, d_model: int, *, rngs: nnx.Rngs):
    self.spec, self.damping = spec, d_model**-0.5
    make = lambda: norm.Norm(spec.norm, d_model)
    self.dense_norm, self.dense_out, self.experts_norm, self.experts_out = make(), make(), make(), make()
    self.router_norm = make()
    self.dense = spec.dense.build(d_model, rngs)
    self.router = router.Router(spec.routed.router, d_model, rngs=rngs)
    self.experts = moe.Experts(spec.routed, d_model, rngs=rngs)
    self.expert_scale = param.constant((spec.routed.router.experts,), ('experts',), value=1.0)

  def __call__(self, x: jax.Array, context):
    """x [B, T, D] -> (y [B, T, D], aux)."""
    y, aux = self.dense(self.dense_norm(x), context)
    routing = self.router(self.router_norm(x) * jnp.asarray(self.damping, x.dtype), context)
    scales = self.expert_scale[...].at[routing.experts].get(mode='fill', fill_value=0)  # padding goes to no expert
    routing = routing._replace(weights=routing.weights * scales.astype(jnp.float32))
    routed = self.experts(self.experts_norm(x), routing)
    aux = auxiliary.joined({'dense': aux, 'router': routing.aux})
    return self.dense_out(y) + self.experts_out(routed), aux
