"""What a run takes in: the model's card, the tokenizer, the batches, and the weights to start from.

All of it is read from the settings, and from the newest checkpoint where there is one; nothing is written.
"""

import dataclasses

from flax import nnx
import jax

from maxtext_layers import config
from maxtext_models import checkpoint as models
from maxtext_models import tokenizer as tokenizers
from maxtext_train.data import pipeline


def card(settings, newest=None):
  """The model's card: the config's, or that of the checkpoint to go on from, or of the weights to start from.

  Raises:
    config.Error: there is none, or the weights to start from are of another model than the config's.
  """
  found = models.read_card(newest or settings.init_from) if newest or settings.init_from else None
  if settings.model is not None:
    if settings.init_from and (text := _other_model(found, settings.model)):
      raise config.Error(f'config.init_from={settings.init_from} holds another model: {text}')
    return settings.model
  if found is None:
    raise config.Error(
      'config.model is none and config.init_from is none: there is nothing to train; '
      '--config=pretrain:MODEL trains a known model'
    )
  if settings.length > found.context:
    raise config.Error(f'config.length={settings.length} exceeds the context of the model, {found.context}')
  return found


def tokenizer(settings, card):
  """The tokenizer of the data, or None for artificial data."""
  if settings.data.artificial:
    return None
  found = tokenizers.load(settings.data.tokenizer)
  if found.vocab > card.vocab:
    raise config.Error(
      f'data.tokenizer={settings.data.tokenizer!r} has {found.vocab} ids, model.vocab={card.vocab} holds fewer'
    )
  return found


def prompt(settings, card, tokenizer):
  """The ids of `config.sample`, or None without one.

  Raises:
    config.Error: the model cannot continue it.
  """
  if settings.sample is None:
    return None
  if tokenizer is None:
    raise config.Error(
      f'config.sample={settings.sample!r}, but data.source={settings.data.source} has no text; '
      'leave it out with --config.sample=none'
    )
  ids = tokenizer.encode(settings.sample, bos=settings.data.bos and tokenizer.bos_id is not None, eos=False)
  if not 0 < len(ids) < card.context:
    shown = settings.sample if len(settings.sample) < 40 else f'{settings.sample[:40]}...'
    raise config.Error(f'config.sample={shown!r} has {len(ids)} tokens, and the context of the model is {card.context}')
  return ids


def loader(settings, card, tokenizer, state=None, split='train'):
  """The data of the run."""
  if jax.process_count() > 1:  # data, feed and sharding know of processes; the run directory has one writer so far
    raise config.Error(f'this run has {jax.process_count()} processes; only one can write a run so far')
  return pipeline.build(
    settings.data, batch=settings.batch, length=settings.length, tokenizer=tokenizer, state=state, split=split,
    vocab=card.vocab, batches=settings.evaluate.batches if split == 'heldout' else None,
  )  # fmt: skip


def weights(settings, parts):
  """The parameters in `init_from`, placed where the state lives."""
  _, model = models.load(
    settings.init_from, dtype='float32', scan=parts.scan, shardings=lambda _: parts.plan.shardings.params
  )
  return nnx.state(model)


def _other_model(theirs, ours):
  if type(theirs) is not type(ours):
    return f'family {type(theirs).__name__}, not {type(ours).__name__}'
  free = ('name', 'source', 'context', 'dtype', 'tied_copy', *ours.choices())
  names = [f.name for f in dataclasses.fields(ours) if f.name not in free]
  pairs = [(name, getattr(theirs, name), getattr(ours, name)) for name in names]
  text = ', '.join(f'{name}={a}, the config says {b}' for name, a, b in pairs if a != b)
  return text and f'{text}; --config.model=none takes it as it is'
