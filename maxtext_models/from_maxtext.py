"""Checkpoints that the public MaxText saved (Orbax): read, never written.

What a checkpoint holds is known from its metadata and the headers of its arrays before a weight is read: whether it is
stacked (scan_layers=true), which names it has, and whether shapes are those of the card, which the user names, because
the checkpoint does not say what model it is. Arrays are read one at a time.

Reading order: `find`, `load`, `Files`; `remarks` and `describe`. maxtext_names.py is the table.
"""

import ast
import functools
import math
import os

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from maxtext_layers import config
from maxtext_models import decoder
from maxtext_models import json_file
from maxtext_models import layout
from maxtext_models import maxtext_names
from maxtext_models import orbax_files

METADATA = '_METADATA'
DTYPES = ('float32', 'bfloat16', 'float16')
SPARE = 256  # by how many rows its tables of tokens may differ from the published ones
# where parameters are, if not at the top; and biases of routers, in parameters alone and in a training state
COLLECTIONS = (('params', 'params'), ('params', 'MoEBiasVar'), ('nnx_aux', 'model'))
PASSED = 'mtp_block'  # its module of multi-token prediction: the model that is read has none


def find(directory) -> str | None:
  """The folder of the parameters that a directory means: itself, STEP/items, or those of the newest step; or None.

  A run of MaxText, its folder `checkpoints`, a step and a step's `items` all mean the same.
  """
  directory = str(directory)
  for folder in (directory, os.path.join(directory, 'checkpoints')):
    steps = sorted((int(name) for name in _listed(folder) if name.isdecimal()), reverse=True)
    for candidate in (folder, *(os.path.join(folder, str(step)) for step in steps)):
      for inner in (candidate, os.path.join(candidate, 'items')):
        if os.path.isfile(os.path.join(inner, METADATA)) and any(_bare(key) for key in _keys(inner)[0]):
          return inner
  return None


def _listed(folder):
  return os.listdir(folder) if os.path.isdir(folder) else []


def load(directory, card, *, scan: bool | str = 'auto', pairs: str = 'auto', lazy=False):
  """(card, Decoder) of a checkpoint, in the dtype that it has; the card's dtype is set to that.

  Args:
    directory: see `find`.
    card: of the model.
    scan: see decoder.Decoder.
    pairs: of maxtext_names.PAIRS.
    lazy: parameters are layout.Lazy, which checkpoint.save and hf.save read one by one.

  Raises:
    config.Error: names the array that is missing, left over, of another shape or of a dtype that is not read.
  """
  files = Files(directory)
  kinds = {str(dtype) for _, dtype in files.headers.values()}
  card.dtype = kinds.pop() if len(kinds) == 1 else None
  card = card.settled(())  # no names of Hugging Face: no modules of multi-token prediction
  model = decoder.abstract(card, scan=scan, dtype=card.dtype or 'float32')
  graph, state = nnx.split(model)
  return card, nnx.merge(graph, fill(card, state, model.stack.plan, files, pairs=pairs, lazy=lazy))


class Files:
  """The arrays of a checkpoint by MaxText's names.

  `headers` is name -> (shape, dtype); `first` the names that are stacked along the first axis, where all others are
  along the second; `others` what else there is.
  """

  def __init__(self, directory):
    self.directory = find(directory)
    if self.directory is None:
      raise config.Error(
        f'{directory} holds no checkpoint of MaxText: no {METADATA} that names a decoder is in it, in items/, '
        'in STEP/items/ or in checkpoints/STEP/items/'
      )
    keys, zarr, ocdbt = _keys(self.directory)
    self._reader = orbax_files.Reader(self.directory, zarr, ocdbt)
    self._keys = {name: '.'.join(key) for key in keys if (name := _bare(key))}
    self.first = {name for key in keys if (name := _bare(key)) and key[:2] in COLLECTIONS[1:]}
    self.others = sorted({key[0] for key in keys if not _bare(key)})
    if adapters := [name for name in self._keys if 'lora' in name.lower()]:
      raise config.Error(f'{self.directory} holds adapters ({_some(adapters)}); merge them into the weights in MaxText')
    self.headers = {name: self._reader.header(key) for name, key in self._keys.items()}
    for name, (_, dtype) in self.headers.items():
      if str(dtype) not in DTYPES:
        raise config.Error(
          f'{self.directory}: {name} has dtype {dtype}; quantised checkpoints are not read, only {", ".join(DTYPES)}'
        )

  def get(self, name) -> np.ndarray:
    """One array, read now."""
    return self._reader(self._keys[name])

  @property
  def stacked(self) -> bool:
    """Whether layers are stacked."""
    return any(name.split('/')[1] in maxtext_names.STACKS for name in self.headers if name.startswith('decoder/'))


def _keys(folder):
  """(keys of the arrays as tuples of words, version of zarr, whether it is one database)."""
  path = os.path.join(folder, METADATA)
  stored = json_file.read(path)
  try:
    tree = stored['tree_metadata']
    there = [key for key, value in tree.items() if not value['value_metadata'].get('skip_deserialize')]
    keys = [tuple(str(word) for word in ast.literal_eval(key)) for key in there]
  except (KeyError, TypeError, AttributeError, ValueError, SyntaxError) as error:
    raise config.Error(f'{path} is not the metadata of an Orbax tree: {error!r}') from None
  return keys, 3 if stored.get('use_zarr3') else 2, stored.get('use_ocdbt', True)


def _bare(key):
  """A key as MaxText's name of a parameter, 'decoder/layers/mlp/wi_0/kernel'; None if it is of something else.

  >>> (
  ...   _bare(('params', 'params', 'decoder', 'decoder_norm', 'scale')),
  ...   _bare(('decoder', 'decoder_norm', 'scale', 'value')),
  ... )
  ('decoder/decoder_norm/scale', 'decoder/decoder_norm/scale')
  >>> _bare(('opt_state', '0', 'mu', 'params', 'decoder', 'decoder_norm', 'scale'))
  """
  inner = next((key[len(one) :] for one in COLLECTIONS if key[: len(one)] == one), key)
  if inner[:1] not in (('decoder',), ('token_embedder',), (PASSED,)) or {'rngs', 'dropout'} & set(inner):
    return None
  return '/'.join(inner[:-1] if inner[-1] == 'value' else inner)


def fill(card, state, segments, files, *, pairs='auto', lazy=False):
  """The abstract `state` with every parameter read from `files`, one array after the other; see `load`."""
  leaves = layout.leaves(state)
  slots = layout.slots(leaves, segments)
  sources = maxtext_names.of(card, slots, files.stacked, pairs)
  sources = {n: source._replace(axis=0) if source.theirs in files.first else source for n, source in sources.items()}
  _match(card, files, {name: _shape(card, name, leaves, slots) for name in slots}, sources)
  filled = {}
  for path, variable in leaves.items():
    leaf, stacked = variable.get_value(), path[0] == 'stack'
    own = [sources[name] for name in layout.names_of(path, segments)]
    kind = functools.reduce(jnp.promote_types, {files.headers[source.theirs][1] for source in own})
    kind = np.dtype(leaf.dtype if variable.get_metadata('fixed', False) else kind)
    read = functools.partial(_rows, files, own, leaf.shape[stacked:], kind, None if stacked else card.vocab)
    if lazy:
      filled[path] = variable.replace(layout.Lazy(leaf.shape, kind, read))
      continue
    buffer, layers = layout.empty(leaf.shape, kind), read()
    for layer in range(len(own)) if stacked else [...]:
      buffer[layer] = layers[layer]
    del layers  # before the next is read
    filled[path] = variable.replace(layout.place(jax.ShapeDtypeStruct(leaf.shape, kind), buffer.__getitem__))
  return nnx.from_flat_state([(path, filled[tuple(map(str, path))]) for path, _ in nnx.to_flat_state(state)])


def _rows(files, sources, shape, kind, vocab):
  """What layout.Lazy.rows gives: each layer is made when it is asked for, from an array that is read once.

  vocab: how many rows are those of tokens, of a parameter that is in no layer.
  """
  held = {}

  def read(layer):
    source = sources[0 if layer is ... else layer]
    if source.theirs not in held:
      held.clear()  # before the next is read
      held[source.theirs] = files.get(source.theirs)
    part = source.take(held[source.theirs])
    if len(shape) == 2 and vocab is not None:
      part = part[: min(vocab, shape[0])]
    into = layout.empty(shape, kind)
    into[: len(part)] = part
    into[len(part) :] = 0
    if layer in (..., len(sources) - 1):
      held.clear()  # who reads may keep this function
    return into

  return layout.Rows(read)


def _shape(card, name, leaves, slots):
  """Of one of our parameters, in one layer and without rows above the vocabulary."""
  shape = leaves[slots[name].path].get_value().shape[slots[name].repeat is not None :]
  return (card.vocab, *shape[1:]) if name in ('embed', 'head') else shape


def _match(card, files, shapes, sources):
  """config.Error unless arrays and parameters are the same set and every shape fits."""
  wanted = {source.theirs for source in sources.values()}
  found = {name for name in files.headers if not name.startswith(PASSED)}
  what = f'a {type(card).__name__} of {card.layers} layers'
  if lacking := wanted - found:
    raise config.Error(f'{files.directory} lacks {_some(lacking)}, which {what} has')
  if left := found - wanted:
    raise config.Error(f'{files.directory} holds {_some(left)}, which {what} does not have')
  for name, source in sources.items():
    expected, got = source.their_shape(shapes[name]), files.headers[source.theirs][0]
    if name in ('embed', 'head') and len(got) == 2:
      axis = 1 if source.transposed else 0
      if abs(got[axis] - expected[axis]) < SPARE and got[1 - axis] == expected[1 - axis]:
        continue
    if expected != got:
      raise config.Error(
        f'{files.directory}: {source.theirs} has shape {list(got)}, the card makes it {list(expected)}'
      )


def remarks(directory, card, pairs: str = 'auto') -> list[str]:
  """What a reader should know, a line each: what is passed over, and rows that are cut off or added."""
  files, lines = Files(directory), []
  if pairs == 'auto' and maxtext_names.turned(card, pairs):
    lines.append(
      '  taken to turn neighbours, as model names llama3.1-.. and rope_type=llama3.1 do; if not, --rope_pairs=halves'
    )
  if files.others:
    lines.append(f'  passed over, because only weights are read: {", ".join(files.others)}')
  if passed := [name for name in files.headers if name.startswith(PASSED)]:
    lines.append(f'  passed over, because the model has no parameter for them: {_some(passed)}')
  rows = files.headers.get(maxtext_names.OUTSIDE['embed'], ((card.vocab,),))[0][0]
  if rows != card.vocab:
    done = 'the rest is left out' if rows > card.vocab else 'the others are zero'
    lines.append(f'  tables have {rows} rows for the {card.vocab} tokens of the card; {done}')
  return lines


def describe(directory) -> dict:
  """What `convert --inspect` prints, without loading an array."""
  files = Files(directory)
  rows, d_model = files.headers.get(maxtext_names.OUTSIDE['embed'], ((0, 0), None))[0]
  return {
    'kind': 'maxtext',
    'items': files.directory,
    'layout': 'stacked (scan_layers=true)' if files.stacked else 'unstacked (scan_layers=false)',
    'arrays': len(files.headers),
    'parameters': sum(math.prod(shape) for shape, _ in files.headers.values()),
    'dtype': ', '.join(sorted({str(dtype) for _, dtype in files.headers.values()})),
    'vocab': rows,
    'd_model': d_model,
    'tied': maxtext_names.OUTSIDE['head'] not in files.headers,
    'others': ', '.join(files.others) or 'none',
    'tokenizer': 'none',
  }


def _some(found):
  found = sorted(found)
  return ', '.join(found[:10]) + (f' and {len(found) - 10} more' if len(found) > 10 else '')
