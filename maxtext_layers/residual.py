"""Where the norms of a residual path stand, and what a layer reads from it and adds to it.

`pre`: x + f(norm(x)) (arXiv 2002.04745). `post`: x + norm(f(x)), the norm on what is added (OLMo 2, arXiv 2501.00656).
`sandwich`: both (Gemma 2, arXiv 2408.00118).
"""

import jax

from maxtext_layers import config
from maxtext_layers import norm


@config.spec
class Spec:
  """The norms before and after a layer; None leaves one out."""

  before: norm.Spec | norm.Layer | None
  after: norm.Spec | norm.Layer | None = None


def pre(spec: norm.Spec | norm.Layer) -> Spec:
  """x + f(norm(x))."""
  return Spec(spec)


def post(spec: norm.Spec | norm.Layer) -> Spec:
  """x + norm(f(x))."""
  return Spec(None, spec)


def sandwich(spec: norm.Spec | norm.Layer) -> Spec:
  """x + norm(f(norm(x)))."""
  return Spec(spec, spec)


def norms(spec: Spec, size: int) -> tuple[norm.Norm | norm.LayerNorm | None, norm.Norm | norm.LayerNorm | None]:
  """The modules (before, after) for an axis of `size`."""
  before, after = (s.build(size) if s else None for s in (spec.before, spec.after))
  return before, after


def enter(path, x: jax.Array):
  """(what a layer reads of x, how its result is added to x): x and a sum, or what a connection of hyper.py says."""
  return path(x) if path else (x, lambda y: x + y)
