"""Which tokens a text may have: those of `Sampling.allowed_ids`, and none that completes one of `Sampling.bad_words`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import Vocabulary
from capibara.inference.sampling.sampling import Sampling


class Restrictions:
    """The restrictions of one text.

    What never changes is a bias of the row on the devices, so that steps of several tokens and guesses follow it, too.
    Words of several tokens depend on the text, which the host knows.

    Args:
      sampling: of the text.
      words: token ids of its bad words.
      rows: ids of the model.
      usable: ids of the vocabulary.

    Raises:
      UserError: no token is left.
    """

    def __init__(self, sampling: Sampling, words: Sequence[tuple[int, ...]], rows: int, usable: int):
        self._never: np.ndarray | None = None
        self._phrases = [ids for ids in words if len(ids) > 1 and max(ids) < rows]
        if sampling.allowed_ids is None and not words:
            return
        self._never = np.full(rows, sampling.allowed_ids is not None)
        self._never[list(sampling.allowed_ids or ())] = False
        self._never[[ids[0] for ids in words if len(ids) == 1 and ids[0] < rows]] = True
        self._never[usable:] = True
        if self._never.all():
            raise UserError("Sampling.allowed_ids and Sampling.bad_words leave no token: change one of them")

    @property
    def follow(self) -> bool:
        """Whether the next token depends on those before it."""
        return bool(self._phrases)

    def bias(self, bias_V: np.ndarray) -> None:
        """Excludes what is never allowed from a row's bias, float32 [V]."""
        if self._never is not None:
            bias_V[self._never] = -np.inf

    def allow(self, row: np.ndarray, text: Sequence[int]) -> None:
        """Clears what may not come after these tokens of the text, in a row of `NextTokens.allowed`.

        Raises:
          UserError: no token is left.
        """
        if self._never is None:
            return
        bits = np.pad(self._never, (0, 32 * len(row) - len(self._never)), constant_values=True)
        row.view(np.uint8)[:] &= ~np.packbits(bits, bitorder="little")
        for *before, last in self._phrases:
            if list(text[-len(before) :]) == before:
                row[last // 32] &= ~np.uint32(1 << last % 32)
        if not row.any():
            raise UserError("no token is left for Sampling.allowed_ids, bad_words, grammar and min_new_tokens together")


def word_ids(words: Sequence[str], vocabulary: Vocabulary) -> list[tuple[int, ...]]:
    """The token ids of words at the beginning of a text, and after a space, where that has other tokens.

    Raises:
      UserError: a word has no tokens.
    """
    every: dict[tuple[int, ...], None] = {}
    for word in words:
        plain, spaced = (tuple(vocabulary.encode(space + word.lstrip())) for space in ("", " "))
        if not plain:
            raise UserError(f"Sampling.bad_words has {word!r}, which has no tokens: leave it out")
        every |= {plain: None} | ({} if spaced[1:] == plain else {spaced: None})
    return list(every)
