"""Synthetic passkeys in long texts, and questions about them: what only heads that retrieve can answer."""

from __future__ import annotations

import dataclasses
import math
import zlib

import numpy as np

from capibara.core.types import HostBatch, UserError
from capibara.data.tokenizers.vocabulary import Vocabulary

_WORDS = (
    "anchor", "basket", "candle", "desert", "engine", "feather", "garden", "harbor", "island", "jacket", "kettle", "ladder",
    "marble", "needle", "orange", "pepper", "quarry", "ribbon", "saddle", "tunnel", "umbrella", "valley", "window", "yellow",
)  # fmt: skip
_ROOM = 1.5  # a row has at least so many times the tokens of its passkeys and questions
_NEAREST, _FARTHEST = 0.05, 0.95  # where passkeys are, as shares of the text


@dataclasses.dataclass(frozen=True)
class Passkeys:
    """Puts passkeys into texts. Equal rows get equal passkeys, whatever the number of processes.

    Attributes:
      vocabulary: of the texts.
      count: passkeys of a row.
      words: of a passkey.
      shortest: tokens of the shortest row; None: rows are whole.
      seed: of all draws.
    """

    vocabulary: Vocabulary
    count: int
    words: int
    shortest: int | None
    seed: int

    def check(self, length: int) -> None:
        """Raises UserError if rows of this length have no room for the passkeys."""
        _, _, needles, questions = self._drawn(np.random.default_rng(0))
        need = math.ceil(_ROOM * sum(map(len, [*needles, *questions])))
        least = length if self.shortest is None else min(self.shortest, length)
        if need > least:
            name = "Dataset.length" if self.shortest is None or self.shortest >= length else "DuoAttention.shortest"
            raise UserError(
                f"{name} is {least}, must be at least {need} for DuoAttention.passkeys ({self.count}) of passkey_words ({self.words}): "
                f"set {name} = {need}, or fewer words"
            )

    def rows(self, batch: HostBatch) -> dict[str, np.ndarray]:
        """The batch (numpy arrays [rows, T]) with passkeys in each row that has tokens; weights are 1 where an answer follows."""
        result = {name: np.array(value) for name, value in batch.items()}
        for row, segments_T in enumerate(result["segment_ids"]):
            text = result["tokens"][row][segments_T > 0]
            if not len(text):
                continue
            tokens, answers = self._row(text, len(segments_T))
            n, T = len(tokens), len(segments_T)
            values = {
                "tokens": tokens,
                "targets": np.append(tokens[1:], self.vocabulary.pad_id),
                "weights": answers,
                "segment_ids": np.ones(n, np.int32),
                "positions": np.arange(n, dtype=np.int32),
            }
            for name, value in values.items():
                padding = self.vocabulary.pad_id if name in ("tokens", "targets") else 0
                result[name][row] = np.pad(value, (0, T - n), constant_values=padding)
        return result

    def _row(self, text: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """A row of at most `length` tokens with passkeys in the text and questions behind it, and its weights."""
        rng = np.random.default_rng([self.seed, zlib.crc32(text.tobytes())])
        keys, asked, needles, questions = self._drawn(rng)
        least = length if self.shortest is None else min(self.shortest, length)
        size = int(rng.integers(least, length + 1))
        begin = list(self.vocabulary.begin_ids)
        room = size - len(begin) - sum(map(len, [*needles, *questions]))
        parts = np.split(
            np.resize(text, room), np.sort((rng.uniform(_NEAREST, _FARTHEST, self.count) * room).astype(int))
        )
        tokens = [*begin, *parts[0]]
        for needle, part in zip(needles, parts[1:], strict=True):
            tokens += [*needle, *part]
        weights = np.zeros(size, np.float32)
        for number, question in zip(asked, questions, strict=True):
            tokens += question
            # From the question's last token on, which predicts the first one of the answer.
            weights[len(tokens) - len(keys[number]) - 1 : len(tokens) - 1] = 1
        return np.asarray(tokens, np.int32), weights

    def _drawn(self, rng: np.random.Generator) -> tuple[list[list[int]], list[int], list[list[int]], list[list[int]]]:
        """The passkeys' tokens, the order in which they are asked for, and the tokens of needles and questions."""
        encode = self.vocabulary.encode
        keys = [encode(" " + " ".join(rng.choice(_WORDS, self.words))) for _ in range(self.count)]
        needles = [[*encode(f"\n\nPasskey {n + 1} is:"), *key, *encode(".\n\n")] for n, key in enumerate(keys)]
        asked = rng.permutation(self.count).tolist()
        return (
            keys,
            asked,
            needles,
            [[*encode(f"\n\nWhat is passkey {n + 1}? Passkey {n + 1} is:"), *keys[n]] for n in asked],
        )
