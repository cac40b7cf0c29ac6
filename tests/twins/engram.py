"""Engram, conditional memory by lookup (arXiv 2601.07372, section 2), one row of tokens in float64.

What the paper leaves open is given: the hash functions, the map to canonical ids, what stands before a row, epsilons.
`released_hash` and `released_parameters` are what the authors' demonstration does (github.com/deepseek-ai/Engram,
engram_demo_v1.py), in words of its own.
"""

import numpy as np


def memory(ids, tables, phi, canonical, pad):
  """e_t [T, d_mem], section 2.2, equations 1 and 2: rows of all n-grams and heads, end to end, n slowest.

  Args:
    ids: [T].
    tables: (n, k) -> E_{n,k} [M, d].
    phi: (n, k, g) -> row; g is the suffix n-gram (x'_{t-n+1}, .., x'_t).
    canonical: id -> x', the tokenizer's compression P.
    pad: the canonical id before the row.
  """
  longest = max(n for n, _ in tables)
  x = [pad] * longest + [canonical(i) for i in ids]
  grams = lambda n: [tuple(x[t - n + 1 : t + 1]) for t in range(longest, len(x))]
  return np.concatenate([table[[phi(n, k, g) for g in grams(n)]] for (n, k), table in sorted(tables.items())], -1)


def fused(h, e, w_k, w_v, norms, kernel, dilation, eps, signed_root=False):
  """Y [T, M, d], which is added to the hidden states: sections 2.3 and 2.4, equations 3 to 6.

  Args:
    h: [T, M, d], M branches; one branch is section 2.3.
    e: [T, d_mem].
    w_k: [M, d_mem, d], of each branch (equation 6).
    w_v: [d_mem, d], shared.
    norms: 'h', 'k', 'v': [M, d], weights of the three RMSNorms.
    kernel: [w, M, d], depthwise; the last entry meets the token itself, as in a causal Conv1D; w is 4 in the paper.
    dilation: the largest n in the paper.
    eps: of RMSNorm.
    signed_root: what the demonstration does to the gate's logit and the paper does not.
  """
  length, branches, d = h.shape
  key = np.einsum('te,med->tmd', e, w_k)  # (3)
  logit = np.sum(rms(h, norms['h'], eps) * rms(key, norms['k'], eps), -1) / np.sqrt(d)
  if signed_root:
    logit = np.sign(logit) * np.sqrt(np.maximum(np.abs(logit), 1e-6))
  alpha = 1 / (1 + np.exp(-logit))  # (4), (6)
  gated = alpha[..., None] * (e @ w_v)[:, None]
  normed = rms(gated, norms['v'], eps)
  smooth = np.zeros((length, branches, d))
  for t in range(length):
    for i, weight in enumerate(kernel):
      before = t - dilation * (len(kernel) - 1 - i)
      if before >= 0:
        smooth[t] += weight * normed[before]
  return smooth / (1 + np.exp(-smooth)) + gated  # (5): SiLU(Conv1D(RMSNorm(V))) + V


def rms(x, weight, eps):
  """x / rms(x) * weight over the last axis."""
  return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def released_hash(factors, primes):
  """phi of the demonstration: the ids of a gram, the latest times the first factor, xored; modulo the head's prime."""

  def phi(n, k, gram):
    mixed = 0
    for token, factor in zip(reversed(gram), factors):
      mixed ^= int(token) * int(factor)
    return mixed % primes[n, k]

  return phi


def released_parameters(layers, sizes, heads, ids, seed):
  """layer -> (factors, primes by (n, k)) of the demonstration.

  Factors are odd and so small that no product with an id overflows int64, drawn with a seed of the layer. Every head
  has a prime of its own over all orders and layers, the next one from the size on.
  """
  taken, found = set(), {}
  for layer in layers:
    bound = max(1, (2**63 - 1) // ids // 2)
    drawn = np.random.default_rng(seed + 10007 * layer).integers(0, bound, len(sizes) + 1, dtype=np.int64)
    primes = {}
    for n, size in enumerate(sizes, 2):
      candidate = size
      for k in range(heads):
        while candidate in taken or any(candidate % d == 0 for d in range(2, int(candidate**0.5) + 1)):
          candidate += 1
        taken.add(candidate)
        primes[n, k] = candidate
    found[layer] = [2 * int(f) + 1 for f in drawn], primes
  return found
