"""Hyper-connections, free (HC, arXiv 2409.19606) and on a manifold (mHC, arXiv 2512.24880), one token in float64.

x [n, C] are the n streams of a token; F is the layer, from [C] to [C]. Letters and names are the papers'.
"""

import numpy as np


def step(x, maps, layer):
  """x_{l+1} = H_res x_l + H_post^T F(H_pre x_l): mHC, section 3, equation 3. maps: H_pre [n], H_post [n], H_res [n, n].

  In HC (section 2.1, equations 2 to 5) the same reads B^T F(H^T A_m)^T + A_r^T H: H_pre = A_m^T, H_post = B,
  H_res = A_r^T.
  """
  h_pre, h_post, h_res = maps
  return h_res @ x + np.outer(h_post, layer(h_pre @ x))


def rms(x, eps):
  """RMSNorm without a weight, over the last axis: mHC, section 4.3.1, equation 15 (a weight is absorbed in phi)."""
  return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)


def manifold(x, phi, alpha, b, t_max, eps):
  """H_pre, H_post, H_res of mHC, section 4.2, equations 7 to 9.

  Args:
    x: [n, C].
    phi: 'pre' and 'post' [nC, n], 'res' [nC, n, n], its columns already laid out by mat(.).
    alpha: three scalars.
    b: 'pre' and 'post' [n], 'res' [n, n].
    t_max: iterations; the paper takes 20.
    eps: of RMSNorm; the paper has none.
  """
  flat = rms(x.reshape(-1), eps)  # x'_l = RMSNorm(vec(x_l)): of all streams together
  pre, post, res = (alpha[m] * np.tensordot(flat, phi[m], 1) + b[m] for m in ('pre', 'post', 'res'))  # (7)
  return sigmoid(pre), 2 * sigmoid(post), sinkhorn(res, t_max)  # (8)


def sinkhorn(x, t_max):
  """M(0) = exp(x), M(t) = T_r(T_c(M(t - 1))): columns are divided by their sums, then rows by theirs (equation 9)."""
  m = np.exp(x)
  for _ in range(t_max):
    m = m / m.sum(0, keepdims=True)
    m = m / m.sum(1, keepdims=True)
  return m


def free(x, w, s, static, eps):
  """H_pre, H_post, H_res of dynamic HC, section 2.2, equations 10 to 13.

  Args:
    x: H [n, C].
    w: 'm' [C] and 'beta' [C], W_m and W_beta; 'r' [C, n], W_r.
    s: 'alpha' and 'beta', scalars; A_m and A_r share the first.
    static: 'm' [n], 'beta' [n], 'r' [n, n]: A_m, B, A_r.
    eps: of norm(.), which is RMSNorm over the last axis as mHC quotes it (section 3, equation 5).
  """
  normed = rms(x, eps)  # (10): each stream by itself
  beta = s['beta'] * np.tanh(normed @ w['beta']) + static['beta']  # (11)
  a_m = s['alpha'] * np.tanh(normed @ w['m']) + static['m']  # (12)
  a_r = s['alpha'] * np.tanh(normed @ w['r']) + static['r']  # (13)
  return a_m, beta, a_r.T


def sigmoid(x):
  """1 / (1 + exp(-x))."""
  return 1 / (1 + np.exp(-x))
