"""Multi-token prediction (DeepSeek-V3's report, arXiv 2412.19437, section 2.2), one row of tokens in float64.

Positions are the report's less one: h^k[i], i = 0 .. T - 1 - k, is where the model has read tokens 0 .. i and, at depth
k, also the k after them; it predicts token i + k + 1.
"""

import numpy as np


def depths(h, tokens, embedding, modules, head, eps):
  """The log-probabilities of every depth: a list of [T - k, V] for k = 1 .. D (equations 21 to 23).

  Args:
    h: h^0 [T, d], "the representation given by the main model".
    tokens: t [T], the input.
    embedding: [V, d], shared with the main model.
    modules: of each depth: 'h_norm', 'e_norm' [d], weights of the RMSNorms; 'm' [d, 2 d], M_k; 'block', TRM_k, from
      [T - k, d] to the same, causal.
    head: OutHead, from [T - k, d] to logits [T - k, V], shared with the main model.
    eps: of RMSNorm.
  """
  found = []
  for k, module in enumerate(modules, 1):
    before = h[: len(tokens) - k]
    after = embedding[tokens[k:]]  # Emb(t_{i+k})
    joined = np.concatenate([rms(before, module['h_norm'], eps), rms(after, module['e_norm'], eps)], -1)
    h = module['block'](joined @ module['m'].T)  # (21), (22)
    found.append(log_softmax(head(h)))  # (23)
  return found


def loss(found, following, weight):
  """lambda / D sum_k L_k, L_k = -1 / T sum_i log P^k[i][t_{i+k+1}]: equations 24 and 25.

  Args:
    found: of `depths`.
    following: t_{i+1}, i = 0 .. T - 1: the tokens that follow the inputs.
    weight: lambda.
  """
  total = 0.0
  for k, logs in enumerate(found, 1):
    total -= logs[np.arange(len(logs)), following[k:]].sum() / len(following)
  return weight * total / len(found)


def rms(x, weight, eps):
  """x / rms(x) * weight over the last axis."""
  return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def log_softmax(x):
  """Over the last axis."""
  x = x - x.max(-1, keepdims=True)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))
