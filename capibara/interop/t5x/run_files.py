"""Files beside the arrays of a T5X checkpoint: config.gin and the vocabulary."""

from __future__ import annotations

import logging
import os

from capibara.core import limits
from capibara.interop.t5x import names as t5x_names

_VOCABULARIES = ("spiece.model", "sentencepiece.model")


def gin_of(folder: str) -> str | None:
    """The path of T5X's config.gin, in the folder of the checkpoint or of the run."""
    levels = [folder, os.path.dirname(folder), os.path.dirname(os.path.dirname(folder))]
    for level in levels if os.path.basename(folder) == "state" else levels[:2]:
        path = os.path.join(level, "config.gin")
        if os.path.exists(path):
            return limits.own_file(level, "config.gin")
    return None


def vocabulary_of(folder: str, gin: str | None, text: str | None) -> dict[str, bytes]:
    """The SentencePiece model that config.gin (its path and text are passed) names, or one beside it; may be empty."""
    named = None if text is None else t5x_names.vocabulary_of(text)
    candidates = [os.path.join(folder, *up, name) for up in ((), (os.pardir,)) for name in _VOCABULARIES]
    for path in filter(None, [_named_file(gin, named), *candidates]):
        if os.path.isfile(path):
            return {"spiece.model": limits.read(limits.own_file(*os.path.split(path)))}
    return {}


def _named_file(gin: str | None, named: str | None) -> str | None:
    """The path of a file that config.gin names, if it is in its folder: no other file is opened."""
    if gin is None or named is None or not os.path.isfile(path := os.path.join(os.path.dirname(gin), named)):
        return None
    real, root = os.path.realpath(path), os.path.realpath(os.path.dirname(gin))
    if os.path.commonpath([real, root]) == root:
        return path
    logging.getLogger(__name__).warning(
        "%s names the vocabulary %s, which is not in its folder and is not read: copy it there, or name it with "
        "--gin.SentencePieceVocabulary.path=PATH",
        gin,
        limits.shortened(named, 200),
    )
    return None
