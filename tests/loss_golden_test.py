"""Five updates of tiny models, number by number those of an independent program (tests/golden/make_loss_golden.py)."""

import functools

from flax import nnx
import jax
import pytest

from maxtext_layers import sharding
from maxtext_models import checkpoint
from maxtext_train import losses
from maxtext_train import optimizer
from maxtext_train import schedule
from maxtext_train import state
from maxtext_train import step
from tests.golden import golden
from tests.golden import loss_golden as settings

DECAY = optimizer.Config(
  b1=settings.B1, b2=settings.B2, eps=settings.EPS, weight_decay=settings.DECAY, clip=settings.CLIP
)
RATE = schedule.Config(kind=schedule.Kind.COSINE, peak=settings.PEAK, warmup=settings.WARMUP, final=settings.FINAL)


@pytest.mark.parametrize('case', settings.CASES)
@pytest.mark.parametrize('scan, accumulate, chunk', [(False, 1, 'tokens'), (True, 2, 'vocabulary')])
def test_five_updates(case, scan, accumulate, chunk, tmp_path):
  """C1, C2, C3, C10, E20: loss, gradient norm and learning rate of five AdamW updates with uneven rows, clip and decay,
  as computed in float64 by PyTorch, which accumulates two micro-batches."""
  _, model = checkpoint.load(golden.directory(case, tmp_path), scan=scan)
  mesh, rules = sharding.mesh(jax.devices()[:1]), sharding.PRESETS['fsdp']
  with sharding.use(mesh, rules):
    plan = state.plan(lambda: model, functools.partial(optimizer.build, DECAY), mesh, rules)
    now = state.create(plan, nnx.state(model))
    loss = functools.partial(losses.next_token, chunk=losses.Chunk(chunk), chunks=3, kernel='chunked')
    run = step.Step(
      plan, loss, schedule.build(RATE, settings.UPDATES), accumulate=accumulate, clip=settings.CLIP
    )  # fmt: skip
    got = {'loss': [], 'grad_norm': [], 'learning_rate': []}
    for update in range(settings.UPDATES):
      now, metrics = run(now, settings.batch(update))
      for name, values in got.items():
        values.append(float(metrics[name]))
  expected = settings.expected(case)
  assert min(expected['grad_norm']) > settings.CLIP  # the clip acts
  assert got['learning_rate'] == pytest.approx(expected['learning_rate'], rel=1e-6)
  assert got['loss'] == pytest.approx(expected['loss'], rel=2e-5)
  assert got['grad_norm'] == pytest.approx(expected['grad_norm'], rel=2e-4)
