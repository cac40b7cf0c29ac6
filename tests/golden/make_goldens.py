"""Makes the reference logits of this folder with transformers; not a test. Needs torch and transformers, CPU is enough.

    python tests/golden/make_goldens.py [OUTPUT_DIR [CASE ..]]

Writes, for every case, CASE.json (config.json as transformers saves it) and CASE.npz (tokens int32 [B, T], logits
float32 [B, T, V], loss and gradient_norm of next-token prediction on these tokens, float64); and for every set of
weights WEIGHTS.safetensors. Several cases share one set, because they differ in how positions are rotated only;
golden.py puts the pieces together as a Hugging Face directory.

Every weight, bias and norm weight is drawn at random, away from its initial value, so that a parameter that is
forgotten or taken for another shows. Scales are such that attention looks at different keys and logits have a standard
deviation of 1 to 4, against which the tolerance of 1e-4 is meant. Made with torch 2.13.0 and transformers 5.24.0.
"""

import pathlib
import shutil
import sys
import tempfile
import zlib

import numpy as np
import safetensors.torch
import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cases_deepseek
import cases_deepseek4
import cases_deepseek32
import cases_dense
import cases_gemma4
import cases_llama4
import cases_moe
import cases_qwen3_next

MODULES = (
  cases_dense,
  cases_moe,
  cases_deepseek,
  cases_deepseek32,
  cases_deepseek4,
  cases_gemma4,
  cases_llama4,
  cases_qwen3_next,
)  # each with CASES and, if need be, randomise(weights, name, draw), published(name) and more(output)
VOCAB = 151
SMALL = dict(
  vocab_size=VOCAB, hidden_size=64, intermediate_size=88, num_hidden_layers=2, num_attention_heads=4,
  num_key_value_heads=2, max_position_embeddings=1024, attn_implementation='eager',
)  # fmt: skip
LLAMA = dict(SMALL, rms_norm_eps=1e-5)
LLAMA3 = dict(rope_type='llama3', rope_theta=500000.0, low_freq_factor=1.0, high_freq_factor=4.0)
BASE = dict(rope_type='default', rope_theta=10000.0)

# case -> (weights, config class, fields, rows, tokens a row)
CASES = {
  'llama': ('llama', 'Llama', dict(LLAMA, rope_parameters=BASE), 2, 256),
  'llama_linear': ('llama', 'Llama', dict(LLAMA, rope_parameters=dict(BASE, rope_type='linear', factor=4.0)), 1, 256),
  'llama_yarn': (
    'llama',
    'Llama',
    dict(LLAMA, rope_parameters=dict(BASE, rope_type='yarn', factor=4.0, original_max_position_embeddings=64)),
    1,
    256,
  ),
  'llama3_factor8': (
    'llama',
    'Llama',
    dict(LLAMA, rope_parameters=dict(LLAMA3, factor=8.0, original_max_position_embeddings=128)),
    1,
    256,
  ),
  'llama3_factor32': (
    'llama_tied',
    'Llama',
    dict(LLAMA, head_dim=24, tie_word_embeddings=True,
         rope_parameters=dict(LLAMA3, factor=32.0, original_max_position_embeddings=64)),
    1,
    1024,
  ),
  'llama_tied': (
    'llama_tied',
    'Llama',
    dict(LLAMA, head_dim=24, tie_word_embeddings=True, rope_parameters=dict(BASE, rope_theta=500000.0)),
    1,
    1024,
  ),
  'llama_bias': ('llama_bias', 'Llama', dict(LLAMA, attention_bias=True, mlp_bias=True, rope_parameters=BASE), 1, 256),
  'qwen3': (
    'qwen3',
    'Qwen3',
    dict(SMALL, head_dim=24, rms_norm_eps=1e-6, rope_parameters=dict(BASE, rope_theta=1000000.0)),
    2,
    256,
  ),
  'qwen3_tied': (
    'qwen3_tied',
    'Qwen3',
    dict(SMALL, num_hidden_layers=3, head_dim=24, rms_norm_eps=1e-6, tie_word_embeddings=True,
         rope_parameters=dict(BASE, rope_theta=1000000.0)),
    1,
    256,
  ),
}  # fmt: skip


def randomise(model, weights, special):
  """Draws every parameter anew; `special` says which of them have another distribution."""
  tied, generator = model.config.tie_word_embeddings, torch.Generator().manual_seed(zlib.crc32(weights.encode()))
  for name, parameter in model.named_parameters():
    draw = torch.randn(parameter.shape, generator=generator)
    if (value := special(weights, name, draw)) is not None:
      pass
    elif 'norm' in name:
      value = 1 + 0.3 * draw
    elif name.endswith('bias'):
      value = 0.5 * draw
    elif 'embed_tokens' in name:
      value = (0.3 if tied else 1.0) * draw
    else:
      value = (2.0 if 'lm_head' in name or 'q_proj' in name else 1.0) * draw / parameter.shape[1] ** 0.5
    parameter.data.copy_(value)
  for name, buffer in model.named_buffers():  # some are published, and a parameter to others
    if (value := special(weights, name, torch.randn(buffer.shape, generator=generator))) is not None:
      buffer.data.copy_(value)


def make(case, weights, kind, fields, rows, length, output, module):
  """One case."""
  torch.manual_seed(0)
  config = getattr(transformers, f'{kind}Config')(**fields)
  model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager').float().eval()
  path = output / f'{weights}.safetensors'
  randomise(model, weights, getattr(module, 'randomise', lambda *_: None))
  draw = lambda seed: torch.from_numpy(np.random.default_rng(seed).integers(0, config.vocab_size, (rows, length)))
  tokens = draw(7)
  if margin := getattr(module, 'MARGIN', 0):
    tokens = next(tokens for seed in range(7, 99) if least_gap(model, tokens := draw(seed)) > margin)
  logits = model(tokens).logits
  loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, config.vocab_size), tokens[:, 1:].reshape(-1))
  loss.backward()
  grads = [p.grad for p in model.parameters() if p.grad is not None]  # an indexer has none
  norm = torch.sqrt(sum((g.double() ** 2).sum() for g in grads))
  with tempfile.TemporaryDirectory() as temporary:
    model.save_pretrained(temporary)
    shutil.copyfile(f'{temporary}/config.json', output / f'{case}.json')
    if publish := getattr(module, 'published', None):
      rename(temporary, publish)
      again = transformers.AutoModelForCausalLM.from_pretrained(temporary, attn_implementation='eager').eval()
      assert torch.equal(again(tokens).logits, logits), 'transformers reads these names otherwise'
    shutil.copyfile(f'{temporary}/model.safetensors', path)
  logits = logits.detach().numpy()
  np.savez_compressed(
    output / f'{case}.npz', tokens=tokens.numpy().astype(np.int32), logits=logits,
    loss=np.float64(loss.item()), gradient_norm=np.float64(norm.item()),
  )  # fmt: skip
  print(
    f'{case}: logits {logits.shape} std {logits.std():.2f}, loss {loss.item():.4f}, gradient norm {norm.item():.4f}'
  )


class Choices(torch.overrides.TorchFunctionMode):
  """Keeps how far the last chosen lies above the first not chosen, in standard deviations, in every topk."""

  def __init__(self):
    super().__init__()
    self.gap = float('inf')

  def __torch_function__(self, func, types, args=(), kwargs=None):
    kwargs = kwargs or {}
    if func in (torch.topk, torch.Tensor.topk):
      values, k = args[0], kwargs.get('k', args[1] if len(args) > 1 else None)
      if k < values.shape[-1]:
        best = values.float().topk(k + 1, dim=-1).values
        gaps = (best[..., k - 1] - best[..., k])[best[..., k] > -1e30]
        seen = values[values > -1e30]
        self.gap = min([self.gap, *(gaps / seen.std()).tolist()])
    return func(*args, **kwargs)


def least_gap(model, tokens):
  """The least gap of any choice that the model makes: what rounding may turn round is no reference."""
  with torch.no_grad(), Choices() as choices:
    model(tokens)
  return choices.gap


def rename(directory, publish):
  """Gives the tensors of a directory the names that their publisher uses, where transformers writes others."""
  path = pathlib.Path(directory) / 'model.safetensors'
  tensors = safetensors.torch.load_file(path)
  safetensors.torch.save_file({publish(name): a for name, a in tensors.items()}, path, metadata={'format': 'pt'})


def main():
  output, *only = sys.argv[1:] or [pathlib.Path(__file__).parent]
  output = pathlib.Path(output)
  nothing = lambda *_: None
  made = [(None, CASES)] + [(module, module.CASES) for module in MODULES]
  for module, cases in made:
    chosen = [case for case in cases if not only or case in only]
    for case in chosen:
      make(case, *cases[case], output, module)
    if chosen:
      getattr(module, 'more', nothing)(output)


if __name__ == '__main__':
  main()
