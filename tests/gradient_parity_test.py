"""Training starts where transformers would, and what it makes goes back to where it came from."""

import functools

from flax import nnx
import jax
import numpy as np
import pytest
import safetensors.numpy

from maxtext_models import checkpoint
from maxtext_models import hf
from tests import wrong
from tests.golden import golden


@pytest.fixture(name='folder', scope='module')
def _folder(tmp_path_factory):
  """case -> its Hugging Face directory, made once."""
  parent = tmp_path_factory.mktemp('golden')
  return functools.cache(lambda case: golden.directory(case, parent))


def loss_of(model, tokens):
  x, _, _ = model.hidden(tokens[:, :-1])
  return model.losses(x, tokens[:, 1:]).mean()


@functools.partial(jax.jit, static_argnames='graph', compiler_options=wrong.QUICK)
def first_step(graph, state, tokens):
  return jax.value_and_grad(lambda s: loss_of(nnx.merge(graph, s), tokens), allow_int=True)(state)


@pytest.mark.parametrize(
  'case',
  [
    'llama',
    'llama_bias',
    'llama_tied',
    'qwen3',
    'gemma2',
    'gpt2',
    'mixtral',
    'gpt_oss',
    'qwen3_next',
    'deepseek3',
    'deepseek32',
    'deepseek4',
  ],
)
def test_first_loss_and_gradient_norm_equal_transformers(folder, case):
  """A19: within 1e-3 relative; they are within 1e-5."""
  reference = golden.reference(case)
  graph, state = nnx.split(checkpoint.load(folder(case))[1])
  loss, gradients = first_step(graph, state, reference.tokens)
  moved = [g for g in jax.tree.leaves(gradients) if g.dtype != jax.dtypes.float0]  # no table of ids
  norms = [np.square(np.asarray(g, np.float64)).sum() for g in moved]
  assert float(loss) == pytest.approx(reference.loss, rel=1e-5)
  assert np.sqrt(sum(norms)) == pytest.approx(reference.gradient_norm, rel=1e-4)


def test_export_after_an_update_has_the_tensors_of_the_source(folder, tmp_path):
  """A1: HF -> native (tables padded to 256 rows) -> one update -> HF: names, shapes and dtypes of the source."""
  case = 'qwen3'
  tokens = golden.reference(case).tokens
  checkpoint.save(tmp_path / 'native', *hf.load(folder(case), vocab_multiple=256))
  card, model = checkpoint.load(tmp_path / 'native')
  assert model.embed.w[...].shape == (256, 64)
  graph, state = nnx.split(model)
  loss, gradients = first_step(graph, state, tokens)
  state = jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients)
  after, _ = first_step(graph, state, tokens)
  assert after < loss
  updated = nnx.merge(graph, state)
  hf.save(tmp_path / 'out', card, updated)
  there, back = (safetensors.numpy.load_file(f'{d}/model.safetensors') for d in (folder(case), tmp_path / 'out'))
  assert {k: (v.shape, v.dtype) for k, v in there.items()} == {k: (v.shape, v.dtype) for k, v in back.items()}
  assert sum((there[k] != back[k]).any() for k in there) == len(there)
  again, model = hf.load(tmp_path / 'out', vocab_multiple=256)
  assert again.vocab == 151
  assert first_step(*nnx.split(model), tokens)[0] == after
