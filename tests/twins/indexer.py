"""DeepSeek Sparse Attention (report of DeepSeek-V3.2, arXiv 2512.02556, section 2.1), one row in float64.

The indexer's queries, keys and head weights are given: the report says only what they are derived from.
"""

import numpy as np


def scores(q, k, w):
  """I[t, s] = sum_j w[t, j] ReLU(q[t, j] . k[s]): equation 1. q [T, J, I], k [S, I], w [T, J] -> [T, S]."""
  return np.einsum('tj,tjs->ts', w, np.maximum(np.einsum('tji,si->tjs', q, k), 0))


def chosen(index, top_k, seen):
  """S_t = {s: I[t, s] in Top-k(I[t, :])} among what a query may see: equation 2 -> bool [T, S].

  Of equals the first is taken, which the report leaves open.
  """
  picked = np.zeros_like(seen)
  for t, allowed in enumerate(seen):
    keys = np.flatnonzero(allowed)
    picked[t, keys[np.argsort(-index[t, keys], kind='stable')[:top_k]]] = True
  return picked


def attention(q, k, v, scale, over):
  """Main attention over the keys of `over`: q [N, T, H], k [N, S, H], v [N, S, W] -> ([N, T, W], weights [N, T, S])."""
  weights = softmax(np.where(over, np.einsum('nth,nsh->nts', q, k) * scale, -np.inf))
  return weights @ v, weights


def divergence(index, weights, over):
  """KL(p || Softmax(I)) of each query [T], over S_t (equation 4) or all that it sees (equation 3).

  p[t] is the weights of main attention, "summed across all attention heads" and "L1-normalized along the sequence
  dimension" (section 2.1.1). In the sparse stage main attention is over S_t itself, so its weights outside are 0.
  """
  total = weights.sum(0)
  p = total / np.abs(total).sum(-1, keepdims=True)
  q = softmax(np.where(over, index, -np.inf))
  return np.array([np.sum(p[t, o] * (np.log(p[t, o]) - np.log(q[t, o]))) for t, o in enumerate(over)])


def gradient_of_weights(index, weights, over, q, k):
  """d sum_t KL / d w [T, J]: dI[t, s] / dw[t, j] is the ReLU, and d KL / dI = Softmax(I) - p; p is detached."""
  total = weights.sum(0)
  slope = softmax(np.where(over, index, -np.inf)) - total / total.sum(-1, keepdims=True)
  return np.einsum('ts,tjs->tj', slope, np.maximum(np.einsum('tji,si->tjs', q, k), 0))


def softmax(x):
  """Over the last axis; -inf gives 0."""
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)
