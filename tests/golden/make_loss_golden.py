"""Makes losses.json: five AdamW updates of tiny Llama and Qwen3 in PyTorch, float64; not a test.

    python tests/golden/make_loss_golden.py

Needs torch, transformers and the files of make_goldens.py. Nothing of this project takes part but the settings in
loss_golden.py. Two micro-batches of two rows are accumulated by hand, the sum is divided by the number of targets that
count, the clip acts on the result, norms and embeddings do not decay. Made with torch 2.13.0 and transformers 5.24.0.
"""

import json
import math
import pathlib
import sys
import tempfile

import torch
import transformers

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

import golden  # noqa: E402
import loss_golden as settings  # noqa: E402


def rate(update):
  """Warm-up, then a cosine that ends at the last update."""
  u = update + 1
  if u < settings.WARMUP:
    return settings.PEAK * u / settings.WARMUP
  p = (u - settings.WARMUP) / (settings.UPDATES - settings.WARMUP)
  return settings.PEAK * (settings.FINAL + (1 - settings.FINAL) * (1 + math.cos(math.pi * p)) / 2)


def train(case):
  """{loss, grad_norm, learning_rate: one number an update}."""
  with tempfile.TemporaryDirectory() as parent:
    model = transformers.AutoModelForCausalLM.from_pretrained(
      golden.directory(case, parent), dtype=torch.float64, attn_implementation='eager'
    )
  named = dict(model.named_parameters())
  exempt = {name for name in named if 'norm' in name or 'embed' in name or name.endswith('bias')}
  optimizer = torch.optim.AdamW(
    [
      {'params': [named[name] for name in named if name not in exempt], 'weight_decay': settings.DECAY},
      {'params': [named[name] for name in exempt], 'weight_decay': 0.0},
    ],
    betas=(settings.B1, settings.B2),
    eps=settings.EPS,
  )
  out = {'loss': [], 'grad_norm': [], 'learning_rate': []}
  for update in range(settings.UPDATES):
    batch = {name: torch.from_numpy(value.copy()) for name, value in settings.batch(update).items()}
    optimizer.zero_grad()
    total = 0.0
    for rows in (slice(0, 2), slice(2, 4)):
      logits = model(batch['tokens'][rows].long()).logits
      nats = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch['targets'][rows].long(), reduction='none')
      loss = (nats * batch['weights'][rows].double()).sum()
      loss.backward()
      total += loss.item()
    count = batch['weights'].sum().item()
    gradients = [p.grad.div_(count) for p in named.values()]
    norm = math.sqrt(sum((g**2).sum().item() for g in gradients))
    for g in gradients:
      g.mul_(min(1.0, settings.CLIP / norm))
    for group in optimizer.param_groups:
      group['lr'] = rate(update)
    optimizer.step()
    for name, value in (('loss', total / count), ('grad_norm', norm), ('learning_rate', rate(update))):
      out[name].append(value)
  return out


def main():
  result = {case: train(case) for case in settings.CASES}
  (HERE / 'losses.json').write_text(json.dumps(result, indent=1) + '\n', encoding='utf-8')
  print(json.dumps(result, indent=1))


if __name__ == '__main__':
  main()
