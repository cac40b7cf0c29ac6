"""Any model that has a card: `--config=pretrain:MODEL`, e.g. pretrain:qwen3-0.6b; models.py lists them.

The settings are a start for one machine, not a recipe. Data is what nobody can choose for you:

    --config.data.source=jsonl --config.data.paths=corpus/*.jsonl --config.data.tokenizer=DIR

Without it the corpus is the standard library's sources, as bytes, which every vocabulary here can hold. Without MODEL
the model is that of `--config.init_from=DIR`.
"""

import sys

from maxtext_layers import stack
from maxtext_models import registry
from maxtext_train import evaluate
from maxtext_train import run
from maxtext_train import schedule
from maxtext_train.data import config as data

_LENGTH = 2048


def get_config(model=None):
  """The run of a named model; runs/MODEL is its directory."""
  card = registry.card(model) if model else None
  if model and (remark := registry.remark(model)):
    print(remark, file=sys.stderr)
  deep = card is None or card.layers > stack.DEEP
  return run.Pretrain(
    name=card.name if card else 'pretrain',
    model=card,
    steps=10000,
    batch=8,
    length=min(_LENGTH, card.context) if card else _LENGTH,
    dtype=run.Dtype.BFLOAT16,
    remat='full' if deep else 'none',  # memory is what runs out first
    data=data.Config(source=data.Source.STDLIB, tokenizer='byte'),
    schedule=schedule.Config(kind=schedule.Kind.COSINE, peak=_peak(card)),
    checkpoint=run.Checkpoint(every=1000),
    evaluate=evaluate.Config(every=500, batches=16),
  )


def _peak(card):
  """What Llama was trained with (arXiv 2302.13971, table 2): 3e-4 at 7B and 13B, 1.5e-4 at 33B and 65B."""
  return 1.5e-4 if card and card.parameters() > 2e10 else 3e-4
