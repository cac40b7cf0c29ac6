"""The native checkpoint, and the one door through which every program reads weights.

A native checkpoint is a directory:

    card.json     the card: family and fields
    model.json    the manifest: format, version, dtype, parameters, the scan plan, and each array with shape and dtype
    weights/      the arrays, an Orbax pytree whose keys are the paths in the model of that plan
    tokenizer.json, tokenizer_config.json, generation_config.json, ...   copied as they were

The manifest names what a segment of the plan holds by layer index, so a model with another plan reads the same files. A
training checkpoint (RUN/checkpoints/STEP) is a native checkpoint with training's own items beside these.

Arrays are written layer by layer and read slice by slice, as a device or a plan needs them, into whatever sharding is
wanted (orbax_files.py): at most one parameter is in flight.

Reading order: `kind`, `load`, `save`; `weights_item`, `write_manifest` and `restore_weights`, which training uses, too;
`describe`.
"""

import collections
import dataclasses
import functools
import json
import os
import types
import typing

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from maxtext_layers import config
from maxtext_layers import plan
from maxtext_models import atomic
from maxtext_models import decoder
from maxtext_models import from_maxtext
from maxtext_models import hf
from maxtext_models import json_file
from maxtext_models import layout
from maxtext_models import orbax_files
from maxtext_models import registry

FORMAT = 'maxtext-native'
VERSION = 1
MANIFEST, CARD, WEIGHTS = 'model.json', 'card.json', 'weights'
CHECKPOINTS, TOKENIZER, COMMIT = 'checkpoints', 'tokenizer', 'commit.json'


def kind(directory) -> str:
  """'hf', 'native' or 'run', from what marks each of them, or 'maxtext'; config.Error if it is none or two of these."""
  if not os.path.isdir(directory):
    raise config.Error(f'{directory} is not a directory')
  here = lambda *names: all(os.path.exists(os.path.join(directory, name)) for name in names)
  weights = any(name.endswith(('.safetensors', '.safetensors.index.json', '.bin')) for name in os.listdir(directory))
  marks = {
    'native': here(MANIFEST),
    'run': here('config.txt') and (here(CHECKPOINTS) or here('metrics.jsonl')),
    'hf': here('config.json') and weights,
  }
  found = [name for name, there in marks.items() if there]
  if not found and from_maxtext.find(directory):
    return 'maxtext'
  if len(found) == 1:
    return found[0]
  if found:
    raise config.Error(f'{directory} is marked as {" and as ".join(found)}; keep one of them a directory')
  raise config.Error(
    f'{directory} is no checkpoint: neither {MANIFEST} (native), nor config.json with safetensors (Hugging Face), '
    f'nor config.txt with {CHECKPOINTS}/ (run), nor STEP/items of the public MaxText'
  )


def load(directory, *, dtype=None, scan: bool | str = 'auto', remat='none', shardings=None, lazy=False):
  """(card, Decoder) from an HF directory, a native checkpoint, or the newest checkpoint of a run.

  Args:
    directory: path.
    dtype: that parameters are converted to and computed in; None: as they are stored.
    scan: see decoder.Decoder; the plan of the files does not matter.
    remat: see decoder.Decoder.
    shardings: maps the abstract state of parameters to shardings, for a model that is born sharded; None: one device.
    lazy: parameters are layout.Lazy, which `save` and hf.save read one by one: for models that memory does not hold.

  Raises:
    config.Error: the directory is no checkpoint or a broken one.
  """
  if kind(directory) == 'hf':
    return hf.load(directory, dtype=dtype, scan=scan, remat=remat, shardings=shardings, lazy=lazy)
  directory = resolve(directory)
  card, manifest = read_card(directory), read_manifest(directory)
  compute = dtype or (manifest['dtype'] if manifest['dtype'] != 'mixed' else 'float32')
  model = decoder.abstract(card, scan=scan, remat=remat, dtype=compute)
  graph, state = nnx.split(model)
  if shardings is not None:
    attach = lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s)
    state = jax.tree.map(attach, state, shardings(state))
  return card, nnx.merge(graph, restore_weights(directory, state, model.stack.plan, dtype=dtype or 'stored', lazy=lazy))


def save(directory, card, model, tokenizer_dir=None):
  """Writes a native checkpoint, whole or not at all.

  Args:
    directory: must not exist, or be empty.
    card: of the model.
    model: a Decoder.
    tokenizer_dir: whose tokenizer files and generation config are copied; None: none are.

  Raises:
    config.Error: the directory is not empty.
    config.Failure: the disk is full.
  """
  state = nnx.state(model, nnx.Param)
  leaves = {path: variable.get_value() for path, variable in layout.leaves(state).items()}
  with atomic.directory(directory, sum(leaf.nbytes for leaf in leaves.values())) as temporary:
    of = lambda path, leaf: (path, leaf.shape, leaf.dtype, path[0] == 'stack', layout.rows(leaf))
    orbax_files.write(os.path.join(temporary, WEIGHTS), (of(path, leaf) for path, leaf in leaves.items()))
    write_manifest(temporary, card, state, model.stack.plan)
    if tokenizer_dir is not None:
      hf.carry(tokenizer_dir, temporary)


def resolve(directory) -> str:
  """The native checkpoint that a directory means: itself, or a run's newest whole one, see `remarks`.

  Raises:
    config.Error: a step of a run is incomplete or was changed, or a run has no whole one; it is one of MaxText's.
  """
  what = kind(directory)
  if what == 'maxtext':
    raise config.Error(
      f'{directory} is a checkpoint of the public MaxText; make a native one of it first: '
      f'python -m maxtext_models.convert --source={directory} --card=NAME --target=DIR --to=native'
    )
  if what != 'run':
    if os.path.exists(os.path.join(directory, COMMIT)) and not committed(directory):
      raise config.Error(f'{directory} is incomplete or changed: not all files have the sizes that {COMMIT} names')
    return directory
  steps = finished_steps(directory)
  if not steps:
    raise config.Error(f'{directory} is a run without a finished checkpoint')
  return os.path.join(directory, CHECKPOINTS, str(steps[-1]))


def remarks(directory) -> list[str]:
  """What a reader should know about a run: checkpoints newer than the one that is taken, which are not whole."""
  if kind(directory) != 'run':
    return []
  if not (taken := finished_steps(directory)[-1:]):
    return []
  root = os.path.join(directory, CHECKPOINTS)
  newer = sorted(int(n) for n in os.listdir(root) if n.isdecimal() and int(n) > taken[0])
  text = f'is incomplete or changed and is not used; step {taken[0]} is taken'
  return [f'{os.path.join(root, str(n))} {text}' for n in newer]


def finished_steps(run) -> list[int]:
  """Steps of a run's finished checkpoints, ascending."""
  root = os.path.join(run, CHECKPOINTS)
  if not os.path.isdir(root):  # nothing was saved yet
    return []
  return sorted(int(n) for n in os.listdir(root) if n.isdecimal() and committed(os.path.join(root, n)))


def committed(directory) -> dict | None:
  """What commit.json of a training checkpoint says, or None if a file that it names is missing or shorter.

  Training writes it last. It is an ordinary file, so a copy of a checkpoint is one, and half a copy is none.
  """
  try:
    with open(os.path.join(directory, COMMIT), encoding='utf-8') as file:
      stored = json.load(file)
    whole = all(os.path.getsize(os.path.join(directory, n)) == size for n, size in stored['files'].items())
  except (OSError, ValueError, KeyError, TypeError, AttributeError):
    return None
  return stored if whole else None


def tokenizer_files(directory) -> str | None:
  """The directory that holds the tokenizer files of a checkpoint, or None."""
  candidates = [directory, os.path.join(directory, TOKENIZER)]
  above = os.path.dirname(os.path.abspath(directory))
  if os.path.basename(above) == CHECKPOINTS:  # of the run that a step belongs to
    candidates.append(os.path.join(os.path.dirname(above), TOKENIZER))
  for candidate in candidates:
    if any(
      os.path.isfile(os.path.join(candidate, name)) for name in ('tokenizer.json', 'tokenizer.model', 'vocab.json')
    ):
      return candidate
  return None


def read_card(directory):
  """The card of any checkpoint."""
  if kind(directory) == 'hf':
    return hf.read(directory)[0]
  return card_from_dict(json_file.read(os.path.join(resolve(directory), CARD)))


def dtypes(model) -> set[str]:
  """Of the parameters of a model; those of one dtype in every model (param.fixed, param.numbers) do not count."""
  leaves = layout.leaves(nnx.state(model, nnx.Param)).values()
  return {str(v.get_value().dtype) for v in leaves if not v.get_metadata('fixed', False)}


# The layout: what is in weights/ and how a model with any plan reads it.


def weights_item(state) -> dict:
  """A state of parameters as the nested dict that goes into weights/; keys are strings."""
  tree: dict = {}
  for path, variable in layout.leaves(state).items():
    inner = tree
    for word in path[:-1]:
      inner = inner.setdefault(word, {})
    inner[path[-1]] = variable.get_value()
  return tree


def manifest(card, state, segments) -> dict:
  """model.json: what the arrays of `state` (or its shapes) are, under the plan `segments`."""
  variables = layout.leaves(state)
  leaves = {'.'.join(path): v.get_value() for path, v in variables.items()}
  kinds = {str(v.get_value().dtype) for v in variables.values() if not v.get_metadata('fixed', False)}
  return {
    'format': FORMAT,
    'version': VERSION,
    'dtype': kinds.pop() if len(kinds) == 1 else 'mixed',
    'parameters': card.parameters(),
    'plan': [{'start': s.start, 'period': len(s.specs), 'count': s.count} for s in segments],
    'weights': {key: {'shape': list(leaf.shape), 'dtype': str(leaf.dtype)} for key, leaf in leaves.items()},
  }


def write_manifest(directory, card, state, segments):
  """Writes model.json and card.json; the first, which marks a checkpoint, last."""
  json_file.write(os.path.join(directory, CARD), card_to_dict(card))
  json_file.write(os.path.join(directory, MANIFEST), manifest(card, state, segments))


def read_manifest(directory) -> dict:
  """model.json, checked."""
  path = os.path.join(directory, MANIFEST)
  value = json_file.read(path)
  if value.get('format') != FORMAT:
    raise config.Error(f'{path}: format={value.get("format")!r} is not {FORMAT!r}')
  if value.get('version') != VERSION:
    raise config.Error(f'{path}: version={value.get("version")!r} is not {VERSION}, the one this release reads')
  if lacking := [key for key in ('dtype', 'parameters', 'plan', 'weights') if key not in value]:
    raise config.Error(f'{path} lacks {", ".join(lacking)}')
  return value


def restore_weights(directory, state, segments, *, dtype=None, lazy=False):
  """`state` (abstract, or arrays to be replaced) with the parameters of a native checkpoint of any plan.

  Args:
    directory: of the native checkpoint.
    state: parameters; the sharding of a leaf, if it has one, is where its array goes.
    segments: the plan of `state`.
    dtype: None: dtypes must be equal; 'stored': the state takes those of the files; else what all are converted to.
    lazy: see `load`.

  Raises:
    config.Error: names missing, left-over and mismatched parameters, by layer.
  """
  stored = read_manifest(directory)
  try:
    plan_there = [plan.Segment((None,) * s['period'], s['count'], s['start']) for s in stored['plan']]
    held = {tuple(key.split('.')): (tuple(a['shape']), _dtype(a['dtype'])) for key, a in stored['weights'].items()}
    there = layout.slots(held, plan_there)
  except (KeyError, IndexError, ValueError, TypeError) as error:
    raise config.Error(f'{os.path.join(directory, MANIFEST)} is damaged: {error!r}') from None
  leaves = layout.leaves(state)
  here = layout.slots(leaves, segments)
  _compare(
    directory,
    {n: (_inner(held[s.path][0], s), held[s.path][1]) for n, s in there.items()},
    {
      n: (_inner(leaves[s.path].get_value().shape, s), np.dtype(leaves[s.path].get_value().dtype))
      for n, s in here.items()
    },
    compare_dtypes=dtype is None,
  )
  reader = orbax_files.Reader(os.path.join(directory, WEIGHTS))
  filled = {}
  for path, variable in leaves.items():
    leaf, names = variable.get_value(), layout.names_of(path, segments)
    kinds = [held[there[name].path][1] for name in names]
    target = kinds[0] if dtype in (None, 'stored') or variable.get_metadata('fixed', False) else np.dtype(dtype)
    for other in kinds[1:] if dtype == 'stored' else ():
      target = jnp.promote_types(target, other)
    wanted = jax.ShapeDtypeStruct(leaf.shape, target, sharding=getattr(leaf, 'sharding', None))
    slots = [there[name] for name in names]
    if lazy:
      value = layout.Lazy(wanted.shape, np.dtype(target), functools.partial(_rows, reader, slots, wanted))
    else:
      value = layout.place(wanted, functools.partial(gather, reader, slots, wanted))
    filled[path] = variable.replace(value)
  return nnx.from_flat_state([(path, filled[tuple(map(str, path))]) for path, _ in nnx.to_flat_state(state)])


def gather(reader, slots, wanted, index):
  """The part `index` (a slice an axis) of the array `wanted`, whose layers, in order, lie in `slots` of the files."""
  if slots[0].repeat is None:
    return reader('.'.join(slots[0].path), index)
  rows = range(wanted.shape[0])[index[0]]
  chosen = [slots[row] for row in rows]
  first = chosen[0]
  if all(slot == layout.Slot(first.path, first.repeat + i) for i, slot in enumerate(chosen)):  # lie together there, too
    return reader('.'.join(first.path), (slice(first.repeat, first.repeat + len(chosen)), *index[1:]))
  return np.stack([reader('.'.join(slot.path), (slot.repeat, *index[1:])).astype(wanted.dtype) for slot in chosen])


def _rows(reader, slots, wanted):
  """What layout.Lazy.rows gives: layers one by one, or all where they are compressed together."""
  read = lambda index: np.asarray(gather(reader, slots, wanted, index), wanted.dtype)
  rest = (slice(None),) * (len(wanted.shape) - 1)
  if slots[0].repeat is None:
    return layout.Rows(lambda _: read((slice(None), *rest)))
  if reader.rows('.'.join(slots[0].path)) > 1:
    return read((slice(None), *rest))
  return layout.Rows(lambda layer: read((slice(layer, layer + 1), *rest))[0])


def _compare(directory, there, here, *, compare_dtypes):
  """config.Error that lists, by parameter, what the files and the model do not share."""
  same = lambda a, b: a[0] == b[0] and (a[1] == b[1] or not compare_dtypes)
  say = lambda x: f'{x[1]}{list(x[0])}' if compare_dtypes else str(list(x[0]))
  faults = {
    'missing': sorted(here.keys() - there.keys()),
    'left over': sorted(there.keys() - here.keys()),
    'mismatched': [f'{n} ({say(there[n])}, the model has {say(here[n])})' for n in sorted(here.keys() & there.keys())
                   if not same(there[n], here[n])],
  }  # fmt: skip
  texts = [
    f'{len(names)} {label}: {", ".join(names[:10])}{", ..." if len(names) > 10 else ""}'
    for label, names in faults.items()
    if names
  ]
  if texts:
    raise config.Error(f'{directory} does not fit the model: {"; ".join(texts)}')


def _inner(shape, slot):
  return tuple(shape if slot.repeat is None else shape[1:])


# Cards as JSON.


def card_to_dict(card) -> dict:
  """{'family': module, 'class': name, fields}; specs inside carry the name of their class."""
  return {'family': type(card).__module__.rsplit('.', 1)[-1], 'class': type(card).__name__, **_plain(card)}


def card_from_dict(value):
  """The inverse; config.Error names a field that this release does not know or that is missing."""
  value = dict(value)
  families = {f.__name__.rsplit('.', 1)[-1]: f for f in registry.FAMILIES}
  name, cls = value.pop('family', None), value.pop('class', None)
  if name not in families or not hasattr(families[name], str(cls)):
    raise config.Error(f'{CARD}: family {name!r} with class {cls!r} is unknown; known families: {", ".join(families)}')
  card = _typed(getattr(families[name], cls), value, CARD)
  card.check()
  return card


def _plain(value):
  if dataclasses.is_dataclass(value):
    return {f.name: _tagged(getattr(value, f.name)) for f in dataclasses.fields(value)}
  return value


def _tagged(value):
  if dataclasses.is_dataclass(value):
    return {'class': type(value).__name__, **_plain(value)}
  return [_tagged(v) for v in value] if isinstance(value, (list, tuple)) else value


def _typed(cls, value, where):
  hints = typing.get_type_hints(cls)
  known = {f.name: f for f in dataclasses.fields(cls)}
  for name in value:
    if name not in known:
      raise config.Error(f'{where}: unknown field {name!r}{config.nearest(name, known)}')
  needed = [f.name for f in known.values() if f.default is f.default_factory is dataclasses.MISSING]
  if lacking := [name for name in needed if name not in value]:
    raise config.Error(f'{where} lacks {", ".join(lacking)}')
  return cls(**{name: _field(hints[name], inner, f'{where}: {name}') for name, inner in value.items()})


def _field(hint, value, where):
  if isinstance(value, list):
    return tuple(value)
  if not isinstance(value, dict):
    return value
  value = dict(value)
  name = value.pop('class', None)
  options = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) else (hint,)
  for option in options:
    if getattr(option, '__name__', None) == name:
      return _typed(option, value, where)
  raise config.Error(f'{where} has unknown class {name!r}')


# What a directory holds.


def describe(directory) -> dict:
  """What `convert --inspect` prints, without loading an array: kind, card, sizes; for a run also where it stands."""
  what = kind(directory)
  if what == 'maxtext':
    return from_maxtext.describe(directory)
  if what == 'hf':
    card, files = hf.read(directory)
    kinds = collections.Counter(code for code, _ in files.headers.values())
    result = {
      'kind': 'hf',
      'model_type': hf.read_config(directory)['model_type'],
      'tensors': len(files.headers),
      'files': len(files.names()),
      'bytes': files.bytes(),
      'dtype': ', '.join(sorted(kinds)),
    }
  else:
    newest = resolve(directory)
    card, stored = read_card(newest), read_manifest(newest)
    result = {
      'kind': what,
      'family': type(card).__name__,
      'dtype': stored['dtype'],
      'arrays': len(stored['weights']),
      'plan': ' '.join(f'{s["period"]}x{s["count"]}' for s in stored['plan']),
    }
    if what == 'run':
      result['checkpoint'] = newest
      result['checkpoints'] = ' '.join(map(str, finished_steps(directory)))
    for item in ('train.json', 'data.json'):
      if os.path.exists(path := os.path.join(newest, item)):
        result |= {k: v for k, v in json_file.read(path).items() if isinstance(v, (int, float, str))}
  numbers = {
    k: getattr(card, k) for k in ('layers', 'd_model', 'heads', 'kv_heads', 'head_dim', 'vocab', 'context', 'tied')
  }
  tokenizer = tokenizer_files(directory)
  name = {'name': card.name} if card.name else {}  # a config.json has none
  return {**result, **name, 'parameters': card.parameters(), **numbers, 'tokenizer': tokenizer or 'none'}


def _dtype(name):
  return np.dtype(jnp.dtype(name))
