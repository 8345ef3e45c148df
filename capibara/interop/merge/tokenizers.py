"""Compares tokenizers of different files: the tokens that they have, and their ids."""

from __future__ import annotations

from collections.abc import Mapping

from capibara.data.tokenizers import added
from capibara.data.tokenizers import files as tokenizer_files
from capibara.data.tokenizers import limits as tokenizer_limits

Tokens = Mapping[str, int]


def tokens_of(files: Mapping[str, bytes], path: str) -> dict[str, int]:
    """The id of every token in a model's tokenizer files; empty if there is no tokenizer.

    Args:
      files: by name.
      path: the model's, for errors.

    Raises:
      UserError: a file cannot be read.
    """
    if tokenizer_files.TOKENIZER_FILE in files:
        return added.of_files(files, path).get_vocab(with_added_tokens=True)
    for name in tokenizer_files.SENTENCEPIECE_FILES:
        if (content := files.get(name)) is not None:
            import sentencepiece

            tokenizer_limits.check_sentencepiece(content, f"{path}: {name}")
            model = sentencepiece.SentencePieceProcessor(model_proto=content)
            return {model.id_to_piece(i): i for i in range(len(model))}
    return {}


def difference(first: Tokens, other: Tokens) -> str | None:
    """The first contradiction between two tokenizers, as "'a' is 5, not 7"; None: there is none.

    A token that only one of them has is none, if the other has no token of its id.
    """
    by_id = {i: token for token, i in first.items()}
    for token, i in sorted(other.items(), key=lambda pair: pair[1]):
        if first.get(token, i) != i:
            return f"{token!r} is token {i}, not {first[token]}"
        if by_id.get(i, token) != token:
            return f"token {i} is {token!r}, not {by_id[i]!r}"
    return None
