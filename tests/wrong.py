"""How far a model with a mistake is from its reference, for tests that make mistakes on purpose; and decoding by steps.

A mistake is made in a copy of the card, in the specs of the blocks, in the tensors of the files, or in a function.
Distances are [B, T], of each position's logits.
"""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from maxtext_models import checkpoint
from maxtext_models import decoder
from maxtext_models import hf
from maxtext_models import scoring
from tests.golden import golden

TOLERANCE = golden.TOLERANCE
SEEN = 100 * TOLERANCE
QUICK = {'xla_backend_optimization_level': 0}  # compiles in 0.6 of the time, for what runs once


def folders(parent):
  """case -> its Hugging Face directory, made once."""
  return functools.cache(lambda case: golden.directory(case, parent))


def loader(parent):
  """case -> (card, model), loaded once."""
  return functools.cache(lambda case: checkpoint.load(golden.directory(case, parent)))


def distance(case, model, score=scoring.scorer):
  """[B, T]: the largest difference of a logit at each position."""
  reference = golden.reference(case)
  return np.abs(score(model)(reference.tokens) - reference.logits).max(-1)


def changed(model):
  """scoring.scorer without its memory of compilations, for a test that changes a function below it."""
  graph, state = nnx.split(model)
  forward = lambda state, tokens: (m := nnx.merge(graph, state)).logits(m.hidden(tokens)[0])
  forward = jax.jit(forward, compiler_options=QUICK)
  return lambda tokens: np.asarray(forward(state, tokens))


def edited(folder, case, edit):
  """The distance of a model whose Hugging Face tensors went through `edit`."""
  card, files = hf.read(folder(case))
  tensors = {name: files.get(name) for name in files.headers}
  edit(tensors)
  files.get = tensors.__getitem__
  model = decoder.abstract(card)
  graph, state = nnx.split(model)
  return distance(case, nnx.merge(graph, hf.fill(card, state, model.stack.plan, files)))


def other_card(folder, case, **changes):
  """The distance of a model with other numbers on its card, and the weights of the case as far as it has them."""
  card, model = checkpoint.load(folder(case))
  for name, value in changes.items():
    setattr(card, name, value)
  return distance(case, _with_weights(card, model), changed)


def other_blocks(monkeypatch, case, card, model, change):
  """The distance after `change` of every block's spec, which leaves those it does not concern; weights as above."""
  specs = card.blocks()
  wrong = [change(spec) for spec in specs]
  assert wrong != specs
  monkeypatch.setattr(type(card), 'blocks', lambda self: wrong)
  return distance(case, _with_weights(card, model), changed)


def _with_weights(card, model):
  """The model of a card with those weights of another that it has; all of them must be there."""
  graph, state = nnx.split(decoder.abstract(card))
  flat = dict(nnx.to_flat_state(nnx.state(model)))
  return nnx.merge(graph, nnx.from_flat_state([(path, flat[path]) for path, _ in nnx.to_flat_state(state)]))


def swap(first, second, rows=None):
  """Swaps two tensors; `rows`: only so many of their first rows."""

  def edit(tensors):
    x, y = tensors[first].copy(), tensors[second].copy()
    if rows is None:
      tensors[first], tensors[second] = y, x
    else:
      x[:rows], y[:rows] = y[:rows].copy(), x[:rows].copy()
      tensors[first], tensors[second] = x, y

  return edit


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


@functools.partial(jax.jit, static_argnames='slots', compiler_options=QUICK)
def _prefill(model, tokens, slots):
  x, caches, _ = model.hidden(tokens, caches=model.stack.caches(len(tokens), slots))
  return model.logits(x), caches


@functools.partial(jax.jit, compiler_options=QUICK)
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
