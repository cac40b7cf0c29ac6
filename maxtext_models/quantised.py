"""Published weights that are quantised, and what they stand for: computed on load, one tensor at a time.

A method reads `quantization_config` and the headers of the files, and says for each quantised tensor which stored ones
it is computed from, and how. Nothing of it depends on a model; export is not quantised.

Reading order: `METHODS`, `method`, `fp8`, `compressed_tensors`, `mxfp4`.
"""

from collections.abc import Callable
import functools
from typing import Any
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from maxtext_layers import config

FIELD = 'quantization_config'
FLOATS = {'F32': np.dtype(np.float32), 'F16': np.dtype(np.float16), 'BF16': np.dtype(jnp.bfloat16)}


class Made(NamedTuple):
  """A tensor that is computed.

  parts: the stored tensors that it is computed from.
  kind: its dtype, as headers name it.
  shape: its shape.
  make: arrays of the parts -> the array; config.Error if they do not fit.
  """

  parts: tuple[str, ...]
  kind: str
  shape: tuple[int, ...]
  make: Callable[..., np.ndarray]


def method(source: dict[str, Any]) -> Callable[..., dict[str, Made]] | None:
  """Headers {name: (dtype, shape)} -> {name: Made}, for a config.json; None: nothing is quantised.

  Raises:
    config.Error: the method, or a field of it, is not supported.
  """
  settings = source.get(FIELD)
  if not settings:
    return None
  named = settings.get('quant_method') if isinstance(settings, dict) else settings
  if not isinstance(settings, dict) or not isinstance(named, str) or named not in METHODS:
    hint = config.nearest(str(named), [one for one in METHODS if one != named])  # a name alone is no object
    raise config.Error(
      f'config.json: {FIELD}.quant_method={named!r} is not supported{hint}; known: {", ".join(METHODS)}'
    )
  return METHODS[named](settings)


def name(source: dict[str, Any]) -> str:
  """The method's name, for a reader."""
  return str((source.get(FIELD) or {}).get('quant_method'))


def fp8(settings: dict[str, Any]) -> Callable[..., dict[str, Made]]:
  """Blocks with a scale each (arXiv 2412.19437, section 3.3; as published, `weight_block_size` is [128, 128]).

  X.weight is float8 e4m3 [.., M, N], X.weight_scale_inv, or X.scale, float32 (or a power of two in 8 bits)
  [.., M / 128, N / 128], rounded up; what is meant is their product, in bfloat16. Experts may have 4 bits instead
  (where `expert_dtype` is fp4): then X.weight is int8 [M, N / 2], two numbers a byte as in MXFP4, the low half first,
  and X.scale is [M, N / 32].
  """
  _only(settings, 'fmt', None, 'e4m3')
  block = settings.get('weight_block_size')
  if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
    raise config.Error(
      f'config.json: {FIELD}.weight_block_size={block!r} is not supported; known: two sizes of a block'
    )
  return functools.partial(_fp8, block)


def _fp8(block, headers):
  made = {}
  for tensor, (kind, shape) in headers.items():
    names = (f'{tensor}_scale_inv', f'{tensor.removesuffix(".weight")}.scale')
    scale = next((name for name in names if name in headers), names[0])
    if kind == 'I8':
      if scale not in headers or len(shape) != 2:
        raise config.Error(f'{tensor} is of 4 bits, but there is no {names[1]}')
      meant = (shape[0], 2 * shape[1])
      if headers[scale][1] != (meant[0], meant[1] // 32) or meant[1] % 32:
        raise config.Error(f'{scale} has shape {list(headers[scale][1])}, which does not fit {tensor} {list(shape)}')
      made[tensor] = Made((tensor, scale), 'BF16', meant, _rows_of_four_bits)
    if kind == 'F8_E4M3':
      if scale not in headers or len(shape) < 2:
        raise config.Error(f'{tensor} is of 8 bits, but there is no {scale}')
      blocks = (*shape[:-2], *(-(-n // b) for n, b in zip(shape[-2:], block)))
      if headers[scale][1] != blocks:
        raise config.Error(f'{scale} has shape {list(headers[scale][1])}, {tensor} makes it {list(blocks)}')
      made[tensor] = Made((tensor, scale), 'BF16', shape, functools.partial(_scaled, block))
  return made


def _scaled(block, weight, scale):
  spread = np.repeat(np.repeat(scale.astype(np.float32), block[0], -2), block[1], -1)
  return (weight.astype(np.float32) * spread[..., : weight.shape[-2], : weight.shape[-1]]).astype(FLOATS['BF16'])


def compressed_tensors(settings: dict[str, Any]) -> Callable[..., dict[str, Made]]:
  """Whole numbers of 4 or 8 bits, packed, with a scale a group (format `pack-quantized` of compressed-tensors).

  X.weight_packed is int32 [M, N * bits / 32], rounded up: with k = 32 / bits, element i of a row lies bits * (i % k)
  bits up in word i // k, as q + 2 ** (bits - 1). X.weight_scale is [M, N / group], X.weight_shape holds (M, N); what is
  meant is q * scale, in the scale's dtype. Experts of 4 bits in groups of 32 are published so (Kimi K2-Thinking).
  """
  _only(settings, 'format', 'pack-quantized')
  groups = settings.get('config_groups')
  if not isinstance(groups, dict) or len(groups) != 1 or not isinstance(one := next(iter(groups.values())), dict):
    raise config.Error(f'config.json: {FIELD}.config_groups of another number than one is not supported')
  where = 'config_groups.weights.'
  _only(one, 'input_activations', None, where='config_groups.')
  if not isinstance(weights := one.get('weights') or {}, dict):
    raise config.Error(f'config.json: {FIELD}.config_groups.weights={weights!r} is not an object')
  _only(weights, 'type', 'int', where=where)
  _only(weights, 'symmetric', True, where=where)
  _only(weights, 'actorder', None, where=where)
  _only(weights, 'strategy', 'group', where=where)
  bits, group = _only(weights, 'num_bits', 4, 8, where=where), weights.get('group_size')
  if not isinstance(group, int) or group < 1:
    raise config.Error(f'config.json: {FIELD}.{where}group_size={group!r} is not a positive whole number')
  return functools.partial(_compressed, bits, group)


def _compressed(bits, group, headers):
  made = {}
  for packed, (stored, words) in headers.items():
    if packed.endswith('.weight_packed'):
      tensor = packed.removesuffix('_packed')
      parts = (packed, f'{tensor}_scale', f'{tensor}_shape')
      if lacking := [part for part in parts if part not in headers]:
        raise config.Error(f'{packed} is there, but not {lacking[0]}')
      if stored != 'I32' or headers[parts[2]][1] != (2,):
        raise config.Error(f'{packed} {stored} and {parts[2]} {list(headers[parts[2]][1])} are not I32 and [2]')
      kind, scales = headers[parts[1]]
      if len(words) != 2 or len(scales) != 2:
        raise config.Error(f'{packed} {list(words)} and {parts[1]} {list(scales)} are not two matrices')
      shape = (words[0], scales[-1] * group)
      if scales[0] != words[0] or words[-1] != -(-shape[1] * bits // 32) or kind not in FLOATS:
        raise config.Error(f'{packed} {list(words)} and {parts[1]} {list(scales)} do not fit groups of {group}')
      made[tensor] = Made(parts, kind, shape, functools.partial(_unpacked, bits, group, shape))
  return made


def _unpacked(bits, group, expected, packed, scale, shape):
  if tuple(shape.tolist()) != expected:
    raise config.Error(f'weight_shape is {shape.tolist()}, its scales make it {list(expected)}')
  places = np.arange(0, 32, bits, dtype=np.uint32)
  raised = packed.view(np.uint32)[..., None] >> places & np.uint32(2**bits - 1)
  q = raised.reshape(len(packed), -1)[:, : expected[1]].astype(np.float32) - 2 ** (bits - 1)
  grouped = q.reshape(*scale.shape, group) * scale.astype(np.float32)[..., None]
  return grouped.reshape(expected).astype(scale.dtype)


def mxfp4(settings: dict[str, Any]) -> Callable[..., dict[str, Made]]:
  """Numbers of 4 bits, 32 of them with one power of two (OCP Microscaling Formats 1.0, section 5.3.3: MXFP4).

  X_blocks is uint8 [E, M, N / 32, 16], two numbers a byte, the low half first; X_scales is uint8 [E, M, N / 32], 127
  more than the exponent. What is meant is X [E, N, M], in bfloat16, which holds every such number.
  """
  del settings  # they name what is not quantised, which the files say, too
  return _mxfp4


def _mxfp4(headers):
  made = {}
  for blocks, (stored, shape) in headers.items():
    if blocks.endswith('_blocks'):
      tensor = blocks.removesuffix('_blocks')
      scales = f'{tensor}_scales'
      if scales not in headers:
        raise config.Error(f'{blocks} is there, but not {scales}')
      if (kinds := (stored, headers[scales][0])) != ('U8', 'U8'):
        raise config.Error(f'{blocks} {kinds[0]} and {scales} {kinds[1]} are not U8')
      if len(shape) != 4 or shape[-1] != 16 or headers[scales][1] != shape[:-1]:
        raise config.Error(f'{blocks} {list(shape)} and {scales} {list(headers[scales][1])} do not fit blocks of 32')
      made[tensor] = Made((blocks, scales), 'BF16', (shape[0], shape[2] * 32, shape[1]), _four_bits)
  return made


_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)


def _four_bits(blocks, scales):
  values = np.concatenate([_E2M1, -_E2M1])
  experts, rows, groups, _ = blocks.shape
  result = np.empty((experts, groups * 32, rows), FLOATS['BF16'])
  for e in range(experts):  # one at a time: indices and float32 take eight times the room of the bytes
    pairs = np.stack([blocks[e] & 15, blocks[e] >> 4], -1).reshape(rows, groups, 32)
    raised = np.ldexp(values[pairs], scales[e].astype(np.int32)[..., None] - 127)
    result[e] = raised.reshape(rows, -1).T.astype(FLOATS['BF16'])
  return result


def _rows_of_four_bits(packed, scale):
  values, codes = np.concatenate([_E2M1, -_E2M1]), packed.view(np.uint8)
  numbers = values[np.stack([codes & 15, codes >> 4], -1)].reshape(*scale.shape, 32)
  return (numbers * scale.astype(np.float32)[..., None]).reshape(len(packed), -1).astype(FLOATS['BF16'])


def _only(settings, field, *allowed, where=''):
  """The value of a field that may have these only; absent, it is None."""
  if (value := settings.get(field)) not in allowed:
    known = ', '.join(map(repr, allowed))
    raise config.Error(f'config.json: {FIELD}.{where}{field}={value!r} is not supported; known: {known}')
  return value


METHODS = {'fp8': fp8, 'compressed-tensors': compressed_tensors, 'mxfp4': mxfp4}
