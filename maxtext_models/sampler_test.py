"""The JAX sampler against full forward passes, hand-computed distributions, and itself in other company."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import config
from maxtext_models import decoder
from maxtext_models import sampler
from maxtext_models.families import qwen3

CONTEXT = 64
PROMPTS = [[5, 17, 99], [3] * 21, [150, 0, 7, 8, 9, 10, 11], [1]]


@pytest.fixture(scope='module')
def model():
  """Two scanned layers of width 32; vocabulary 151 in tables of 256 rows."""
  return build(qwen3.Qwen3)


def build(family, scan=True, context=CONTEXT):
  card = family(
    layers=2, d_model=32, d_ff=64, heads=4, kv_heads=2, head_dim=8, vocab=151, vocab_multiple=256, context=context
  )
  made = decoder.Decoder(card, rngs=nnx.Rngs(0), scan=scan)
  made.head.w[...] = made.head.w[...] * 3  # distributions with peaks
  return made


def sample(model, prompts=PROMPTS, *, ends=(), emit=None, streams=None, context=CONTEXT, **settings):
  """One number of tokens a dispatch for all tests: few compilations."""
  made = sampler.Jax(model, context=context, end_ids=frozenset(ends), dispatch=5)
  return made.sample(prompts, sampler.Settings(**settings), streams=streams, emit=emit)


@pytest.fixture(scope='module')
def forward(model):
  """tokens -> log-probabilities [T, V] by a full pass without caches; one compilation for all lengths."""
  return forward_of(model)


def forward_of(model):
  graph, params = nnx.split(model)

  @jax.jit
  def run(params, tokens):
    made = nnx.merge(graph, params)
    return jax.nn.log_softmax(made.logits(made.hidden(tokens)[0]), -1)

  def call(tokens):
    row = np.zeros((1, CONTEXT), np.int32)
    row[0, : len(tokens)] = tokens
    return np.asarray(run(params, row))[0, : len(tokens)]  # what stands behind is not seen

  return call


def naive(forward, prompt, steps, ends=()):
  """Greedy decoding with a full pass a token -> (ids, log-probabilities)."""
  tokens, logprobs = list(prompt), []
  while len(logprobs) < steps:
    last = forward(tokens)[-1]
    tokens.append(int(last.argmax()))
    logprobs.append(float(last.max()))
    if tokens[-1] in ends:
      break
  return tokens[len(prompt) :], logprobs


@pytest.mark.parametrize('scan', [True, False])
def test_greedy_is_a_loop_of_full_passes(scan):
  """Decode parity: ragged prompts through caches give the tokens and log-probabilities of full passes."""
  model = build(qwen3.Qwen3, scan)
  forward = forward_of(model)
  got = sample(model, max_new_tokens=11, temperature=0.0)
  for prompt, completion in zip(PROMPTS, got, strict=True):
    ids, logprobs = naive(forward, prompt, 11)
    assert list(completion.ids) == ids
    np.testing.assert_allclose(completion.logprobs, logprobs, atol=2e-5)
    assert completion.finish_reason == 'length'


@pytest.mark.parametrize(
  'settings',
  [
    {'max_new_tokens': 9, 'temperature': 0.0},
    {'max_new_tokens': 9, 'temperature': 1.2, 'top_k': 40, 'top_p': 0.95, 'seed': 3},
  ],
)
def test_rows_do_not_know_their_neighbours(model, settings):
  """Ragged together == one by one, greedy and sampled: a random stream follows its prompt."""
  together = sample(model, **settings)
  for row in (0, 1):
    [alone] = sample(model, [PROMPTS[row]], streams=[row], **settings)
    assert alone.ids == together[row].ids
    np.testing.assert_allclose(alone.logprobs, together[row].logprobs, atol=2e-5)


def test_a_seed_gives_the_same_again_and_each_row_its_own(model):
  drawn = [sample(model, [PROMPTS[1]] * 4, max_new_tokens=9, top_k=40, top_p=0.95, seed=seed) for seed in (0, 1, 0)]
  assert drawn[0] == drawn[2]
  assert len({c.ids for batch in drawn[:2] for c in batch}) == 8


def test_log_probabilities_are_the_models_own(model, forward):
  """Whatever temperature, top_k and top_p choose, a token bears its log-probability under the whole distribution."""
  got = sample(model, max_new_tokens=12, temperature=1.7, top_k=40, top_p=0.9, seed=1)
  for prompt, completion in zip(PROMPTS, got, strict=True):
    want = forward([*prompt, *completion.ids])[len(prompt) - 1 : -1]
    np.testing.assert_allclose(completion.logprobs, want[np.arange(12), list(completion.ids)], atol=2e-5)


def test_every_end_token_stops(model, forward):
  """G10: whichever of the end tokens comes first ends its row, which counts as finished; the other rows go on."""
  ids = [naive(forward, prompt, 12)[0] for prompt in PROMPTS]
  ends = {ids[0][2], ids[1][5]}
  got = sample(model, ends=ends | {151, 400}, max_new_tokens=12, temperature=0.0)
  reasons = set()
  for prompt, completion in zip(PROMPTS, got, strict=True):
    want, logprobs = naive(forward, prompt, 12, ends)
    assert list(completion.ids) == want
    np.testing.assert_allclose(completion.logprobs, logprobs, atol=2e-5)
    assert completion.finish_reason == ('stop' if want[-1] in ends else 'length')
    reasons.add(completion.finish_reason)
  assert reasons == {'stop', 'length'}


def test_the_device_stops_when_all_rows_are_done(model):
  """The loop ends early: after the end token, 1 to 5 steps into a dispatch of 5, no further step is made."""
  settings = {'max_new_tokens': 41, 'top_k': 40, 'top_p': 0.95, 'temperature': 3.0, 'streams': [7] * 4}
  prompts, calls = [list(range(40, 60))] * 4, []
  ids = sample(model, prompts, **settings)[0].ids
  steps = next(i for i in range(1, 6) if ids[i] not in ids[:i])
  sample(model, prompts, ends={ids[steps]}, emit=lambda rows: calls.append([len(row) for row in rows]), **settings)
  assert calls == [[1] * 4, [steps] * 4]


def test_emit_shows_every_token_once(model):
  seen = [[] for _ in PROMPTS]

  def emit(rows):
    for row, new in zip(seen, rows, strict=True):
      row += new

  got = sample(model, max_new_tokens=8, temperature=0.0, emit=emit)
  assert [tuple(row) for row in seen] == [c.ids for c in got]
  assert {len(row) for row in seen} == {8}


def test_a_completion_ends_with_the_context(model):
  got = sample(model, context=24, max_new_tokens=10, temperature=0.0)
  assert [len(c.ids) for c in got] == [10, 3, 10, 10] and got[1].finish_reason == 'length'


def test_padded_vocabulary_is_never_sampled():
  """A18: vocabulary 151 in tables of 256 rows, the rows above made attractive: no id >= 151 in 4 x 40 hot samples."""
  model = build(qwen3.Qwen3)
  for table in (model.embed.w, model.head.w):
    table[...] = table[...].at[151:].set(9.0)
  ids = np.array([c.ids for c in sample(model, [[7] * 17] * 4, max_new_tokens=40, temperature=50.0)])
  assert ids.max() <= 150 and len(np.unique(ids)) > 70


def test_what_top_k_and_top_p_keep():
  """By hand: probabilities 0.4 0.3 0.2 0.1, in another order in the second row; a tie in the third."""
  rows = [[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.4, 0.3], [0.3, 0.3, 0.3, 0.1]]
  logits = jnp.log(jnp.array(rows, jnp.float32))
  kept = lambda k, p: np.isfinite(sampler.keep(logits, k, p and jnp.float32(p))).astype(int).tolist()
  assert kept(None, None) == [[1, 1, 1, 1]] * 3
  assert kept(1, None) == [[1, 0, 0, 0], [0, 0, 1, 0], [1, 1, 1, 0]]
  assert kept(2, None) == [[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 0]]
  assert kept(4, None) == [[1, 1, 1, 1]] * 3
  assert kept(None, 0.05) == [[1, 0, 0, 0], [0, 0, 1, 0], [1, 1, 1, 0]]  # the first always stays
  assert kept(None, 0.69)[:2] == [[1, 1, 0, 0], [0, 0, 1, 1]]  # 0.4 < 0.69 <= 0.4 + 0.3
  assert kept(None, 0.71)[:2] == [[1, 1, 1, 0], [0, 1, 1, 1]]
  assert kept(2, 0.56)[:2] == [[1, 0, 0, 0], [0, 0, 1, 0]]  # of 0.4 and 0.3 the first has 0.4 / 0.7 = 0.571
  assert kept(2, 0.58)[:2] == [[1, 1, 0, 0], [0, 0, 1, 1]]


def test_samples_follow_the_distribution():
  """4000 draws at temperature 2 from 0.64 0.32 0.04: by hand sqrt(p) normalised; then only the two of top_k = 2."""
  logits = jnp.log(jnp.tile(jnp.array([[0.64, 0.32, 0.04]], jnp.float32), (4000, 1)))
  keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(4000))
  for k, weights in ((None, [0.8, 0.32**0.5, 0.2]), (2, [0.8, 0.32**0.5, 0.0])):
    how = sampler._How(greedy=False, top_k=k, top_p=False)
    token, logprob = sampler._choose(logits, keys, jnp.zeros(4000, jnp.int32), jnp.array([2.0, 1.0]), how)
    share = np.bincount(token, minlength=3) / 4000
    np.testing.assert_allclose(share, np.array(weights) / sum(weights), atol=0.025)  # 3 standard deviations
    np.testing.assert_allclose(logprob, np.log([0.64, 0.32, 0.04])[np.asarray(token)], atol=1e-5)


def test_cold_samples_are_greedy(model):
  cold = sample(model, max_new_tokens=6, temperature=1e-4, top_k=40, top_p=0.95)
  assert [c.ids for c in cold] == [c.ids for c in sample(model, max_new_tokens=6, temperature=0.0)]


def test_caches_are_donated_and_nothing_compiles_twice(model):
  """Other prompts of the same bucket and another number of tokens run the programs that are there."""
  sample(model, max_new_tokens=5, seed=1)
  before = sampler._prefill._cache_size(), sampler._decode._cache_size()
  sample(model, [[4, 5], [1] * 18, [1], [2]], max_new_tokens=17, seed=2, temperature=0.3)
  assert (sampler._prefill._cache_size(), sampler._decode._cache_size()) == before
  rows = sampler._Rows(jnp.array([13]), jnp.array([9]), jax.random.split(jax.random.key(0), 1), jnp.zeros(0, jnp.int32))
  (graph, params), how, heat = nnx.split(model), sampler._How(True, None, False), jnp.ones(2)
  state = sampler._prefill(graph, params, np.ones((1, 16), np.int32), rows, heat, how=how, slots=64)
  sampler._decode(graph, params, state, rows, heat, 16, 2, how=how, size=5)
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.caches))


@pytest.mark.parametrize(
  'settings,message',
  [
    ({'max_new_tokens': 0}, 'max_new_tokens=0'),
    ({'temperature': -0.1}, 'temperature=-0.1'),
    ({'temperature': float('nan')}, 'temperature=nan'),
    ({'top_k': 0}, 'top_k=0'),
    ({'top_p': 0.0}, r'top_p=0.0 is not in \(0, 1\]'),
    ({'top_p': 1.5}, 'top_p=1.5'),
    ({'seed': -1}, 'seed=-1'),
  ],
)
def test_settings_that_make_no_sense(settings, message):
  with pytest.raises(config.Error, match=message):
    sampler.Settings(**settings).check()


def test_prompts_that_make_no_sense():
  made = sampler.Jax(build(qwen3.Qwen3), context=8)
  settings = sampler.Settings(max_new_tokens=2)
  with pytest.raises(config.Error, match='prompt 2 has no tokens'):
    made.sample([[1], []], settings)
  with pytest.raises(config.Error, match='prompt 1 has 8 tokens, but the context of the model is 8'):
    made.sample([[1] * 8], settings)
  with pytest.raises(config.Error, match='prompt 1 holds a token 151, but the vocabulary of the model is 151'):
    made.sample([[1, 151]], settings)
  assert made.sample([], settings) == []
