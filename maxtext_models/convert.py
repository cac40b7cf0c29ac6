"""Hugging Face directory <-> native checkpoint, and what a directory holds. Reads the public MaxText's, too.

    python -m maxtext_models.convert --source=HF_DIR --target=NATIVE_DIR --to=native
    python -m maxtext_models.convert --source=runs/quickstart --target=HF_DIR --to=hf
    python -m maxtext_models.convert --source=DIR --inspect
    python -m maxtext_models.convert --source=MAXTEXT_DIR --card=llama3.1-8b --target=DIR --to=native

A run directory counts as native: its newest checkpoint is taken. Tokenizer files and the generation config go along.
A checkpoint of MaxText does not say what model it is: --card does, by a name or a config.json, and the tokenizer files
that lie beside a config.json go along.
Weights stream: of a model of any size about a layer of a parameter is in memory; of MaxText's, all.
"""

import os
import time

from absl import flags

from maxtext_models import program

_SOURCE = flags.DEFINE_string('source', None, 'HF directory, native checkpoint or run directory.', allow_override=True)
_CARD = flags.DEFINE_string(
  'card', None, 'What model a checkpoint of MaxText is: a name, a config.json or its directory.', allow_override=True
)
_PAIRS = flags.DEFINE_enum(
  'rope_pairs', 'auto', ['auto', 'halves', 'neighbours'], 'What Llama turns in MaxText.', allow_override=True
)
_TARGET = flags.DEFINE_string('target', None, 'Directory to make; must not exist or be empty.', allow_override=True)
_TO = flags.DEFINE_enum('to', None, ['native', 'hf'], 'What to make.', allow_override=True)
_FORMAT = flags.DEFINE_enum(
  'source_format', 'auto', ['auto', 'hf', 'native', 'maxtext'], 'What the source is.', allow_override=True
)
_INSPECT = flags.DEFINE_bool('inspect', False, 'Print what the source holds and stop.', allow_override=True)


def main(args):
  """Converts or inspects."""
  del args
  from maxtext_layers import config
  from maxtext_models import atomic
  from maxtext_models import checkpoint
  from maxtext_models import from_maxtext
  from maxtext_models import hf

  source, target, to = _SOURCE.value, _TARGET.value, _TO.value
  if not source:
    raise config.Error('flag --source is needed')
  kind = checkpoint.kind(source)
  family, theirs = ('native' if kind == 'run' else kind), kind == 'maxtext'
  if _FORMAT.value not in ('auto', family):
    raise config.Error(f'--source_format={_FORMAT.value}, but {source} is marked as {kind}')
  for line in checkpoint.remarks(source):
    print(line)
  if _INSPECT.value:
    for name, value in checkpoint.describe(source).items():
      print(f'{name:<16} {_words(value)}')
    return
  for name, value in (('target', target), ('to', to)):
    if not value:
      raise config.Error(f'flag --{name} is needed')
  if to == kind:
    raise config.Error(f'{source} is {to} already, as its own marks say; nothing to convert')
  if theirs and not _CARD.value:
    raise config.Error(
      f'flag --card is needed, a name or a config.json, because {source} does not say what model it is; '
      'the program models lists the names'
    )
  if (_CARD.value or _PAIRS.value != 'auto') and not theirs:
    flag = f'--card={_CARD.value}' if _CARD.value else f'--rope_pairs={_PAIRS.value}'
    raise config.Error(f'{flag} is for checkpoints of MaxText; {source} says itself what model it is')
  atomic.refuse_filled(target)
  started = time.monotonic()
  print(f'reading {source} ({kind})', flush=True)
  if kind == 'hf':
    for line in hf.remarks(source):
      print(line)
  if theirs:
    card, files = _card(_CARD.value)
    for line in from_maxtext.remarks(source, card, _PAIRS.value):
      print(line)
    card, model = from_maxtext.load(source, card, pairs=_PAIRS.value, lazy=True)
  else:
    card, model = checkpoint.load(source, lazy=True)
    files = checkpoint.tokenizer_files(source)
  print(
    f'  {type(card).__name__} {card.name}'.rstrip() + f', {card.parameters():,} parameters, {card.layers} layers',
    flush=True,
  )
  if to == 'native':
    checkpoint.save(target, card, model, files or (source if kind == 'hf' else None))
  else:
    if rounded := hf.export_dtype(card, checkpoint.dtypes(model)):
      print(f'  weights are rounded from float32 to {rounded}, in which the model was published')
    hf.save(target, card, model, carry_from=files or (None if theirs else source))
  print(f'wrote {target} ({to}) in {time.monotonic() - started:.1f} s')
  print('  with ' + (f'the tokenizer of {files}' if files else 'no tokenizer files, because the source has none'))


def _card(value):
  """(card, directory of tokenizer files or None) of the flag."""
  from maxtext_models import checkpoint
  from maxtext_models import json_file
  from maxtext_models import registry

  path = os.path.join(value, 'config.json') if os.path.isdir(value) else value
  if not (os.path.exists(path) or path.endswith('.json')):
    return registry.card(value), None
  return registry.card_from_hf(json_file.read(path)), checkpoint.tokenizer_files(os.path.dirname(os.path.abspath(path)))


def _words(value):
  return f'{value:,}' if isinstance(value, int) and not isinstance(value, bool) else str(value)


def cli():
  """The console script."""
  program.run(main)


if __name__ == '__main__':
  cli()
