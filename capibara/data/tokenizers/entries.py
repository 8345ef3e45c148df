"""Ids as the files of tokenizers have them."""

from __future__ import annotations

from capibara.data.tokenizers.vocabulary import SentencePieceVocabulary, TokenizerJsonVocabulary, Vocabulary


def entry(vocabulary: Vocabulary, token: int) -> str:
    """The entry of an id in the tokenizer's file, such as "Ġriver"; its text for a vocabulary of bytes, empty for unused ids."""
    if isinstance(vocabulary, TokenizerJsonVocabulary):
        return vocabulary.tokenizer.id_to_token(token) or ""
    if isinstance(vocabulary, SentencePieceVocabulary):
        return vocabulary.processor.id_to_piece(token) if 0 <= token < len(vocabulary.processor) else ""
    return vocabulary.spelling(token) or vocabulary.bytes_of([token]).decode("utf-8", "replace")
