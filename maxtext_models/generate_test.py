"""The generate program on a tiny byte-level checkpoint: its output, and one line for what is wrong."""

import io
import json
import sys

from absl.testing import flagsaver
from flax import nnx
import jax
from jax.experimental.compilation_cache import compilation_cache
import numpy as np
import pytest

from maxtext_models import checkpoint
from maxtext_models import decoder
from maxtext_models import generate
from maxtext_models import program
from maxtext_models import sampler
from maxtext_models import tokenizer
from maxtext_models.families import qwen3

TEMPLATE = (
  "{% for m in messages %}{{ '<' + m.role + '>' + m.content + eos_token }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@pytest.fixture(scope='module')
def made(tmp_path_factory):
  """(directory of native checkpoints, their model)."""
  root = tmp_path_factory.mktemp('generate')
  card = qwen3.Qwen3(layers=1, d_model=32, d_ff=32, heads=2, kv_heads=1, head_dim=16, vocab=259, context=96)
  model = decoder.Decoder(card, rngs=nnx.Rngs(1))
  model.head.w[...] = (model.head.w[...] * 3).at[128:].set(0)  # greedy text is ASCII
  tokenizer.load('byte').save(str(root / 'tokenizer'))
  (root / 'tokenizer' / 'chat_template.jinja').write_text(TEMPLATE)
  checkpoint.save(str(root / 'full'), card, model, str(root / 'tokenizer'))
  checkpoint.save(str(root / 'bare'), card, model)
  broken = nnx.clone(model)
  broken.norm.w[...] = broken.norm.w[...].at[0].set(np.nan)
  checkpoint.save(str(root / 'broken'), card, broken, str(root / 'tokenizer'))
  tokenizer.load('byte').save(str(root / 'plain'))
  checkpoint.save(str(root / 'no_template'), card, model, str(root / 'plain'))
  return root, model


class Terminal(io.StringIO):
  """Says that somebody watches, and keeps what each write added."""

  def __init__(self):
    super().__init__()
    self.parts = []

  def isatty(self):
    return True

  def write(self, text):
    self.parts.append(text)
    return super().write(text)


@pytest.fixture
def run(made, monkeypatch, capsys):
  """run(*flags) -> (exit code, stdout, stderr); DIR in a flag is the folder of checkpoints."""

  def call(*arguments, stdout=None):
    arguments = [a.replace('DIR', str(made[0])) for a in arguments]
    monkeypatch.setenv('XDG_CACHE_HOME', str(made[0] / 'home'))
    capsys.readouterr()
    if stdout is not None:
      monkeypatch.setattr(sys, 'stdout', stdout)
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as end:
      program.run(generate.main, argv=['generate', *arguments])
    out, err = capsys.readouterr()
    return end.value.code or 0, out if stdout is None else stdout.getvalue(), err

  return call


def expected(model, ids, ends=(257,), **settings):
  return sampler.Jax(model, context=96, end_ids=frozenset(ends)).sample(ids, sampler.Settings(**settings))


def test_json_is_one_object_a_prompt(run, made):
  """Prompt, text, ids, log-probabilities and reason are those of the sampler, in the order of the prompts."""
  code, out, _ = run('--checkpoint=DIR/full', '--prompt=abc', '--prompt=é', '--max_new_tokens=7', '--json')
  lines = [json.loads(line) for line in out.splitlines()]
  want = expected(made[1], [[97, 98, 99], [195, 169]], max_new_tokens=7, temperature=0.0)
  assert code == 0
  for line, prompt, completion in zip(lines, ['abc', 'é'], want, strict=True):
    assert sorted(line) == ['finish_reason', 'logprobs', 'prompt', 'text', 'token_ids']
    assert (line['prompt'], line['token_ids']) == (prompt, list(completion.ids))
    text = bytes(i for i in completion.ids if i < 256).decode(errors='replace')
    assert (line['text'], line['finish_reason']) == (text, completion.finish_reason)
    np.testing.assert_allclose(line['logprobs'], completion.logprobs, atol=1e-6)


def test_sampling_flags_reach_the_sampler(run, made):
  flags = ['--temperature=1.3', '--top_k=20', '--top_p=0.9', '--seed=4', '--max_new_tokens=7']
  _, out, _ = run('--checkpoint=DIR/full', '--prompt=abc', '--prompt=ab', '--json', *flags)
  want = expected(made[1], [[97, 98, 99], [97, 98]], temperature=1.3, top_k=20, top_p=0.9, seed=4, max_new_tokens=7)
  assert [json.loads(line)['token_ids'] for line in out.splitlines()] == [list(c.ids) for c in want]


def test_chat_puts_the_prompt_into_the_template(run, made):
  """The ids that the model reads are those of '<user>hi', the end token and '<assistant>', written out here."""
  _, out, _ = run('--checkpoint=DIR/full', '--prompt=hi', '--chat', '--max_new_tokens=7', '--json')
  ids = [*b'<user>hi', 257, *b'<assistant>']
  assert json.loads(out)['token_ids'] == list(expected(made[1], [ids], max_new_tokens=7, temperature=0.0)[0].ids)


def test_plain_text_of_one_prompt_and_of_several(run):
  _, one, _ = run('--checkpoint=DIR/full', '--prompt=abc', '--max_new_tokens=7')
  _, two, _ = run('--checkpoint=DIR/full', '--prompt=abc', '--prompt=abc', '--max_new_tokens=7')
  assert two == f'[1] {one}[2] {one}' and one.endswith('\n')


def test_one_prompt_on_a_terminal_is_shown_as_it_comes(run):
  terminal = Terminal()
  code, shown, _ = run('--checkpoint=DIR/full', '--prompt=abc', '--max_new_tokens=40', stdout=terminal)
  monitor = [part for part in terminal.parts if part.strip()]
  assert code == 0
  assert len(monitor) > 3
  assert shown.endswith('\n')


def test_what_is_streamed_is_what_is_printed(run):
  _, printed, _ = run('--checkpoint=DIR/full', '--prompt=abc', '--max_new_tokens=40')
  _, shown, _ = run('--checkpoint=DIR/full', '--prompt=abc', '--max_new_tokens=40', stdout=Terminal())
  assert shown == printed


def test_compiled_programs_are_kept(run, made, tmp_path):
  """J11: the second start finds what the first compiled; --cache=none keeps nothing."""
  ask = ('--checkpoint=DIR/full', '--prompt=abc', '--max_new_tokens=33')
  found = []
  for folder in ('none', 'none', tmp_path / 'kept', tmp_path / 'kept'):
    events = []
    listener = lambda event, events=events, **_: events.append(event.rsplit('/', 1)[-1])
    jax.clear_caches()
    compilation_cache.reset_cache()
    jax.monitoring.register_event_listener(listener)
    code, _, _ = run(*ask, f'--cache={folder}')
    jax.monitoring.unregister_event_listener(listener)
    assert code == 0
    found.append('cache_hits' in events)
  assert found == [False, False, False, True] and list((tmp_path / 'kept').iterdir())
  code, _, err = run(*ask, f'--cache={made[0] / "full" / "model.json" / "x"}')
  assert code == 2 and '--cache=' in err and 'Not a directory' in err


def test_logits_that_are_no_numbers_are_a_failure(run):
  """No text that means nothing, and no NaN in JSON: one line and code 1."""
  for more in (['--json'], [], ['--prompt=b']):
    code, out, err = run('--checkpoint=DIR/broken', '--prompt=a', '--max_new_tokens=3', *more)
    assert (code, out) == (1, '')
    assert 'prompt 1: a token has the log-probability nan' in err and err.count('\n') == 1
  code, _, err = run('--checkpoint=DIR/broken', '--prompt=a', '--max_new_tokens=3', stdout=Terminal())
  assert code == 1 and 'log-probability nan' in err


@pytest.mark.parametrize('prompts', [['--prompt='], ['--prompt=a', '--prompt=']])
def test_an_empty_prompt_is_found_before_weights_are_read(run, monkeypatch, prompts):
  monkeypatch.setattr(checkpoint, 'load', None)
  code, out, err = run('--checkpoint=DIR/full', *prompts)
  assert (code, out) == (2, '') and f'prompt {len(prompts)} has no tokens' in err and err.count('\n') == 1


@pytest.mark.parametrize(
  'arguments,message',
  [
    (['--prompt=a'], 'flag --checkpoint is needed'),
    (['--checkpoint=DIR/full'], 'flag --prompt is needed'),
    (['--checkpoint=DIR/nowhere', '--prompt=a'], 'nowhere'),
    (['--checkpoint=DIR/bare', '--prompt=a'], 'bare holds no tokenizer'),
    (['--checkpoint=DIR/no_template', '--prompt=a', '--chat'], 'holds no chat template'),
    (['--checkpoint=DIR/full', '--prompt=' + 'a' * 96], 'prompt 1 has 96 tokens, but the context of the model is 96'),
    (['--checkpoint=DIR/full', '--prompt=a', '--prompt='], 'prompt 2 has no tokens'),
    (['--checkpoint=DIR/full', '--prompt=a', '--temperature=-1'], 'temperature=-1.0'),
    (['--checkpoint=DIR/full', '--prompt=a', '--top_p=0'], 'top_p=0.0'),
    (['--checkpoint=DIR/full', '--prompt=a', '--top_k=0'], 'top_k=0'),
    (['--checkpoint=DIR/full', '--prompt=a', '--max_new_tokens=0'], 'max_new_tokens=0'),
    (['--checkpoint=DIR/full', '--prompt=a', '--max_new_token=3'], "did you mean '--max_new_tokens'"),
    (['--checkpoint=DIR/full', '--prompt=a', '--seed=x'], 'seed'),
  ],
)
def test_what_is_wrong_is_one_line_and_code_2(run, arguments, message):
  code, out, err = run(*arguments)
  assert (code, out) == (2, '')
  assert message in err and err.count('\n') == 1
