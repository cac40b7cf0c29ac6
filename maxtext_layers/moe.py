"""Mixture of experts: a router, gated feed-forward layers of which a token visits a few, and perhaps one for all.

Dropless unless a capacity is asked for. The ways of `Spec.dispatch` compute the same sum: 'dense' runs every expert on
every token and is what the others are tested against; 'sorted', the default, gives each expert its rows and no more;
'capacity' gives each the same number of rows (dispatch.py).

On several devices a token's experts are computed where its row of the batch lies: the weights are gathered, as those of
every layer are, and stay cut along their hidden axis where the rules cut that.

Reading order: `Spec`, `Moe`, `Experts`.
"""

import functools
import math
from typing import Any

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from maxtext_layers import auxiliary
from maxtext_layers import config
from maxtext_layers import dispatch
from maxtext_layers import linear
from maxtext_layers import mlp
from maxtext_layers import param
from maxtext_layers import router
from maxtext_layers import sharding

DISPATCHES = ('sorted', 'dense', 'capacity')
WEIGHS = ('output', 'input')


@config.spec
class Spec:
  """What a mixture is."""

  router: router.Spec
  d_expert: int  # hidden units of an expert
  activation: str | mlp.Clipped = 'silu'
  bias: tuple[str, ...] = ()  # which of gate, up, down have one, an expert each
  shared: mlp.Spec | None = None  # a layer that every token visits, added
  shared_gate: bool = False  # times the sigmoid of one more linear map of x
  weigh: str = 'output'  # what the router's weight multiplies: an expert's output or its input
  dispatch: str = 'sorted'
  capacity: float = 1.25  # with dispatch='capacity': rows an expert has, times those that equal loads would need

  def __post_init__(self):
    for name, known in (('dispatch', DISPATCHES), ('weigh', WEIGHS)):
      if (value := getattr(self, name)) not in known:
        raise config.Error(f'{name} {value!r} is none of {", ".join(known)}{config.nearest(value, known)}')
    if not self.capacity > 0:
      raise config.Error(f'capacity={self.capacity} is not positive')

  def build(self, d_model: int, rngs: nnx.Rngs) -> 'Moe':
    """The module."""
    return Moe(self, d_model, rngs=rngs)


class Moe(nnx.Module):
  """Modules router, experts; by the spec also shared and shared_gate [D, 1]."""

  def __init__(self, spec: Spec, d_model: int, *, rngs: nnx.Rngs):
    self.spec = spec
    self.router = router.Router(spec.router, d_model, rngs=rngs)
    self.experts = Experts(spec, d_model, rngs=rngs)
    self.shared = spec.shared.build(d_model, rngs) if spec.shared else None
    gated = spec.shared is not None and spec.shared_gate
    self.shared_gate = linear.Linear('BTD,DS->BTS', (d_model, 1), ('embed', None), rngs=rngs) if gated else None

  def __call__(self, x: jax.Array, context) -> tuple[jax.Array, dict[str, Any]]:
    """x [B, T, D] -> (y [B, T, D], aux)."""
    routing = self.router(x, context)
    y = self.experts(x, routing)
    if self.shared is not None:
      every, _ = self.shared(x, context)
      y = y + (every if self.shared_gate is None else every * jax.nn.sigmoid(self.shared_gate(x)))
    return y, auxiliary.joined({'router': routing.aux})


class Experts(nnx.Module):
  """Parameters gate, up [E, D, F], down [E, F, D]; by the spec also gate_b, up_b [E, F], down_b [E, D].

  `share`: of its parameters a token meets so many.
  """

  maps = ('gate', 'up', 'down')

  def __init__(self, spec: Spec, d_model: int, *, rngs: nnx.Rngs):
    e, d, f = spec.router.experts, d_model, spec.d_expert
    self.spec = spec
    self.share = spec.router.top_k / e
    self.gate = param.normal((e, d, f), ('experts', 'embed', 'mlp'), sigma=d**-0.5, rngs=rngs)
    self.up = param.normal((e, d, f), ('experts', 'embed', 'mlp'), sigma=d**-0.5, rngs=rngs)
    self.down = param.normal((e, f, d), ('experts', 'mlp', 'embed'), sigma=f**-0.5, rngs=rngs)
    offset = lambda name, size, word: (
      param.constant((e, size), ('experts', word), value=0.0) if name in spec.bias else None
    )
    self.gate_b = offset('gate', f, 'mlp')
    self.up_b = offset('up', f, 'mlp')
    self.down_b = offset('down', d, 'embed')

  def __call__(self, x: jax.Array, routing: router.Routing) -> jax.Array:
    """x [B, T, D] -> [B, T, D], the weighted sum of what each token's experts make of it."""
    names = ('gate', 'up', 'down', 'gate_b', 'up_b', 'down_b')
    weights = {n: getattr(self, n)[...].astype(x.dtype) for n in names if getattr(self, n) is not None}
    if self.spec.dispatch == 'dense':
      return _dense(self.spec, x, routing.experts, routing.weights, weights)
    run = functools.partial(_grouped, self.spec, sharding.platform())
    if not sharding.active():
      return run(x, routing.experts, routing.weights, weights)
    rows = lambda a: sharding.activation(a.shape, 'batch', None, None)
    cut = {'gate': (None, None, 'mlp'), 'down': (None, 'mlp', None), 'gate_b': (None, 'mlp'), 'down_b': (None, None)}
    words = cut | {'up': cut['gate'], 'up_b': cut['gate_b']}
    specs = {n: sharding.activation(w.shape, *words[n]) for n, w in weights.items()}
    axes = specs['down'][1]
    local = functools.partial(run, axes=(axes,) if isinstance(axes, str) else axes or ())
    given = (x, routing.experts, routing.weights)
    in_specs = (*map(rows, given), specs)
    return jax.shard_map(local, in_specs=in_specs, out_specs=rows(x), check_vma=False)(*given, weights)


def _grouped(spec, platform, x, chosen, scales, weights, axes=()):
  """The sum, by rows that lie together; `axes` cut the hidden units, so that this is a part of each sum."""
  b, t, d = x.shape
  n, e = b * t, spec.router.experts
  if spec.dispatch == 'capacity':
    plan = dispatch.capacity_plan(chosen, e, spec.capacity)
  else:
    block = dispatch.block_size(chosen.size, e, platform)
    plan = dispatch.sorted_plan(chosen.reshape(n, -1), e, block, ragged=platform != 'cpu')
  scales = scales.reshape(n, -1)
  rows = dispatch.spread(x.reshape(n, d), plan)
  if spec.weigh == 'input':
    rows = rows * dispatch.spread_choices(scales, plan).astype(x.dtype)
  with_bias = lambda y, name: y + dispatch.bias(weights[name], plan, y.dtype) if name in weights else y
  gate = with_bias(dispatch.product(rows, weights['gate'], plan), 'gate_b')
  up = with_bias(dispatch.product(rows, weights['up'], plan), 'up_b')
  hidden = checkpoint_name(mlp.gated(spec.activation, gate, up), 'hidden')
  parts = math.prod(jax.lax.axis_size(axis) for axis in axes)
  if 'down_b' in weights and parts > 1:  # each part adds its share
    weights = weights | {'down_b': weights['down_b'] / parts}
  rows = with_bias(dispatch.product(hidden, weights['down'], plan), 'down_b')
  y = dispatch.collect(rows, plan)
  y = y.sum(1) if spec.weigh == 'input' else jnp.einsum('NKD,NK->ND', y.astype(jnp.float32), scales).astype(x.dtype)
  return (jax.lax.psum(y, axes) if axes else y).reshape(b, t, d)


def _dense(spec, x, chosen, scales, weights):
  """The sum, by all experts on all tokens."""
  hit = chosen[..., None] == np.arange(spec.router.experts)  # [B, T, K, E]
  scale = (hit * scales[..., None]).sum(-2).astype(x.dtype)
  inward, outward = (
    (hit.any(-2).astype(x.dtype), scale) if spec.weigh == 'output' else (scale, hit.any(-2).astype(x.dtype))
  )
  with_bias = lambda y, name: y + weights[name][:, None, None] if name in weights else y
  rows = jnp.einsum('BTD,BTE->EBTD', x, inward)
  gate = with_bias(jnp.einsum('EBTD,EDF->EBTF', rows, weights['gate']), 'gate_b')
  up = with_bias(jnp.einsum('EBTD,EDF->EBTF', rows, weights['up']), 'up_b')
  hidden = checkpoint_name(mlp.gated(spec.activation, gate, up), 'hidden')
  y = with_bias(jnp.einsum('EBTF,EFD->EBTD', hidden, weights['down']), 'down_b')
  return jnp.einsum('EBTD,BTE->BTD', y, outward)
