"""What a layer returns beside its output: a dict of scalars, which are added over layers, and perhaps `loads`.

Scalars are terms of the loss, already scaled. `loads` is a dict of its own: the dotted path of a selection bias (see
router.py) from the module that returns it -> float32 [E], how many tokens each expert got. Loads are never added over
layers: every level puts its own name before the path, a scan stacks them, and the training step finds the parameter
under the path that comes out at the top.

>>> joined({'mixer': {}, 'ffn': {'balance_loss': 1.5, 'loads': {'router.correction': [3.0, 1.0]}}})
{'balance_loss': 1.5, 'loads': {'ffn.router.correction': [3.0, 1.0]}}
"""

from collections.abc import Mapping
from typing import Any

import jax

LOADS = 'loads'


def joined(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
  """{attribute: what its module returned} -> what the module that holds them returns."""
  total: dict[str, Any] = {}
  loads: dict[str, Any] = {}
  for where, part in parts.items():
    for name, value in part.items():
      if name == LOADS:
        loads |= {f'{where}.{path}': load for path, load in value.items()}
      else:
        total[name] = total.get(name, 0) + value
  return total | ({LOADS: loads} if loads else {})


def scanned(stacked: Mapping[str, Any]) -> dict[str, Any]:
  """What a scan returned, each value with a leading axis of layers: scalars are added, loads stay as they are."""
  return {name: value if name == LOADS else value.sum(0) for name, value in stacked.items()}


def single(part: Mapping[str, Any]) -> dict[str, Any]:
  """What one layer returned, as if a scan of one had: loads get their leading axis."""
  return {name: jax.tree.map(lambda a: a[None], value) if name == LOADS else value for name, value in part.items()}
