"""Worker processes: the same batches as without, nothing of JAX's devices in them, errors in one line, a clean end."""

import hashlib
import json
import multiprocessing
import sys

import numpy as np
import pytest

from maxtext_layers import config
from maxtext_train.data import config as data_config
from maxtext_train.data import pipeline
from maxtext_train.data import worker


class _Words:
  vocab, bos_id, eos_id = 300, None, None

  def encode(self, text, bos, eos):
    del bos, eos
    return list(text.encode())


def _encode(record):
  """The text, and where it was read: [processes' devices, is a worker] as the first two ids."""
  bridge = sys.modules.get('jax._src.xla_bridge')
  begun = len(bridge._backends) if bridge else 0
  worker = multiprocessing.parent_process() is not None
  text = np.frombuffer(record.value['text'].encode(), np.uint8).astype(np.int32)
  return np.concatenate([np.array([begun, worker], np.int32), text]), None


def _folder(path):
  for file in range(3):
    lines = [json.dumps({'text': f'{i}' * (i % 9 + 2)}) for i in range(40) if i % 3 == file]
    (path / f'{file}.jsonl').write_text('\n'.join(lines))
  return data_config.Config(source='jsonl', paths=(str(path),), holdout=0.0)


def _digest(batch):
  return hashlib.sha256(b''.join(batch[k].tobytes() for k in sorted(batch))).hexdigest()


def test_batches_do_not_depend_on_workers(tmp_path):
  """D3: steps == some + resume + the rest, from none to 2 workers and back; 5 rows, so that their parts differ."""
  settings = _folder(tmp_path)
  settings.at_end = 'stop'
  arguments = {'batch': 5, 'length': 12, 'tokenizer': _Words()}
  whole = [_digest(b) for b in pipeline.build(settings, **arguments)]
  loader = pipeline.build(settings, **arguments)
  for _ in range(4):
    next(loader)
  settings.workers = 2
  with pipeline.build(settings, **arguments, state=loader.state()) as resumed:
    after = []
    for batch in resumed:
      assert all(type(a) is np.ndarray for a in batch.values())
      after.append(_digest(batch))
      if len(after) == 2:
        middle = resumed.state()
  assert after == whole[4:]
  settings.workers = 0
  assert [_digest(b) for b in pipeline.build(settings, **arguments, state=middle)] == whole[6:]
  assert not multiprocessing.active_children()


def test_workers_touch_no_device_and_their_errors_are_one_line(tmp_path):
  """D10: a broken record read by a worker names file and line."""
  settings = _folder(tmp_path)
  settings.workers, settings.packing, settings.shuffle = 1, 'none', False
  with (tmp_path / '2.jsonl').open('a') as file:
    file.write('\nbroken')
  with pipeline.build(settings, batch=2, length=16, encode=_encode) as loader:
    assert (next(loader)['tokens'][:, :2] == [0, 1]).all()
    with pytest.raises(config.Error, match=r'2\.jsonl:14: not JSON'):
      for _ in range(40):
        next(loader)


def test_more_workers_than_rows_and_too_little_memory(tmp_path, monkeypatch):
  settings = _folder(tmp_path)
  settings.workers = 8
  assert pipeline.build(settings, batch=2, length=16, tokenizer=_Words()).describe()['workers'] == 2

  class _Full:
    f_bavail, f_frsize = 1, 4096

  monkeypatch.setattr(worker.os.path, 'isdir', lambda path: True)
  monkeypatch.setattr(worker.os, 'statvfs', lambda path: _Full())
  with pytest.raises(config.Error, match='workers=8 need 3 MiB of shared memory and /dev/shm has 0 MiB'):
    pipeline.build(settings, batch=32, length=1024, tokenizer=_Words())
