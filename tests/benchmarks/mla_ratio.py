"""Latent attention in training against its naive twin: all pairs of tokens, written out for every head and kept.

    python -m tests.benchmarks.mla_ratio --rounds=7

Forward and backward pass of one layer on one row of 2048 tokens. `naive` follows the equations as they stand (arXiv
2405.04434, 37 to 47), as the released eager code does; `absorbed` is what decoding does, on the whole row, with heads
that attend to the latents. All are compiled; ratios are taken round by round.
"""

import argparse
import dataclasses
import time

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from maxtext_layers import attend
from maxtext_layers import block
from maxtext_layers import mla
from maxtext_layers import rope
from tests.benchmarks import measure


class Naive(mla.Latent):
  """Keys and values of every head, a mask that is added, a softmax over whole rows."""

  def __call__(self, x, context, view=None):
    _, q, k = self.projections(x, context)
    q, k, v = self.heads(q, k)
    scores = jnp.einsum('BNTH,BNSH->BNTS', q, k) * self.shape().scale
    scores = scores + jnp.triu(jnp.full(scores.shape[2:], -jnp.inf), 1)
    y = jnp.einsum('BNTS,BNSW->BNTW', jax.nn.softmax(scores, -1), v)
    return self.o(y), view, {}


class Absorbed(mla.Latent):
  """The layer as it decodes, without a cache: queries in the space of latents, all pairs of tokens at once."""

  def __call__(self, x, context, view=None):
    _, (q_nope, q_rope), (latent, k_rope) = self.projections(x, context)
    up_k, up_v = jnp.split(self.kv_up.w[...], [self.spec.nope_dim], -1)
    q = jnp.einsum('BNTH,RNH->BNTR', q_nope, up_k), q_rope
    slots = np.arange(x.shape[1])[None]
    y = attend.cached(q, (latent, k_rope), latent, self.shape(), slots, jnp.zeros(1, jnp.int32))
    return self.o(jnp.einsum('BNTR,RNH->BNTH', y, up_v)), view, {}


def timed(module, x, context):
  """A function that runs value and gradients once and tells how long it took; it is compiled here."""
  graph, state = nnx.split(module)
  step = jax.jit(jax.value_and_grad(lambda s, x: jnp.square(nnx.merge(graph, s)(x, context)[0]).sum(), (0, 1)))
  jax.block_until_ready(step(state, x))

  def once():
    begin, cpu, busy = time.perf_counter(), time.process_time(), measure.busy_seconds()
    value, _ = jax.block_until_ready(step(state, x))
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    others = max(0.0, (measure.busy_seconds() - busy - cpu) / (seconds * measure.CPUS))
    return {'tokens_per_s': x.shape[1] / seconds, 'cpu': cpu, 'others': others, 'loss': float(value)}

  return once


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--length', type=int, default=2048)
  parser.add_argument('--rounds', type=int, default=7)
  flags = parser.parse_args()
  # the proportions of arXiv 2405.04434, a quarter of the size: 4 heads of 32 + 16, values of 32, latents of 128
  spec = mla.Spec(4, 128, nope_dim=32, value_dim=32, rope=rope.Spec(16, 10000.0, pairs='neighbours'))
  tables = {spec.rope: rope.table(spec.rope, np.arange(flags.length)[None])}
  context = block.Context(tables=tables, kernel='chunked')
  x = jnp.asarray(np.random.default_rng(0).standard_normal((1, flags.length, 256), np.float32))
  forms = {'naive': Naive, 'absorbed': Absorbed, 'expanded': mla.Latent}
  sides = {name: timed(form(spec, 256, rngs=nnx.Rngs(0)), x, context) for name, form in forms.items()}
  rows = measure.interleaved(sides, flags.rounds)
  measure.print_line(
    benchmark='mla_ratio',
    spec=str(dataclasses.asdict(spec)),
    length=flags.length,
    rounds=flags.rounds,
    **measure.compared(rows, 'expanded', 'naive'),
    **measure.compared(rows, 'naive', 'expanded', 'cpu', 'cpu_'),
    **measure.compared(rows, 'expanded', 'absorbed', prefix='absorbed_'),
    **measure.compared(rows, 'absorbed', 'expanded', 'cpu', 'absorbed_cpu_'),
    **{field: measure.median(rows, field) for field in ('tokens_per_s', 'cpu', 'others', 'loss')},
  )


if __name__ == '__main__':
  main()
