"""Reference cases of multi-token prediction: a module behind a model of this folder, as transformers drafts with it.

CASE_mtp.safetensors holds it under the published names; CASE_mtp.npz the logits that it adds, float32 [1, T - 1, V]: at
i, what token i + 2 is. Run by make_goldens.py.
"""

import pathlib
import shutil
import tempfile

import numpy as np
from safetensors.numpy import save_file
import torch
import transformers
from transformers import modeling_layers


def make(case, output, special, published, copies=lambda model: {}):
  """One case.

  `special(name, draw)` is as in make_goldens.py; `published(name, layers)` the name in the files of a module's tensor,
  which are enorm, hnorm, eh_proj, post_norm and the block's below `block.`; `copies(model)` further tensors.
  """
  with tempfile.TemporaryDirectory() as folder:
    shutil.copyfile(output / f'{case}.json', pathlib.Path(folder, 'config.json'))
    shutil.copyfile(output / f'{case}.safetensors', pathlib.Path(folder, 'model.safetensors'))
    model = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32, attn_implementation='eager'
    ).eval()
  layers = len(model.model.layers)
  last = model.model.layers[-1]
  module = modeling_layers.MtpLayer(model.config, type(last), type(last.input_layernorm), layers - 1)
  generator = torch.Generator().manual_seed(5)
  for name, value in module.state_dict().items():
    draw = torch.randn(value.shape, generator=generator)
    drawn = special(name, draw)
    plain = 1 + 0.3 * draw if 'norm' in name else draw / value.shape[-1] ** 0.5
    value.copy_(plain if drawn is None else drawn)
  with np.load(output / f'{case}.npz') as file:
    tokens = torch.from_numpy(file['tokens'][:1]).long()
  with torch.no_grad():
    hidden, embedded = model.model(tokens).last_hidden_state[:, :-1], model.model.embed_tokens(tokens[:, 1:])
    positions = torch.arange(1, tokens.shape[1])[None]
    unseen = torch.full((positions.shape[1],) * 2, float('-inf')).triu(1)[None, None]
    turned = model.model.rotary_emb(embedded, position_ids=positions)
    x = module(embedded, hidden, position_embeddings=turned, attention_mask=unseen, position_ids=positions, cache=None)
    logits = model.lm_head(x).numpy()
  tensors = {}
  for name, value in module.state_dict().items():
    name = name.replace('mtp_block.', 'block.')
    if name.endswith('gate_up_proj'):
      for e, parts in enumerate(chunk.chunk(2) for chunk in value):
        for part, half in zip(('gate_proj', 'up_proj'), parts, strict=True):
          tensors[published(f'block.mlp.experts.{e}.{part}.weight', layers)] = half
    elif name.endswith('experts.down_proj'):
      for e, down in enumerate(value):
        tensors[published(f'block.mlp.experts.{e}.down_proj.weight', layers)] = down
    else:
      tensors[published(name, layers)] = value
  tensors |= {name: value.detach() for name, value in copies(model).items()}
  save_file({k: np.ascontiguousarray(v.numpy()) for k, v in tensors.items()}, output / f'{case}_mtp.safetensors')
  np.savez_compressed(output / f'{case}_mtp.npz', logits=logits)
  print(f'{case}_mtp: logits {logits.shape} std {logits.std():.2f}')
