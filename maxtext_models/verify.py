"""Parity of a model here with its reference: logits at every position, not a few of the first.

    python -m maxtext_models.verify --hf=DIR                        # live against transformers, where it is installed
    python -m maxtext_models.verify --hf=DIR --reference=FILE.npz   # stored `tokens` [B, T] and `logits` [B, T, V]
    python -m maxtext_models.verify --hf=DIR --checkpoint=DIR       # a native checkpoint or run, too

Computes in float32. Without transformers and without --reference, a --checkpoint is compared with this library's own
forward pass of --hf: that shows that the weights are the same, not that the mathematics is right, and the report says
so. Exit code 1 when a threshold is missed.
"""

from absl import flags

from maxtext_models import program

_HF = flags.DEFINE_string('hf', None, 'Hugging Face directory.', allow_override=True)
_CHECKPOINT = flags.DEFINE_string(
  'checkpoint', None, 'HF directory, native checkpoint or run directory.', allow_override=True
)
_REFERENCE = flags.DEFINE_string('reference', None, '.npz with tokens and logits.', allow_override=True)
_MAX_ABS = flags.DEFINE_float('max_abs', 1e-4, 'Largest difference of a logit that passes.', allow_override=True)
_MAX_KL = flags.DEFINE_float(
  'max_kl', None, 'Largest KL divergence at a position that passes, nats.', allow_override=True
)
_MIN_TOP1 = flags.DEFINE_float(
  'min_top1', None, 'Smallest share of positions with the same likeliest id that passes.', allow_override=True
)

ROWS, LENGTH = 2, 256  # of random ids, where no reference brings its own


def main(args):
  """Verifies; 0 or 1."""
  del args
  import numpy as np

  from maxtext_layers import config
  from maxtext_models import checkpoint
  from maxtext_models import scoring

  if not _HF.value:
    raise config.Error('flag --hf is needed')
  if (kind := checkpoint.kind(_HF.value)) != 'hf':
    raise config.Error(f'--hf={_HF.value} is marked as {kind}, not as a Hugging Face directory')
  card = checkpoint.read_card(_HF.value)
  subjects = {'hf': _HF.value} | ({'checkpoint': _CHECKPOINT.value} if _CHECKPOINT.value else {})
  if _REFERENCE.value:
    tokens, logits = _stored(_REFERENCE.value, card.vocab)
    print(f'reference: {_REFERENCE.value}')
    reference = lambda row: logits[row]
  else:
    tokens = np.random.default_rng(0).integers(0, card.vocab, (ROWS, min(LENGTH, card.context)), dtype=np.int32)
    theirs = _transformers(_HF.value)
    if theirs is None and not _CHECKPOINT.value:
      raise config.Error('transformers is not installed here, so verify needs --reference=FILE.npz or a --checkpoint')
    if theirs is None:
      ours = scoring.scorer(checkpoint.load(_HF.value, dtype='float32')[1])
      del subjects['hf']
      print(
        'reference: this forward pass of --hf (transformers is not installed): '
        'shows equal weights, not right mathematics'
      )
      reference = lambda row: ours(tokens[row][None])[0]
    else:
      print('reference: transformers, random ids')
      reference = lambda row: theirs(tokens[row])
  missed = False
  for name, directory in subjects.items():
    for line in checkpoint.remarks(directory):
      print(line)
    other, model = checkpoint.load(directory, dtype='float32')
    if other.vocab != card.vocab:
      raise config.Error(f'--{name}={directory} has a vocabulary of {other.vocab}, --hf one of {card.vocab}')
    score = scoring.scorer(model)
    rows = [scoring.compare(score(ids[None])[0], reference(row)) for row, ids in enumerate(tokens)]
    difference = scoring.Difference(*(np.stack(parts) for parts in zip(*rows)))  # each [B, T]
    print(f'\n{name}: {directory}, {difference.kl.size:,} positions')
    missed |= _report(np, difference)
  return 1 if missed else 0


def _report(np, d):
  """Prints one comparison; whether a threshold is missed."""
  row, position = np.unravel_index(d.absolute.argmax(), d.absolute.shape)
  top1 = d.agree.mean()
  print(
    f'  max |difference|   {d.absolute.max():.3e}   '
    f'worst at row {row}, position {position}, id {d.worst[row, position]}'
  )
  print(f'  KL per position    max {d.kl.max():.3e}   mean {d.kl.mean():.3e} nats')
  print(f'  top-1 agreement    {top1:.4%}')
  print('  by position        max |difference|   max KL')
  bands = np.array_split(np.arange(d.kl.shape[1]), min(8, d.kl.shape[1]))
  for band in bands:
    print(f'    {band[0]:>6}-{band[-1]:<6}    {d.absolute[:, band].max():.3e}         {d.kl[:, band].max():.3e}')
  checks = [('max_abs', d.absolute.max(), _MAX_ABS.value, lambda got, limit: got <= limit)]
  checks.append(('max_kl', d.kl.max(), _MAX_KL.value, lambda got, limit: got <= limit))
  checks.append(('min_top1', top1, _MIN_TOP1.value, lambda got, limit: got >= limit))
  missed = [(name, got, limit) for name, got, limit, good in checks if limit is not None and not good(got, limit)]
  for name, got, limit in missed:
    print(f'  MISSED --{name}={limit:g}: {got:.3e}')
  if not missed:
    print('  passed')
  return bool(missed)


def _stored(path, vocab):
  """(tokens [B, T], logits [B, T, V]) of an .npz, checked."""
  import zipfile
  import zlib

  import numpy as np

  from maxtext_layers import config
  from maxtext_models import scoring

  try:
    found = np.load(path, allow_pickle=False)
    if isinstance(found, np.ndarray):
      raise config.Error(f'{path} is one array, .npy; an .npz with tokens and logits is needed')
    with found as file:
      if lacking := {'tokens', 'logits'} - set(file.files):
        raise config.Error(f'{path} lacks {" and ".join(sorted(lacking))}')
      tokens, logits = file['tokens'], file['logits']
  except OSError as error:
    raise config.Error(f'cannot read {path}: {error.strerror or error}') from None
  except config.Error:
    raise
  except (ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile, zlib.error) as error:
    raise config.Error(f'{path} is not an .npz file of numbers: {error}') from None
  scoring.check_tokens(tokens, vocab, path)
  if logits.shape != (*tokens.shape, vocab):
    raise config.Error(f'{path}: logits have shape {list(logits.shape)}, the model makes it {[*tokens.shape, vocab]}')
  return tokens, logits


def _transformers(directory):
  """ids [T] -> logits [T, V] of the reference implementation, or None where it is not installed."""
  import importlib.util

  if not all(importlib.util.find_spec(name) for name in ('torch', 'transformers')):
    return None
  import transformers

  # its numbers are made and read without a word of torch, which is its business
  model = transformers.AutoModelForCausalLM.from_pretrained(
    directory, dtype='float32', attn_implementation='eager', local_files_only=True
  ).eval()

  def logits(ids):
    batch = transformers.BatchEncoding({'input_ids': ids[None].astype('int64')}, tensor_type='pt')
    return model(**batch).logits[0].detach().float().numpy()

  return logits


def cli():
  """The console script."""
  program.run(main)


if __name__ == '__main__':
  cli()
