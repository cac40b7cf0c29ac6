"""Chat templates: ids and weights written out token by token, and what is refused."""

import json

import pytest

from maxtext_layers import config
from maxtext_models import chat
from maxtext_models import tokenizer as tokenizers

CHATML = (
  "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
  "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
  "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + "
  "message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
  '{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}'
  "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
  "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
  "{{ raise_exception('roles must alternate') }}{% endif %}{% set role = 'model' if message['role'] == 'assistant' "
  "else message['role'] %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
  "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Qwen 3: a thinking block before the last answer, and none in the answers before it.
QWEN3 = (
  "{%- for message in messages %}{%- set content = message.content %}{%- if message.role == 'assistant' %}"
  "{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
  "{{- '<|im_start|>assistant\n' }}{%- if loop.last %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
  "{{- content + '<|im_end|>\n' }}{%- else %}{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}"
  "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# Without a header that asks for an answer (Llama 2, Mistral).
INST = (
  "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '[INST] ' + message.content + "
  "' [/INST]' }}{% else %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"
)
MARKED = (
  "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
  "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + "
  "'<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)
SPECIALS = [
  '<s>',
  '</s>',
  '<|im_start|>',
  '<|im_end|>',
  '<|start_header_id|>',
  '<|end_header_id|>',
  '<|eot_id|>',
  '<start_of_turn>',
  '<end_of_turn>',
]
WORDS = [
  '<unk>',
  '\n',
  '\n\n',
  ' ',
  'system',
  'user',
  'assistant',
  'model',
  'hi',
  'yo',
  'no',
  'why',
  '<think>',
  '</think>',
  '[INST]',
  '[/INST]',
  ' hi',
  ' yo',
  'Yes',
  '.',
]
PATTERN = r'<think>|</think>|\[/?INST\]|\n\n|\n| ?[A-Za-z]+|.'


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  return make(tmp_path_factory.mktemp('words'))


def make(directory, pattern=PATTERN, extra=(), eos='<|im_end|>', **settings):
  """Whole words; ids are those of SPECIALS + WORDS in order."""
  flags = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False, 'special': True}
  names = [*SPECIALS, *WORDS, *extra]
  (directory / 'tokenizer.json').write_text(
    json.dumps(
      {
        'version': '1.0',
        'truncation': None,
        'padding': None,
        'normalizer': None,
        'post_processor': None,
        'added_tokens': [{'id': i, 'content': t, **flags} for i, t in enumerate(SPECIALS)],
        'pre_tokenizer': {'type': 'Split', 'pattern': {'Regex': pattern}, 'behavior': 'Isolated', 'invert': False},
        'decoder': {'type': 'Fuse'},
        'model': {'type': 'WordLevel', 'vocab': {t: i for i, t in enumerate(names)}, 'unk_token': '<unk>'},
      }
    )
  )
  (directory / 'tokenizer_config.json').write_text(json.dumps({'bos_token': '<s>', 'eos_token': eos, **settings}))
  return tokenizers.load(str(directory))


def turns(*contents, system=None):
  roles = ['user', 'assistant'] * len(contents)
  first = [] if system is None else [{'role': 'system', 'content': system}]
  return first + [{'role': r, 'content': c} for r, c in zip(roles, contents)]


def said(tokenizer, messages, template, **options):
  """[(token, weight)], as written in the tests."""
  ids, weights = chat.render(messages, tokenizer, template, **options)
  assert len(ids) == len(weights)
  return [(tokenizer.token(i), w) for i, w in zip(ids, weights)]


def zeros(*tokens):
  return [(t, 0) for t in tokens]


def ones(*tokens):
  return [(t, 1) for t in tokens]


def test_chatml_token_by_token(tokenizer):
  """G3, G5: two turns of ChatML: headers and line breaks 0, answers with their end of turn 1."""
  assert said(tokenizer, turns('hi', 'yo yo', 'why', 'no', system='hi'), CHATML) == [
    *zeros('<|im_start|>', 'system', '\n', 'hi', '<|im_end|>', '\n'),
    *zeros('<|im_start|>', 'user', '\n', 'hi', '<|im_end|>', '\n', '<|im_start|>', 'assistant', '\n'),
    *ones('yo', ' yo', '<|im_end|>'), *zeros('\n'),
    *zeros('<|im_start|>', 'user', '\n', 'why', '<|im_end|>', '\n', '<|im_start|>', 'assistant', '\n'),
    *ones('no', '<|im_end|>'), *zeros('\n'),
  ]  # fmt: skip


def test_llama3_token_by_token(tmp_path):
  """G5, G12: Llama 3's style; BOS once although the template writes it and the tokenizer adds it."""
  tokenizer = make(tmp_path, eos='<|eot_id|>', add_bos_token=True)
  assert said(tokenizer, turns(' hi ', 'yo', 'why', 'no'), LLAMA3) == [
    *zeros('<s>', '<|start_header_id|>', 'user', '<|end_header_id|>', '\n\n', 'hi', '<|eot_id|>'),
    *zeros('<|start_header_id|>', 'assistant', '<|end_header_id|>', '\n\n'), *ones('yo', '<|eot_id|>'),
    *zeros('<|start_header_id|>', 'user', '<|end_header_id|>', '\n\n', 'why', '<|eot_id|>'),
    *zeros('<|start_header_id|>', 'assistant', '<|end_header_id|>', '\n\n'), *ones('no', '<|eot_id|>'),
  ]  # fmt: skip


def test_gemma_token_by_token(tokenizer):
  """G5: Gemma's style, where the assistant is called model."""
  assert said(tokenizer, turns('hi', 'yo'), GEMMA) == [
    *zeros('<s>', '<start_of_turn>', 'user', '\n', 'hi', '<end_of_turn>', '\n', '<start_of_turn>', 'model', '\n'),
    *ones('yo', '<end_of_turn>'), *zeros('\n'),
  ]  # fmt: skip


def test_qwen3_token_by_token(tokenizer):
  """G5: the empty thinking block of the last answer is the model's to say: its prompt ends before it."""
  assert said(tokenizer, turns('hi', 'yo'), QWEN3) == [
    *zeros('<|im_start|>', 'user', '\n', 'hi', '<|im_end|>', '\n', '<|im_start|>', 'assistant', '\n'),
    *ones('<think>', '\n\n', '</think>', '\n\n', 'yo', '<|im_end|>'), *zeros('\n'),
  ]  # fmt: skip


def test_a_template_that_rewrites_history_is_an_error_that_names_the_token(tokenizer):
  """G4: Qwen 3 drops the thinking block of an answer once another follows: token 9 differs."""
  with pytest.raises(config.Error, match=r"rewrites history after message 2 .* token 9 is '<think>' there and 'yo' in"):
    chat.render(turns('hi', 'yo', 'why', 'no'), tokenizer, QWEN3)
  last = said(tokenizer, turns('hi', 'yo', 'why', 'no'), QWEN3, train='last')
  assert [t for t, w in last if w] == ['<think>', '\n\n', '</think>', '\n\n', 'no', '<|im_end|>']
  assert last[9] == ('yo', 0)


def test_weights_come_by_prefixes_without_generation_tags_and_by_tags_with_them(tokenizer):
  """G4: a template with {% generation %} and one without give the same ids and weights."""
  messages = turns('hi', 'yo yo', 'why', 'no')
  assert chat.render(messages, tokenizer, MARKED) == chat.render(messages, tokenizer, CHATML)
  last = said(tokenizer, messages, MARKED, train='last')
  assert [t for t, w in last if w] == ['no', '<|im_end|>']


def test_a_template_without_a_header_for_the_answer(tokenizer):
  """G3, G5: whether or not the template can ask for an answer, its header has weight 0."""
  headless = CHATML.split('{% if')[0]
  assert chat.render(turns('hi', 'yo', 'why', 'no'), tokenizer, headless) == chat.render(
    turns('hi', 'yo', 'why', 'no'), tokenizer, CHATML
  )
  assert said(tokenizer, turns('hi', 'yo'), INST.replace('eos_token', "'</s>'")) == [
    *zeros('<s>', '[INST]', ' hi', ' ', '[/INST]'),
    *ones(' yo', '</s>'),
  ]


def test_an_answer_may_repeat_the_header(tokenizer):
  """G8: the header's tokens inside an answer stay trained, and so does what follows them."""
  got = said(tokenizer, turns('hi', 'no<|im_end|>\n<|im_start|>assistant\nyo', 'why', 'no'), CHATML)
  assert got[9:17] == [*ones('no', '<|im_end|>', '\n', '<|im_start|>', 'assistant', '\n', 'yo', '<|im_end|>')]
  assert [w for _, w in got[17:]] == [0] * 10 + [1, 1, 0]


def test_the_end_of_turn_need_not_be_the_end_of_text(tmp_path):
  """G8: <|im_end|> ends a turn although the tokenizer's EOS is another token."""
  tokenizer = make(tmp_path, eos='</s>')
  assert said(tokenizer, turns('hi', 'yo'), CHATML)[-3:] == [('yo', 1), ('<|im_end|>', 1), ('\n', 0)]


def test_identical_contents_in_two_turns(tokenizer):
  """G9: the same words said by both sides, twice: each span is its own."""
  got = said(tokenizer, turns('hi', 'hi', 'hi', 'hi'), CHATML)
  assert [i for i, (_, w) in enumerate(got) if w] == [9, 10, 21, 22]


def test_a_tokenizer_that_merges_across_the_border_is_an_error(tmp_path):
  """G9: the answer begins with a line break that melts into the header's."""
  tokenizer = make(tmp_path)
  with pytest.raises(
    config.Error, match=r"merges across the border before message 2 .*token 8 is '\\n' .* and '\\n\\n'"
  ):
    chat.render(turns('hi', '\nyo'), tokenizer, CHATML)


def test_one_renderer_for_one_turn_and_many(tokenizer):
  """G7: a one-turn chat has the ids and weights with which a longer chat begins; its prompt is a prefix of it."""
  ids, weights = chat.render(turns('hi', 'yo'), tokenizer, CHATML)
  more, more_weights = chat.render(turns('hi', 'yo', 'why', 'no'), tokenizer, CHATML)
  prompt, nothing = chat.render(turns('hi'), tokenizer, CHATML, True)
  assert (more[: len(ids)], more_weights[: len(ids)]) == (ids, weights)
  assert ids[: len(prompt)] == prompt and nothing == [0] * len(prompt)
  assert weights.index(1) == len(prompt)


def test_a_prompt_of_one_token_and_an_answer_of_four(tokenizer):
  """G6: shifted by one, exactly 4 weighted targets, the first is the first answer token."""
  template = '{% for m in messages %}{{ m.content }}{% endfor %}'
  ids, weights = chat.render(turns('hi', '\nyo hi.'), tokenizer, template)
  targets = [tokenizer.token(i) for i, w in zip(ids[1:], weights[1:]) if w]
  assert targets == ['\n', 'yo', ' hi', '.']
  assert (len(ids), weights[0]) == (5, 0)


def test_pad_may_be_eos(tmp_path):
  """G2: with pad_token == eos_token the end of turn still has weight 1."""
  tokenizer = make(tmp_path, pad_token='<|im_end|>')
  assert tokenizer.pad_id == tokenizer.eos_id
  assert ('<|im_end|>', 1) in said(tokenizer, turns('hi', 'yo'), CHATML)


def test_nothing_to_say_is_an_error(tokenizer):
  """G3: an all-zero mask is never returned for training data."""
  with pytest.raises(config.Error, match='nothing of this chat is for the model to say'):
    chat.render(turns('hi'), tokenizer, CHATML)
  with pytest.raises(config.Error, match=r'writes nothing for message 2 \(assistant\)'):
    chat.render(turns('hi', 'yo'), tokenizer, "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
  with pytest.raises(config.Error, match='no messages'):
    chat.render([], tokenizer, CHATML)


def test_a_prompt_of_a_long_chat_may_rewrite_history(tokenizer):
  ids, weights = chat.render(turns('hi', 'yo', 'why'), tokenizer, QWEN3, True)
  assert [tokenizer.token(i) for i in ids[-3:]] == ['<|im_start|>', 'assistant', '\n'] and not any(weights)


@pytest.mark.parametrize('template,message', [
  ("{{ ''.__class__.__mro__ }}", 'SecurityError'),
  ("{{ ''.__class__.__mro__[1].__subclasses__() }}", 'SecurityError'),
  ("{{ messages.__init__.__globals__ }}", 'SecurityError'),
  ("{{ raise_exception.__globals__['os'] }}", 'SecurityError'),
  ("{% import 'os' as os %}", 'no loader'),
  ("{% include '/etc/passwd' %}", 'no loader'),
  ("{% extends '/etc/passwd' %}", 'no loader'),
  ("{{ messages.append(1) }}", 'SecurityError'),
  ("{{ messages.clear() }}", 'SecurityError'),
  ("{% for i in range(10 ** 9) %}{% endfor %}", 'Range too big'),
  ("{{ 'a' * 10 ** 9 }}", 'a sequence of 1000000000'),
  ("{{ 9 ** 999 }}", 'a power of that size'),
  ("{{ open('/etc/passwd') }}", "'open' is undefined"),
  ("{{ cycler.__init__.__globals__.os }}", 'SecurityError'),
  ("{% for %}", 'no Jinja'),
  ("{{ raise_exception('roles must alternate') }}", 'roles must alternate'),
  ("{{ 1 // (messages | length - 2) }}", 'ZeroDivisionError'),
  ("{{ 'a'.center(10 ** 18) }}", 'MemoryError|OverflowError'),
  ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", 'RecursionError'),
  ("{{ '{}'.format() }}", 'IndexError'),
  ("{{ " + '(' * 5000 + '1' + ')' * 5000 + " }}", 'no Jinja'),
  ("{{ " + '[' * 150 + ']' * 150 + " }}", 'no Jinja|cannot write'),
  ("\ufdd0{{ messages[0].content }}\ufdd1", 'the chat template holds U.FDD0'),
])  # fmt: skip
def test_templates_are_strangers(template, message, tokenizer):
  with pytest.raises(config.Error, match=message.replace('*', r'\*')) as caught:
    chat.render(turns('hi', 'yo'), tokenizer, template)
  assert '\n' not in str(caught.value)


def test_what_templates_expect():
  """tojson leaves HTML's letters alone, strftime_now gives today, blocks are trimmed, loops may break."""
  tokenizer = tokenizers.load('byte')

  def text(source, **variables):
    return tokenizer.decode(chat.render(turns('hi'), tokenizer, source, True, variables=variables)[0])

  assert text('{{ tools | tojson }}', tools=[{'a': "<é>&'"}]) == '[{"a": "<é>&\'"}]'
  assert text("{{ {'b': 1, 'a': [2]} | tojson(indent=2) }}") == '{\n  "b": 1,\n  "a": [\n    2\n  ]\n}'
  assert len(text("{{ strftime_now('%Y-%m-%d') }}")) == 10
  assert text('  {% if true %}\nx\n  {% endif %}\n') == 'x\n'
  assert text('{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}') == '01'
  assert text('{{ bos_token }}{{ missing }}') == '<|bos|>'
  assert text("{{ '{0.__class__}'.format(1) }}") == ''


def test_tools_and_documents_are_none_unless_given():
  """As transformers gives them: templates ask `is not none` after `is defined`."""
  tokenizer = tokenizers.load('byte')
  source = '{% for x in (tools, documents) %}{{ x is defined }} {{ x is none }} {% endfor %}'
  text = lambda **given: tokenizer.decode(chat.render(turns('hi'), tokenizer, source, True, variables=given)[0])
  assert text() == 'True True True True '
  assert text(tools=[{'name': 'f'}]) == 'True False True True '


@pytest.mark.parametrize('mark', ['\ufdd0', '\ufdd1'])
def test_messages_with_the_marks_of_answers_are_refused(tokenizer, mark):
  """Else a user's text would say what is to be learnt, in a template with {% generation %} and in one without."""
  for message in ({'content': f'h{mark}i'}, {'content': [{'text': mark}]}, {'content': 'hi', 'tool': {mark: 1}}):
    for template in (MARKED, CHATML):
      with pytest.raises(config.Error, match=f'message 3 holds U.{ord(mark):04X}'):
        chat.render([*turns('hi', 'yo'), {'role': 'user'} | message], tokenizer, template, True)


def test_where_templates_are_found(tmp_path):
  """The file wins over tokenizer_config.json, there a list names several; without any, an error says so."""
  one = make(tmp_path, chat_template='config')
  assert chat.templates(one) == {'default': 'config'}
  many = make(tmp_path, chat_template=[{'name': 'default', 'template': 'a'}, {'name': 'tool_use', 'template': 'b'}])
  assert chat.templates(many) == {'default': 'a', 'tool_use': 'b'}
  (tmp_path / 'chat_template.json').write_text(json.dumps({'chat_template': 'old'}))
  assert chat.templates(make(tmp_path)) == {'default': 'old'}
  (tmp_path / 'chat_template.jinja').write_text('file')
  assert chat.templates(many) == {'default': 'file', 'tool_use': 'b'}
  with pytest.raises(config.Error, match='byte: the tokenizer has no chat template'):
    chat.render(turns('hi'), tokenizers.load('byte'), add_generation_prompt=True)
  with pytest.raises(config.Error, match='neither a text nor a list'):
    chat.templates(make(tmp_path, chat_template=[1]))
