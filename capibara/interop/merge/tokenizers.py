"""Compares tokenizers of different files: the tokens that they have, and their ids."""

from __future__ import annotations

from collections.abc import Mapping

from capibara.core import limits
from capibara.core.types import UserError
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
    if (content := files.get(tokenizer_files.TOKENIZER_FILE)) is not None:
        try:
            return _of_json(limits.parse_json(content))
        except (limits.Refused, ValueError, TypeError, KeyError, AttributeError) as error:
            name = f"{path}: {tokenizer_files.TOKENIZER_FILE}"
            raise UserError(f"{name} cannot be read ({limits.cause(error)}): copy it again") from None
    for name in tokenizer_files.SENTENCEPIECE_FILES:
        if (content := files.get(name)) is not None:
            import sentencepiece

            tokenizer_limits.check_sentencepiece(content, f"{path}: {name}")
            model = sentencepiece.SentencePieceProcessor(model_proto=content)
            return {model.id_to_piece(i): i for i in range(len(model))}
    return {}


def _of_json(values: limits.Json) -> dict[str, int]:
    vocabulary = values["model"]["vocab"]
    if isinstance(vocabulary, list):  # a unigram model: [token, score] in the order of their ids
        vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
    added = {one["content"]: one["id"] for one in values.get("added_tokens") or ()}
    tokens = {**vocabulary, **added}
    if not all(isinstance(token, str) and isinstance(i, int) for token, i in tokens.items()):
        raise ValueError("its vocabulary has other values than tokens and their ids")
    return tokens


def difference(one: Tokens, other: Tokens) -> str | None:
    """The first contradiction between two tokenizers, as "'a' is 5, not 7"; None: there is none.

    A token that only one of them has is none, if the other has no token of its id.
    """
    by_id = {i: token for token, i in one.items()}
    for token, i in sorted(other.items(), key=lambda pair: pair[1]):
        if one.get(token, i) != i:
            return f"{token!r} is token {i}, not {one[token]}"
        if by_id.get(i, token) != token:
            return f"token {i} is {token!r}, not {by_id[i]!r}"
    return None
