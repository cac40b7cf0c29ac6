"""Token ids in, token ids and log-probabilities out: the Sampler protocol, and the sampler that runs on JAX.

Notable: prompts of unequal length are padded on the left, so that all rows write the same cache slot; the loop over
tokens runs on the device, many tokens a dispatch, and ends when every row has; caches are donated, never copied. The
samples of a row depend on its own tokens and its own random stream, not on its neighbours.

Reading order: Settings, Completion, Sampler, Jax, _prefill, _decode, _choose, keep.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import math
from typing import Protocol

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from maxtext_layers import config


@config.config
class Settings:
  """How to choose tokens.

  top_k and top_p are applied in this order to the distribution that the temperature gives, as in transformers.
  """

  max_new_tokens: int = 128
  temperature: float = 1.0  # 0: always the most probable token
  top_k: int | None = None  # only the k most probable, and what ties with the last of them
  top_p: float = 1.0  # only the most probable that together reach p; the first always stays
  seed: int = 0

  def check(self):
    """Raises config.Error naming the field and its value."""
    if self.max_new_tokens < 1:
      raise config.Error(f'max_new_tokens={self.max_new_tokens} is not positive')
    if not 0 <= self.temperature < math.inf:
      raise config.Error(f'temperature={self.temperature} is not 0 (greedy) or a positive number')
    if self.top_k is not None and self.top_k < 1:
      raise config.Error(f'top_k={self.top_k} is not positive')
    if not 0 < self.top_p <= 1:
      raise config.Error(f'top_p={self.top_p} is not in (0, 1]')
    if not 0 <= self.seed < 2**32:
      raise config.Error(f'seed={self.seed} is not in [0, 2**32)')


@config.spec
class Completion:
  """What was said after one prompt.

  Attributes:
    ids: the sampled tokens, the end token that stopped it included.
    logprobs: natural logarithm of each one's probability under the model itself: over the whole vocabulary and at
      temperature 1, whatever temperature, top_k and top_p chose from.
    finish_reason: 'stop' (an end token) or 'length' (max_new_tokens, or the context is full).
  """

  ids: tuple[int, ...]
  logprobs: tuple[float, ...]
  finish_reason: str


class Sampler(Protocol):
  """Whatever answers prompts of token ids: this process, or a server."""

  def sample(self, prompts: Sequence[Sequence[int]], settings: Settings) -> list[Completion]:
    """One completion a prompt, in order."""


def scan() -> bool | str:
  """How to load a model that will be sampled from (`scan` of checkpoint.load): on a CPU in single layers.

  A scan takes each layer's weights out of their stack by a copy. While training that is little beside the arithmetic;
  for one token it is as much traffic again as reading them.
  """
  return False if jax.default_backend() == 'cpu' else 'auto'


class Jax:
  """The model in this process.

  Args:
    model: a decoder.Decoder.
    context: most tokens of a prompt with its completion.
    end_ids: tokens that end a completion.
    dispatch: tokens a dispatch; fewer show up earlier in `emit`.
  """

  def __init__(self, model, *, context: int, end_ids: frozenset[int] = frozenset(), dispatch: int = 64):
    self._graph, self._params = nnx.split(model)
    self._stack, self._vocab, self._dtype = model.stack, model.vocab, model.dtype
    self._context, self._dispatch = context, dispatch
    self._ends = jnp.array(sorted(i for i in end_ids if 0 <= i < model.vocab), jnp.int32)

  def sample(
    self,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    *,
    streams: Sequence[int] | None = None,
    emit: Callable[[list[list[int]]], None] | None = None,
  ) -> list[Completion]:
    """One completion a prompt.

    Args:
      prompts: token ids, at least one each, of any lengths.
      settings: for all of them.
      streams: the random stream that each prompt draws from; None: 0, 1, 2, .. A prompt with its stream gives the same
        samples in any company.
      emit: called after each dispatch with the new tokens of each row.

    Raises:
      config.Error: a prompt is empty, fills the context or holds ids that the model does not have.
    """
    settings.check()
    self._check(prompts)
    if not prompts:
      return []
    lengths = [len(prompt) for prompt in prompts]
    room = [min(settings.max_new_tokens, self._context - length) for length in lengths]
    width = _up(max(lengths), 16)  # few shapes, few compilations
    padding = np.array([width - length for length in lengths], np.int32)
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
      tokens[row, padding[row] :] = prompt
    streams = range(len(prompts)) if streams is None else streams
    rows = _Rows(
      padding=jnp.asarray(padding) if padding.any() else None,
      room=jnp.array(room, jnp.int32),
      keys=jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(settings.seed), jnp.array(streams, jnp.uint32)),
      ends=self._ends,
    )
    how = _How(settings.temperature == 0, settings.top_k and min(settings.top_k, self._vocab), settings.top_p < 1)
    heat = jnp.array([settings.temperature or 1.0, settings.top_p], jnp.float32)

    state = _prefill(self._graph, self._params, tokens, rows, heat, how=how, slots=_up(width + max(room), 64))
    out: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    _gather(out, [np.asarray(x)[:, None] for x in (state.token, state.logprob)], [1] * len(prompts), emit)
    done, count = np.asarray(state.done), 1
    while not done.all():
      steps = min(self._dispatch, max(room) - count)
      state, ids, logprobs, made = _decode(
        self._graph, self._params, state, rows, heat, width + count - 1, steps, how=how, size=self._dispatch
      )
      _gather(out, [np.asarray(ids), np.asarray(logprobs)], np.asarray(made).tolist(), emit)
      done, count = np.asarray(state.done), count + steps
    ends = set(self._ends.tolist())
    return [Completion(tuple(ids), tuple(lps), 'stop' if ids[-1] in ends else 'length') for ids, lps in out]

  def _check(self, prompts):
    for number, prompt in enumerate(prompts, 1):
      if not len(prompt):
        raise config.Error(f'prompt {number} has no tokens')
      if len(prompt) >= self._context:
        raise config.Error(f'prompt {number} has {len(prompt)} tokens, but the context of the model is {self._context}')
      if not 0 <= min(prompt) <= max(prompt) < self._vocab:
        raise config.Error(
          f'prompt {number} holds a token {max(prompt)}, but the vocabulary of the model is {self._vocab}'
        )


def _gather(out, columns, made, emit):
  """Adds the first `made[row]` new tokens to each row's lists, and shows them."""
  for (ids, logprobs), count, new_ids, new_logprobs in zip(out, made, *(c.tolist() for c in columns), strict=True):
    ids += new_ids[:count]
    logprobs += new_logprobs[:count]
  if emit:
    emit([ids[:count] for ids, count in zip(columns[0].tolist(), made, strict=True)])


@functools.partial(jax.tree_util.register_dataclass, data_fields=['padding', 'room', 'keys', 'ends'], meta_fields=[])
@config.spec
class _Rows:
  """What does not change while rows are completed."""

  padding: jax.Array | None  # [B] slots before the first token; None: none anywhere, which is faster
  room: jax.Array  # [B] most tokens to say
  keys: jax.Array  # [B] one random stream a row
  ends: jax.Array  # [E] end tokens


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=['token', 'logprob', 'done', 'count', 'caches'], meta_fields=[]
)
@config.spec
class _State:
  """Where decoding stands."""

  token: jax.Array  # [B] the last token said; not in the caches yet
  logprob: jax.Array  # [B] its log-probability
  done: jax.Array  # [B]
  count: jax.Array  # [B] tokens said
  caches: list


@config.spec
class _How:
  """What the choice of a token compiles to."""

  greedy: bool
  top_k: int | None
  top_p: bool


@functools.partial(jax.jit, static_argnames=('graph', 'how', 'slots'))
def _prefill(graph, params, tokens, rows, heat, *, how, slots):
  """tokens [B, T], padded on the left -> the state after the first token said."""
  model = nnx.merge(graph, params)
  batch, width = tokens.shape
  positions = None if rows.padding is None else jnp.arange(width) - rows.padding[:, None]
  caches = model.stack.caches(batch, slots, model.dtype)
  x, caches, _ = model.hidden(tokens, positions=positions, caches=caches)
  count = jnp.zeros(batch, jnp.int32)
  token, logprob = _choose(model.logits(x[:, -1:])[:, 0], rows.keys, count, heat, how)
  return _State(token, logprob, _ended(token, count + 1, rows), count + 1, caches)


@functools.partial(jax.jit, static_argnames=('graph', 'how', 'size'), donate_argnames=('state',))
def _decode(graph, params, state, rows, heat, start, steps, *, how, size):
  """Up to `steps` <= `size` more tokens a row, until all rows are done; the last token said stands at slot `start`.

  Returns the state, tokens int32 [B, size], their log-probabilities float32 [B, size], and how many each row said.
  """
  batch, before = state.token.shape[0], state.count
  graph, params = _without_padding(graph, params)

  def more(carry):
    step, state, _, _ = carry
    return (step < steps) & ~state.done.all()

  def step(carry):
    step, state, ids, logprobs = carry
    slot = start + step
    model = nnx.merge(graph, params)
    positions = None if rows.padding is None else (slot - rows.padding)[:, None]
    x, caches, _ = model.hidden(state.token[:, None], start=slot, positions=positions, caches=state.caches)
    token, logprob = _choose(model.logits(x)[:, 0], rows.keys, state.count, heat, how)
    ids = jax.lax.dynamic_update_slice(ids, token[:, None], (0, step))
    logprobs = jax.lax.dynamic_update_slice(logprobs, logprob[:, None], (0, step))
    count = state.count + ~state.done
    return step + 1, _State(token, logprob, state.done | _ended(token, count, rows), count, caches), ids, logprobs

  start = jnp.asarray(start, jnp.int32)
  empty = jnp.zeros((batch, size), jnp.int32), jnp.zeros((batch, size), jnp.float32)
  _, state, ids, logprobs = jax.lax.while_loop(more, step, (jnp.int32(0), state, *empty))
  return state, ids, logprobs, state.count - before


def _without_padding(graph, params):
  """The model with its tables cut to the vocabulary: once before the loop, not again for the logits of every token."""
  model = nnx.merge(graph, params)
  for table in (model.embed, model.head):
    if table is not None and table.w[...].shape[0] > model.vocab:
      table.w = table.w.replace(table.w[...][: model.vocab])
  return nnx.split(model)


def _ended(token, count, rows):
  return (token[:, None] == rows.ends).any(-1) | (count >= rows.room)


def _choose(logits, keys, count, heat, how):
  """logits float32 [B, V], a key and a number of tokens said for each row -> token int32 [B], log-probability [B]."""
  if how.greedy:
    token = jnp.argmax(logits, -1)
  else:
    keys = jax.vmap(jax.random.fold_in)(keys, count)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
    token = jnp.argmax(keep(logits / heat[0], how.top_k, heat[1] if how.top_p else None) + noise, -1)
  logprob = jnp.take_along_axis(logits, token[:, None], 1)[:, 0] - jax.nn.logsumexp(logits, -1)
  return token.astype(jnp.int32), logprob


def keep(logits: jax.Array, top_k: int | None, top_p: jax.Array | None) -> jax.Array:
  """logits [B, V] with -inf where top_k and then top_p forbid a token; None forbids nothing.

  The top_p set is the smallest one of most probable tokens, among those that top_k left, whose sum reaches top_p.
  Tokens that tie with the last one in stay in.
  """
  if top_k is None and top_p is None:
    return logits
  best = jax.lax.top_k(logits, top_k)[0] if top_k else -jnp.sort(-logits, -1)
  last = best[:, -1:]
  if top_p is not None:
    shares = jax.nn.softmax(best, -1)
    before = jnp.cumsum(shares, -1) - shares
    last = jnp.take_along_axis(best, ((before < top_p).sum(-1, keepdims=True) - 1), 1)
  return jnp.where(logits >= last, logits, -jnp.inf)


def _up(value, multiple):
  return -(-value // multiple) * multiple
