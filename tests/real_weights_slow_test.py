"""SmolLM2-135M-Instruct: logits, ids and answers against what `transformers` gave (golden/make_smollm2_golden.py)."""

import hashlib
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from safetensors import safe_open

from maxtext_models import chat
from maxtext_models import checkpoint
from maxtext_models import sampler
from maxtext_models import tokenizer
from tests import smollm2

pytestmark = pytest.mark.slow

GOLDEN = pathlib.Path(__file__).parent / 'golden'
QUESTION = 'What is the capital of France?'


@pytest.fixture(scope='module')
def golden():
  return dict(np.load(GOLDEN / 'smollm2.npz'))


@pytest.fixture(scope='module')
def directory():
  return smollm2.directory()


@pytest.fixture(scope='module')
def loaded(directory):
  return checkpoint.load(directory)


def run(program, *flags):
  """A program in a process of its own, as a user starts it -> what it printed."""
  command = [sys.executable, '-m', f'maxtext_models.{program}', *flags]
  # Under Bazel our folders are on sys.path of this process only.
  environment = os.environ | {'PYTHONPATH': os.pathsep.join(filter(None, sys.path)), 'JAX_PLATFORMS': 'cpu'}
  done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr[-2000:]
  return done.stdout


def test_logits_are_those_of_transformers(loaded, golden):
  """All positions by their 16 largest logits (up to 39, standard deviation 2 to 4) and moments, two positions whole."""
  _, model = loaded
  x, _, _ = model.hidden(golden['tokens'][None])
  logits = np.asarray(model.logits(x))[0].astype(np.float64)
  assert golden['std'].min() > 1
  np.testing.assert_allclose(np.take_along_axis(logits, golden['top_ids'], 1), golden['top_logits'], atol=2e-4, rtol=0)
  np.testing.assert_allclose(logits[golden['positions']], golden['logits'], atol=2e-4, rtol=0)
  np.testing.assert_allclose(logits.mean(-1), golden['mean'], atol=1e-4, rtol=0)
  np.testing.assert_allclose(logits.std(-1), golden['std'], atol=1e-4, rtol=0)
  np.testing.assert_allclose(np.log(np.exp(logits).sum(-1)), golden['logsumexp'], atol=1e-4, rtol=0)


def test_token_ids_are_those_of_transformers(directory):
  made = tokenizer.load(directory)
  cases = json.loads((GOLDEN / 'smollm2_tokens.json').read_text())['strings']
  assert len(cases) > 10
  for case in cases:
    assert made.encode(case['text']) == case['ids'], case['text']
    assert made.decode(case['ids']) == case['text']


def test_prompt_and_greedy_answer_are_those_of_transformers(loaded, directory, golden):
  card, model = loaded
  made = tokenizer.load(directory)
  ids, _ = chat.render([{'role': 'user', 'content': QUESTION}], made, add_generation_prompt=True)
  assert ids == golden['prompt'].tolist()
  source = sampler.Jax(model, context=card.context, end_ids=made.eos_ids)
  [answer] = source.sample([ids], sampler.Settings(temperature=0.0, max_new_tokens=24))
  assert list(answer.ids) == golden['answer'].tolist()
  assert answer.finish_reason == 'stop'


def test_the_generate_program_names_paris(directory):
  out = run('generate', f'--checkpoint={directory}', '--chat', f'--prompt={QUESTION}', '--json', '--max_new_tokens=24')
  answer = json.loads(out)
  assert 'Paris' in answer['text'] and answer['finish_reason'] == 'stop'


def test_hf_to_native_to_hf_is_bit_equal(directory, tmp_path):
  """Tensor names, dtypes and bytes come back, and so do the tokenizer's files."""
  native, back = tmp_path / 'native', tmp_path / 'hf'
  run('convert', f'--source={directory}', f'--target={native}', '--to=native')
  run('convert', f'--source={native}', f'--target={back}', '--to=hf')
  assert tensors(back) == tensors(pathlib.Path(directory))
  for name in ('tokenizer.json', 'tokenizer_config.json', 'generation_config.json'):
    assert (back / name).read_bytes() == (pathlib.Path(directory) / name).read_bytes()


def tensors(directory):
  """name -> (dtype, shape, digest)."""
  found = {}
  for path in directory.glob('*.safetensors'):
    with safe_open(path, 'numpy') as file:
      for name in file.keys():
        value = file.get_tensor(name)
        found[name] = str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest()
  assert found
  return found
