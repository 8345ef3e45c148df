"""Continues or answers text: greedy, temperature, top-k and top-p sampling, one row at a time."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from capibara.config import configurable
from capibara.data.vocabulary import Vocabulary
from capibara.models.api import Model
from capibara.types import Params, UserError

_SENTINEL = re.compile(r"<extra_id_(\d+)>")


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
      max_new_tokens: where a continuation is cut off.
      temperature: divides the logits; 0: greedy.
      top_k: only the k likeliest tokens; None: all.
      top_p: only the likeliest tokens that together reach this probability (Holtzman et al. 2020); None: all.
      seed: equal seeds give equal text.
    """

    max_new_tokens: int = 128
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise UserError(f"Sampling.max_new_tokens is {self.max_new_tokens}, must be at least 1")
        if self.temperature < 0:
            raise UserError(f"Sampling.temperature is {self.temperature}, must be at least 0 (0: greedy)")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"Sampling.top_k is {self.top_k}, must be at least 1, or None for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"Sampling.top_p is {self.top_p}, must be above 0 and at most 1, or None for all tokens")


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleText:
    """Prompts that a training run continues (or answers) after each evaluation; an empty one begins a document."""

    prompts: tuple[str, ...] = ()
    sampling: Sampling = Sampling()


def choose(logits_V: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """One token id, int32 scalar, drawn from the logits as `sampling` says."""
    if sampling.temperature == 0:
        return jnp.argmax(logits_V).astype(jnp.int32)
    logits_V = logits_V / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits_V.shape[0]:
        smallest = jax.lax.top_k(logits_V, sampling.top_k)[0][-1]
        logits_V = jnp.where(logits_V < smallest, -jnp.inf, logits_V)
    if sampling.top_p is not None:
        descending = jnp.sort(logits_V, descending=True)
        probability = jax.nn.softmax(descending)
        # A token stays while the likelier ones before it have not reached top_p yet: the first always does.
        kept = jnp.cumsum(probability) - probability < sampling.top_p
        smallest = jnp.min(jnp.where(kept, descending, jnp.inf))
        logits_V = jnp.where(logits_V < smallest, -jnp.inf, logits_V)
    return jax.random.categorical(key, logits_V).astype(jnp.int32)


class Generator:
    """Continues prompts with a decoder, or answers them with an encoder-decoder; compiled once for a row length.

    An encoder-decoder's prompts and answers spell the sentinels of removed spans as <extra_id_0>, <extra_id_1>, ...

    Args:
      model: the model.
      vocabulary: of its training data.
      length: the decoder reads at most this many last tokens, as in training.
      sampling: how tokens are chosen.
      encoder_length: an encoder reads at most this many first tokens, as in training.

    Raises:
      UserError: the model is an encoder.
    """

    def __init__(
        self,
        model: Model,
        vocabulary: Vocabulary,
        length: int,
        sampling: Sampling,
        encoder_length: int | None = None,
    ):
        check_generates(model)
        self._vocabulary, self._sampling = vocabulary, sampling
        self._length, self._encoder_length = length, encoder_length
        self._run = jax.jit(functools.partial(_generate, model, sampling, vocabulary.size, vocabulary.eos_id))

    def __call__(self, params: Params, prompt: str) -> str:
        """The continuation of `prompt`, without it, or the answer to it."""
        vocabulary = self._vocabulary
        if self._encoder_length is None:
            ids, encoder = [vocabulary.bos_id, *vocabulary.encode(prompt)], {}
        else:
            ids, encoder = [vocabulary.pad_id], self._encoder_entries(prompt)
        ids = ids[-self._length :]
        row_T = _row(ids, self._length, vocabulary.pad_id)
        key = jax.random.key(self._sampling.seed)
        tokens, count = jax.device_get(self._run(_on_one_device(params), encoder, row_T, np.int32(len(ids)), key))
        return self._text(tokens[:count].tolist())

    def _encoder_entries(self, prompt: str) -> dict[str, np.ndarray]:
        """What the encoder reads, as entries of a batch of one row."""
        vocabulary, ids = self._vocabulary, []
        count = len(vocabulary.sentinel_ids)
        for i, part in enumerate(_SENTINEL.split(prompt)):  # text and the numbers of sentinels in turn
            if i % 2 and int(part) >= count:
                raise UserError(
                    f"the prompt has <extra_id_{part}>, the vocabulary {count} sentinels: number them from 0"
                )
            ids += [vocabulary.sentinel_ids[int(part)]] if i % 2 else vocabulary.encode(part)
        ids = [*ids, vocabulary.eos_id][: self._encoder_length]
        return {
            "encoder_tokens": _row(ids, self._encoder_length, vocabulary.pad_id)[None],
            "encoder_segment_ids": _row([1] * len(ids), self._encoder_length, 0)[None],
            "encoder_positions": _row(range(len(ids)), self._encoder_length, 0)[None],
        }

    def _text(self, ids: list[int]) -> str:
        vocabulary = self._vocabulary
        if self._encoder_length is None:
            return vocabulary.decode(ids)
        numbers = {token: i for i, token in enumerate(vocabulary.sentinel_ids)}
        return "".join(
            vocabulary.decode(part) if number is None else f"<extra_id_{number}>" * len(list(part))
            for number, part in itertools.groupby(ids, key=numbers.get)
        )


def check_generates(model: Model) -> None:
    """Raises UserError for a model that has no next token."""
    if model.config.objective == "masked":
        raise UserError(
            f"the model ({type(model.config).__name__}) is a masked language model: it fills in tokens of a whole text "
            "and cannot continue one; sample from a decoder or an encoder-decoder, and leave SampleText.prompts empty"
        )


def sampler(
    model: Model,
    get_vocabulary: Callable[[], Vocabulary],
    length: int,
    texts: SampleText,
    encoder_length: int | None = None,
) -> Callable[[Params], list[tuple[str, str]]]:
    """For the training loop: parameters -> (prompt, continuation) pairs; answers begin on a new line."""
    if texts.prompts:
        check_generates(model)

    @functools.cache
    def generator() -> Generator:
        return Generator(model, get_vocabulary(), length, texts.sampling, encoder_length)

    begin = "" if encoder_length is None else "\n"
    return lambda params: [(prompt, begin + generator()(params, prompt)) for prompt in texts.prompts]


def _row(ids: Sequence[int], length: int, fill: int) -> np.ndarray:
    row = np.full(length, fill, np.int32)
    row[: len(ids)] = ids
    return row


def _generate(
    model: Model, sampling: Sampling, vocabulary_size: int, eos_id: int, params: Params, encoder, row_T, filled, key
) -> tuple[jax.Array, jax.Array]:
    """New tokens [max_new_tokens] and how many of them count (the end token is not counted)."""
    (T,) = row_T.shape
    if encoder:
        encoder = encoder | {"encoded": model.encode(params, encoder)}
    positions_BT = jnp.arange(T, dtype=jnp.int32)[None]
    usable_V = jnp.arange(model.config.vocab_size) < vocabulary_size

    def next_token(carry):
        row_T, filled, out, count, _ = carry
        batch = {"tokens": row_T[None], "positions": positions_BT, "segment_ids": jnp.ones((1, T), jnp.int32)}
        hidden_D = model.hidden(params, encoder | batch)[0][0, filled - 1]
        logits_V = model.capped((model.head(params).astype(hidden_D.dtype) @ hidden_D).astype(jnp.float32))
        token = choose(jnp.where(usable_V, logits_V, -jnp.inf), jax.random.fold_in(key, count), sampling)
        ended = token == eos_id
        # A full row moves on by one: the model reads its last T tokens.
        row_T = jnp.where(filled == T, jnp.roll(row_T, -1), row_T)
        filled = jnp.minimum(filled, T - 1)
        row_T = row_T.at[filled].set(token)
        return row_T, filled + 1, out.at[count].set(token), count + jnp.where(ended, 0, 1), ended

    def unfinished(carry):
        return (carry[3] < sampling.max_new_tokens) & ~carry[4]

    out = jnp.zeros(sampling.max_new_tokens, jnp.int32)
    start = (row_T, filled, out, jnp.int32(0), jnp.bool_(False))
    _, _, out, count, _ = jax.lax.while_loop(unfinished, next_token, start)
    return out, count


def _on_one_device(params: Params) -> Params:
    """One row cannot be spread over devices: where this host has all the parameters, one device does the work."""
    leaves = jax.tree.leaves(params)
    if not all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
        return params
    return jax.device_put(params, jax.local_devices()[0])
