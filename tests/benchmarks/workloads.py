"""Run configurations of the workloads that every peer is measured on: peers/workloads.py has the same shapes.

    python -m maxtext_train.pretrain --config=tests/benchmarks/workloads.py:W1 --config.steps=12

W1 has 20M parameters, four layers and a large vocabulary. W2 is SmolLM2-135M, thirty layers. W3 has 18M parameters,
four layers with eight experts, of which two see a token. W0 is for tests of these programs. One fixed random batch,
AdamW with a constant rate that decays every parameter, global clip 1, float32.
"""

from maxtext_models.families import llama
from maxtext_models.families import mixtral
from maxtext_train import losses
from maxtext_train import optimizer
from maxtext_train import run
from maxtext_train import schedule
from maxtext_train.data import config as data

SHAPES = {
  'W0': dict(layers=2, d_model=64, heads=4, kv_heads=2, head_dim=16, d_ff=128, vocab=512, tied=False, context=64),
  'W1': dict(layers=4, d_model=256, heads=8, kv_heads=4, head_dim=32, d_ff=1024, vocab=32000, tied=False, context=512),
  'W2': dict(layers=30, d_model=576, heads=9, kv_heads=3, head_dim=64, d_ff=1536, vocab=49152, tied=True, context=256),
  'W3': dict(
    layers=4, d_model=256, heads=8, kv_heads=4, head_dim=32, d_ff=512, vocab=8192, tied=False, context=512,
    experts=8, top_k=2, d_expert=512, balance_loss=0.0,
  ),
}  # fmt: skip
ROWS = {'W0': 2, 'W1': 4, 'W2': 2, 'W3': 2}


def get_config(name='W1'):
  """The run of workload `name`."""
  if name not in SHAPES:
    raise ValueError(f'no workload {name!r}; there are {", ".join(SHAPES)}')
  return run.Pretrain(
    name=name,
    model=(mixtral.Mixtral if 'experts' in SHAPES[name] else llama.Llama)(
      name=name, eps=1e-5, theta=10000.0, **SHAPES[name]
    ),
    steps=12,
    batch=ROWS[name],
    length=SHAPES[name]['context'],
    loss=losses.Config(chunks=4),  # as many as the hand-written step's default
    data=data.Config(source=data.Source.SYNTHETIC),
    optimizer=optimizer.Config(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, no_decay=(), clip=1.0),
    schedule=schedule.Config(kind=schedule.Kind.CONSTANT, peak=3e-4, warmup=0),
    checkpoint=run.Checkpoint(every=0),
    log_every=1,
  )


def tokens(name):
  """A step of workload `name`."""
  return ROWS[name] * SHAPES[name]['context']
