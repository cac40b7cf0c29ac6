"""Tokens a second that the data pipeline delivers: one JSON line. `--workers=0 --packing=documents --tokenizer=byte`.

In this process, from files in the system's cache, without a device: what a step has to be faster than to wait for data.
"""

import json
import statistics
import time

from absl import app
from absl import flags

from maxtext_models import tokenizer
from maxtext_train.data import config
from maxtext_train.data import pipeline

_BATCH = flags.DEFINE_integer('batch', 16, 'rows of a batch')
_LENGTH = flags.DEFINE_integer('length', 1024, 'tokens of a row')
_PACKING = flags.DEFINE_string('packing', 'documents', 'documents or none')
_ROUNDS = flags.DEFINE_integer('rounds', 7, 'rounds; the median counts')
_SECONDS = flags.DEFINE_float('seconds', 1.0, 'of a round')
_TOKENIZER = flags.DEFINE_string('tokenizer', 'byte', 'byte or a directory')
_WORKERS = flags.DEFINE_integer('workers', 0, 'processes')


def main(_):
  settings = config.Config(workers=_WORKERS.value, packing=_PACKING.value)
  words = tokenizer.load(_TOKENIZER.value)
  begin = time.perf_counter()
  with pipeline.build(settings, batch=_BATCH.value, length=_LENGTH.value, tokenizer=words) as loader:
    built = time.perf_counter()
    next(loader)
    first = time.perf_counter()
    rates, cpu = [], []
    for _ in range(_ROUNDS.value):
      before, start, busy = loader.report()['tokens'], time.perf_counter(), time.process_time()
      while (now := time.perf_counter()) - start < _SECONDS.value:
        next(loader)
      tokens = loader.report()['tokens'] - before
      rates.append(tokens / (now - start))
      cpu.append(tokens / (time.process_time() - busy))
    line = {
      'program': 'data_rate', 'tokenizer': _TOKENIZER.value, 'packing': _PACKING.value, 'workers': _WORKERS.value,
      'batch': _BATCH.value, 'length': _LENGTH.value, 'tokens_per_s': round(statistics.median(rates)),
      'tokens_per_s_range': [round(min(rates)), round(max(rates))], 'tokens_per_cpu_s': round(statistics.median(cpu)),
      'build_s': round(built - begin, 3), 'first_batch_s': round(first - built, 3), 'source': repr(loader.rows.source),
    }  # fmt: skip
    print(json.dumps(line))


if __name__ == '__main__':
  app.run(main)
