"""The weights of a reference under specs that are wrong in one place, and decoded step by step.

A mistake is a function of one block's spec; where it does not apply it returns the spec as it is.
"""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from maxtext_models import checkpoint
from maxtext_models import decoder
from maxtext_models import scoring
from tests.golden import golden

TOLERANCE = 1e-4
SEEN = 100 * TOLERANCE


def loader(parent):
  """case -> (card, model), loaded once."""
  return functools.cache(lambda case: checkpoint.load(golden.directory(case, parent)))


def replaced(spec, path, **changes):
  """The spec with these fields of what stands at a dotted path in it; as it is where that or a field is None."""
  name, _, rest = path.partition('.')
  inner = getattr(spec, name, None)
  if inner is None:
    return spec
  if rest:
    return dataclasses.replace(spec, **{name: replaced(inner, rest, **changes)})
  if any(getattr(inner, field, None) is None for field in changes):
    return spec
  return dataclasses.replace(spec, **{name: dataclasses.replace(inner, **changes)})


def distance(monkeypatch, case, card, model, change):
  """The largest difference of a logit from the reference's, after `change` of every block."""
  specs = card.blocks()
  wrong = [change(spec) for spec in specs]
  assert wrong != specs
  monkeypatch.setattr(type(card), 'blocks', lambda self: wrong)
  graph, shapes = nnx.split(decoder.abstract(card))
  kept = {path for path, _ in nnx.to_flat_state(shapes)}
  state = [(path, leaf) for path, leaf in nnx.to_flat_state(nnx.state(model)) if path in kept]
  assert len(state) == len(kept)
  reference = golden.reference(case)
  logits = scoring.scorer(nnx.merge(graph, nnx.from_flat_state(state)))(reference.tokens)
  return np.abs(logits - reference.logits).max()


@functools.partial(jax.jit, static_argnames='slots')
def _prefill(model, tokens, slots):
  x, caches, _ = model.hidden(tokens, caches=model.stack.caches(len(tokens), slots))
  return model.logits(x), caches


@jax.jit
def _step(model, token, start, caches):
  x, caches, _ = model.hidden(token, start=start, caches=caches)
  return model.logits(x), caches


def decoded(model, tokens, prompt):
  """Logits of tokens [B, T]: `prompt` of them at once, the others one by one."""
  tokens = jnp.asarray(tokens)
  logits, caches = _prefill(model, tokens[:, :prompt], tokens.shape[1])
  parts = [logits]
  for t in range(prompt, tokens.shape[1]):
    logits, caches = _step(model, tokens[:, t : t + 1], jnp.int32(t), caches)
    parts.append(logits)
  return np.concatenate(parts, 1)
