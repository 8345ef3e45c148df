"""Checks vocabularies that are a user's own classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from capibara.core import user_modules
from capibara.core.fields import short
from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import Vocabulary


def check(vocabulary: Vocabulary) -> None:
    """Checks what a vocabulary of the user's declares.

    Raises:
      UserError: an attribute is missing or of a wrong type, or an id is outside of the vocabulary.
    """
    if (user_class := user_modules.own_class(vocabulary)) is None:
        return
    for name in ("size_multiple", "extra_ids", "pad_id", "eos_id", "bos_id"):
        value = getattr(vocabulary, name, None)
        if not isinstance(value, (int, np.integer)):
            raise UserError(f"{user_class}.{name} is {short(value)}, must be an int: see Vocabulary")
    pieces = vocabulary.pieces
    if not isinstance(pieces, Sequence) or not all(isinstance(piece, bytes) for piece in pieces):
        raise UserError(
            f"{user_class}.pieces is {short(pieces)}, must be a sequence with the bytes of every id: see Vocabulary"
        )
    for name in ("pad_id", "eos_id", "bos_id"):
        if not 0 <= getattr(vocabulary, name) < vocabulary.size:
            top = vocabulary.size - 1
            raise UserError(
                f"{user_class}.{name} is {getattr(vocabulary, name)}, must be from 0 to {top} (its size less 1)"
            )
