"""Every implementation against one twin: float64 numpy, with the mask written out by its definition."""

import itertools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import attend
from maxtext_layers import mask
from maxtext_layers import sharding

HERE = {'chunked': attend.chunked, 'chunked in blocks of 5': lambda *a: attend.chunked(*a, block=5), 'xla': attend.xla}
here = pytest.mark.parametrize('run', HERE.values(), ids=HERE)


def twin(q, k, v, shape, segments=None, sinks=None):
  """softmax over the keys j <= i with i - j < window and the same segment, one query at a time."""
  q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
  out = np.zeros(q.shape)
  for b, n, i in itertools.product(*map(range, q.shape[:3])):
    g = n // (q.shape[1] // k.shape[1])
    keys = [
      j
      for j in range(i + 1)
      if (shape.window is None or i - j < shape.window) and (segments is None or segments[b][i] == segments[b][j])
    ]
    scores = shape.scale * k[b, g, keys] @ q[b, n, i]
    if shape.cap is not None:
      scores = shape.cap * np.tanh(scores / shape.cap)
    raised = np.exp(scores)
    total = raised.sum() + (0 if sinks is None else np.exp(float(sinks[n])))
    out[b, n, i] = raised @ v[b, g, keys] / total
  return out


def example(b=2, n=4, k=2, t=16, h=8, seed=0, scale=1.0):
  rng = np.random.default_rng(seed)
  return tuple(jnp.asarray(rng.standard_normal((b, heads, t, h), np.float32) * scale) for heads in (n, k, k))


SEGMENTS = jnp.asarray([[1] * 5 + [2] * 8 + [0] * 3, [1] * 16])


@here
@pytest.mark.parametrize('window', [None, 1, 2, 5])
def test_window(run, window):
  """A4, A5: all implementations see the same keys, T=16."""
  shape = attend.Shape(0.3, window)
  np.testing.assert_allclose(run(*example(), shape), twin(*example(), shape), atol=1e-6)


@here
@pytest.mark.parametrize('window', [1, 2])
def test_small_windows_beside_padding(run, window):
  """A6: window 1 sees itself alone and window 2 one more, T=10, with padding on the right."""
  shape, segments = attend.Shape(0.3, window), jnp.asarray([[1] * 7 + [0] * 3, [1] * 10])
  q, k, v = example(t=10)
  got = run(q, k, v, shape, segments)
  np.testing.assert_allclose(got, twin(q, k, v, shape, segments), atol=1e-6)
  if window == 1:  # the softmax of one score is 1
    np.testing.assert_allclose(got, jnp.repeat(v, 2, 1), atol=1e-6)


@here
def test_segments_cap_and_sinks(run):
  shape, sinks = attend.Shape(0.3, 5, 1.5), jnp.asarray([0.5, -1.0, 2.0, 0.0])
  got = run(*example(), shape, SEGMENTS, sinks)
  np.testing.assert_allclose(got, twin(*example(), shape, SEGMENTS, sinks), atol=1e-6)


@here
def test_soft_cap_of_large_scores(run):
  """A15: raw scores reach 200 and more, cap 50."""
  q, k, v = example(scale=8.0)
  shape = attend.Shape(1.0, None, 50.0)
  assert jnp.abs(jnp.einsum('BNTH,BNSH->BNTS', q, jnp.repeat(k, 2, 1))).max() > 200
  np.testing.assert_allclose(run(q, k, v, shape), twin(q, k, v, shape), atol=1e-4)


@here
def test_packed_documents_are_isolated(run):
  """B1, B7: a document in a packed row equals the document alone, and does not see what stands before it."""
  q, k, v = example(b=1)
  shape, segments = attend.Shape(0.3), jnp.asarray([[1] * 7 + [2] * 9])
  both = run(q, k, v, shape, segments)
  alone = run(q[:, :, 7:], k[:, :, 7:], v[:, :, 7:], shape)
  np.testing.assert_allclose(both[:, :, 7:], alone, atol=1e-6)
  changed = run(q.at[:, :, :7].add(1), k.at[:, :, :7].add(1), v.at[:, :, :7].add(1), shape, segments)
  assert (changed[:, :, 7:] == both[:, :, 7:]).all()


@here
def test_padding_does_not_leak(run):
  """B2: what stands in padding changes nothing on real tokens, bit for bit."""
  q, k, v = example()
  dirty = [jnp.where((SEGMENTS == 0)[:, None, :, None], 1e3, a) for a in (q, k, v)]
  real = np.asarray(SEGMENTS != 0)
  for a, b in zip(
    run(q, k, v, attend.Shape(0.3), SEGMENTS).swapaxes(1, 2)[real],
    run(*dirty, attend.Shape(0.3), SEGMENTS).swapaxes(1, 2)[real],
  ):
    assert (a == b).all()


@here
def test_a_row_of_padding_is_finite(run):
  """C15: a fully padded row gives finite output and gradients."""
  segments = jnp.asarray([[0] * 16, [1] * 16])
  loss = lambda q, k, v: (run(q, k, v, attend.Shape(0.3, 3), segments) ** 2).sum()
  value, grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*example())
  assert jnp.isfinite(value) and all(jnp.isfinite(g).all() for g in grads)


def test_blocks_skip_what_they_cannot_see():
  """Causal blocks do less than a square's work: (1 + 2 + 3 + 4) / 16 of its scores; a window of one block 7 / 16."""

  def scores(window):
    jaxpr = jax.make_jaxpr(lambda *a: attend.chunked(*a, attend.Shape(1.0, window), block=4))(*example(b=1, n=2, k=2))
    dots = [e.outvars[0].aval.shape for e in jaxpr.jaxpr.eqns if e.primitive.name == 'dot_general']
    return sum(shape[-2] * shape[-1] for shape in dots[::2])

  assert scores(None) == 16 * 16 * 10 // 16
  assert scores(1) == 4 * 16


@here
@pytest.mark.parametrize('chunk', [1, 3, 5, 8])
def test_chunks(run, chunk):
  """Ids of chunks in the place of segments, known while tracing or not, against softmax over the chunk's keys alone."""
  ids = mask.chunks(np.arange(16)[None], chunk)
  expected = twin(*example(), attend.Shape(0.3), np.repeat(ids, 2, 0))
  for given in (ids, jnp.asarray(ids)):
    np.testing.assert_allclose(run(*example(), attend.Shape(0.3, chunk), given), expected, atol=1e-6)


def test_blocks_skip_chunks_that_ended():
  """Chunks of 4 in blocks of 4 are a diagonal of 4 squares, of 16; ids that nobody knows yet cost a window."""

  def scores(ids):
    run = lambda *a: attend.chunked(*a, attend.Shape(1.0, 4), ids, block=4)
    jaxpr = jax.make_jaxpr(run)(*example(b=1, n=2, k=2))
    dots = [e.outvars[0].aval.shape for e in jaxpr.jaxpr.eqns if e.primitive.name == 'dot_general']
    return sum(shape[-2] * shape[-1] for shape in dots[::2])

  ids = mask.chunks(np.arange(16)[None], 4)
  assert scores(ids) == 4 * 16
  assert scores(jnp.asarray(ids)) == 4 * 4 + 3 * 4 * 7


def test_cached_equals_the_last_rows_of_the_whole():
  q, k, v = example()
  sinks, shape = jnp.asarray([0.5, -1.0, 2.0, 0.0]), attend.Shape(0.3, 5, 1.5)
  whole = attend.xla(q, k, v, shape, None, sinks)
  longer = [jnp.pad(a, ((0, 0), (0, 0), (0, 4), (0, 0)), constant_values=9.0) for a in (k, v)]
  got = attend.cached(q[:, :, 12:], *longer, shape, jnp.arange(12, 16)[None], jnp.zeros(1, jnp.int32), sinks)
  np.testing.assert_allclose(got, whole[:, :, 12:], atol=1e-6)


@pytest.mark.parametrize('window, cap', [(None, None), (37, 5.0)])
def test_splash_in_the_interpreter_equals_chunked(window, cap):
  """B1, A4, A15: the TPU kernel with segments, window and cap, forward and backward."""
  shape = attend.Shape(0.3, window, cap)
  q, k, v = example(b=1, n=2, k=1, t=128, h=128, scale=0.5)
  segments = jnp.asarray([[1] * 50 + [2] * 60 + [0] * 18])
  real = (segments != 0)[:, None, :, None]

  def loss(run):
    out = lambda q, k, v: jnp.where(real, run(q, k, v, shape, segments), 0)
    return jax.jit(jax.value_and_grad(lambda *a: ((y := out(*a)) ** 2).sum() + y.sum(), (0, 1, 2)))(q, k, v)

  value, grads = loss(lambda *a: attend.splash(*a, interpret=True))
  expected, twins = loss(attend.chunked)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  for g, t in zip(grads, twins):
    np.testing.assert_allclose(g, t, atol=2e-5)


MESHES = {'2 ways, rows cut too': (2, 2), '4 ways': (1, 4)}


def on_meshes():
  """Largest distance of splash from chunked, for 8 heads of queries and 2 of keys; in a process with 4 devices."""
  q, k, v = example(b=2, n=8, k=2, t=128, h=128, scale=0.5)
  segments = jnp.asarray([[1] * 50 + [2] * 78, [1] * 128])
  shape, rules = attend.Shape(0.3), sharding.PRESETS['tensor']
  out = {}
  for name, (data, tensor) in MESHES.items():
    mesh = sharding.mesh(jax.devices()[: data * tensor], data=data, fsdp=1, tensor=tensor)
    with sharding.use(mesh, rules):
      loss = lambda run: jax.jit(jax.value_and_grad(lambda *a: (run(*a, shape, segments) ** 2).sum(), (0, 1, 2)))
      value, grads = loss(lambda *a: attend.splash(*a, interpret=True))(q, k, v)
    expected, twins = loss(attend.chunked)(q, k, v)
    far = [float(np.abs(np.asarray(g) - np.asarray(t)).max()) for g, t in zip(grads, twins)]
    out[name] = [abs(float(value / expected) - 1), *far]
  print(json.dumps(out))


def test_splash_on_a_mesh_that_cuts_queries_further_than_keys():
  """Each device's queries meet the keys of their own group: 8 heads over 4 devices, 2 of keys, which 4 do not cut."""
  environment = os.environ | {
    'XLA_FLAGS': '--xla_force_host_platform_device_count=4',
    'JAX_PLATFORMS': 'cpu',
    'PYTHONPATH': os.pathsep.join(p for p in sys.path if p),
  }
  done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  far = json.loads(done.stdout.splitlines()[-1])
  assert far.keys() == MESHES.keys()
  for name, distances in far.items():
    assert max(distances) < 1e-4, name


if __name__ == '__main__':
  on_meshes()
