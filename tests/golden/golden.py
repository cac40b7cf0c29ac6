"""Reference models of this folder as Hugging Face directories, with what transformers computes with them."""

import functools
import pathlib
import shutil
from typing import NamedTuple
import zipfile

import numpy as np

HERE = pathlib.Path(__file__).parent
WEIGHTS = {  # case -> file of weights; see make_goldens.py
  'llama': 'llama',
  'llama_linear': 'llama',
  'llama_yarn': 'llama',
  'llama3_factor8': 'llama',
  'llama3_factor32': 'llama_tied',
  'llama_tied': 'llama_tied',
  'llama_bias': 'llama_bias',
  'qwen3': 'qwen3',
  'qwen3_tied': 'qwen3_tied',
  'qwen2': 'qwen2',
  'qwen2_tied': 'qwen2_tied',
  'mistral': 'mistral',
  'mistral_2': 'mistral',
  'mistral_1': 'mistral',
  'mistral_none': 'mistral',
  'gemma': 'gemma',
  'gemma2': 'gemma2',
  'gemma3': 'gemma3',
  'gemma4': 'gemma4',
  'gemma4_experts': 'gemma4_experts',
  'gemma4_small': 'gemma4_small',
  'olmo3': 'olmo3',
  'gpt2': 'gpt2',
  'mixtral': 'mixtral',
  'mixtral_window': 'mixtral',
  'qwen3_moe': 'qwen3_moe',
  'qwen3_moe_plain': 'qwen3_moe_plain',
  'gpt_oss': 'gpt_oss',
  'llama4_scout': 'llama4_scout',
  'llama4_maverick': 'llama4_maverick',
  'qwen3_next': 'qwen3_next',
  'qwen3_next_raw': 'qwen3_next',
  'qwen3_5_moe': 'qwen3_5_moe',
  'qwen3_5': 'qwen3_5',
  'deepseek2': 'deepseek2',
  'deepseek2_groups': 'deepseek2_groups',
  'deepseek3': 'deepseek3',
  'deepseek3_halves': 'deepseek3_halves',
  'deepseek32': 'deepseek32',
  'deepseek4': 'deepseek4',
}
CASES = tuple(WEIGHTS)
TOLERANCE = 1e-4  # of a logit, in float32, at every position of every case: parity_test.py
TWINS = {'envy': 'envy_twin_test', 'gpt3': 'gpt3_twin_test'}  # family -> its test against equations in NumPy
MAXTEXT = (  # cases of make_maxtext_goldens.py
  'llama',
  'llama_halves',
  'qwen3',
  'qwen3_moe',
  'mixtral',
  'deepseek3',
  'deepseek2',
  'gpt_oss',
  'gemma2',
  'gemma3',
)


class Reference(NamedTuple):
  """tokens int32 [B, T], logits float32 [B, T, V]; loss (nats a target) and gradient norm of predicting the next."""

  tokens: np.ndarray
  logits: np.ndarray
  loss: float
  gradient_norm: float


@functools.cache
def reference(case: str) -> Reference:
  """What transformers computed."""
  with np.load(HERE / f'{case}.npz') as file:
    return Reference(file['tokens'], file['logits'], float(file['loss']), float(file['gradient_norm']))


def directory(case: str, parent) -> str:
  """Puts the Hugging Face directory of a case below `parent`; its path."""
  target = pathlib.Path(parent) / case
  target.mkdir()
  shutil.copyfile(HERE / f'{case}.json', target / 'config.json')
  shutil.copyfile(HERE / f'{WEIGHTS[case]}.safetensors', target / 'model.safetensors')
  return str(target)


@functools.cache
def maxtext_logits(case: str) -> tuple[np.ndarray, np.ndarray]:
  """(tokens int32 [B, T], logits float32 [B, T, V]) of the public MaxText."""
  with np.load(HERE / 'maxtext' / f'{case}.npz') as file:
    return file['tokens'], file['logits']


def maxtext_directory(case: str, parent) -> str:
  """Puts the checkpoints of the public MaxText below `parent`, with a config.json of the same model; its path."""
  target = pathlib.Path(parent) / case
  zipfile.ZipFile(HERE / 'maxtext' / f'{case}.zip').extractall(target)
  shutil.copyfile(HERE / 'maxtext' / f'{case}.json', target / 'config.json')
  return str(target)
