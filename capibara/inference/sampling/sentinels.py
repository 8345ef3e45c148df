"""Text of encoder-decoders: spells the sentinels of removed spans as <extra_id_0>, <extra_id_1>, ..."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from capibara.core.types import HostBatch, UserError
from capibara.data.tokenizers.vocabulary import Vocabulary

_DIGITS = 9
_SENTINEL = re.compile(r"<extra_id_(\d+)>")


def names(vocabulary: Vocabulary) -> dict[int, str]:
    """The spelling of each sentinel, by id."""
    return {token: f"<extra_id_{number}>" for number, token in enumerate(vocabulary.sentinel_ids)}


def ids_of(prompt: str, vocabulary: Vocabulary) -> list[int]:
    """The tokens of a prompt, including its sentinels, and the end token.

    Raises:
      UserError: the prompt names a sentinel that does not exist.
    """
    ids: list[int] = []
    count = len(vocabulary.sentinel_ids)
    for i, part in enumerate(_SENTINEL.split(prompt)):  # alternates text and sentinel numbers
        if i % 2 and (len(part) > _DIGITS or int(part) >= count):
            raise UserError(
                f"the prompt has <extra_id_{part[:_DIGITS]}>, the vocabulary {count} sentinels: number them from 0"
            )
        ids += [vocabulary.sentinel_ids[int(part)]] if i % 2 else vocabulary.encode(part)
    return [*ids, vocabulary.eos_id]


def encoder_entries(ids: Sequence[int], length: int, pad_id: int) -> HostBatch:
    """The first `length` tokens as the encoder's entries of a batch with one row."""
    ids = ids[:length]
    return {
        "encoder_tokens": _row(ids, length, pad_id),
        "encoder_segment_ids": _row([1] * len(ids), length, 0),
        "encoder_positions": _row(range(len(ids)), length, 0),
    }


def _row(ids: Sequence[int], length: int, fill: int) -> np.ndarray:
    row = np.full((1, length), fill, np.int32)
    row[0, : len(ids)] = ids
    return row
