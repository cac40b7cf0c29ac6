"""Five updates of two tiny models: the settings that the reference (make_loss_golden.py) and the test share."""

import json
import pathlib

import numpy as np

CASES = ('llama', 'qwen3')
UPDATES, ROWS, LENGTH, VOCAB = 5, 4, 48, 151
PEAK, WARMUP, FINAL = 3e-3, 2, 0.1  # cosine
B1, B2, EPS, DECAY, CLIP = 0.9, 0.95, 1e-8, 0.1, 1.0
COUNTS = (48, 7, 30, 2)  # targets that count in each row


def batch(update):
  """tokens, targets int32 [4, 48], weights float32 [4, 48]."""
  tokens = np.random.default_rng(100 + update).integers(0, VOCAB, (ROWS, LENGTH + 1), dtype=np.int32)
  weights = (np.arange(LENGTH)[None] < np.asarray(COUNTS)[:, None]).astype(np.float32)
  return {'tokens': tokens[:, :-1], 'targets': tokens[:, 1:], 'weights': weights}


def expected(case):
  """loss, grad_norm, learning_rate of each update."""
  return json.loads((pathlib.Path(__file__).parent / 'losses.json').read_text(encoding='utf-8'))[case]
