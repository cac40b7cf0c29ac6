"""Logits of given token ids.

    python -m maxtext_models.score --checkpoint=DIR --tokens=IN.npy --logits=OUT.npy

IN.npy holds integers [B, T]; OUT.npy gets float32 [B, T, V]. One row is computed and written at a time, so that the
file may be larger than memory. A tokenizer is not needed.
"""

import os
import time

from absl import flags

from maxtext_models import program

_CHECKPOINT = flags.DEFINE_string(
  'checkpoint', None, 'HF directory, native checkpoint or run directory.', allow_override=True
)
_TOKENS = flags.DEFINE_string('tokens', None, 'Ids, .npy, integers [B, T].', allow_override=True)
_LOGITS = flags.DEFINE_string('logits', None, 'Where logits go, .npy, float32 [B, T, V].', allow_override=True)
_DTYPE = flags.DEFINE_enum(
  'dtype', 'float32', ['float32', 'bfloat16', 'float16'], 'Of weights and computation.', allow_override=True
)


def main(args):
  """Scores."""
  del args
  import numpy as np

  from maxtext_layers import config
  from maxtext_models import checkpoint
  from maxtext_models import scoring

  for flag in (_CHECKPOINT, _TOKENS, _LOGITS):
    if not flag.value:
      raise config.Error(f'flag --{flag.name} is needed')
  out = os.path.abspath(_LOGITS.value)
  if os.path.isdir(out):
    raise config.Error(f'--logits={_LOGITS.value} is a directory')
  if not os.path.isdir(os.path.dirname(out)):
    raise config.Error(f'--logits={_LOGITS.value}: there is no directory {os.path.dirname(out)}')
  tokens = scoring.read_tokens(_TOKENS.value)
  checked = scoring.check_tokens(tokens, checkpoint.read_card(_CHECKPOINT.value).vocab, _TOKENS.value)
  for line in checkpoint.remarks(_CHECKPOINT.value):
    print(line)
  started = time.monotonic()
  card, model = checkpoint.load(_CHECKPOINT.value, dtype=_DTYPE.value)
  score = scoring.scorer(model)
  temporary = f'{out}.tmp-{os.getpid()}'
  try:
    target = scoring.create(temporary, (*checked.shape, card.vocab))
    for row, ids in enumerate(checked):
      target[row] = score(np.asarray(ids)[None])[0]
    target.flush()
    os.replace(temporary, out)
  finally:
    if os.path.exists(temporary):
      os.unlink(temporary)
  rows, length = checked.shape
  seconds = time.monotonic() - started
  print(f'wrote {_LOGITS.value}: float32 [{rows}, {length}, {card.vocab}] in {seconds:.1f} s, with compilation')
  if length > card.context:
    print(f'note: rows are longer than the {card.context} positions that the model was published for')


def cli():
  """The console script."""
  program.run(main)


if __name__ == '__main__':
  cli()
