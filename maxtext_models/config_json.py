"""config.json of Hugging Face, read without guessing and written: what families have in common.

What is needed and missing, or there and not supported, is a config.Error that names field and value.

Reading order: `Fields`, `shape`, `rope_of`, `rope_by_kind`; each has its inverse.
"""

from maxtext_layers import config
from maxtext_layers import rope


def _short(value):
  text = repr(value)
  return text if len(text) <= 60 else text[:57] + '...'


class Fields:
  """A config.json as a family reads it: what is needed and missing, or there and not supported, is a config.Error.

  `defaults` are fields that the family's published files leave out and Hugging Face documents.
  """

  def __init__(self, source, defaults=None):
    self._source = source
    self._defaults = defaults or {}

  def _value(self, name):
    value = self._source.get(name)
    return self._defaults.get(name) if value is None else value

  def need(self, name, kind=None):
    """The value of a field that has no default; `kind` is int or float for a positive number, or str, bool or list."""
    if (value := self._value(name)) is None:
      raise config.Error(f'config.json lacks {name}')
    return self._fitting(name, value, kind) if kind else value

  def get(self, name, default, kind=None):
    """The value of a field whose default Hugging Face documents for this architecture; `kind` as in `need`."""
    value = self._value(name)
    if value is None:
      return default
    return self._fitting(name, value, kind) if kind else value

  def count(self, name, default=None):
    """A whole number that may be 0; without a default it must be there."""
    value = self.need(name) if default is None else self.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
      raise config.Error(f'config.json: {name}={_short(value)} is not a whole number')
    return value

  def only(self, name, *allowed):
    """Refuses a field that is there with another value; an absent one has the first of `allowed`."""
    value = self._value(name)
    if value is not None and value not in allowed:
      raise config.Error(f'config.json: {name}={value!r} is not supported; known: {", ".join(map(repr, allowed))}')
    return allowed[0] if value is None else value

  def absent(self, *names):
    """Refuses fields that switch on what no layer here does."""
    for name in names:
      if value := self._source.get(name):
        raise config.Error(f'config.json: {name}={_short(value)} is not supported')

  @staticmethod
  def _fitting(name, value, kind):
    if kind in (int, float):
      _positive(name, value, whole=kind is int)
    elif not isinstance(value, kind):
      raise config.Error(f'config.json: {name}={_short(value)} is not {_KINDS[kind]}')
    return value

  def given(self, name, kind=None):
    """The value of a field that must be there and may be null, because being left out means something else."""
    if name not in self._source:
      raise config.Error(f'config.json lacks {name} (null: none)')
    return self.get(name, None, kind)

  def tied(self, default=False):
    """The tie flag, at the top or, in a wrapper's export, in `text_config`; `default` is Hugging Face's."""
    nested = self._source.get('text_config') or {}
    if not isinstance(nested, dict):
      raise config.Error(f'config.json: text_config={_short(nested)} is not an object')
    said = [Fields(where).get('tie_word_embeddings', None, bool) for where in (self._source, nested)]
    said = [value for value in said if value is not None]
    return any(said) if said else default

  def layer_types(self, expected):
    """Refuses `layer_types` that say something else than the other fields; it may be left out."""
    given = self.get('layer_types', None, list)
    if given is not None and given != expected:
      raise config.Error(f'config.json: layer_types={_short(given)} is not what its other fields make of it')

  def full_every(self, layers, default):
    """n, if every n-th layer of `layer_types` is full attention and the others slide; `default` if there is none."""
    given = self.get('layer_types', None, list)
    if given is None:
      return default
    for every in (default, *range(1, layers + 2)):
      if given == layer_types(layers, every):
        return every
    raise config.Error(
      f'config.json: layer_types={_short(given)} is not supported; known: one word for each of {layers} layers, '
      "'full_attention' for every n-th, 'sliding_attention' for the others"
    )

  def dtype(self):
    """The dtype of the published weights or None; `torch_dtype` before transformers 5."""
    value = self._source.get('dtype') or self._source.get('torch_dtype')
    return str(value).removeprefix('torch.') if value else None


_KINDS = {str: 'a word', bool: 'true or false', list: 'a list'}


# of every decoder: our field -> theirs, kind
_SHAPE: dict[str, tuple[str, type]] = {
  'layers': ('num_hidden_layers', int),
  'd_model': ('hidden_size', int),
  'heads': ('num_attention_heads', int),
  'vocab': ('vocab_size', int),
  'context': ('max_position_embeddings', int),
  'eps': ('rms_norm_eps', float),
}


def shape(fields, tied=False):
  """What config.json says of every decoder, as arguments of its card; `tied`: what a file without the flag means."""
  numbers = {ours: fields.need(theirs, kind) for ours, (theirs, kind) in _SHAPE.items()}
  return {**numbers, 'tied': fields.tied(default=tied), 'dtype': fields.dtype()}


def shape_fields(c):
  """The inverse of `shape`, with the heads of keys and values, which every card has."""
  return {
    **{theirs: getattr(c, ours) for ours, (theirs, _) in _SHAPE.items()},
    'num_key_value_heads': c.kv_heads,
    'tie_word_embeddings': c.tied,
    **dtype_fields(c),
  }


def dtype_fields(c):
  """The inverse of `Fields.dtype`, by its old name, too."""
  return {'dtype': c.dtype, 'torch_dtype': c.dtype} if c.dtype else {}


def layer_types(layers, every):
  """`layer_types` of a config.json in which every n-th layer sees everything; 1: all do."""
  return ['sliding_attention' if (i + 1) % every else 'full_attention' for i in range(layers)]


def _positive(name, value, whole=False):
  if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
    raise config.Error(f'config.json: {name}={_short(value)} is not a number' + (' without fraction' if whole else ''))
  if value <= 0:
    raise config.Error(f'config.json: {name}={value} is not positive')
  if not value < float('inf'):
    raise config.Error(f'config.json: {name}={value} is not finite')


def rope_of(source):
  """(theta, scaling) of a config.json: flat (rope_theta, rope_scaling), nested (rope_parameters) or both."""
  forms = {where: source[where] for where in ('rope_parameters', 'rope_scaling') if source.get(where)}
  for where, form in forms.items():
    if not isinstance(form, dict):
      raise config.Error(f'config.json: {where}={_short(form)} is not an object')
  forms = {where: {k: v for k, v in form.items() if v is not None} for where, form in forms.items()}
  bases = {f'{where}.rope_theta': form.pop('rope_theta') for where, form in forms.items() if 'rope_theta' in form}
  if source.get('rope_theta') is not None:
    bases['rope_theta'] = source['rope_theta']
  if not bases:
    raise config.Error(
      'config.json has no rope base, neither rope_theta nor rope_parameters.rope_theta; '
      'for a model that was published without one (Llama 2) add "rope_theta": 10000.0'
    )
  for where, base in bases.items():
    _positive(where, base)
  scalings = {where: _scaling(form, where) for where, form in forms.items()}
  for values in (bases, scalings):
    if len(set(values.values())) > 1:
      raise config.Error('config.json contradicts itself: ' + ', '.join(f'{k}={v}' for k, v in values.items()))
  return float(next(iter(bases.values()))), next(iter(scalings.values()), None)


def rope_by_kind(source, *, local, defaults=None):
  """(theta, scaling, theta of sliding layers) of a config.json whose kinds of layers turn differently.

  Nested by kind (`rope_parameters.full_attention`, `.sliding_attention`) or flat, where rope_theta and rope_scaling are
  the full layers' and the field `local` is the base of the sliding ones, which are never stretched; or both. `defaults`
  are bases that Hugging Face documents for files that have neither form.
  """
  found, nested = {}, source.get('rope_parameters')
  if isinstance(nested, dict) and not nested.keys() <= {'full_attention', 'sliding_attention'}:
    raise config.Error(
      f'config.json: rope_parameters={_short(nested)} has other keys than full_attention and sliding_attention'
    )
  if nested:
    whole, part = (
      rope_of({'rope_parameters': nested.get(kind) if isinstance(nested, dict) else nested})
      for kind in ('full_attention', 'sliding_attention')
    )
    if part[1] is not None:
      raise config.Error(
        f'config.json: rope_parameters.sliding_attention.rope_type={nested["sliding_attention"]["rope_type"]!r} '
        "is not supported; known: 'default'"
      )
    found['rope_parameters'] = (*whole, part[0])
  if not nested or source.get('rope_theta') is not None:
    fields = Fields(source, defaults)
    whole = rope_of({name: fields.get(name, None) for name in ('rope_theta', 'rope_scaling')})
    if (base := fields.get(local, None)) is None:
      raise config.Error(f'config.json lacks {local}')
    _positive(local, base)
    found[f'rope_theta, rope_scaling, {local}'] = (*whole, float(base))
  if len(set(found.values())) > 1:
    raise config.Error('config.json contradicts itself: ' + ', '.join(f'{k}={v}' for k, v in found.items()))
  return next(iter(found.values()))


# rope_type -> (scaling class, {its field: theirs}, {its field: theirs, may be absent})
_SCALINGS = {
  'proportional': (rope.Proportional, {'share': 'partial_rotary_factor'}, {'factor': 'factor'}),
  'linear': (rope.Linear, {'factor': 'factor'}, {}),
  'llama3': (
    rope.Llama3,
    {
      'factor': 'factor',
      'low': 'low_freq_factor',
      'high': 'high_freq_factor',
      'trained': 'original_max_position_embeddings',
    },
    {},
  ),
  'yarn': (
    rope.Yarn,
    {'factor': 'factor', 'trained': 'original_max_position_embeddings'},
    {
      'beta_fast': 'beta_fast',
      'beta_slow': 'beta_slow',
      'attention': 'attention_factor',
      'mscale': 'mscale',
      'mscale_all_dim': 'mscale_all_dim',
      'truncate': 'truncate',
    },
  ),
}


def _scaling(form, where):
  """One dict of rope settings as a spec of rope.py; every key must be understood."""
  kinds = {str(form.pop(key)) for key in ('rope_type', 'type') if form.get(key) is not None} or {'default'}
  kind = kinds.pop() if len(kinds) == 1 else '/'.join(sorted(kinds))
  if kind != 'proportional' and form.pop('partial_rotary_factor', None) not in (None, 1.0):
    raise config.Error(f'config.json: {where}.partial_rotary_factor is not supported for this architecture')
  if kind == 'default':
    return None
  if kind not in _SCALINGS:
    known = ', '.join(['default', *_SCALINGS])
    raise config.Error(f'config.json: {where}.rope_type={kind!r} is not supported; known: {known}')
  make, needed, optional = _SCALINGS[kind]
  if missing := [theirs for theirs in needed.values() if form.get(theirs) is None]:
    raise config.Error(f'config.json: {where} of rope_type {kind!r} lacks {", ".join(missing)}')
  names = {theirs: ours for ours, theirs in (needed | optional).items()}
  if unknown := [key for key, value in form.items() if key not in names and value is not None]:
    raise config.Error(
      f'config.json: {where}.{unknown[0]}={form[unknown[0]]!r} is not supported for rope_type {kind!r}'
    )
  for key, value in form.items():
    if not isinstance(value, bool) or key != 'truncate':
      _positive(f'{where}.{key}', value)
  if kind == 'llama3' and form['low_freq_factor'] > form['high_freq_factor']:
    raise config.Error(
      f'config.json: {where}.low_freq_factor={form["low_freq_factor"]} is above '
      f'high_freq_factor={form["high_freq_factor"]}'
    )
  return make(**{names[key]: value for key, value in form.items()})


def rope_fields(theta, scaling, context):
  """The inverse of `rope_of`: both forms, the nested one for transformers 5, the flat one for what is older."""
  form = _form(scaling)
  return {
    'rope_theta': theta,
    'rope_scaling': form if scaling is not None else None,
    'rope_parameters': {'rope_theta': theta, **form},
    'max_position_embeddings': context,
  }


def rope_fields_by_kind(theta, scaling, local_theta, context, *, local):
  """The inverse of `rope_by_kind`: both forms."""
  return {
    **rope_fields(theta, scaling, context),
    local: local_theta,
    'rope_parameters': {
      'full_attention': {'rope_theta': theta, **_form(scaling)},
      'sliding_attention': {'rope_theta': local_theta, 'rope_type': 'default'},
    },
  }


def _form(scaling):
  """A scaling as config.json says it."""
  for kind, (make, needed, optional) in _SCALINGS.items():
    if isinstance(scaling, make):
      values = {theirs: getattr(scaling, ours) for ours, theirs in (needed | optional).items()}
      return {'rope_type': kind, **{k: v for k, v in values.items() if v is not None}}
  return {'rope_type': 'default'}
