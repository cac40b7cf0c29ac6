"""Multi-token prediction: tensors under published names, logits of transformers' module, and the loss of the paper."""

import functools
import json

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from maxtext_models import checkpoint
from maxtext_models import hf
from maxtext_train import losses
from tests.golden import golden

COPIES = {'model.layers.3.embed_tokens.weight', 'model.layers.3.shared_head.head.weight'}  # in the files of deepseek3


@pytest.fixture(name='folder', scope='module')
def _folder(tmp_path_factory):
  """case -> the case with a module of multi-token prediction behind its last layer, in one directory."""

  @functools.cache
  def make(case):
    directory = golden.directory(case, tmp_path_factory.mktemp('mtp'))
    whole = safetensors.numpy.load_file(f'{directory}/model.safetensors')
    whole |= safetensors.numpy.load_file(golden.HERE / f'{case}_mtp.safetensors')
    safetensors.numpy.save_file(whole, f'{directory}/model.safetensors', metadata={'format': 'pt'})
    return directory

  return make


@pytest.fixture(name='loaded', scope='module')
def _loaded(folder):
  """case -> (card, model)."""
  return functools.cache(lambda case: checkpoint.load(folder(case)))


@pytest.fixture(name='model', scope='module')
def _model(loaded):
  return loaded('deepseek3')


def forward(model, tokens, **options):
  """(logits of the model, logits of its module)."""
  graph, state = nnx.split(model)

  @functools.partial(jax.jit)
  def run(state, tokens):
    m = nnx.merge(graph, state)
    x, _, _ = m.hidden(tokens, **options)
    (further,), _ = m.further(tokens, x, **options)
    return m.logits(x), m.logits(further)

  return run(state, tokens)


@pytest.mark.parametrize('case', ['deepseek3', 'qwen3_next', 'qwen3_5'])
def test_logits_equal_transformers(loaded, case):
  """The last token has nothing ahead of it; of all others the module says the one after the next."""
  reference = golden.reference(case)
  with np.load(golden.HERE / f'{case}_mtp.npz') as file:
    expected = file['logits']
  assert expected.std() >= 1
  first, second = forward(loaded(case)[1], reference.tokens[:1])
  assert np.abs(first - reference.logits[:1]).max() <= 1e-4
  assert np.abs(second[:, :-1] - expected).max() <= 1e-4


@pytest.mark.parametrize('case, copies', [('deepseek3', COPIES), ('qwen3_next', set()), ('qwen3_5', set())])
def test_the_way_back_has_the_published_names(folder, loaded, tmp_path, case, copies):
  """But for the copies of the table and of the head, which are passed over and named."""
  hf.save(tmp_path / 'out', *loaded(case))
  there, back = (safetensors.numpy.load_file(f'{d}/model.safetensors') for d in (folder(case), tmp_path / 'out'))
  assert copies < there.keys() and back.keys() == there.keys() - copies
  assert all(back[k].tobytes() == there[k].tobytes() for k in back)
  assert all(any(name in line for line in hf.remarks(folder(case))) for name in copies)
  checkpoint.save(tmp_path / 'native', *loaded(case))
  again = dict(hf.tensors(*checkpoint.load(tmp_path / 'native', scan=True)))
  assert again.keys() == back.keys() and all(again[k].tobytes() == back[k].tobytes() for k in back)


NEXT, AHEAD = 'num_nextn_predict_layers', 'mtp_num_hidden_layers'


@pytest.mark.parametrize(
  'case, field, promised', [('deepseek3', NEXT, 1), ('qwen3_next', NEXT, None), ('qwen3_5', AHEAD, None)]
)
def test_a_directory_without_the_modules_is_a_model_without(tmp_path, case, field, promised):
  """transformers' save_pretrained leaves them out, whatever config.json says; what is exported says 0."""
  directory = golden.directory(case, tmp_path)
  assert json.load(open(f'{directory}/config.json')).get(field) == promised
  card, model = hf.load(directory)
  assert card.mtp == 0 and len(model.ahead) == 0
  hf.save(tmp_path / 'out', card, model)
  assert json.load(open(tmp_path / 'out/config.json'))[field] == 0
  assert hf.read(tmp_path / 'out')[0].mtp == 0


@pytest.mark.parametrize('chunk', [losses.Chunk.TOKENS, losses.Chunk.VOCABULARY])
def test_the_loss_of_the_paper(model, chunk):
  """Equation 25: lambda / D times the sum over modules of -1/T sum log P(token i + k + 1); two documents in a row, of
  which none says anything about the other, and weights that leave tokens out."""
  tokens = golden.reference('deepseek3').tokens[:, :33]
  segments = np.array([[1] * 20 + [2] * 12])
  positions = np.array([[*range(20), *range(12)]])
  weights = np.ones((1, 32), np.float32)
  weights[0, [5, 19, 31]] = 0
  batch = {
    'tokens': tokens[:, :-1],
    'targets': tokens[:, 1:],
    'weights': weights,
    'positions': positions,
    'segments': segments,
  }
  where = {'positions': jnp.asarray(positions), 'segments': jnp.asarray(segments)}
  _, second = forward(model[1], tokens[:, :-1], **where)
  logp = np.asarray(jax.nn.log_softmax(second))[0].astype(np.float64)
  total = sum(
    -logp[i, tokens[0, i + 2]]
    for i in range(32)
    if i + 1 < 32 and segments[0, i] == segments[0, i + 1] and weights[0, i + 1]
  )
  graph, state = nnx.split(model[1])
  run = jax.jit(
    lambda state, share: losses.next_token(
      nnx.merge(graph, state), batch, chunk=chunk, chunks=3, ahead=0.3 if share else 0
    ),
    static_argnums=1,
  )
  plain, more = run(state, False), run(state, True)
  assert 'mtp_loss' not in plain.aux and plain.weight == more.weight == 29
  np.testing.assert_allclose(more.aux['mtp_loss'], total, rtol=1e-5)
  balance = more.aux['balance_loss'] - plain.aux['balance_loss']  # of the module's own experts
  assert balance > 0
  np.testing.assert_allclose(more.total, plain.total + 0.3 * total + balance, rtol=1e-6)
  np.testing.assert_allclose(more.aux['lm_loss'], plain.aux['lm_loss'], rtol=1e-6)


def test_the_loss_teaches_the_module_and_the_model(model):
  """Gradients reach the module, and through its input the layers below; without the loss the module has none."""
  graph, state = nnx.split(model[1])
  tokens = golden.reference('deepseek3').tokens[:, :33]
  batch = {'tokens': tokens[:, :-1], 'targets': tokens[:, 1:], 'weights': np.ones((1, 32), np.float32)}

  @functools.partial(jax.jit, static_argnums=1)
  def gradients(state, share):
    loss = lambda s: losses.next_token(nnx.merge(graph, s), batch, chunk=losses.Chunk.TOKENS, ahead=share).total
    return jax.grad(loss)(state)

  norm = lambda tree: float(sum(jnp.abs(a).sum() for a in jax.tree.leaves(tree)))
  none, some = gradients(state, 0.0), gradients(state, 0.5)
  assert norm(none['ahead']) == 0 and norm(some['ahead']) > 0
  assert norm(jax.tree.map(jnp.subtract, some['stack'], none['stack'])) > 0
