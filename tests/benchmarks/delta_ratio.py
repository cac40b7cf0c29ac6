"""Gated delta net: forward and backward pass of the chunked form against the recurrent one, tokens a second.

    python -m tests.benchmarks.delta_ratio --rounds=7

Both are compiled, on the same q, k, v and gates of one row of 2048 tokens. Ratios are taken round by round.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_layers import delta
from tests.benchmarks import measure


def recurrent(q, k, v, decay, beta, state):
  """The recurrence, token by token: what `delta.chunked` computes."""
  tokens = tuple(jnp.moveaxis(a, axis, 0) for a, axis in ((q, 2), (k, 2), (v, 3), (decay, 3), (beta, 3)))
  end, y = jax.lax.scan(lambda state, token: delta.step(*token, state)[::-1], state, tokens)
  return jnp.moveaxis(y, 0, 3), end


def inputs(batch, length, heads, groups, size):
  """Random arguments of both forms."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
  unit = lambda a: a / jnp.linalg.norm(a, axis=-1, keepdims=True)
  g, r = heads, groups
  q, k, v = unit(draw(batch, g, length, size)), unit(draw(batch, g, length, size)), draw(batch, g, r, length, size)
  decay, beta = -jnp.exp(draw(batch, g, r, length) - 3), jax.nn.sigmoid(draw(batch, g, r, length))
  return q, k, v, decay, beta, jnp.zeros((batch, g, r, size, size))


def timed(form, arguments):
  """A function that runs value and gradients once and tells how long it took; it is compiled here."""
  loss = lambda *a: sum(jnp.sum(x * x) for x in form(*a))
  step = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(arguments)))))
  jax.block_until_ready(step(*arguments))
  tokens = arguments[0].shape[0] * arguments[0].shape[2]

  def once():
    begin, cpu, busy = time.perf_counter(), time.process_time(), measure.busy_seconds()
    value, _ = jax.block_until_ready(step(*arguments))
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    others = max(0.0, (measure.busy_seconds() - busy - cpu) / (seconds * measure.CPUS))
    return {'tokens_per_s': tokens / seconds, 'cpu': cpu, 'others': others, 'loss': float(value)}

  return once


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--batch', type=int, default=1)
  parser.add_argument('--length', type=int, default=2048)
  parser.add_argument('--heads', type=int, default=2, help='of keys')
  parser.add_argument('--groups', type=int, default=2, help='of values, for each head of keys')
  parser.add_argument('--size', type=int, default=64, help='of a key and of a value')
  parser.add_argument('--rounds', type=int, default=7)
  flags = parser.parse_args()
  arguments = inputs(flags.batch, flags.length, flags.heads, flags.groups, flags.size)
  sides = {'recurrent': timed(recurrent, arguments), 'chunked': timed(delta.chunked, arguments)}
  rows = measure.interleaved(sides, flags.rounds)
  measure.print_line(
    benchmark='delta_ratio',
    length=flags.length,
    rounds=flags.rounds,
    **measure.compared(rows, 'chunked', 'recurrent'),
    **measure.compared(rows, 'recurrent', 'chunked', 'cpu', 'cpu_'),
    **{field: measure.median(rows, field) for field in ('tokens_per_s', 'cpu', 'others', 'loss')},
  )


if __name__ == '__main__':
  main()
