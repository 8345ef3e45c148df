"""Chooses the next token of every row of a batch, each row with its own settings, in one program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from capibara.inference.sampling.sampling import Sampling
from capibara.kernels.argmax import argmax
from capibara.kernels.slots import take


class Settings(NamedTuple):
    """`Sampling` for B rows, as arrays.

    Attributes:
      temperature: [B] float32; 0: greedy.
      top_k: [B] int32; 0: all tokens.
      top_p, min_p, penalty: [B] float32; 1, 0 and 1: off.
      presence, frequency: [B] float32; 0: off.
      biased: [B] bool, whether `History.bias` has other numbers than 0.
      key: [B, 2] uint32, the words of a PRNG key.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    penalty: np.ndarray
    presence: np.ndarray
    frequency: np.ndarray
    biased: np.ndarray
    key: np.ndarray


class History(NamedTuple):
    """What changes the logits of B rows.

    Attributes:
      seen: [B, V] bool, the tokens of prompt and text that the row's repetition penalty applies to.
      counts: [B, V] int32, how often the text has each token.
      bias: [B, V] float32, added to the logits; -inf: excluded.
    """

    seen: Any
    counts: Any
    bias: Any

    def with_tokens(self, tokens_R: jax.Array, rows_R: jax.Array | None = None) -> History:
        """With one more token in the texts of these rows, those outside left out; None: of each row."""
        rows_R = jnp.arange(len(tokens_R), dtype=jnp.int32) if rows_R is None else rows_R
        seen = self.seen.at[rows_R, tokens_R].set(True, mode="drop")
        return History(seen, self.counts.at[rows_R, tokens_R].add(1, mode="drop"), self.bias)


class HistoryOfSlots:
    """The rows of a history that some slots have; copied where they are read, since most texts need none of it."""

    def __init__(self, history: History, slots_R: jax.Array):
        self._history, self._slots_R = history, slots_R

    @property
    def seen(self) -> jax.Array:
        return take(self._history.seen, self._slots_R)

    @property
    def counts(self) -> jax.Array:
        return take(self._history.counts, self._slots_R)

    @property
    def bias(self) -> jax.Array:
        return take(self._history.bias, self._slots_R)


GREEDY = Settings(
    temperature=np.zeros(1, np.float32),
    top_k=np.zeros(1, np.int32),
    top_p=np.ones(1, np.float32),
    min_p=np.zeros(1, np.float32),
    penalty=np.ones(1, np.float32),
    presence=np.zeros(1, np.float32),
    frequency=np.zeros(1, np.float32),
    biased=np.zeros(1, bool),
    key=np.zeros((1, 2), np.uint32),
)


def with_row(old: np.ndarray, index: int, new: np.ndarray) -> np.ndarray:
    """A copy with one row changed: the devices may still be reading the old array."""
    changed = old.copy()
    changed[index] = new[0]
    return changed


def settings_of(samplings: Sequence[Sampling]) -> Settings:
    """The settings of one row per sampling."""

    def column(dtype: type[np.generic], values: Iterable[float]) -> np.ndarray:
        return np.array([*values], dtype)

    return Settings(
        temperature=column(np.float32, (s.temperature for s in samplings)),
        top_k=column(np.int32, (s.top_k or 0 for s in samplings)),
        top_p=column(np.float32, (1.0 if s.top_p is None else s.top_p for s in samplings)),
        min_p=column(np.float32, (s.min_p or 0.0 for s in samplings)),
        penalty=column(np.float32, (s.repetition_penalty for s in samplings)),
        presence=column(np.float32, (s.presence_penalty for s in samplings)),
        frequency=column(np.float32, (s.frequency_penalty for s in samplings)),
        biased=column(np.bool_, (bool(s.logit_bias or s.allowed_ids or s.bad_words) for s in samplings)),
        key=np.array([_key_words(s.seed) for s in samplings], np.uint32).reshape(-1, 2),
    )


def _key_words(seed: int) -> tuple[int, int]:
    """The words of jax.random.key(seed), which would be computed behind the programs that the devices already have."""
    return 0, seed & 0xFFFFFFFF


def choose(
    logits_BV: jax.Array, settings: Settings, index_B: jax.Array, history: History | HistoryOfSlots | None = None
) -> tuple[jax.Array, jax.Array]:
    """Chooses a token id for every row, int32 [B]; also returns its log probability, float32 [B].

    The log probability is taken after temperature, limits, bias and penalties; it is 0 for greedy choices.

    A row's token depends only on its own logits, settings and index, not on other rows.

    Args:
      logits_BV: float32; -inf: excluded.
      settings: of the rows.
      index_B: index of the token in its text: equal keys and indices draw equal tokens.
      history: of the rows; None: no row has a bias or a penalty.
    """
    if history is not None:
        logits_BV = _penalised(logits_BV, settings, history)
    greedy_B = argmax(logits_BV)
    draws_B = jnp.asarray(settings.temperature) > 0

    def drawn() -> tuple[jax.Array, jax.Array]:
        scaled = logits_BV / jnp.where(draws_B, settings.temperature, 1.0)[:, None]
        limited = (jnp.asarray(settings.top_k) > 0) | (jnp.asarray(settings.top_p) < 1)
        scaled = jax.lax.cond(jnp.any(limited), lambda: _likeliest(scaled, settings), lambda: scaled)
        # p < min_p * max(p), in logarithms.
        least_B1 = jnp.max(scaled, axis=-1, keepdims=True) + jnp.log(settings.min_p)[:, None]
        scaled = jnp.where(scaled < least_B1, -jnp.inf, scaled)
        keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(jnp.asarray(settings.key)), index_B)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, scaled.shape[1:], scaled.dtype))(keys)
        tokens_B = argmax(noise + scaled)  # as jax.random.categorical draws
        return tokens_B, log_probability(scaled, tokens_B)

    certain_B = jnp.zeros_like(logits_BV[:, 0])
    tokens_B, log_p_B = jax.lax.cond(jnp.any(draws_B), drawn, lambda: (greedy_B, certain_B))
    return jnp.where(draws_B, tokens_B, greedy_B), jnp.where(draws_B, log_p_B, certain_B)


def _penalised(logits_BV: jax.Array, settings: Settings, history: History | HistoryOfSlots) -> jax.Array:
    """The logits with the rows' bias and penalties."""
    additive_B = (jnp.asarray(settings.presence) != 0) | (jnp.asarray(settings.frequency) != 0)

    def repeated(logits_BV: jax.Array) -> jax.Array:
        penalty_B1 = jnp.where(history.seen, settings.penalty[:, None], 1.0)
        return jnp.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)

    def counted(logits_BV: jax.Array) -> jax.Array:
        counts_BV = history.counts.astype(jnp.float32)
        present_BV = (history.counts > 0).astype(jnp.float32)
        return logits_BV - settings.frequency[:, None] * counts_BV - settings.presence[:, None] * present_BV

    def biased(logits_BV: jax.Array) -> jax.Array:
        # A slot whose text has none may still have that of an earlier text.
        return logits_BV + jnp.where(jnp.asarray(settings.biased)[:, None], history.bias, 0.0)

    steps = (
        (settings.biased, biased),
        (settings.penalty != 1, repeated),
        (additive_B, counted),
    )
    for rows_B, change in steps:  # most rows have none of them: then nothing of [B, V] is read
        logits_BV = jax.lax.cond(jnp.any(rows_B), change, lambda unchanged_BV: unchanged_BV, logits_BV)
    return logits_BV


def log_probability(logits_BV: jax.Array, tokens_B: jax.Array) -> jax.Array:
    """The log probability of one token per row, [B]."""
    chosen_B = jnp.take_along_axis(logits_BV, tokens_B[:, None], axis=-1)[:, 0]
    return chosen_B - jax.nn.logsumexp(logits_BV, axis=-1)


def _likeliest(logits_BV: jax.Array, settings: Settings) -> jax.Array:
    """The logits of the tokens that pass top_k, then those of the smallest set that reaches top_p; -inf for the others."""
    V = logits_BV.shape[-1]
    k_B = jnp.where(settings.top_k > 0, settings.top_k, V)
    # A token passes if fewer than k are likelier.
    count = lambda larger: jnp.sum(larger.astype(jnp.int32), axis=-1) < k_B  # noqa: E731
    logits_BV = jnp.where(_from_smallest(logits_BV, count), logits_BV, -jnp.inf)
    probability_BV = jax.nn.softmax(logits_BV, axis=-1)
    top_p_B = jnp.where(settings.top_p < 1, settings.top_p, jnp.inf)
    # A token passes if the likelier ones together are below top_p: the first always passes.
    mass = lambda larger: jnp.sum(jnp.where(larger, probability_BV, 0.0), axis=-1) < top_p_B  # noqa: E731
    passes_BV = _from_smallest(logits_BV, mass)
    # Of the least likely ones that pass, which are equal, only as many as the smallest set needs: the lowest ids.
    least_B1 = jnp.min(jnp.where(passes_BV, logits_BV, jnp.inf), axis=-1, keepdims=True)
    ties_BV = passes_BV & (logits_BV == least_B1)
    above_B1 = jnp.sum(jnp.where(passes_BV & ~ties_BV, probability_BV, 0.0), axis=-1, keepdims=True)
    before_BV = (jnp.cumsum(ties_BV, axis=-1, dtype=jnp.int32) - 1).astype(jnp.float32)
    passes_BV &= ~ties_BV | (above_B1 + before_BV * probability_BV < top_p_B[:, None])
    return jnp.where(passes_BV, logits_BV, -jnp.inf)


def _from_smallest(x_BV: jax.Array, fits: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Bool [B, V]: the values v of a row for which `fits` (mask of larger values [B, V] -> [B]) holds.

    `fits` must be monotonic: if it holds for v, then also for all larger values. The smallest such v is found bit by
    bit, in 32 passes over a row; a sort takes many more.
    """
    bits = jax.lax.bitcast_convert_type(x_BV, jnp.int32)
    top = jnp.int32(-(2**31))
    # As unsigned integers that sort like the floats.
    order_BV = jax.lax.bitcast_convert_type(jnp.where(bits < 0, ~bits, bits | top), jnp.uint32)

    def narrow(step: jax.Array, below_B: jax.Array) -> jax.Array:
        half = jnp.uint32(1) << (jnp.uint32(31) - step.astype(jnp.uint32))
        return jnp.where(fits(order_BV > (below_B + (half - jnp.uint32(1)))[:, None]), below_B, below_B + half)

    smallest_B = jax.lax.fori_loop(0, 32, narrow, jnp.zeros(len(x_BV), jnp.uint32))
    return order_BV >= smallest_B[:, None]
