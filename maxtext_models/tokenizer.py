"""Text to token ids and back: byte-level (built in), `tokenizer.json`, SentencePiece `tokenizer.model`.

Notable: what a directory's tokenizer does at the ends of a text (BOS, EOS) is read from its files once and then belongs
to `Tokenizer`, so `encode(text, bos=..., eos=...)` gives exact ids whichever library cuts the text; end tokens are a
set everywhere; `save` copies files byte for byte. Reading order: load, Tokenizer, Stream, the three codecs, _specials.
"""

from collections.abc import Iterable
import functools
import json
import os
import re
import shutil
from typing import Any
from typing import Protocol

from maxtext_layers import config
from maxtext_models import json_file

BYTE = 'byte'

# What a tokenizer needs beside a checkpoint, copied verbatim wherever weights go.
FILES = (
  'tokenizer.json',
  'tokenizer.model',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'vocab.json',
  'merges.txt',
  'generation_config.json',
  'chat_template.jinja',
  'chat_template.json',
)


def load(name: str) -> 'Tokenizer':
  """The tokenizer of a directory, or the built-in one for the name 'byte'.

  A directory is read by what lies in it: `tokenizer.json` if there is one, else `tokenizer.model`. Raises config.Error
  in one line where neither is there or a file cannot be read.
  """
  if name == BYTE:
    return Tokenizer(_Bytes(), BYTE, _BYTE_CONFIG)
  if not os.path.isdir(name):
    raise config.Error(f'tokenizer {name!r} is neither a directory nor {BYTE!r}')
  settings = _json(name, 'tokenizer_config.json')
  codec: Codec
  if os.path.exists(path := os.path.join(name, 'tokenizer.json')):
    codec = _Bytes() if _read(path) == _byte_json() else _Library(path)
  elif os.path.exists(path := os.path.join(name, 'tokenizer.model')):
    codec = _SentencePiece(path, _added(name, settings), settings)
  else:
    raise config.Error(f'{name}: holds no tokenizer (neither tokenizer.json nor tokenizer.model)')
  settings = _json(name, 'special_tokens_map.json') | settings
  return Tokenizer(
    codec, os.path.abspath(name), settings, _json(name, 'config.json'), _json(name, 'generation_config.json')
  )


class Tokenizer:
  """Ids of one vocabulary.

  Attributes:
    name: what `load` was given, a directory as an absolute path.
    vocab: number of ids, added tokens included; a card's vocabulary may be larger.
    bos_id, eos_id, pad_id: int or None where the files name none. `eos_id` is the one that `encode` appends.
    eos_ids: every id that ends a text, from tokenizer_config.json, config.json and generation_config.json together.
    add_bos, add_eos: what `encode` does when it is not told.
    specials: the strings `bos_token`, `eos_token`, ... as a chat template wants them.
    special_ids: ids that are no text, which `decode(skip_special=True)` leaves out.
    settings: tokenizer_config.json, parsed.
  """

  def __init__(self, codec: 'Codec', name: str, settings: dict[str, Any], *more: dict[str, Any]):
    self.codec, self.name, self.settings = codec, name, settings
    self.vocab = codec.size
    self.specials = _specials(settings)
    self.special_ids = codec.special
    self.bos_id = self._special('bos', *more)
    self.eos_id = self._special('eos', *more)
    self.pad_id = self._special('pad', *more)
    ends = [_ids(source, 'eos') for source in more]
    self.eos_ids = frozenset([] if self.eos_id is None else [self.eos_id]).union(*ends)
    self.add_bos, self.add_eos = self._ends()

  def encode(self, text: str, bos: bool | None = None, eos: bool | None = None) -> list[int]:
    """Ids of `text`, special tokens in it recognised. `bos`, `eos` None: as the files say; never two of either."""
    try:
      ids = self.codec.encode(text)
    except (UnicodeEncodeError, TypeError) as error:
      raise config.Error(f'text is not valid Unicode: {_line(error)}') from None
    if self.add_bos if bos is None else bos:
      ids = ids if ids[:1] == [self._required('bos')] else [self._required('bos'), *ids]
    if self.add_eos if eos is None else eos:
      ids = ids if ids[-1:] == [self._required('eos')] else [*ids, self._required('eos')]
    return ids

  def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
    """Text of ids; bytes that are no UTF-8 become U+FFFD."""
    ids = [int(i) for i in ids]
    return self.codec.decode([i for i in ids if i not in self.special_ids] if skip_special else ids)

  def token(self, id: int) -> str:
    """How one id is written in the vocabulary, for messages."""
    return self.codec.token(id)

  def stream(self, skip_special: bool = True) -> 'Stream':
    """Incremental decoding: text as ids arrive."""
    return Stream(self, skip_special)

  def save(self, directory: str) -> None:
    """Writes the tokenizer's files: verbatim copies, or for the built-in one a `tokenizer.json` of the same ids.

    End tokens that only `config.json` names would be lost without it: then, and only then, generation_config.json is
    written anew with all of them.
    """
    os.makedirs(directory, exist_ok=True)
    if self.name == BYTE:
      _write(directory, 'tokenizer.json', _byte_json())
      _write(directory, 'tokenizer_config.json', json.dumps(_BYTE_CONFIG, indent=1))
      own = {'bos_token_id': _Bytes.BOS, 'eos_token_id': _Bytes.EOS, 'pad_token_id': _Bytes.PAD}
      _write(directory, 'generation_config.json', json.dumps(own, indent=1))
      return
    for file in FILES:
      if os.path.exists(path := os.path.join(self.name, file)):
        shutil.copyfile(path, os.path.join(directory, file))
    saved = load(directory)
    if (saved.bos_id, saved.eos_ids, saved.pad_id) != (self.bos_id, self.eos_ids, self.pad_id):
      ends: dict[str, Any] = {
        'bos_token_id': self.bos_id,
        'eos_token_id': sorted(self.eos_ids),
        'pad_token_id': self.pad_id,
      }
      _write(
        directory, 'generation_config.json', json.dumps(_json(directory, 'generation_config.json') | ends, indent=1)
      )

  def __reduce__(self):
    return load, (self.name,)  # libraries' objects do not travel to worker processes; files do

  def _special(self, word, *more):
    """The id of 'bos', 'eos' or 'pad': by tokenizer_config.json where it has the key (null means none), else by id."""
    if f'{word}_token' in self.settings:
      text = self.specials.get(f'{word}_token')
      id = None if text is None else self.codec.id(text)
      if text is not None and id is None:
        raise config.Error(f'{self.name}: {word}_token {text!r} is not in the vocabulary')
      return id
    return next((ids[0] for source in reversed(more) if (ids := _ids(source, word))), self.codec.named.get(word))

  def _required(self, word):
    if (id := getattr(self, f'{word}_id')) is None:
      raise config.Error(f'{self.name}: the tokenizer names no {word}_token')
    return id

  def _ends(self):
    """(add_bos, add_eos): the flags of tokenizer_config.json, else what the codec does with an empty text."""
    added = list(self.codec.ends)
    for flag in ('add_bos_token', 'add_eos_token'):
      if not isinstance(self.settings.get(flag), (bool, type(None))):
        raise config.Error(f'{self.name}: {flag} is {self.settings[flag]!r}, not true or false')
    strange = [i for i in added if i not in (self.bos_id, self.eos_id)]
    if strange:
      raise config.Error(
        f'{self.name}: the tokenizer adds {self.token(strange[0])!r}, which no file names as BOS or EOS'
      )
    bos, eos = self.settings.get('add_bos_token'), self.settings.get('add_eos_token')
    return (self.bos_id in added[:1] if bos is None else bos), (self.eos_id in added[-1:] if eos is None else eos)


class Stream:
  """Decodes ids one by one; what it has returned so far is always a prefix of the decoded whole.

  A character of several tokens is held back until it is complete (or `flush` says that nothing follows).
  """

  def __init__(self, tokenizer: Tokenizer, skip_special: bool):
    self._decode = functools.partial(tokenizer.decode, skip_special=skip_special)
    self._ids: list[int] = []
    self._start = self._read = 0  # ids[start:read] are out already; they give the next ids their context

  def push(self, id: int) -> str:
    """New text, '' while a character is incomplete."""
    self._ids.append(int(id))
    text = self._text()
    if not text or text.endswith('\ufffd'):
      return ''
    self._start, self._read = self._read, len(self._ids)
    return text

  def flush(self) -> str:
    """What was held back."""
    text, self._start, self._read = self._text(), len(self._ids), len(self._ids)
    return text

  def _text(self):
    return self._decode(self._ids[self._start :])[len(self._decode(self._ids[self._start : self._read])) :]


class Codec(Protocol):
  """Cuts text into ids. Special tokens in the text are recognised; none are added."""

  size: int
  special: frozenset[int]
  named: dict[str, int]  # 'bos', 'eos', 'pad' -> id, where the file itself says so
  ends: list[int]  # what the library would add around an empty text

  def encode(self, text: str) -> list[int]:
    """All of the text, whatever its length."""

  def decode(self, ids: list[int]) -> str:
    """Special tokens are written out; ids of no token are left out."""

  def id(self, token: str) -> int | None:
    """None: not in the vocabulary."""

  def token(self, id: int) -> str:
    """How the vocabulary writes it."""


class _Bytes:
  """One id a byte of UTF-8, then BOS, EOS, PAD: the ids of the `tokenizer.json` it is saved as, 100 times as fast."""

  BOS, EOS, PAD = 256, 257, 258
  TOKENS = ('<|bos|>', '<|eos|>', '<|pad|>')

  size = 259
  special = frozenset([BOS, EOS, PAD])

  def __init__(self):
    self.named = {'bos': self.BOS, 'eos': self.EOS, 'pad': self.PAD}
    self.ends: list[int] = []

  def encode(self, text):
    if '<|' not in text:
      return list(text.encode())
    ids: list[int] = []
    for i, part in enumerate(_BYTE_SPECIAL.split(text)):
      ids += [256 + self.TOKENS.index(part)] if i % 2 else part.encode()
    return ids

  def decode(self, ids):
    pieces = (bytes([i]) if i < 256 else self.TOKENS[i - 256].encode() for i in ids if 0 <= i < self.size)
    return b''.join(pieces).decode('utf-8', errors='replace')

  def id(self, token):
    letters = _byte_letters()
    return (
      256 + self.TOKENS.index(token) if token in self.TOKENS else letters.index(token) if token in letters else None
    )

  def token(self, id):
    return self.TOKENS[id - 256] if id >= 256 else _byte_letters()[id]


class _Library:
  """A `tokenizer.json`, read by the `tokenizers` library."""

  def __init__(self, path: str):
    import tokenizers

    try:
      self._inner = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
      raise config.Error(f'{path}: not a tokenizer.json: {_line(error)}') from None
    self._inner.no_truncation()  # a file saved from a training script may carry its own limits
    self._inner.no_padding()
    self.size = max(self._inner.get_vocab().values(), default=-1) + 1
    self.special = frozenset(i for i, t in self._inner.get_added_tokens_decoder().items() if t.special)
    self.named: dict[str, int] = {}
    self.ends = self._inner.encode('', add_special_tokens=True).ids

  def encode(self, text):
    return self._inner.encode(text, add_special_tokens=False).ids

  def decode(self, ids):
    return self._inner.decode(ids, skip_special_tokens=False)

  def id(self, token):
    return self._inner.token_to_id(token)

  def token(self, id):
    return self._inner.id_to_token(id) or f'<{id}>'


class _SentencePiece:
  """A `tokenizer.model`, read by the `sentencepiece` library, with the tokens that the JSON files beside it add.

  SentencePiece puts a space before a text ("dummy prefix"). It belongs before the first word of the text only; before
  every stretch between special tokens where tokenizer_config.json says `legacy` or, as transformers reads it, nothing.
  A text that begins with a space gets it all the same, as from SentencePiece; transformers 5 leaves it out there.
  """

  def __init__(self, path: str, added: dict[str, tuple[int, bool]], settings: dict[str, Any]):
    import sentencepiece

    with open(path, 'rb') as file:
      proto = file.read()
    try:
      self._first = sentencepiece.SentencePieceProcessor(model_proto=proto)
      # Protocol buffers merge when concatenated: field 3 (normalizer_spec), its field 3 (add_dummy_prefix) = false.
      self._rest = sentencepiece.SentencePieceProcessor(model_proto=proto + b'\x1a\x02\x18\x00')
      size = self._first.vocab_size()
    except Exception as error:
      raise config.Error(f'{path}: not a SentencePiece model: {_line(error)}') from None
    if not size:
      raise config.Error(f'{path}: not a SentencePiece model: it has no pieces')
    if settings.get('legacy', True):
      self._rest_encode = self._first.encode
    else:
      self._rest_encode = self._rest.encode
    control = {self._first.id_to_piece(i): (i, True) for i in range(size) if self._first.is_control(i)}
    self._added = control | added
    self._names = {i: text for text, (i, _) in self._added.items()}
    self._split = re.compile('|'.join(map(re.escape, sorted(self._added, key=len, reverse=True))) or '(?!)')
    self.size = max([size - 1, *self._names]) + 1
    self.special = frozenset(i for i, special in self._added.values() if special)
    ids = {'bos': self._first.bos_id(), 'eos': self._first.eos_id(), 'pad': self._first.pad_id()}
    self.named = {word: i for word, i in ids.items() if i >= 0}
    # What the file does not say: models that define BOS were trained behind it (transformers' default for this format).
    self.ends = [self.named['bos']] if 'bos' in self.named else []

  def encode(self, text):
    ids: list[int] = []
    at = 0
    for hit in [*self._split.finditer(text), None]:
      piece = text[at : hit.start() if hit else len(text)]
      ids += (self._rest_encode if at else self._first.encode)(piece) if piece else []
      if hit:
        ids.append(self._added[hit.group()][0])
        at = hit.end()
    return ids

  def decode(self, ids):
    parts: list[str] = []
    run: list[int] = []
    for i in [*ids, None]:
      if i is not None and i not in self._names:
        run += [i] if 0 <= i < self.size else []
        continue
      if run:
        parts.append((self._rest if parts else self._first).decode(run))
        run = []
      parts.append('' if i is None else self._names[i])
    return ''.join(parts)

  def id(self, token):
    if token in self._added:
      return self._added[token][0]
    id = self._first.piece_to_id(token)
    return id if self._first.id_to_piece(id) == token else None

  def token(self, id):
    return self._names.get(id) or self._first.id_to_piece(id)


def _specials(settings):
  """{'bos_token': '<s>', ...} from strings or {'content': '<s>'}."""
  found = {}
  for key, value in settings.items():
    if key.endswith('_token') and not key.startswith(('add_', 'split_')):
      value = value.get('content') if isinstance(value, dict) else value
      if isinstance(value, str):
        found[key] = value
  return found


def _ids(source, word):
  """`bos_token_id`, `eos_token_id`, ... of a config as a list: a number, a list or null."""
  value = source.get(f'{word}_token_id')
  values = [] if value is None else value if isinstance(value, list) else [value]
  if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
    raise config.Error(f'{word}_token_id is {value!r}, not a number or a list of numbers')
  return [v for v in values if v >= 0]


def _added(directory, settings):
  """token -> (id, special) of tokenizer_config.json and the older added_tokens.json."""
  added = {text: (id, True) for text, id in _json(directory, 'added_tokens.json').items()}
  for id, entry in settings.get('added_tokens_decoder', {}).items():
    added[entry['content']] = (int(id), bool(entry.get('special')))
  return added


def _json(directory, file):
  """A parsed JSON object, {} where the file does not exist."""
  return json_file.read_if_there(os.path.join(directory, file))


def _read(path):
  try:
    with open(path, encoding='utf-8') as file:
      return file.read()
  except (OSError, UnicodeDecodeError) as error:
    raise config.Error(f'{path}: cannot be read: {_line(error)}') from None


def _write(directory, file, text):
  with open(os.path.join(directory, file), 'w', encoding='utf-8') as out:
    out.write(text)


def _line(error):
  return ' '.join(str(error).split())[:200]


@functools.cache
def _byte_letters():
  """The letter that byte-level vocabularies write for each byte (GPT-2's table): itself, or one from U+0100 on."""
  plain = [*range(ord('!'), ord('~') + 1), *range(ord('¡'), ord('¬') + 1), *range(ord('®'), ord('ÿ') + 1)]
  others = iter(range(256, 512))
  return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


@functools.cache
def _byte_json():
  """The built-in tokenizer as a `tokenizer.json`: byte-level BPE without a merge."""
  level = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': False}
  flags = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False, 'special': True}
  return json.dumps(
    {
      'version': '1.0',
      'truncation': None,
      'padding': None,
      'added_tokens': [{'id': 256 + i, 'content': t, **flags} for i, t in enumerate(_Bytes.TOKENS)],
      'normalizer': None,
      'pre_tokenizer': level,
      'post_processor': None,
      'decoder': level,
      'model': {
        'type': 'BPE',
        'dropout': None,
        'unk_token': None,
        'continuing_subword_prefix': None,
        'end_of_word_suffix': None,
        'fuse_unk': False,
        'byte_fallback': False,
        'ignore_merges': False,
        'vocab': {letter: b for b, letter in enumerate(_byte_letters())},
        'merges': [],
      },
    }
  )


_BYTE_CONFIG = {
  'tokenizer_class': 'PreTrainedTokenizerFast',
  'bos_token': _Bytes.TOKENS[0],
  'eos_token': _Bytes.TOKENS[1],
  'pad_token': _Bytes.TOKENS[2],
  'add_bos_token': False,
  'add_eos_token': False,
  'clean_up_tokenization_spaces': False,
}
_BYTE_SPECIAL = re.compile('(' + '|'.join(map(re.escape, _Bytes.TOKENS)) + ')')
