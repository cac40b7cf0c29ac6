import json

import jax.numpy as jnp
import pytest

from maxtext_layers import config
from maxtext_train import metrics

NAMES = 'step loss lm_loss grad_norm learning_rate step_seconds tokens_per_second mfu tokens_seen epoch'.split()


def device(**changes):
  values = {'loss': 2.5, 'lm_loss': 2.25, 'grad_norm': 0.5, 'learning_rate': 1e-3, 'weight': 30.0, 'skipped': 0.0}
  return {name: jnp.float32(value) for name, value in (values | changes).items()}


def record(**changes):
  return metrics.record(
    7, device(**changes), seconds=0.5, tokens=64, tokens_seen=448, epoch=0.25, flops=1e12, peak=1e13, devices=2
  )


def test_record():
  row = record()
  assert list(row) == NAMES
  assert row['loss'] == 2.5 and row['lm_loss'] == 2.25 and row['learning_rate'] == pytest.approx(1e-3)
  assert row['tokens_per_second'] == 128 and row['mfu'] == pytest.approx(0.1)
  assert (row['step'], row['tokens_seen'], row['epoch']) == (7, 448, 0.25)


def test_empty_batch_has_no_loss():
  """B15: the loss of a batch without a supervised token is null, not 0."""
  row = record(weight=0.0, loss=0.0, lm_loss=0.0, grad_norm=0.0, skipped=1.0)
  assert row['loss'] is None and row['lm_loss'] is None and row['skipped'] == 1


def test_more_terms_follow():
  row = record(balance=0.125)
  assert list(row) == [*NAMES, 'balance'] and row['balance'] == 0.125


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_lines_are_json(tmp_path, value):
  """Every line is valid JSON for a strict reader, and is in the file as soon as it is added."""
  path = tmp_path / 'metrics.jsonl'
  writer = metrics.Writer(path)
  writer.add(record(loss=value, grad_norm=value, skipped=1.0))
  forbid = lambda text: pytest.fail(f'{text} is not JSON')
  (row,) = [json.loads(line, parse_constant=forbid) for line in path.read_text().splitlines()]
  assert row['loss'] is None and row['grad_norm'] is None and row['lm_loss'] == 2.25
  writer.add({'step': 8})
  assert path.read_text().count('\n') == 2
  writer.close()
  with pytest.raises(ValueError):
    metrics.Writer(path).add({'loss': value})


def test_full_disk():
  writer = metrics.Writer('/dev/full')
  with pytest.raises(config.Failure, match='/dev/full: No space left on device'):
    writer.add({'step': 1})
