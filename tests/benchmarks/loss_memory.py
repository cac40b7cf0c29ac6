"""Temporary memory of the loss and its gradients, of the compiled program: a share of the logits' bytes.

    python -m tests.benchmarks.loss_memory

4096 tokens and 32768 ids by default, whose logits are 512 MiB in float32. Nothing is run, so nothing is noisy.
"""

import argparse

import jax
import jax.numpy as jnp

from maxtext_layers import head
from tests.benchmarks import measure


def temporary(function, *arguments):
  """Bytes that the compiled gradient of `function` needs beside its arguments and results."""
  compiled = jax.jit(jax.value_and_grad(function, argnums=(0, 1))).lower(*arguments).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def shares(batch, length, vocab, d_model, chunks):
  """{cross-entropy: its temporary bytes / bytes of the logits}."""
  x = jax.ShapeDtypeStruct((batch, length, d_model), jnp.float32)
  w = jax.ShapeDtypeStruct((vocab, d_model), jnp.float32)
  targets = jax.ShapeDtypeStruct((batch, length), jnp.int32)
  weights = jax.ShapeDtypeStruct((batch, length), jnp.float32)
  whole = batch * length * vocab * 4
  losses = {
    'tokens': lambda x, w, t, a: head.cross_entropy_sum(x, w, t, a, chunks=chunks)[0],
    'vocabulary': lambda x, w, t, a: jnp.sum(head.cross_entropy(x, w, t, chunks=chunks) * a),
    'whole': lambda x, w, t, a: jnp.sum(a * _plain(x, w, t)),
  }
  return {name: temporary(loss, x, w, targets, weights) / whole for name, loss in losses.items()}


def _plain(x, w, targets):
  y = head.logits(x, w)
  return jax.nn.logsumexp(y, -1) - jnp.take_along_axis(y, targets[..., None], -1)[..., 0]


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--batch', type=int, default=4)
  parser.add_argument('--length', type=int, default=1024)
  parser.add_argument('--vocab', type=int, default=32768)
  parser.add_argument('--d_model', type=int, default=256)
  parser.add_argument('--chunks', type=int, default=16)
  flags = parser.parse_args()
  found = shares(flags.batch, flags.length, flags.vocab, flags.d_model, flags.chunks)
  measure.print_line(benchmark='loss_memory', tokens=flags.batch * flags.length, chunks=flags.chunks, share=found)


if __name__ == '__main__':
  main()
