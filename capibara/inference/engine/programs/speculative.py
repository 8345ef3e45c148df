"""Guesses of next tokens: by what followed an earlier occurrence of a text's last tokens, or by the model's own modules."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from capibara.core.types import Params
from capibara.kernels.argmax import argmax
from capibara.models.api import Cache, Model, PrefillInputs, mtp

_SIZES = (4, 3, 2)  # lengths of the token runs to look up, the longest first
_LONGEST_REST = 16  # steps


class Drafter:
    """Guesses for one text, which only grows.

    Args:
      tokens: of the text; the caller appends to them.
    """

    def __init__(self, tokens: Sequence[int]):
        self._tokens = tokens
        self._known = 0  # tokens whose runs are indexed
        self._after: dict[tuple[int, ...], int] = {}  # run -> the position after its last occurrence
        self._failed = self._rests = 0  # consecutive guesses without a correct token; steps left without a guess

    def guess(self, most: int) -> list[int]:
        """Up to `most` tokens; none if the last run is new, or recent guesses were wrong."""
        tokens = self._tokens
        for end in range(self._known + 1, len(tokens)):  # nothing follows the last run yet
            for size in _SIZES:
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._known = max(self._known, len(tokens) - 1)
        if self._rests:
            self._rests -= 1
            return []
        for size in _SIZES:
            position = self._after.get(tuple(tokens[-size:])) if size < len(tokens) else None
            if position is not None:
                text = list(tokens[position : position + most])
                period = len(tokens) - position  # assumes that a repeating text continues to repeat
                while len(text) < most:
                    text.append(text[len(text) - period])
                return text
        return []

    def record(self, right: int) -> None:
        """Records how many tokens of the last guess were correct; pauses after failures, twice as long every time.

        Verifying a guess costs more than a plain step if the devices multiply no faster than they read.
        """
        self._failed = 0 if right else self._failed + 1
        self._rests = 0 if right else min(2**self._failed, _LONGEST_REST)


class Placeholders:
    """Stands in for a Drafter where the program that verifies guesses makes them itself, by `draft`."""

    def guess(self, most: int) -> list[int]:
        """So many tokens, whatever they are."""
        return [0] * most

    def record(self, right: int) -> None:
        """Wrong guesses cost no pauses: they cost little beside a step."""
        del right


def draft(model: Model, params: Params, tokens_B: jax.Array, cache: Cache, count: int, usable: int) -> jax.Array:
    """Guesses [B, count] of the tokens after `tokens_B`, which no row has read, by the first module of `mtp`.

    The module is applied to its own result for each further token; its likeliest token is the guess.

    Args:
      model: with modules.
      params: as its programs read them.
      tokens_B: the last token of each row.
      cache: of what the rows have read; not changed.
      count: tokens to guess.
      usable: ids of the vocabulary that may be guessed.
    """
    assert model.ahead is not None, "it has modules"
    states_B1D = cache["layers"][-1][mtp.STATE][:, None].astype(model.config.dtype.value)
    lengths_B, ones_B, guesses = cache["lengths"] - 1, jnp.ones_like(tokens_B), []
    for _ in range(count):
        now = PrefillInputs(lengths_B, ones_B, lengths_B[:, None], False)
        states_B1D, cache = model.ahead.draft(params, states_B1D, tokens_B[:, None], now, cache)
        logits_BV = model.logits_of(params, states_B1D)[:, 0, :usable]
        tokens_B, lengths_B = argmax(logits_BV), lengths_B + 1
        guesses.append(tokens_B)
    return jnp.stack(guesses, axis=1)
