"""Checks token ids against the rows of a model's embedding: an id without a row would be read as another token."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from capibara.core.fields import short
from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import Vocabulary

_SHOWN = 8  # tokens that a message names


def check_vocabulary(vocabulary: Vocabulary, rows: int, where: str) -> None:
    """Compares a tokenizer with its model; warns of added tokens without a row, which requests then cannot use.

    Args:
      vocabulary: of the model.
      rows: of the model's embedding.
      where: names the model in errors.

    Raises:
      UserError: the tokenizer makes ids of plain text, or begins texts with an id, for which the model has no row.
    """
    missing = [i for i in range(rows, len(vocabulary.pieces)) if vocabulary.pieces[i] or vocabulary.spelling(i)]
    added = [i for i in missing if i in vocabulary.added_ids]
    if len(added) < len(missing):
        raise UserError(
            f"{where}: its tokenizer has ids up to {missing[-1]}, its model rows for ids up to {rows - 1}: put the model's "
            "own tokenizer beside it"
        )
    for token in vocabulary.begin_ids:
        if token >= rows:
            name = f"{type(vocabulary).__name__}.add_bos_token"
            raise UserError(
                f"{where}: its tokenizer begins texts with {named(token, vocabulary)}, its model has rows for ids up to "
                f"{rows - 1}: set {name} = False, or correct the tokenizer"
            )
    if added:
        names = ", ".join(named(token, vocabulary) for token in added[:_SHOWN])
        count = f"{len(added)} tokens of the tokenizer" + (f", {names}, ..." if len(added) > _SHOWN else f" ({names})")
        logging.getLogger(__name__).warning(
            "%s: %s have no row in its model, which has %d: prompts with them are refused", where, count, rows
        )


def check_ids(ids: Iterable[int], rows: int, vocabulary: Vocabulary | None, subject: str) -> None:
    """Checks the ids of a request.

    Args:
      ids: of its tokens.
      rows: of the model's embedding.
      vocabulary: of the model; None: errors name ids without their spelling.
      subject: names the ids in errors.

    Raises:
      UserError: an id has no row.
    """
    for token in ids:
        if not isinstance(token, (int, np.integer)) or not 0 <= token < rows:
            shown = named(int(token), vocabulary) if isinstance(token, (int, np.integer)) else short(token)
            raise UserError(f"{subject} has token {shown}, must be from 0 to {rows - 1}: the model has {rows} rows")


def named(token: int, vocabulary: Vocabulary | None) -> str:
    """An id, with its spelling if it has one."""
    if vocabulary is None or not 0 <= token < len(vocabulary.pieces):
        return short(token)
    spelled = vocabulary.spelling(token) or vocabulary.bytes_of([token]).decode("utf-8", "replace")
    return f"{short(token)} ({spelled[:40]!r})" if spelled else short(token)
