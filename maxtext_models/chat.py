"""Chats to (ids, weights): a Hugging Face chat template, rendered in a sandbox and weighted turn by turn.

Notable: weights come from rendering, never from searching. What a template writes for the first n messages must be how
it begins the whole chat (the prefix property), so an assistant turn is the tokens between two prefixes: the one that
ends with the header which asks for an answer, and the one that ends with the turn. A template that rewrites history, or
a tokenizer that merges across such a border, has no right weights: an error names the first token that differs.
Templates that mark their answers themselves (`{% generation %}`) are taken at their word.

Reading order: render, templates, _turn, _prefix, _Sandbox.
"""

import datetime
import functools
import json
import os
import re
from typing import Any

import jinja2
from jinja2 import ext
from jinja2 import nodes
from jinja2 import sandbox

from maxtext_layers import config
from maxtext_models import json_file
from maxtext_models import tokenizer as tokenizers

Message = dict[str, Any]  # {'role': 'user', 'content': 'Hi'} and whatever else the template reads

# Noncharacters, which no text contains: where a {% generation %} block begins and ends.
_OPEN, _CLOSE = '\ufdd0', '\ufdd1'
_REPEAT = 1 << 20  # how long a sequence a template may make by multiplication


def render(
  messages: list[Message],
  tokenizer: tokenizers.Tokenizer,
  template: str | None = None,
  add_generation_prompt: bool = False,
  *,
  train: str = 'all',
  variables: dict[str, Any] | None = None,
) -> tuple[list[int], list[int]]:
  """(ids, weights): what the model reads, and for each id 1 if it is for the model to say, else 0.

  Weight 1: the content of an assistant message and its end-of-turn token. Weight 0: everything else, headers and the
  line break behind the end of turn included. No BOS is added to what the template writes.

  Args:
    messages: of one chat, at least one.
    tokenizer: cuts the text and gives the template its special tokens.
    template: Jinja source; None: the tokenizer's own.
    add_generation_prompt: end with the header of an answer to come. That is a prompt, of which nothing is to be learnt:
      all weights are 0, and templates that rewrite history are welcome.
    train: 'all' assistant messages, or only the 'last'.
    variables: more names for the template, e.g. `enable_thinking`; `tools` and `documents` are None without.

  Raises config.Error where the template cannot render these messages, where no weights can be right, where all of them
  would be 0, and where a message holds one of the two noncharacters that mark {% generation %} blocks.
  """
  source = templates(tokenizer).get('default') if template is None else template
  if source is None:
    raise config.Error(f'{tokenizer.name}: the tokenizer has no chat template')
  if not messages:
    raise config.Error('a chat of no messages')
  if train not in ('all', 'last'):
    raise config.Error(f"train={train!r} is neither 'all' nor 'last'")
  given = {'tools': None, 'documents': None} | (variables or {})
  texts = {'the chat template': source, 'variables': given} | {f'message {i}': m for i, m in enumerate(messages, 1)}
  for where, value in texts.items():
    if mark := _mark_in(value):
      raise config.Error(f'{where} holds U+{ord(mark):04X}, which is no character and marks what is to be learnt')
  write = functools.partial(_write, _compiled(source), tokenizer, given)
  text = write(messages, add_generation_prompt)
  ids = tokenizer.encode(text, bos=False, eos=False)
  weights = [0] * len(ids)
  if add_generation_prompt:
    return ids, weights
  if 'endgeneration' in source:
    spans = _marked(write, messages, text, tokenizer, ids)
  else:
    turns = [i for i, message in enumerate(messages) if message.get('role') == 'assistant']
    spans = [_turn(write, messages, i, text, tokenizer, ids) for i in (turns if train == 'all' else turns[-1:])]
  for start, end in spans if train == 'all' else spans[-1:]:
    weights[start:end] = [1] * (end - start)
  if not any(weights):
    raise config.Error('nothing of this chat is for the model to say: the template marks no assistant turn in it')
  return ids, weights


def templates(tokenizer: tokenizers.Tokenizer) -> dict[str, str]:
  """Name -> Jinja source of a tokenizer's directory; 'default' is the one to use where none is asked for.

  `chat_template.jinja` wins over `chat_template` in tokenizer_config.json (a string, or a list of named ones), which
  wins over the older chat_template.json.
  """
  found: dict[str, str] = {}
  directory = tokenizer.name
  if directory == tokenizers.BYTE:  # which is no directory
    return found
  older = json_file.read_if_there(os.path.join(directory, 'chat_template.json'))
  for entry in (older.get('chat_template'), tokenizer.settings.get('chat_template')):
    named = entry if isinstance(entry, list) else [{'name': 'default', 'template': entry}] if entry else []
    for one in named:
      if not isinstance(one, dict) or not all(isinstance(one.get(k), str) for k in ('name', 'template')):
        raise config.Error(f'{directory}: chat_template is neither a text nor a list of named texts')
      found[one['name']] = one['template']
  path = os.path.join(directory, 'chat_template.jinja')
  if os.path.exists(path):
    try:
      with open(path, encoding='utf-8', newline='') as file:
        found['default'] = file.read()
    except (OSError, UnicodeDecodeError) as error:
      raise config.Error(f'{path}: cannot be read: {error}') from None
  return found


def _write(compiled, tokenizer, variables, messages, add_generation_prompt, marked=False):
  """The text of a chat, with or without the marks of {% generation %}."""
  names = tokenizer.specials | variables
  try:
    text = compiled.render(messages=messages, add_generation_prompt=add_generation_prompt, **names)
  except Exception as error:  # whatever a stranger's template raises is its own fault, memory and recursion included
    last = messages[-1].get('role') if messages else 'none'
    raise config.Error(
      f'the chat template cannot write {len(messages)} messages (last: {last}): {type(error).__name__}: {_line(error)}'
    ) from None
  return text if marked else text.replace(_OPEN, '').replace(_CLOSE, '')


def _mark_in(value):
  """The first mark in the texts of a message, or None."""
  if isinstance(value, str):
    return next((mark for mark in (_OPEN, _CLOSE) if mark in value), None)
  inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
  return next(filter(None, map(_mark_in, inner)), None)


def _turn(write, messages, turn, text, tokenizer, ids):
  """(start, end) in `ids` of the assistant message `turn`: behind its header, up to and with its end-of-turn token."""
  asked, ended = write(messages[:turn], True), write(messages[: turn + 1], False)
  if asked == write(
    messages[:turn], False
  ):  # the template has no header to ask with: what it writes before any content
    asked = _common(*(write([*messages[:turn], messages[turn] | {'content': c}], False) for c in ('Yes', 'no')))
    asked = asked if asked[len(write(messages[:turn], False)) :].strip() else write(messages[:turn], False)
  start = _prefix(asked, text, tokenizer, ids, f'before message {turn + 1} (assistant)')
  end = _prefix(ended, text, tokenizer, ids, f'after message {turn + 1} (assistant)')
  if start >= end:
    raise config.Error(f'the chat template writes nothing for message {turn + 1} (assistant)')
  said = next((i for i in range(end - 1, start - 1, -1) if ids[i] in tokenizer.special_ids | tokenizer.eos_ids), None)
  if said is not None and not tokenizer.decode(ids[said + 1 : end]).strip():
    end = said + 1  # the end-of-turn token is the last thing said; a line break behind it is the template's
  return start, end


def _marked(write, messages, text, tokenizer, ids):
  """Spans in `ids` of the {% generation %} blocks."""
  spans, at = [], 0
  for i, piece in enumerate(re.split(f'[{_OPEN}{_CLOSE}]', write(messages, False, marked=True))):
    start, at = at, at + len(piece)
    if i % 2:
      spans.append(tuple(_prefix(text[:x], text, tokenizer, ids, f'at character {x}') for x in (start, at)))
  return spans


def _prefix(part, text, tokenizer, ids, where):
  """How many of `ids`, the tokens of `text`, are the tokens of `part`; an error unless these begin with those."""
  own = tokenizer.encode(part, bos=False, eos=False)
  same = next((i for i, (a, b) in enumerate(zip(own, ids)) if a != b), min(len(own), len(ids)))
  if same == len(own) and text.startswith(part):
    return same
  alone = repr(tokenizer.token(own[same])) if same < len(own) else 'its end'
  whole = repr(tokenizer.token(ids[same])) if same < len(ids) else 'its end'
  fault = 'the tokenizer merges across the border' if text.startswith(part) else 'the chat template rewrites history'
  advice = '' if text.startswith(part) else "; train='last' weights only the last answer"
  raise config.Error(f'{fault} {where}: token {same} is {alone} there and {whole} in the whole chat{advice}')


def _common(a, b):
  return a[: next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))]


def _line(error):
  return ' '.join(str(error).split())[:200] or type(error).__name__


class _Sandbox(sandbox.ImmutableSandboxedEnvironment):
  """Templates come with weights from anywhere: no private attributes, no changed arguments, no other files.

  `range`, `*` and `**` have limits, so that a slip does not fill the memory. A template that wants to take time or
  memory still can (nested loops, `center(10 ** 9)`): what renders strangers' templates for others needs limits on its
  process.
  """

  intercepted_binops = frozenset(['*', '**'])

  def call_binop(self, context, operator, left, right):
    """Numbers may be multiplied freely, sequences only up to a length."""
    numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
    if operator == '**' and (not numbers or abs(right) > 64):
      raise sandbox.SecurityError('a power of that size')
    if operator == '*' and not numbers:
      length = max((len(x) for x in (left, right) if hasattr(x, '__len__')), default=0)
      times = max((x for x in (left, right) if isinstance(x, int)), default=0)
      if length * times > _REPEAT:
        raise sandbox.SecurityError(f'a sequence of {length * times}')
    return super().call_binop(context, operator, left, right)


class _Generation(ext.Extension):
  """{% generation %} ... {% endgeneration %}: what stands between is for the model to say."""

  tags = {'generation'}  # noqa: RUF012 (the base class declares it so)

  def parse(self, parser):
    """One block, whose text goes through `_mark`."""
    line = next(parser.stream).lineno
    body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
    return nodes.CallBlock(self.call_method('_mark'), [], [], body).set_lineno(line)

  def _mark(self, caller):
    return f'{_OPEN}{caller()}{_CLOSE}'


def _refuse(message):
  raise jinja2.TemplateError(message)


def _json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
  """As templates expect it: jinja's own filter would escape <, >, & and ' for HTML."""
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=32)
def _compiled(source):
  environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols])
  environment.filters['tojson'] = _json
  environment.globals['raise_exception'] = _refuse
  environment.globals['strftime_now'] = lambda form: datetime.datetime.now().strftime(form)
  try:
    return environment.from_string(source)
  except Exception as error:  # also what Python's own compiler says to deep nesting
    raise config.Error(f'the chat template is no Jinja: {_line(error)}') from None
