"""Files as records: cut, named, refused."""

import json
import os
import pathlib
import sysconfig

import numpy as np
import pytest

from maxtext_layers import config
from maxtext_train.data import config as data_config
from maxtext_train.data import sources


def _write(folder, **files):
  for name, text in files.items():
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def test_a_file_is_cut_behind_lines_and_nothing_is_lost(tmp_path):
  text = ''.join(f'line {i} ä北\n' * (i % 3 + 1) for i in range(500))
  _write(tmp_path, a=text, b='short', c='')
  source = sources.Text(sources.find((str(tmp_path),)), 1024)
  records = [source[i] for i in range(len(source))]
  assert ''.join(r.value for r in records) == text + 'short'
  assert all(len(r.value.encode()) <= 1024 for r in records)
  assert all(r.value.endswith('\n') for r in records[:-1])
  assert [r.ends for r in records] == [False] * (len(records) - 2) + [True, True]
  assert [r.begins for r in records] == [True] + [False] * (len(records) - 2) + [True]
  assert records[1].name == f'{tmp_path}/a@{len(records[0].value.encode())}'


@pytest.mark.parametrize('shift', range(4))
def test_a_line_longer_than_a_piece_is_cut_between_characters(tmp_path, shift):
  text = 'x' * shift + '𝄞' * 1000  # four bytes each
  _write(tmp_path, a=text)
  source = sources.Text([str(tmp_path / 'a')], 1024)
  assert ''.join(source[i].value for i in range(len(source))) == text


def test_lines_are_numbered_as_an_editor_does(tmp_path):
  _write(tmp_path, **{'a.jsonl': '{"text": "one"}\n\n{"text": "two"}\r\n', 'b.jsonl': '{"text": "three"}'})
  source = sources.Lines(sources.find((str(tmp_path),), '.jsonl'), 'text')
  assert [source[i].value for i in range(len(source))] == ['one', 'two', 'three']
  assert [source.name(i)[len(str(tmp_path)) + 1 :] for i in range(3)] == ['a.jsonl:1', 'a.jsonl:3', 'b.jsonl:1']
  assert sources.Lines([str(tmp_path / 'b.jsonl')], None)[0].value == {'text': 'three'}


def test_a_file_longer_than_what_is_scanned_at_once(tmp_path, monkeypatch):
  monkeypatch.setattr(sources, '_SCAN', 7)
  lines = [json.dumps({'text': 'x' * n}) for n in range(30)]
  _write(tmp_path, a='\n'.join(lines))
  source = sources.Lines([str(tmp_path / 'a')], 'text')
  assert [len(source[i].value) for i in range(len(source))] == list(range(30))


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    (b'{"text": ', 'not JSON: '),
    (b'[1, 2]', 'not a JSON object but list'),
    (b'{"body": "x"}', "field 'text' is missing; the line has body"),
    (b'{"text": ' + b'[' * 100000, 'not JSON: '),
    (b'{"text": 3}', "field 'text' is not text"),
    (b'{"text": "\xff"}', 'byte 27 is not UTF-8'),
  ],
)
def test_a_broken_line_names_file_and_line(tmp_path, line, message):
  """D10: the message names file and record."""
  _write(tmp_path, **{'a.jsonl': b'{"text": "fine"}\n' + line})
  source = sources.Lines([str(tmp_path / 'a.jsonl')], 'text')
  with pytest.raises(sources.BadRecord, match=f'a.jsonl:2: {message}'):
    source[1]


def test_a_binary_file_is_named(tmp_path):
  _write(tmp_path, a=b'fine\n\xfe\xff')
  with pytest.raises(config.Error, match='/a: byte 5 is not UTF-8'):
    sources.Text([str(tmp_path / 'a')], 1024)[0]


def test_a_piece_is_some_rows(tmp_path):
  _write(tmp_path, a='line\n' * 8000)
  settings = data_config.Config(source='text', paths=(str(tmp_path),))
  sizes = {n: sources.open_source(settings, n).stop[0] for n in (8, 256, 1024)}
  assert sizes == {8: 1020, 256: 4095, 1024: 16380}  # whole lines of 5 bytes in 1024 (the least), 4096, 16384
  settings.piece = 2000
  assert sources.open_source(settings, 1024).stop[0] == 2000


def test_paths_that_lead_nowhere(tmp_path):
  (tmp_path / 'empty').mkdir()
  _write(tmp_path, **{'zero.txt': '', 'packed.jsonl.gz': 'x'})
  os.symlink(tmp_path / 'gone', tmp_path / 'dangling.md')
  for path, message in [
    ('absent.txt', 'absent.txt does not exist'),
    ('*.rst', r'\*.rst does not exist \(no match\)'),
    ('empty', 'empty holds no file'),
    ('packed.jsonl.gz', 'is compressed'),
    ('zero.txt', '1 files, all empty'),
    ('*.md', 'dangling.md cannot be read: No such file'),
  ]:
    settings = data_config.Config(source='text', paths=(str(tmp_path / path),))
    with pytest.raises(config.Error, match=message):
      sources.open_source(settings, 64)
  with pytest.raises(config.Error, match=r'empty holds no \.jsonl file'):
    sources.open_source(data_config.Config(source='jsonl', paths=(str(tmp_path / 'empty'),)), 64)


def test_a_file_without_permission(tmp_path, monkeypatch):
  _write(tmp_path, a='x')

  def refuse(*_):
    raise PermissionError(13, 'Permission denied')

  monkeypatch.setattr(sources, 'open', refuse, raising=False)
  with pytest.raises(config.Error, match='/a cannot be read: Permission denied'):
    sources.Text([str(tmp_path / 'a')], 1024)


def test_find_is_sorted_once_and_without_hidden(tmp_path):
  (tmp_path / 'deep' / '.git').mkdir(parents=True)
  for name in ('b.txt', 'a.txt', '.hidden', 'deep/c.txt', 'deep/.git/x'):
    (tmp_path / name).write_text('x')
  found = sources.find((str(tmp_path), str(tmp_path / '*.txt'), str(tmp_path / '**' / 'c.txt')))
  assert [os.path.relpath(f, tmp_path) for f in found] == ['a.txt', 'b.txt', 'deep/c.txt']


def test_identity_follows_content_not_place(tmp_path):
  for folder in ('one', 'two'):
    (tmp_path / folder / 'sub').mkdir(parents=True)
    (tmp_path / folder / 'a').write_text('x')
    (tmp_path / folder / 'sub' / 'b').write_text('yy')
  names = [sources.Text(sources.find((str(tmp_path / f),)), 1024).identity() for f in ('one', 'two')]
  assert names[0] == names[1]
  (tmp_path / 'two' / 'a').write_text('xx')
  assert sources.Text(sources.find((str(tmp_path / 'two'),)), 1024).identity() != names[0]


def test_the_standard_library_is_the_interpreters_own():
  source = sources.standard_library(1 << 16)
  root = pathlib.Path(sysconfig.get_paths()['stdlib'])
  assert str(root / 'argparse.py') in source.files
  assert not any('-packages' in f for f in source.files)
  assert source.files == sorted(source.files)
  assert not any('iso_8859' in f for f in source.files)  # not UTF-8, on purpose
  assert (source.stop - source.start).sum() > 8e6  # 11 MB without, 31 MB with the interpreter's tests
  index = source.files.index(str(root / 'bisect.py'))
  assert source[int(np.flatnonzero(source.file == index)[0])].value == (root / 'bisect.py').read_text()


def test_split_keeps_files_whole_where_there_are_many(tmp_path):
  for i in range(25):
    (tmp_path / f'{i:02}').write_text('line\n' * 500)
  source = sources.Text(sources.find((str(tmp_path),)), 1024)
  train, held = sources.split(source, 0.1, 3)
  assert sorted([*train, *held]) == list(range(len(source)))
  assert not set(source.file[train]) & set(source.file[held])
  assert len(set(source.file[held])) == 2  # round(25 × 0.1)
  assert [a.tolist() for a in sources.split(source, 0.1, 3)] == [train.tolist(), held.tolist()]
  assert sources.split(source, 0.1, 4)[1].tolist() != held.tolist()


def test_split_of_few_records(tmp_path):
  _write(tmp_path, a='line\n' * 500)
  source = sources.Text([str(tmp_path / 'a')], 1024)
  train, held = sources.split(source, 0.001, 0)
  assert len(held) == 1 and len(train) == len(source) - 1
  assert [len(a) for a in sources.split(source, 0.99, 0)] == [1, len(source) - 1]
  assert [len(a) for a in sources.split(source, 0.0, 0)] == [len(source), 0]
  with pytest.raises(config.Error, match=r'holdout=0.5: .*/a is the only record'):
    sources.split(sources.Text([str(tmp_path / 'a')], 4096), 0.5, 0)
