"""Single layers here against transformers; golden/make_layers.py makes the references. All in float32."""

import pathlib

import einops
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import block
from maxtext_layers import compressed
from maxtext_layers import hyper
from maxtext_layers import indexer
from maxtext_layers import mla
from maxtext_layers import norm
from maxtext_layers import rope
from maxtext_layers import sparse

TOLERANCE = 1e-4
EPS = norm.Spec(1e-5)
SPARSE = sparse.Spec(
  mla.Spec(
    heads=3, kv_rank=12, nope_dim=6, value_dim=5, rope=rope.Spec(8, 100.0, pairs='neighbours'), q_rank=10,
  ),
  indexer.Spec(heads=9, head_dim=12, top_k=7),
)  # fmt: skip
YARN = rope.Yarn(4.0, 16, attention=1.0)
WINDOW = dict(heads=4, head_dim=16, q_rank=10, groups=2, o_rank=5, window=7, norm=EPS)
LIGHT = compressed.Compress(4, overlap=True, index=indexer.Spec(9, 12, 3))
SPECS = {
  'sparse': SPARSE,
  'window': compressed.Spec(**WINDOW, rope=rope.Spec(8, 100.0)),
  'light': compressed.Spec(**WINDOW, rope=rope.Spec(8, 500.0, YARN), compress=LIGHT),
  'heavy': compressed.Spec(**WINDOW, rope=rope.Spec(8, 500.0, YARN), compress=compressed.Compress(6)),
}
STREAMS = hyper.Manifold(3, iterations=3, eps=1e-3, norm_eps=1e-5)


def _pool(ours, theirs):
  return [
    (f'{ours}kv', f'{theirs}kv_proj.weight', '(c h) d -> d c h'),
    (f'{ours}gate', f'{theirs}gate_proj.weight', '(c h) d -> d c h'),
    (f'{ours}b', f'{theirs}position_bias', 'r (c h) -> r c h'),
    (f'{ours}norm', f'{theirs}kv_norm.weight', 'h -> h'),
  ]


ROWS = {
  'sparse': [
    ('q_down', 'q_a_proj.weight', 'r d -> d r'),
    ('q_norm', 'q_a_layernorm.weight', 'r -> r'),
    ('q_up', 'q_b_proj.weight', '(n h) r -> r n h'),
    ('kv_down', 'kv_a_proj_with_mqa.weight', 'r d -> d r'),
    ('kv_norm', 'kv_a_layernorm.weight', 'r -> r'),
    ('kv_up', 'kv_b_proj.weight', '(n h) r -> r n h'),
    ('o', 'o_proj.weight', 'd (n h) -> n h d'),
    ('indexer.q', 'indexer.wq_b.weight', '(j i) r -> r j i'),
    ('indexer.k', 'indexer.wk.weight', 'i d -> d i'),
    ('indexer.k_norm', 'indexer.k_norm.weight', 'i -> i'),
    ('indexer.k_norm.b', 'indexer.k_norm.bias', 'i -> i'),
    ('indexer.weights', 'indexer.weights_proj.weight', 'j d -> d j'),
  ],
  'window': [
    ('q_down', 'q_a_proj.weight', 'r d -> d r'),
    ('q_norm', 'q_a_norm.weight', 'r -> r'),
    ('q_up', 'q_b_proj.weight', '(n h) r -> r n h'),
    ('kv', 'kv_proj.weight', 'h d -> d h'),
    ('kv_norm', 'kv_norm.weight', 'h -> h'),
    ('sinks', 'sinks', 'n -> n'),
    ('o_down', 'o_a_proj.weight', '(g r) (n h) -> g n h r'),
    ('o_up', 'o_b_proj.weight', 'd (g r) -> g r d'),
  ],
  'connection': [('project', 'fn', 'm (s d) -> s d m'), ('b', 'base', 'm -> m'), ('scale', 'scale', 'm -> m')],
  'collapse': [('project', 'hc_fn', 'm (s d) -> s d m'), ('b', 'hc_base', 'm -> m'), ('scale', 'hc_scale', 'm -> m')],
}
ROWS['heavy'] = ROWS['window'] + _pool('pool.', 'compressor.')
ROWS['light'] = [
  *ROWS['heavy'],
  ('indexer.q', 'compressor.indexer.q_b_proj.weight', '(j i) r -> r j i'),
  ('indexer.weights', 'compressor.indexer.scorer.weights_proj.weight', 'j d -> d j'),
  *_pool('indexer.pool.', 'compressor.indexer.'),
]


@pytest.fixture(name='golden', scope='module')
def _golden():
  with np.load(pathlib.Path(__file__).parent / 'golden' / 'layers.npz') as file:
    return {name: file[name] for name in file.files}


def filled(module, case, golden):
  """The module with the parameters of the reference, all of which must be used and none of ours left over."""
  theirs = {name.split('/')[2]: a for name, a in golden.items() if name.startswith(f'{case}/w/')}
  graph, state = nnx.split(module)
  ours = {'.'.join(map(str, path[:-1] if path[-1] == 'w' else path)): v for path, v in nnx.to_flat_state(state)}
  assert {row[0] for row in ROWS[case]} == ours.keys() and {row[1] for row in ROWS[case]} == theirs.keys()
  for name, source, pattern in ROWS[case]:
    variable = ours[name]
    sizes = dict(zip(pattern.split(' -> ')[1].split(), variable.get_value().shape))
    variable.set_value(jnp.asarray(einops.rearrange(theirs[source], pattern, **sizes)))
  return nnx.merge(graph, state)


def attended(module, spec, x):
  """One layer over rows that begin at position 0."""
  tables = {spec.rope: rope.table(spec.rope, np.arange(x.shape[1])[None])}
  return module(x, block.Context(tables=tables, kernel='chunked'))[0]


@pytest.mark.parametrize('case', SPECS)
def test_attention_equals_transformers(golden, case):
  """Selected keys, windows, entries of both kinds, across 45 tokens: at every position of two rows."""
  spec, x = SPECS[case], jnp.asarray(golden[f'{case}/x'])
  module = filled(spec.build(x.shape[-1], nnx.Rngs(0)), case, golden)
  y = jax.jit(lambda x: attended(module, spec, x))(x)
  assert golden[f'{case}/y'].std() > 0.1
  np.testing.assert_allclose(y, golden[f'{case}/y'], atol=TOLERANCE, rtol=0)
  # another choice of keys, another window or another ratio would have shown
  changed = {
    'sparse': lambda: sparse.Spec(SPARSE.latent, indexer.Spec(9, 12, 8)),
    'window': lambda: compressed.Spec(**{**WINDOW, 'window': 8}, rope=spec.rope),
    'light': lambda: compressed.Spec(
      **WINDOW, rope=spec.rope, compress=compressed.Compress(4, True, indexer.Spec(9, 12, 4))
    ),
    'heavy': lambda: compressed.Spec(**WINDOW, rope=rope.Spec(8, 100.0), compress=spec.compress),
  }[case]()
  other = filled(changed.build(x.shape[-1], nnx.Rngs(0)), case, golden)
  assert np.abs(jax.jit(lambda x: attended(other, changed, x))(x) - y).max() > 100 * TOLERANCE


def test_hyper_connection_equals_transformers(golden):
  x = jnp.asarray(golden['connection/x'])
  module = filled(STREAMS.build(x.shape[-1], nnx.Rngs(0)), 'connection', golden)
  h, add = module(x)
  np.testing.assert_allclose(h, golden['connection/y'], atol=TOLERANCE, rtol=0)
  y = np.random.default_rng(0).standard_normal(h.shape).astype(np.float32)
  kept = np.einsum('BTSR,BTSD->BTRD', golden['connection/comb'], x)
  expected = golden['connection/post'][..., None] * y[:, :, None] + kept
  np.testing.assert_allclose(add(jnp.asarray(y)), expected, atol=TOLERANCE, rtol=0)
  swapped = np.einsum('BTRS,BTSD->BTRD', golden['connection/comb'], x)
  assert np.abs(swapped - kept).max() > 100 * TOLERANCE  # the matrix is not symmetric, so the direction shows


def test_collapse_equals_transformers(golden):
  x = jnp.asarray(golden['collapse/x'])
  module = filled(STREAMS.collapse(x.shape[-1], nnx.Rngs(0)), 'collapse', golden)
  np.testing.assert_allclose(module(x), golden['collapse/y'], atol=TOLERANCE, rtol=0)
