"""Tokens and their log probabilities in responses."""

from __future__ import annotations

from collections.abc import Iterable

from capibara.data.tokenizers.vocabulary import Vocabulary
from capibara.inference.engine.requests.stream import Piece
from capibara.inference.server.service.answers import RequestedText
from capibara.inference.server.service.reply import Json

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI uses the same value


def token_log_probabilities(vocabulary: Vocabulary, pieces: Iterable[Piece], by_id: bool = False) -> list[Json]:
    """The tokens of a chat's answer, each with the likeliest ones in its place, by their texts or ids."""
    return [
        _token(vocabulary, token, piece.log_probability, by_id)
        | {"top_logprobs": [_token(vocabulary, *likely, by_id) for likely in piece.likeliest]}
        for piece in pieces
        if (token := piece.token) is not None
    ]


def prompt_log_probabilities(vocabulary: Vocabulary, ask: RequestedText, likeliest: int) -> list[Json | None]:
    """Those of a prompt's tokens as vLLM writes them: by id, the likeliest and the prompt's own; the first has none."""
    scores = ask.scores
    assert scores is not None, "they were asked for"
    each: list[Json | None] = [None]
    for place, token in enumerate(ask.ids[1:]):
        ids, values = scores.likeliest[place, :likeliest], scores.their_log_probabilities[place, :likeliest]
        ranked = [(int(item), float(value), rank) for rank, (item, value) in enumerate(zip(ids, values), 1)]
        token_scores = int(token), float(scores.log_probabilities[place]), int(scores.ranks[place])
        if token not in ids:
            ranked.append(token_scores)
        each.append(
            {
                str(item): {
                    "logprob": max(LEAST_LOGPROB, value), "rank": rank, "decoded_token": named(vocabulary, item),
                }
                for item, value, rank in ranked
            }
        )  # fmt: skip
    return each


def _token(vocabulary: Vocabulary, token: int, log_probability: float, by_id: bool) -> Json:
    spelled = vocabulary.bytes_of([token])
    text = spelled.decode("utf-8", "replace") or _without_text(vocabulary, token)
    return {
        "token": f"token_id:{token}" if by_id else text,
        "bytes": [*spelled] or None,
        "logprob": max(LEAST_LOGPROB, log_probability),
    }


def named(vocabulary: Vocabulary, token: int, by_id: bool = False) -> str:
    """A token's text, or its bytes if it is part of a character: as text, many tokens would have the same name; or its id."""
    if by_id:
        return f"token_id:{token}"
    spelled = vocabulary.bytes_of([token])
    try:
        return spelled.decode() or _without_text(vocabulary, token)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _without_text(vocabulary: Vocabulary, token: int) -> str:
    """The spelling of a special token, or the id of one that the tokenizer does not have."""
    return vocabulary.spelling(token) or f"<id {token}>"
