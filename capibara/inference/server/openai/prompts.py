"""Texts and token ids in a request."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from capibara.core.types import UserError
from capibara.data.tokenizers import model_rows
from capibara.inference.engine.reading import TokenScores
from capibara.inference.sampling import sentinels
from capibara.inference.server.service.bounds import brief, quoted
from capibara.inference.server.service.http_errors import Refusal
from capibara.inference.server.service.service import Served


def given_prompts(value: Any, param: str = "prompt") -> list[str | list[int]]:
    """Parses texts: a string, strings, token ids, or lists of token ids.

    Raises:
      Refusal: they are something else.
    """
    if isinstance(value, str) or (isinstance(value, list) and value and all(_is_id(item) for item in value)):
        return [value]
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return value
    lists = isinstance(value, list) and all(isinstance(item, list) and item for item in value)
    if lists and value and all(_is_id(token) for item in value for token in item):
        return value
    raise Refusal(
        400,
        f"{param} is {brief(value)}, must be a string, a list of strings, a list of token ids or a list of such lists",
        param=param,
        code="invalid_value",
    )


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def prompt_ids(prompt: str | list[int], served: Served, param: str = "prompt", *, special: bool = True) -> list[int]:
    """The ids of a prompt.

    Args:
      prompt: text or ids.
      served: the model.
      param: for errors.
      special: whether a decoder's text begins with the tokens with which the tokenizer begins texts.

    Raises:
      Refusal: the model has no row for a token, or the text cannot be encoded.
    """
    vocabulary = served.vocabulary
    with invalid(param):
        if isinstance(prompt, list):
            ids = prompt
        else:
            reads = served.encoder_length is not None
            ids = sentinels.ids_of(prompt, vocabulary) if reads else vocabulary.prompt_ids(prompt)
            if not special and not reads:
                ids = vocabulary.encode(prompt)
                if not ids:
                    raise UserError(f"{param} has no tokens: leave add_special_tokens out")
        model_rows.check_ids(ids, served.rows, vocabulary, param)
    return ids


def prompt_scores(ids: Sequence[int], likeliest: int, adapter: str | None, served: Served) -> TokenScores:
    """What the model, with an adapter, says of a prompt's tokens.

    Raises:
      Refusal: the model reads no texts alone.
    """
    with invalid("logprobs"):
        return served.engine.reader.score(ids, likeliest, adapter)


def truncated(ids: Sequence[int], count: int | None, side: str, most: int) -> Sequence[int]:
    """The last ids of a prompt, or its first ones.

    Args:
      ids: of the prompt.
      count: how many; None: all; -1: `most`.
      side: which are left out, left or right.
      most: the longest prompt.
    """
    if count is None:
        return ids
    count = max(1, most if count < 0 else count)
    return ids[-count:] if side == "left" else ids[:count]


@contextlib.contextmanager
def invalid(param: str) -> Iterator[None]:
    """A context whose UserErrors become refusals of a parameter."""
    try:
        yield
    except UserError as error:
        raise Refusal(400, quoted(str(error)), param=param, code="invalid_value") from None
