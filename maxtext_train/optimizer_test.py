import functools
import os
import subprocess
import sys

from flax import nnx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from maxtext_layers import attention
from maxtext_layers import block
from maxtext_layers import config
from maxtext_layers import delta
from maxtext_layers import hyper
from maxtext_layers import mlp
from maxtext_layers import norm
from maxtext_layers import rope
from maxtext_layers import stack
from maxtext_models import decoder
from maxtext_models.families import llama
from maxtext_train import losses
from maxtext_train import optimizer
from maxtext_train import schedule
from maxtext_train import state
from maxtext_train import step


def card():
  return llama.Llama(
    layers=3, d_model=8, d_ff=12, heads=2, kv_heads=1, head_dim=4, vocab=16, context=8, attention_bias=True
  )


@functools.cache
def params(scan=True):
  return jax.jit(lambda: nnx.state(decoder.Decoder(card(), rngs=nnx.Rngs(0), scan=scan)))()


def adamw(p, grads, rates, b1, b2, eps, decay):
  """The published algorithm (arXiv 1711.05101, algorithm 2) in float64."""
  p, m, v = p.astype(np.float64), np.zeros_like(p, np.float64), np.zeros_like(p, np.float64)
  for t, (g, rate) in enumerate(zip(grads, rates), 1):
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g**2
    p = p - rate * ((m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps) + decay * p)
  return p


@pytest.mark.parametrize('b1, b2', [(0.9, 0.95), (0.9, 0.9999), (0.0, 0.99)])
def test_adamw_against_float64(b1, b2):
  rng = np.random.default_rng(0)
  p, grads = rng.normal(size=(4, 3)), rng.normal(size=(20, 4, 3)) * 10.0 ** rng.integers(-6, 2, size=(20, 4, 3))
  rates = np.linspace(1e-2, 1e-3, 20)
  transform = optimizer.build(optimizer.Config(b1=b1, b2=b2, weight_decay=0.1), {'w': p})
  values = {'w': jnp.asarray(p, jnp.float32)}
  moments = transform.init(values)
  for g, rate in zip(grads, rates):
    direction, moments = transform.update({'w': jnp.asarray(g, jnp.float32)}, moments, values, applied=jnp.array(True))
    values = jax.tree.map(lambda p, d, r=rate: p - np.float32(r) * d, values, direction)
  expected = adamw(p, grads, rates, b1, b2, 1e-8, 0.1)
  np.testing.assert_allclose(values['w'], expected, rtol=0, atol=2e-6)


def test_same_as_optax():
  """The fused transformation is optax's own AdamW, for those who know that one."""
  rng = np.random.default_rng(1)
  values = {'w': jnp.asarray(rng.normal(size=(5,)), jnp.float32)}
  ours, theirs = (
    optimizer.build(optimizer.Config(no_decay=()), values),
    optax.adamw(1.0, 0.9, 0.95, 1e-8, weight_decay=0.1),
  )
  mine, other = ours.init(values), theirs.init(values)
  for _ in range(5):
    g = {'w': jnp.asarray(rng.normal(size=(5,)), jnp.float32)}
    a, mine = ours.update(g, mine, values)
    b, other = theirs.update(g, other, values)
    np.testing.assert_allclose(-a['w'], b['w'], rtol=2e-5)


@pytest.mark.parametrize('scan', [True, False])
def test_decay_is_decided_by_path(scan):
  """C10: with no gradient, exempt leaves are bit-equal after a step and all others are scaled by 1 - rate x decay; the
  same leaves with stacked layers, whose norms have rank 2."""
  tree, settings = params(scan), optimizer.Config(weight_decay=0.1, clip=None)
  transform = optimizer.build(settings, tree)
  loss = lambda model, batch, key: losses.Loss(0.0 * jnp.sum(model.embed.w[...]), jnp.float32(1), {})
  graph = nnx.graphdef(nnx.eval_shape(lambda: decoder.Decoder(card(), rngs=nnx.Rngs(0), scan=scan)))
  before = state.State(tree, transform.init(tree), jnp.int32(0))
  after, _ = step.train_step(graph, loss, transform, 0.5, before, {})
  decays, exempt = optimizer.decayed(settings, tree)
  assert len(decays) + len(exempt) == len(jax.tree.leaves(tree))
  for name, old, new in zip(optimizer.paths(tree), jax.tree.leaves(tree), jax.tree.leaves(after.params)):
    words = name.split('.')
    plain = words[-1] == 'b' or words[0] == 'embed' or any('norm' in word for word in words)
    assert (name in exempt) == plain, name
    if plain:
      assert np.array_equal(old, new), name
    else:
      np.testing.assert_allclose(new, old * (1 - 0.5 * 0.1), rtol=2e-7)
  kinds = lambda names: {'.'.join(w for w in name.split('.') if not w.isdigit()) for name in names}
  assert kinds(decays) == kinds(optimizer.decayed(settings, params(not scan))[0])


@pytest.mark.parametrize('scan', [True, False])
def test_gates_and_scalars_do_not_decay(scan):
  """By path, scanned or not: the decay and the step of a delta net, sinks, what hyper-connections multiply with; the
  matrices beside them do."""
  blocks = [
    block.Spec(mixer, mlp.Spec(12), norm.Spec(), streams=streams)
    for mixer in (
      delta.Spec(1, 2, 4, 4, norm.Spec(), taps=2),
      attention.Spec(2, 1, 4, rope.Spec(4, 1e4), sinks=True),
    )
    for streams in (hyper.Manifold(2), hyper.Free(2))
  ]
  for kind in (hyper.Manifold, hyper.Free):
    own = [spec for spec in blocks if isinstance(spec.streams, kind)] * 2
    tree = nnx.state(nnx.eval_shape(lambda: stack.Stack(own, 8, rngs=nnx.Rngs(0), scan=scan)))  # noqa: B023
    decays, exempt = ({name.removesuffix('.w').split('.')[-1] for name in names} for names in decayed(tree))
    assert exempt >= {'a_log', 'dt_bias', 'sinks', 'scale', 'mixer_norm'} and not exempt & decays
    assert decays >= {'q', 'k', 'v', 'o', 'conv_q', 'project', 'decay', 'beta', 'up'}


def decayed(tree):
  return optimizer.decayed(optimizer.Config(), tree)


def test_patterns_of_the_user_replace_the_default():
  decays, exempt = optimizer.decayed(optimizer.Config(no_decay=('mixer.q', 'down')), params())
  assert {name.split('.')[-2] for name in exempt} == {'q', 'down'}
  assert 'embed.w' in decays and 'norm.w' in decays
  assert optimizer.decayed(optimizer.Config(no_decay=()), params())[1] == []
  assert optimizer.decayed(optimizer.Config(weight_decay=0.0), params())[0] == []


def test_pattern_that_matches_nothing_is_an_error():
  """C10."""
  with pytest.raises(config.Error, match="no_decay: 'emebd' matches no parameter; did you mean 'embed'"):
    optimizer.build(optimizer.Config(no_decay=('norm', 'emebd')), params())


@pytest.mark.parametrize(
  'pattern',
  ['norm', 'mixer_norm', 'stack.*.w', 'blocks.0', '0', 'mixer', '*_norm', 'stack.segments.0.blocks.0.mixer_norm.w'],
)
def test_matches(pattern):
  assert optimizer.matches(pattern, 'stack.segments.0.blocks.0.mixer_norm.w')


@pytest.mark.parametrize('pattern', ['or', 'ix', 'mixer.norm', 'block', 'stack', ''])
def test_does_not_match(pattern):
  assert not optimizer.matches(pattern, 'segments.0.blocks.0.mixer_norm.w')


RATES = {
  'float': 1e-3,
  'np.float32': np.float32(1e-3),
  'np.float64': np.float64(1e-3),
  'np bf16': ml_dtypes.bfloat16(1e-3),
  'jnp': jnp.float32(1e-3),
  'jnp bf16': jnp.bfloat16(1e-3),
  'callable': schedule.build(schedule.Config(), 10),
  'callable float': lambda k: 1e-3,
  'optax': optax.constant_schedule(1e-3),
}


def one_step(rate, dtype):
  """Dtypes before and after a step on a single weight."""
  module = nnx.Linear(3, 2, param_dtype=dtype, rngs=nnx.Rngs(0))
  graph, tree = nnx.split(module)
  transform = optimizer.build(optimizer.Config(), tree)
  loss = lambda model, batch, key: losses.Loss(jnp.sum(model(batch) ** 2), jnp.float32(2), {})
  before = state.State(tree, transform.init(tree), jnp.zeros((), jnp.int32))
  after, metrics = step.train_step(graph, loss, transform, rate, before, jnp.ones((2, 3), dtype), clip=1.0)
  dtypes = lambda s: [leaf.dtype for leaf in jax.tree.leaves(s)]
  return dtypes(before), dtypes(after), {k: v.dtype for k, v in metrics.items()}


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('rate', RATES)
def test_dtypes_are_stable(rate, dtype):
  """C11: parameters and moments keep their dtypes whatever the learning rate is; moments are float32."""
  before, after, metrics = one_step(RATES[rate], dtype)
  assert before == after
  assert before.count(jnp.dtype(dtype)) >= 2 and before.count(jnp.dtype('float32')) >= 4
  assert set(metrics.values()) == {jnp.dtype('float32')}


def test_dtypes_are_stable_with_x64():
  """C12: the same with jax_enable_x64."""
  code = """
import jax
jax.config.update('jax_enable_x64', True)
import jax.numpy as jnp
from maxtext_train import optimizer_test
for dtype in (jnp.float32, jnp.bfloat16):
  for name, rate in optimizer_test.RATES.items():
    before, after, metrics = optimizer_test.one_step(rate, dtype)
    assert before == after and jnp.dtype('float64') not in after, (name, before, after)
    assert set(metrics.values()) == {jnp.dtype('float32')}, (name, metrics)
print('same')
"""
  environment = {**os.environ, 'PYTHONPATH': os.pathsep.join([*sys.path, ''])}
  command = [sys.executable, '-c', code]
  done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
  assert done.stdout.strip() == 'same', done.stderr[-2000:]


@pytest.mark.parametrize('applied', [True, False])
def test_applied(applied):
  """Moments stay bit-equal where a step is not applied, also for a transformation that knows nothing of it."""
  values, grads = {'w': jnp.ones(3)}, {'w': jnp.full(3, jnp.nan if not applied else 1.0)}
  for transform in (optimizer.build(optimizer.Config(), values), optimizer.guarded(optax.scale_by_adam())):
    old = transform.init(values)
    _, new = transform.update(grads, old, values, applied=jnp.array(applied))
    same = jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), old, new))
    assert same is not applied


def test_update_is_done_in_place():
  """Parameters and moments are overwritten, not copied: neither the skip nor many leaves cost a second pass."""
  values = {f'w{i}': jnp.ones((64, 64)) for i in range(20)}
  transform = optimizer.build(optimizer.Config(no_decay=()), values)

  def update(values, moments, grads, applied):
    direction, moments = transform.update(grads, moments, values, applied=applied)
    return jax.tree.map(lambda p, d: jnp.where(applied, p - 0.1 * d, p), values, direction), moments

  moments = transform.init(values)
  compiled = jax.jit(update, donate_argnums=(0, 1)).lower(values, moments, values, jnp.array(True)).compile()
  memory = compiled.memory_analysis()
  assert memory.alias_size_in_bytes >= 3 * 20 * 64 * 64 * 4
  assert memory.temp_size_in_bytes < 64 * 64 * 4  # not one leaf
  assert compiled.as_text().count(' copy(') <= 1  # of the count


@pytest.mark.parametrize('settings', [{'b1': 1.0}, {'b2': -0.1}, {'eps': 0.0}, {'weight_decay': -1.0}, {'clip': 0.0}])
def test_check_names_the_field(settings):
  with pytest.raises(config.Error, match=f'{next(iter(settings))}='):
    optimizer.Config(**settings).check()
