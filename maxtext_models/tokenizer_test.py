"""Tokenizers: exact ids at the ends, a set of end tokens, verbatim files, streaming, one-line errors."""

import io
import itertools
import json
import os
import pickle
import random

import pytest
import sentencepiece
import tokenizers

from maxtext_layers import config
from maxtext_models import tokenizer


def write(directory, **files):
  """Writes `name=value` as name.json (underscore-separated), or verbatim where the value is text or bytes."""
  os.makedirs(directory, exist_ok=True)
  for name, value in files.items():
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    with open(os.path.join(directory, f'{name}.json' if name != 'model' else 'tokenizer.model'), 'wb') as file:
      file.write(raw)
  return str(directory)


def words_json(post=None, **changes):
  """A tokenizer.json of whole words: <s>=0 </s>=1 <pad>=2 <|end|>=3 (special), a=4 b=5 ... j=13."""
  specials = ['<s>', '</s>', '<pad>', '<|end|>']
  flags = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False, 'special': True}
  vocab = {t: i for i, t in enumerate([*specials, *'abcdefghij'])}
  model = {'type': 'WordLevel', 'vocab': vocab, 'unk_token': '<pad>'}
  return {
    'version': '1.0',
    'truncation': None,
    'padding': None,
    'normalizer': None,
    'decoder': None,
    'post_processor': post,
    'added_tokens': [{'id': i, 'content': t, **flags} for i, t in enumerate(specials)],
    'pre_tokenizer': {'type': 'WhitespaceSplit'},
    'model': model,
  } | changes


BOS_TEMPLATE = {
  'type': 'TemplateProcessing',
  'single': [{'SpecialToken': {'id': '<s>', 'type_id': 0}}, {'Sequence': {'id': 'A', 'type_id': 0}}],
  'pair': [{'Sequence': {'id': 'A', 'type_id': 0}}, {'Sequence': {'id': 'B', 'type_id': 0}}],
  'special_tokens': {'<s>': {'id': '<s>', 'ids': [0], 'tokens': ['<s>']}},
}


@pytest.fixture(scope='module')
def pieces():
  """A SentencePiece model of 300 pieces with byte fallback: <unk>=0 <s>=1 </s>=2, bytes from 3 on."""
  out = io.BytesIO()
  text = ['the cat sat on the mat', 'a dog and a cat', 'where the dog was', 'the the the cat cat'] * 20
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(text),
    model_writer=out,
    vocab_size=300,
    model_type='bpe',
    byte_fallback=True,
    remove_extra_whitespaces=False,
    normalization_rule_name='identity',
    hard_vocab_limit=False,
    minloglevel=2,
  )
  return out.getvalue()


def test_byte_ids_are_bytes():
  made = tokenizer.load('byte')
  assert made.encode('hé') == [104, 195, 169]
  assert made.encode('a<|eos|>b') == [97, 257, 98]
  assert made.encode('', bos=True, eos=True) == [256, 257]
  assert (made.vocab, made.bos_id, made.eos_id, made.pad_id, made.eos_ids) == (259, 256, 257, 258, {257})
  assert (made.add_bos, made.add_eos) == (False, False)
  assert made.decode([104, 195, 169, 257, 255]) == 'hé<|eos|>\ufffd'
  assert made.decode([104, 257], skip_special=True) == 'h'
  assert [made.token(i) for i in (65, 32, 257)] == ['A', 'Ġ', '<|eos|>']  # GPT-2 writes a space as U+0120


def test_saved_byte_tokenizer_is_a_real_tokenizer_json(tmp_path):
  """The library reads what was saved and cuts any text into the same ids, and any ids into the same text."""
  made = tokenizer.load('byte')
  made.save(str(tmp_path))
  library = tokenizers.Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
  again = tokenizer.load(str(tmp_path))
  rng = random.Random(0)
  letters = ['a', ' ', '\n', 'é', '日', '👩', '\u0301', '<|eos|>', '<|', '|>', '\x00', 'Ġ']
  for _ in range(300):
    text = ''.join(rng.choices(letters, k=rng.randrange(12)))
    ids = [rng.randrange(259) for _ in range(rng.randrange(12))]
    assert made.encode(text) == library.encode(text).ids == again.encode(text)
    assert made.decode(ids) == library.decode(ids, skip_special_tokens=False) == again.decode(ids)
    assert made.decode(ids, skip_special=True) == library.decode(ids, skip_special_tokens=True)
  assert (again.vocab, again.bos_id, again.eos_ids, again.pad_id) == (259, 256, {257}, 258)
  assert library.get_vocab_size() == 259
  assert isinstance(again.codec, tokenizer._Bytes)


@pytest.mark.parametrize('bos,eos', [*itertools.product([False, True], repeat=2)])
@pytest.mark.parametrize('kind', ['byte', 'json', 'json with a template', 'sentencepiece'])
def test_ends_in_all_combinations(kind, bos, eos, tmp_path, pieces):
  """G12: exact ids for add_bos and add_eos in all four combinations; never two BOS."""
  settings = {'bos_token': '<s>', 'eos_token': '</s>', 'add_bos_token': bos, 'add_eos_token': eos}
  if kind == 'byte':
    made, text, ids, first, last = tokenizer.load('byte'), 'ab', [97, 98], 256, 257
    asked = made.encode(text, bos=bos, eos=eos)
  elif kind == 'sentencepiece':
    made = tokenizer.load(write(tmp_path, model=pieces, tokenizer_config=settings))
    text, first, last = 'the cat', 1, 2
    ids = sentencepiece.SentencePieceProcessor(model_proto=pieces).encode(text)
    asked = made.encode(text)  # by the files
  else:
    post = BOS_TEMPLATE if 'template' in kind else None
    made = tokenizer.load(write(tmp_path, tokenizer=words_json(post), tokenizer_config=settings))
    text, ids, first, last = 'a b', [4, 5], 0, 1
    asked = made.encode(text)
  want = [first] * bos + ids + [last] * eos
  assert asked == want
  assert made.encode(text, bos=bos, eos=eos) == want
  assert made.encode(made.token(first) + text, bos=True)[:2] != [first, first]
  assert made.encode(made.token(first) + text, bos=True).count(first) == 1
  assert made.encode(text + made.token(last), eos=True).count(last) == 1


def test_without_flags_the_post_processor_decides(tmp_path):
  """G12: a tokenizer.json whose own template adds BOS (Llama 3) does so once, and not when told otherwise."""
  settings = {'bos_token': '<s>', 'eos_token': '</s>'}
  made = tokenizer.load(write(tmp_path, tokenizer=words_json(BOS_TEMPLATE), tokenizer_config=settings))
  assert made.encode('a') == [0, 4]
  assert made.encode('a', bos=False) == [4]
  assert made.encode('a', eos=True) == [0, 4, 1]
  assert made.encode('<s> a') == [0, 4]


def test_end_tokens_are_a_set_from_all_files(tmp_path):
  """G10: tokenizer_config.json names one end token, generation_config.json and config.json more: all count."""
  made = tokenizer.load(
    write(
      tmp_path,
      tokenizer=words_json(),
      config={'eos_token_id': 1},
      generation_config={'eos_token_id': [3, 1]},
      tokenizer_config={'eos_token': {'content': '</s>', 'lstrip': False}, 'pad_token': '</s>', 'bos_token': None},
    )
  )
  assert made.eos_ids == {1, 3}
  assert (made.eos_id, made.pad_id, made.bos_id) == (1, 1, None)
  with pytest.raises(config.Error, match='names no bos_token'):
    made.encode('a', bos=True)


def test_ids_of_configs_where_no_token_is_named(tmp_path):
  made = tokenizer.load(
    write(
      tmp_path,
      tokenizer=words_json(),
      config={'bos_token_id': 2, 'eos_token_id': 1},
      generation_config={'bos_token_id': 0},
    )
  )
  assert (made.bos_id, made.eos_id, made.eos_ids) == (0, 1, {1})  # the generation config wins over the model's


def test_save_copies_files_verbatim(tmp_path):
  source = write(
    tmp_path / 'a',
    tokenizer=words_json(),
    tokenizer_config={'eos_token': '</s>', 'ünknown': [1]},
    generation_config={'eos_token_id': [1, 3], 'temperature': 0.6},
    special_tokens_map={'pad_token': '<pad>'},
  )
  (tmp_path / 'a' / 'chat_template.jinja').write_text('{{ messages }}\r\n', newline='')
  made = tokenizer.load(source)
  made.save(str(tmp_path / 'b'))
  names = sorted(os.listdir(source))
  assert sorted(os.listdir(tmp_path / 'b')) == names
  for name in names:
    assert (tmp_path / 'a' / name).read_bytes() == (tmp_path / 'b' / name).read_bytes()
  assert tokenizer.load(str(tmp_path / 'b')).pad_id == 2


def test_save_keeps_end_tokens_that_only_the_model_config_names(tmp_path):
  source = write(
    tmp_path / 'a', tokenizer=words_json(), config={'eos_token_id': [1, 3]}, generation_config={'top_p': 0.9}
  )
  tokenizer.load(source).save(str(tmp_path / 'b'))
  assert not (tmp_path / 'b' / 'config.json').exists()
  assert tokenizer.load(str(tmp_path / 'b')).eos_ids == {1, 3}
  assert json.loads((tmp_path / 'b' / 'generation_config.json').read_text())['top_p'] == 0.9


def test_limits_saved_in_the_file_do_not_cut_texts(tmp_path):
  truncation = {'direction': 'Right', 'max_length': 2, 'strategy': 'LongestFirst', 'stride': 0}
  padding = {
    'strategy': {'Fixed': 6},
    'direction': 'Right',
    'pad_to_multiple_of': None,
    'pad_id': 2,
    'pad_type_id': 0,
    'pad_token': '<pad>',
  }
  made = tokenizer.load(write(tmp_path, tokenizer=words_json(truncation=truncation, padding=padding)))
  assert made.encode('a b c d') == [4, 5, 6, 7]


def test_sentencepiece_with_added_tokens(tmp_path, pieces):
  """Special tokens inside a text are one id each; only the first word of the text gets SentencePiece's space."""
  plain = sentencepiece.SentencePieceProcessor(model_proto=pieces)
  size = plain.vocab_size()
  added = {str(size): {'content': '<|turn|>', 'special': True}, str(size + 1): {'content': '<tool>', 'special': False}}
  settings = {'added_tokens_decoder': added, 'bos_token': '<s>', 'eos_token': '</s>', 'add_bos_token': False}
  new = tokenizer.load(write(tmp_path / 'a', model=pieces, tokenizer_config=settings | {'legacy': False}))
  old = tokenizer.load(write(tmp_path / 'b', model=pieces, tokenizer_config=settings))
  cat = plain.encode('the cat')
  assert plain.id_to_piece(cat) == ['▁the', '▁cat']
  assert new.vocab == size + 2
  assert new.encode('the cat<|turn|> cat</s>') == [*cat, size, cat[1], 2]
  assert old.encode('the cat<|turn|>the cat') == [*cat, size, *cat]
  assert new.decode([*cat, size, cat[1], size + 1]) == 'the cat<|turn|> cat<tool>'
  assert new.decode([1, *cat, size, cat[1], 2], skip_special=True) == 'the cat cat'
  assert new.decode(new.encode('日')) == '日'  # three byte pieces
  assert len(new.encode('日')) == 4  # and the space before them
  assert new.special_ids >= {1, 2, size} and size + 1 not in new.special_ids


def test_sentencepiece_alone_names_its_own_ends(tmp_path, pieces):
  made = tokenizer.load(write(tmp_path, model=pieces))
  assert (made.bos_id, made.eos_id, made.eos_ids) == (1, 2, {2})
  assert made.encode('a', eos=True)[0] == 1 and made.encode('a', eos=True)[-1] == 2


@pytest.mark.parametrize('kind', ['byte', 'sentencepiece'])
def test_streaming_never_breaks_a_character(kind, tmp_path, pieces):
  made = tokenizer.load('byte' if kind == 'byte' else write(tmp_path, model=pieces))
  for text in ['the cat 日本 é 👩‍👩‍👧 sat', 'plain', '日', '']:
    ids, stream = made.encode(text, bos=True, eos=True), made.stream()
    parts = [stream.push(i) for i in ids]
    assert '\ufffd' not in ''.join(parts)
    assert ''.join(parts) + stream.flush() == text == made.decode(ids, skip_special=True)
    assert stream.flush() == ''
  stream = made.stream()
  ids = made.encode('é', bos=False)
  parts = [stream.push(i) for i in ids]
  assert ''.join(parts[:-1]).strip() == '' and parts[-1].endswith('é')


def test_streaming_says_at_the_end_what_was_no_character():
  stream = tokenizer.load('byte').stream()
  assert [stream.push(i) for i in [104, 0xE6, 0x97]] == ['h', '', '']
  assert stream.flush() == '\ufffd'


def test_tokenizers_travel_to_worker_processes(tmp_path, pieces):
  for source in ['byte', write(tmp_path / 'a', tokenizer=words_json()), write(tmp_path / 'b', model=pieces)]:
    made = tokenizer.load(source)
    assert pickle.loads(pickle.dumps(made)).encode('a b') == made.encode('a b')


@pytest.mark.parametrize(
  'files,message',
  [
    ({}, 'holds no tokenizer'),
    ({'tokenizer': b'{"version"'}, 'not a tokenizer.json'),
    ({'tokenizer': b'\xff\xfe'}, 'tokenizer.json: cannot be read'),
    ({'model': b'not a model'}, 'not a SentencePiece model'),
    ({'model': b''}, 'not a SentencePiece model'),
    ({'tokenizer': words_json(), 'tokenizer_config': b'{'}, 'tokenizer_config.json is not JSON'),
    ({'tokenizer': words_json(), 'tokenizer_config': b'[]'}, 'holds no JSON object'),
    (
      {'tokenizer': words_json(), 'tokenizer_config': {'eos_token': '<nope>'}},
      "eos_token '<nope>' is not in the vocabulary",
    ),
    ({'tokenizer': words_json(), 'tokenizer_config': {'add_bos_token': 'yes'}}, "add_bos_token is 'yes'"),
    ({'tokenizer': words_json(), 'generation_config': {'eos_token_id': '2'}}, "eos_token_id is '2'"),
    ({'tokenizer': words_json(BOS_TEMPLATE)}, "adds '<s>', which no file names"),
  ],
)
def test_broken_directories_are_one_line(files, message, tmp_path):
  with pytest.raises(config.Error, match=message) as caught:
    tokenizer.load(write(tmp_path / 'x', **files))
  assert '\n' not in str(caught.value)


def test_a_name_that_is_no_directory():
  with pytest.raises(config.Error, match="'Qwen/Qwen3' is neither a directory nor 'byte'"):
    tokenizer.load('Qwen/Qwen3')


def test_text_that_is_not_unicode(tmp_path):
  for made in (tokenizer.load('byte'), tokenizer.load(write(tmp_path, tokenizer=words_json()))):
    with pytest.raises(config.Error, match='not valid Unicode'):
      made.encode('a\ud800')
