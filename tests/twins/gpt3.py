"""GPT-3 (arXiv 2005.14165, section 2.1) in float64: the model of GPT-2 (Radford et al. 2019, section 2.3), one row.

GPT-2 is the decoder of GPT (Radford et al. 2018, section 3.1, equation 2) with layer normalization (arXiv 1607.06450)
moved to the input of each sub-block and one more after the last block. The GELU is the tanh form of arXiv 1606.08415,
section 2. The bands of GPT-3's sparse layers are unpublished, hence given.
"""

import numpy as np


def logits(tokens, w, layers, heads, eps, bands=None):
  """[T, V]. h_0 = U W_e + W_p, h_l = block(h_{l-1}), P = softmax(h_n W_e^T): GPT's equation 2, the head tied.

  Args:
    tokens: [T].
    w: by name: 'wte' [V, D], 'wpe' [context, D]; 'ln_f.g', 'ln_f.b' [D]; of each layer 'h.{l}.' and 'ln_1.g', 'ln_1.b',
      'ln_2.g', 'ln_2.b' [D], 'attn.q', 'attn.k', 'attn.v' [D, N, H] and their biases 'attn.q.b', .. [N, H], 'attn.o'
      [N, H, D], 'attn.o.b' [D], 'mlp.in' [D, F], 'mlp.in.b' [F], 'mlp.out' [F, D], 'mlp.out.b' [D].
    layers: how many.
    heads: N.
    eps: of the norms.
    bands: of each layer: how many keys a query sees, itself included; None: all before it.
  """
  x = w['wte'][tokens] + w['wpe'][: len(tokens)]
  for l in range(layers):
    own = {name.removeprefix(f'h.{l}.'): value for name, value in w.items() if name.startswith(f'h.{l}.')}
    x = x + attention(layer_norm(x, own['ln_1.g'], own['ln_1.b'], eps), own, heads, bands and bands[l])
    y = layer_norm(x, own['ln_2.g'], own['ln_2.b'], eps)
    x = x + gelu(y @ own['mlp.in'] + own['mlp.in.b']) @ own['mlp.out'] + own['mlp.out.b']
  return layer_norm(x, w['ln_f.g'], w['ln_f.b'], eps) @ w['wte'].T


def attention(x, w, heads, band):
  """Masked multi-head attention (arXiv 1706.03762, equation 1), heads of D / N, scaled by their root; x [T, D]."""
  q, k, v = (np.einsum('td,dnh->nth', x, w[f'attn.{m}']) + w[f'attn.{m}.b'][:, None] for m in 'qkv')
  distance = np.arange(len(x))[:, None] - np.arange(len(x))
  seen = (distance >= 0) & (distance < (band or len(x)))
  scores = np.where(seen, q @ k.transpose(0, 2, 1) / np.sqrt(x.shape[-1] / heads), -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  return np.einsum('nth,nhd->td', weights @ v, w['attn.o']) + w['attn.o.b']


def layer_norm(x, gain, bias, eps):
  """arXiv 1607.06450, equation 3: (x - mean) / deviation * gain + bias over the last axis."""
  centred = x - x.mean(-1, keepdims=True)
  return centred / np.sqrt(np.mean(centred**2, -1, keepdims=True) + eps) * gain + bias


def gelu(x):
  """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))): arXiv 1606.08415, section 2."""
  return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
