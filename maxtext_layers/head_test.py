"""The chunked losses against their twin, which makes all logits and lets JAX differentiate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_layers import head


def twin(x, w, targets, z_loss=0.0, cap=None, vocab=None):
  """Per-token (loss, nats) by the definition."""
  y = jnp.einsum('BTD,VD->BTV', x, w[:vocab], preferred_element_type=jnp.float32)
  y = y if cap is None else cap * jnp.tanh(y / cap)
  lse = jax.nn.logsumexp(y, -1)
  nats = lse - jnp.take_along_axis(y, targets[..., None], -1)[..., 0]
  return nats + z_loss * lse**2, nats


def example(b=2, t=7, d=8, v=37, dtype=jnp.float32, seed=0, scale=1.0):
  rng = np.random.default_rng(seed)
  x, w = (jnp.asarray(rng.standard_normal(s, np.float32) * scale, dtype) for s in ((b, t, d), (v, d)))
  return x, w, jnp.asarray(rng.integers(0, v, (b, t))), jnp.asarray(rng.random((b, t), np.float32))


def by_token(x, w, targets, weights, **options):
  losses = head.cross_entropy(x, w, targets, **options)
  return jnp.where(weights != 0, losses * weights, 0).sum()


def by_sum(x, w, targets, weights, **options):
  return head.cross_entropy_sum(x, w, targets, weights, **options)[0]


def dense(x, w, targets, weights, chunks=None, **options):
  losses = twin(x, w, targets, **options)[0]
  return jnp.where(weights != 0, losses * weights, 0).sum()


LOSSES = {'by_token': by_token, 'by_sum': by_sum}
losses = pytest.mark.parametrize('loss', LOSSES.values(), ids=LOSSES)


def gradients(loss, *args, **options):
  """(value, gradients by x and w) in one compilation."""
  return jax.jit(jax.value_and_grad(lambda *a: loss(*a, **options), (0, 1)))(*args)


@losses
@pytest.mark.parametrize(
  'chunks, options',
  [(1, {}), (3, {'z_loss': 1e-2}), (5, {'cap': 2.0}), (64, {'vocab': 31, 'z_loss': 1e-2, 'cap': 2.0})],
  ids=str,
)
def test_equals_the_twin(loss, chunks, options):
  """B19: loss and both gradients, chunks that divide neither vocabulary (37) nor time (7), z-loss and soft cap."""
  x, w, targets, weights = example(scale=1.5)
  targets = targets % options.get('vocab', 37)
  args = (x, w, targets, weights)
  value, grads = gradients(loss, *args, chunks=chunks, **options)
  expected, twins = gradients(dense, *args, **options)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  for g, t in zip(grads, twins):
    np.testing.assert_allclose(g, t, atol=1e-5)


@losses
def test_bfloat16_inputs_accumulate_in_float32(loss):
  """B19: bf16 inputs; the loss is what float32 arithmetic gives for these inputs."""
  x, w, targets, weights = example(t=64, d=32, v=101, dtype=jnp.bfloat16)
  value, grads = gradients(loss, x, w, targets, weights, chunks=4)
  as32 = (x.astype(jnp.float32), w.astype(jnp.float32), targets, weights)
  expected, twins = gradients(dense, *as32)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  for g, t in zip(grads, twins):
    assert g.dtype == jnp.bfloat16
    np.testing.assert_allclose(g.astype(jnp.float32), t, rtol=2**-7, atol=2e-2)


def test_parts_and_total_without_z_loss():
  x, w, targets, weights = example()
  loss, nats = twin(x, w, targets, z_loss=0.1)
  got, got_nats = head.cross_entropy_parts(x, w, targets, 4, z_loss=0.1)
  np.testing.assert_allclose(got, loss, rtol=1e-5)
  np.testing.assert_allclose(got_nats, nats, rtol=1e-5, atol=1e-6)
  total, total_nats = head.cross_entropy_sum(x, w, targets, weights, 4, z_loss=0.1)
  np.testing.assert_allclose(total, (weights * loss).sum(), rtol=1e-5)
  np.testing.assert_allclose(total_nats, (weights * nats).sum(), rtol=1e-5)


def test_logits_cap_and_padding():
  """A18: ids of padding have no probability."""
  x, w, _, _ = example(v=8)
  y = np.einsum('BTD,VD->BTV', x, w)
  np.testing.assert_allclose(head.logits(x, w, cap=3.0), 3 * np.tanh(y / 3), atol=1e-5)
  padded = head.logits(x, w, vocab=5)
  np.testing.assert_allclose(padded[..., :5], y[..., :5], atol=1e-5)
  assert (padded[..., 5:] == -jnp.inf).all()


@losses
def test_padded_vocabulary_has_no_gradient(loss):
  """A18: rows from `vocab` on change nothing and their gradient is exactly 0."""
  x, w, targets, weights = example(v=16)
  targets = targets % 11
  run = lambda w: gradients(loss, x, w, targets, weights, chunks=4, vocab=11)
  value, (_, grad) = run(w)
  other, _ = run(w.at[11:].set(1e4))
  assert value == other and (grad[11:] == 0).all() and (grad[:11] != 0).all()


@losses
@pytest.mark.parametrize('poison', [jnp.nan, jnp.inf])
def test_tokens_that_do_not_count_are_harmless(loss, poison):
  """B5: NaN and inf at masked positions reach neither the loss nor a gradient; nor do targets that are no ids."""
  x, w, targets, weights = example()
  weights = weights.at[0, :3].set(0)
  bad = (x.at[0, :3].set(poison), w, targets.at[0, :3].set(-100), weights)
  value, grads = gradients(loss, *bad, chunks=3)
  expected, twins = gradients(dense, x, w, targets, weights)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  assert (grads[0][0, :3] == 0).all()
  for g, t in zip(grads, twins):
    np.testing.assert_allclose(g, t, atol=1e-5)


@losses
def test_no_token_counts(loss):
  """B16: weights all 0: the loss is 0.0 and the gradients are zeros."""
  x, w, targets, _ = example()
  value, grads = gradients(loss, x, w, targets, jnp.zeros(targets.shape), chunks=3, z_loss=0.1)
  assert value == 0.0 and all((g == 0).all() for g in grads)


@losses
def test_one_token_of_many_counts(loss):
  """B21: one labelled token of 512, in chunks of 64 of which 7 are empty: the gradient is the dense one, not 0."""
  x, w, targets, _ = example(b=1, t=512)
  weights = jnp.zeros((1, 512)).at[0, 500].set(1.0)
  _, grads = gradients(loss, x, w, targets, weights, chunks=8)
  _, twins = gradients(dense, x, w, targets, weights)
  for g, t in zip(grads, twins):
    assert jnp.abs(g).max() > 0.1
    np.testing.assert_allclose(g, t, atol=1e-5)


@losses
def test_large_vocabulary_in_bfloat16(loss):
  """B20: V=262144, d=8, bf16: the gradients are no further from float64's than those of a loss on dense bf16 logits."""
  x, w, targets, _ = example(b=1, t=4, d=8, v=262144, dtype=jnp.bfloat16)
  ones = jnp.ones(targets.shape)
  x64, w64 = (np.asarray(a, np.float64).reshape(-1, 8) for a in (x, w))
  y = x64 @ w64.T
  p = np.exp(y - y.max(-1, keepdims=True))
  p /= p.sum(-1, keepdims=True)
  p[np.arange(4), np.asarray(targets)[0]] -= 1
  exact = (p @ w64, p.T @ x64)
  far = lambda grads: [
    np.linalg.norm(np.asarray(g, np.float64).reshape(e.shape) - e) / np.linalg.norm(e) for g, e in zip(grads, exact)
  ]

  def plain(x, w, targets, _):
    y = jnp.einsum('BTD,VD->BTV', x, w).astype(jnp.float32)
    return (jax.nn.logsumexp(y, -1) - jnp.take_along_axis(y, targets[..., None], -1)[..., 0]).sum()

  ours = far(gradients(loss, x, w, targets, ones, chunks=8)[1])
  theirs = far(gradients(plain, x, w, targets, ones)[1])
  assert all(o <= t for o, t in zip(ours, theirs)), (ours, theirs)


@losses
def test_memory(loss):
  """B18: temporaries of forward and backward for B * T = 4096, V = 32768 stay below a quarter of the logits."""
  shapes = [
    jax.ShapeDtypeStruct(s, t)
    for s, t in (
      ((4, 1024, 64), jnp.float32),
      ((32768, 64), jnp.float32),
      ((4, 1024), jnp.int32),
      ((4, 1024), jnp.float32),
    )
  ]
  run = lambda *args: jax.value_and_grad(loss, (0, 1))(*args, chunks=16)
  for f in (run, lambda *args: loss(*args, chunks=16)):
    used = jax.jit(f).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    assert used < 0.25 * 4096 * 32768 * 4, used / (4096 * 32768 * 4)
