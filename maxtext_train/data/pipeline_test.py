"""The order of records, and that it survives any stop, any number of processes, and the end of the data."""

import hashlib
import json

from absl import logging
import numpy as np
import pytest

from maxtext_layers import config
from maxtext_models import tokenizer as tokenizers
from maxtext_train.data import config as data_config
from maxtext_train.data import pipeline

BYTES = tokenizers.load('byte')


def _text(i):
  return f'<{i}>' + 'x' * (i * 7 % 41)  # from 3 to 44 bytes: records do not align with rows


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  """60 records in 7 files."""
  folder = tmp_path_factory.mktemp('corpus')
  for file in range(7):
    lines = [json.dumps({'text': _text(i)}) for i in range(60) if i % 7 == file]
    (folder / f'{file}.jsonl').write_text('\n'.join(lines) + '\n')
  return folder


def _settings(folder, **change):
  return data_config.Config(**{'source': 'jsonl', 'paths': (f'{folder}/*.jsonl',), 'holdout': 0.0, **change})


def _build(folder, *, batch=4, length=16, state=None, process=0, processes=1, split='train', batches=None, encode=None,
           **change):  # fmt: skip
  return pipeline.build(
    _settings(folder, **change), batch=batch, length=length, tokenizer=BYTES, state=state, process=process,
    processes=processes, split=split, batches=batches, encode=encode,
  )  # fmt: skip


def _take(loader, n):
  return [batch for _, batch in zip(range(n), loader)]


def _digest(batch):
  return hashlib.sha256(b''.join(batch[k].tobytes() for k in sorted(batch))).hexdigest()


def _records(batches):
  """The texts in each row's stream, in order; the last may be cut."""
  streams = []
  for row in range(len(batches[0]['tokens'])):
    ids = np.concatenate([b['tokens'][row][b['segments'][row] > 0] for b in batches])
    streams.append([BYTES.decode(part, skip_special=True) for part in np.split(ids, np.flatnonzero(ids == 256))[1:]])
  return streams


def _through_json(state):
  return json.loads(json.dumps(state))


def test_records_go_to_streams_in_the_order_of_the_files(corpus):
  streams = _records(_take(_build(corpus, shuffle=False, at_end='stop'), 1000))
  order = [_text(i) for file in range(7) for i in range(60) if i % 7 == file]
  assert streams == [order[s::4] for s in range(4)]


def test_stop_at_every_step_and_go_on(corpus):
  """D3, D7: at every k, prefix + resumed suffix == the whole sequence, in the same batches; packing carries over."""
  whole = [_digest(b) for b in _build(corpus, at_end='stop')]
  assert len(whole) > 20 and len(set(whole)) == len(whole)
  for k in range(len(whole) + 1):
    loader = _build(corpus, at_end='stop')
    before = [_digest(b) for b in _take(loader, k)]
    after = _build(corpus, at_end='stop', state=_through_json(loader.state()))
    assert before + [_digest(b) for b in after] == whole
    assert after.state()['batches'] == len(whole)


@pytest.mark.parametrize('packing', ['documents', 'none'])
def test_an_epoch_has_each_record_once_also_after_a_resume(corpus, packing):
  """D4: resumed at 40 % of an epoch, the union of the records over the epoch is each exactly once."""
  loader = _build(corpus, at_end='stop', packing=packing, length=64)
  first = _take(loader, 2 if packing == 'documents' else 6)
  assert 0.3 < loader.report()['records'] / 60 < 0.6
  second = list(_build(corpus, at_end='stop', packing=packing, length=64, state=loader.state()))
  seen = [text for stream in _records(first + second) for text in stream]
  assert sorted(seen) == sorted(_text(i) for i in range(60))


def test_every_epoch_has_its_own_order(corpus):
  loader = _build(corpus, at_end='stop', epochs=3, batch=1)
  (texts,) = _records(list(loader))
  epochs = [texts[:60], texts[60:120], texts[120:]]
  assert [sorted(e) for e in epochs] == [sorted(_text(i) for i in range(60))] * 3
  assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
  assert _records(list(_build(corpus, at_end='stop', epochs=3, batch=1)))[0] == texts
  assert _records(list(_build(corpus, at_end='stop', seed=2, batch=1)))[0] != epochs[0]


@pytest.mark.parametrize('processes', [1, 2, 4, 8])
def test_state_of_four_readers_resumes_with_any_number(corpus, processes):
  """D1, D2, D8: saved with 4 readers, resumed with 1, 2, 4, 8: the batches are those of one that never stopped."""
  whole = _take(_build(corpus, batch=8), 9)
  readers = [_build(corpus, batch=8, process=p, processes=4) for p in range(4)]
  for reader in readers:
    _take(reader, 4)
  state = pipeline.merge([_through_json(r.state()) for r in reversed(readers)])
  assert state == _state_after(corpus, 4)
  resumed = [_build(corpus, batch=8, process=p, processes=processes, state=state) for p in range(processes)]
  for step in range(4, 9):
    rows = [next(r) for r in resumed]
    for name, value in whole[step].items():
      np.testing.assert_array_equal(np.concatenate([r[name] for r in rows]), value)


def _state_after(corpus, steps):
  loader = _build(corpus, batch=8)
  _take(loader, steps)
  return _through_json(loader.state())


def test_a_part_of_the_state_is_refused(corpus):
  """D2: never goes on with the state of a part of the readers."""
  readers = [_build(corpus, process=p, processes=4) for p in range(4)]
  states = [r.state() for r in readers]
  with pytest.raises(config.Error, match='row 1 of 4 is missing'):
    pipeline.merge([states[0], *states[2:]])
  with pytest.raises(config.Error, match=r'it holds rows 0 \.\. 0 of 4; the parts .* merged'):
    _build(corpus, state=states[0])
  next(readers[1])
  with pytest.raises(config.Error, match='batches differs between processes'):
    pipeline.merge([r.state() for r in readers])


def test_a_hundred_shards_and_eight_readers(tmp_path):
  """D11: all records of 100 shards are used by 8 readers."""
  for i in range(100):
    (tmp_path / f'{i:03}.jsonl').write_text(json.dumps({'text': _text(i)}))
  seen = []
  for p in range(8):
    reader = _build(tmp_path, batch=8, process=p, processes=8, at_end='stop')
    seen += [text for stream in _records(list(reader)) for text in stream]
  assert sorted(seen) == sorted(_text(i) for i in range(100))


def test_a_broken_record_in_one_of_seven_shards(corpus, tmp_path):
  """D10: fail names file and record; skip counts it, and every other record is used once, by 2 readers."""
  for file in corpus.iterdir():
    (tmp_path / file.name).write_text(file.read_text())
  lines = (tmp_path / '3.jsonl').read_text().split('\n')
  lines[2] = lines[2][:-3]
  (tmp_path / '3.jsonl').write_text('\n'.join(lines))
  with pytest.raises(config.Error, match=r'/3\.jsonl:3: not JSON'):
    for p in range(2):
      list(_build(tmp_path, process=p, processes=2, at_end='stop'))
  readers = [_build(tmp_path, process=p, processes=2, at_end='stop', on_bad_record='skip') for p in range(2)]
  seen = [text for r in readers for stream in _records(list(r)) for text in stream]
  assert sorted(seen) == sorted(_text(i) for i in range(60) if i != 17)  # the third of 3, 10, 17, …
  dropped = [r.report()['dropped'] for r in readers]
  assert sorted(dropped, key=len) == [{}, {'broken': 1}]


def test_the_end_of_the_data_is_a_choice(tmp_path):
  """D9: data for 350 steps, 400 asked: stop ends it, repeat goes on; no batch without weight; the epoch is reported."""
  lines = [json.dumps({'text': f'{i:015}'}) for i in range(700)]  # with begin and end: 16 tokens and the last target
  (tmp_path / 'a.jsonl').write_text('\n'.join(lines))
  loader = _build(tmp_path, at_end='stop', batch=2)
  batches = _take(loader, 400)
  assert [b['weights'].sum() for b in batches] == [32] * 350
  report = loader.report()
  assert (report['epoch'], report['records'], report['next_record']) == (0, 700, None)
  loader = _build(tmp_path, at_end='repeat', batch=2)
  epochs = []
  for _, batch in zip(range(400), loader):
    assert batch['weights'].sum() == 32
    epochs.append(loader.report()['epoch'])
  assert epochs == [0] * 349 + [1] * 51  # of the record that comes next
  loader = _build(tmp_path, at_end='stop', epochs=2, batch=2)
  assert len(_take(loader, 1000)) == 700
  assert loader.report()['epoch'] == 1


def test_streams_that_end_early_are_padded(corpus):
  batches = list(_build(corpus, at_end='stop', batch=7))
  going = np.array([b['segments'].any(axis=1) for b in batches])
  assert going[0].all() and not going[-1].all() and going[-1].any()
  assert (going[1:] <= going[:-1]).all()  # what has ended stays so
  assert all((b['weights'][b['segments'] == 0] == 0).all() for b in batches)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'length': 17}, 'length was 16 and is 17'),
    ({'batch': 8}, 'batch was 4 and is 8'),
    ({'seed': 5}, 'seed was 1 and is 5'),
    ({'packing': 'none'}, "packing was 'documents' and is 'none'"),
    ({'bos': False}, "tokenizer was '"),
    ({'holdout': 0.1}, 'holdout was 0.0 and is 0.1'),
    ({'shuffle': False}, 'shuffle was True and is False'),
  ],
)
def test_other_data_on_resume_is_named(corpus, change, message):
  state = _build(corpus).state()
  with pytest.raises(config.Error, match=message):
    _build(corpus, state=state, **change)


def test_other_files_on_resume_are_named(corpus, tmp_path):
  (tmp_path / '0.jsonl').write_text('{"text": "another"}\n')
  with pytest.raises(config.Error, match=r"files was '.*records was 60 and is 1"):
    _build(tmp_path, state=_build(corpus).state())
  with pytest.raises(config.Error, match="format 'old' is not 1"):
    _build(corpus, state={'format': 'old'})


def test_what_may_change_on_resume(corpus):
  state = _build(corpus).state()
  _build(corpus, state=state, at_end='stop', epochs=9, on_bad_record='skip')


def _chat(record):
  """Prompt of weight 0, answer of weight 1, no special token."""
  prompt, answer = record.value['prompt'], record.value['answer']
  ids = np.frombuffer((prompt + answer).encode(), np.uint8).astype(np.int32)
  return ids, np.repeat([0.0, 1.0], [len(prompt), len(answer)])


def _chats(folder, prompts):
  lines = [json.dumps({'prompt': 'p' * n, 'answer': f'{i:03}'}) for i, n in enumerate(prompts)]
  (folder / 'a.jsonl').write_text('\n'.join(lines))


def test_truncation_that_leaves_no_target(tmp_path, monkeypatch):
  """B14, B15: 20 % of the records lose every target: dropped, counted by reason, warned of; 100 %: an error."""
  said = []
  monkeypatch.setattr(logging, 'warning', lambda message, *args: said.append(message % args))
  _chats(tmp_path, [5, 5, 50, 5, 5] * 4)
  loader = _build(tmp_path, packing='none', encode=_chat, at_end='stop')
  batches = list(loader)
  assert loader.report()['dropped'] == {'no_target': 4}
  assert sum(b['weights'].sum() for b in batches) == 16 * 3
  assert all(b['weights'].sum() > 0 for b in batches)
  assert said and 'have no token to train on (within the length of a row) (no_target): dropped' in said[-1]
  _chats(tmp_path, [50] * 20)
  with pytest.raises(config.Error, match='none of the 20 records can be trained on: 20 have no token to train on'):
    _build(tmp_path, packing='none', encode=_chat)


def test_a_cut_document_is_counted(tmp_path):
  _chats(tmp_path, [14, 5])
  loader = _build(tmp_path, packing='none', encode=_chat, at_end='stop', batch=2)
  (batch,) = loader
  assert batch['weights'].sum() == 3 + 3
  assert loader.report()['truncated'] == 0  # 17 tokens: 16 slots and the last target
  _chats(tmp_path, [15, 5])
  loader = _build(tmp_path, packing='none', encode=_chat, at_end='stop', batch=2)
  (batch,) = loader
  assert batch['weights'].sum() == 2 + 3
  assert loader.report()['truncated'] == 1


def test_chats_without_end_token_are_isolated(tmp_path):
  """B11: two packed chats, no end token in the inputs: segments come from lengths."""
  _chats(tmp_path, [2, 3])
  (batch,) = _build(tmp_path, encode=_chat, at_end='stop', batch=1, shuffle=False)
  assert batch['segments'][0].tolist() == [1] * 5 + [2] * 6 + [0] * 5
  assert batch['weights'][0].tolist() == [0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0]


def test_a_stream_whose_own_records_are_all_dead_goes_on(tmp_path):
  """Without shuffle and with as many rows as records, a stream sees one record for ever: it may be a dead one."""
  _chats(tmp_path, [5, 50])
  loader = _build(tmp_path, packing='none', encode=_chat, batch=2, shuffle=False)
  batches = _take(loader, 3)
  assert [b['weights'].sum(1).tolist() for b in batches] == [[3, 0]] * 3
  assert loader.report()['dropped'] == {'no_target': 6}


def test_held_out_is_the_same_each_time_and_apart_from_training(corpus):
  train = _records(list(_build(corpus, holdout=0.2, at_end='stop')))
  held = _build(corpus, holdout=0.2, split='heldout', batch=3)
  first, second = [_digest(b) for b in held], [_digest(b) for b in held]
  assert first == second
  rows = _in_one_row(list(held))
  texts = _records([rows])[0]
  assert len(texts) == 12
  assert sorted(texts + [t for stream in train for t in stream]) == sorted(_text(i) for i in range(60))


def _in_one_row(batches):
  return {k: np.concatenate([b[k] for b in batches]).reshape(1, -1) for k in batches[0]}


def test_held_out_rows_do_not_depend_on_the_batch(corpus):
  """Rows are those of one stream, in order, whatever batch and number of processes; the last batch is padded."""
  one = list(_build(corpus, holdout=0.2, split='heldout', batch=1))
  rows = {k: np.concatenate([b[k] for b in one]) for k in one[0]}
  n = len(rows['tokens'])
  for batch in (2, 5, 32):
    batches = list(_build(corpus, holdout=0.2, split='heldout', batch=batch))
    assert len(batches) == -(-n // batch)
    for name in rows:
      joined = np.concatenate([b[name] for b in batches])
      np.testing.assert_array_equal(joined[:n], rows[name])
      assert not joined[n:].any()
  parts = [list(_build(corpus, holdout=0.2, split='heldout', batch=4, process=p, processes=2)) for p in range(2)]
  whole = list(_build(corpus, holdout=0.2, split='heldout', batch=4))
  for left, right, both in zip(*parts, whole, strict=True):
    np.testing.assert_array_equal(np.concatenate([left['tokens'], right['tokens']]), both['tokens'])


def test_held_out_batches_are_limited(corpus):
  few = list(_build(corpus, holdout=0.2, split='heldout', batch=2, batches=3))
  full = list(_build(corpus, holdout=0.2, split='heldout', batch=2))
  assert [_digest(b) for b in few] == [_digest(b) for b in full[:3]]
  assert len(list(_build(corpus, holdout=0.2, split='heldout', batch=2, batches=99))) == len(full)
  with pytest.raises(config.Error, match='holdout=0 leaves nothing'):
    _build(corpus, split='heldout')


def test_synthetic_is_the_stated_draw():
  """One batch, the same each step: the draw of a generator that anyone can repeat."""
  settings = data_config.Config(source='synthetic', vocab=1000)
  loader = pipeline.build(settings, batch=8, length=32)
  drawn = np.random.default_rng(1).integers(0, 1000, (8, 33), dtype=np.int32)
  for batch in _take(loader, 2):
    assert batch.keys() == {'tokens', 'targets', 'weights'}
    np.testing.assert_array_equal(batch['tokens'], drawn[:, :-1])
    np.testing.assert_array_equal(batch['targets'], drawn[:, 1:])
    assert (batch['weights'] == 1).all()
  half = next(pipeline.build(settings, batch=8, length=32, process=1, processes=2))
  np.testing.assert_array_equal(half['tokens'], drawn[4:, :-1])
  with pytest.raises(config.Error, match='vocab: source=random needs'):
    pipeline.build(data_config.Config(source='random'), batch=8, length=32)


def test_random_is_new_each_step_and_resumes():
  settings = data_config.Config(source='random')
  whole = _take(pipeline.build(settings, batch=4, length=8, vocab=50), 6)
  assert len({_digest(b) for b in whole}) == 6
  loader = pipeline.build(settings, batch=4, length=8, vocab=50)
  _take(loader, 3)
  resumed = pipeline.build(settings, batch=4, length=8, vocab=50, state=_through_json(loader.state()))
  assert [_digest(b) for b in _take(resumed, 3)] == [_digest(b) for b in whole[3:]]
  held = pipeline.build(settings, batch=4, length=8, vocab=50, split='heldout', batches=2)
  assert [_digest(b) for b in held] == [_digest(b) for b in held]
  assert not {_digest(b) for b in held} & {_digest(b) for b in whole}


def test_begin_and_end_of_a_file_in_pieces(tmp_path):
  (tmp_path / 'a.txt').write_text('line\n' * 300)  # 1500 bytes: two pieces
  loader = _build(tmp_path, source='text', paths=(f'{tmp_path}/a.txt',), piece=1024, shuffle=False, at_end='stop',
                  batch=1, length=2048)  # fmt: skip
  (batch,) = loader
  ids = batch['tokens'][0][batch['segments'][0] > 0]
  assert len(ids) == 1502 and np.flatnonzero(ids == 256).tolist() == [0]
  assert np.flatnonzero(batch['segments'][0] == 2)[0] == 1021  # behind the begin token and 204 lines of 5 bytes
  assert ids[-1] == 257 and (ids == 257).sum() == 1 and batch['targets'][0][len(ids) - 2] == 257


def test_text_that_is_no_unicode_names_its_record(tmp_path):
  """D10: also what the tokenizer refuses is a broken record."""
  (tmp_path / 'a.jsonl').write_text('{"text": "fine"}\n{"text": "\\ud800"}\n')
  with pytest.raises(config.Error, match=r'a\.jsonl:2: text is not valid Unicode'):
    list(_build(tmp_path, at_end='stop', batch=2))
  loader = _build(tmp_path, at_end='stop', batch=2, on_bad_record='skip')
  assert len(list(loader)) == 1 and loader.report()['dropped'] == {'broken': 1}


def test_fewer_records_than_rows_is_said(tmp_path, monkeypatch):
  said = []
  monkeypatch.setattr(logging, 'warning', lambda message, *args: said.append(message % args))
  (tmp_path / 'a.jsonl').write_text('{"text": "one"}\n{"text": "two"}\n')
  _build(tmp_path, batch=4)
  assert said == ['data: 2 records for 4 rows: rows of a batch read the same records']


def test_report_says_where_it_is(corpus):
  loader = _build(corpus, shuffle=False, batch=2, length=32)
  assert loader.report() == {
    'batches': 0, 'records': 0, 'epoch': 0, 'next_record': f'{corpus}/0.jsonl:1', 'tokens': 0, 'dropped': {},
    'truncated': 0,
  }  # fmt: skip
  batches = _take(loader, 3)
  report = loader.report()
  done = [len(stream) for stream in _records(batches)]
  assert report['batches'] == 3
  assert report['tokens'] == sum((b['segments'] > 0).sum() for b in batches)
  assert sum(done) - 2 <= report['records'] <= sum(done)
  assert report['next_record'].startswith(f'{corpus}/')
  described = loader.describe()
  assert described['train_records'] == 60 and 'isolated by segment ids' in described['documents']


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'batch': 3, 'processes': 2}, 'batch=3 is not divisible by the 2 processes'),
    ({'split': 'valid'}, "split='valid' is not one of"),
    ({'length': 0}, 'length=0 must be positive'),
  ],
)
def test_wrong_arguments(corpus, change, message):
  with pytest.raises(config.Error, match=message):
    _build(corpus, **change)
