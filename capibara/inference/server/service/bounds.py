"""Limits on a request, checked before anything is parsed, rendered or tokenised."""

from __future__ import annotations

import contextlib
import json
import math
import re
import reprlib
from typing import Any

import pydantic_core

from capibara.core.fields import short
from capibara.inference.server.service.http_errors import Refusal
from capibara.inference.server.service.service import Served, ServerConfig

_MOST_CONTAINERS = 65_536  # counts texts too: parsing more would delay other requests' tokens
_DEEPEST = 64
# What may be a number that no float64 holds: others have exponents below 100 and fewer than 200 digits before them.
_LARGE = re.compile(r"[0-9][eE]\+?[0-9]{3}|[0-9]{200}|NaN|Infinity")
_MOST_PARAMETERS = 100
_LONGEST_ARGUMENTS = 1 << 17  # characters of JSON within JSON
# Length of one token's text: most have 3 to 5 characters, a few vocabularies have runs of a hundred spaces.
_CHARACTERS_PER_TOKEN = (4, 16)
_TEMPLATE_CHARACTERS = 1 << 16  # that a chat template may add itself


def parse(body: bytes, most_tokens: int) -> dict[str, Any]:
    """Parses a request's parameters within milliseconds of CPU time, whatever the body is.

    Args:
      body: of the request.
      most_tokens: most tokens that may be passed as numbers.

    Raises:
      Refusal: the body is not a JSON object in UTF-8, or has too many values.
    """
    _check_parts(body, most_tokens)
    try:
        values = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON in UTF-8: {error}", code="invalid_json") from None
    check_numbers(body)
    if not isinstance(values, dict):
        raise Refusal(400, f"the body must be a JSON object, not {brief(values)}", code="invalid_json")
    options = values.get("stream_options")
    most = max(len(values), len(options) if isinstance(options, dict) else 0)
    if most > _MOST_PARAMETERS:
        raise Refusal(
            400, f"the body has {most} parameters, must have at most {_MOST_PARAMETERS}", code="invalid_value"
        )
    return values


def check_numbers(content: str | bytes) -> None:
    """Raises Refusal if JSON has a number that no float64 holds: parsers read 1e400 as infinity, which templates write."""
    text = content if isinstance(content, str) else content.decode("utf-8", "replace")
    if not _LARGE.search(text):  # most have none, and are parsed once
        return
    with contextlib.suppress(ValueError, RecursionError):  # whoever reads it says what is malformed
        json.loads(text, parse_float=_finite, parse_constant=_finite)


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        message = f"the body has {brief(number)}, must have numbers that a float64 holds"
        raise Refusal(400, message, code="invalid_json")
    return value


def _check_parts(body: bytes, most_tokens: int) -> None:
    """Raises Refusal if there are more lists, texts or numbers than a request needs."""
    limits = [
        ((b"[", b"{", b":"), _MOST_CONTAINERS, "lists, objects and keys"),
        ((b",",), max(_MOST_CONTAINERS, most_tokens), "values"),
    ]
    if body.count(b'"') <= 2 * _MOST_CONTAINERS and all(
        sum(map(body.count, signs)) <= most for signs, most, _ in limits
    ):
        return
    # A text may contain many of these characters, and is one value.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 2 * _MOST_CONTAINERS:
        raise _too_many(_MOST_CONTAINERS, "texts")
    outside = b"".join(plain.split(b'"')[::2])
    for signs, most, subject in limits:
        if sum(map(outside.count, signs)) > most:
            raise _too_many(most, subject)


def _too_many(most: int, subject: str) -> Refusal:
    return Refusal(400, f"the body has more than {most} {subject}: send less at once", code="too_many_values")


def check_prompt(
    prompt: object,
    served: Served,
    config: ServerConfig,
    param: str = "prompt",
    most: int | None = None,
    is_cut: bool = False,
) -> None:
    """Raises Refusal if there are too many texts, characters or tokens; does not read each of them.

    Args:
      prompt: a text, token ids, or a list of those.
      served: the model.
      config: the limits.
      param: the parameter that contains it.
      most: most texts; None: ServerConfig.max_texts.
      is_cut: whether prompts of too many tokens are cut.
    """
    if isinstance(prompt, str):
        check_characters(len(prompt), served, config, param)
    if not isinstance(prompt, list) or not prompt:
        return
    if isinstance(prompt[0], int):
        if not is_cut:
            check_tokens(len(prompt), served, config, param)
        return
    most = config.max_texts if most is None else most
    if len(prompt) > most:
        message = f"{param} has {len(prompt)} items: at most {most} texts in all"
        raise Refusal(400, message, param=param, code="too_many_texts")
    for item in prompt:
        if isinstance(item, str):
            check_characters(len(item), served, config, param)
        elif isinstance(item, list) and not is_cut:
            check_tokens(len(item), served, config, param)


def check_tokens(tokens: int, served: Served, config: ServerConfig, param: str) -> None:
    """Raises Refusal if a prompt has too many tokens."""
    most = most_tokens(served, config)
    if tokens > most:
        raise Refusal(
            400,
            f"{param} has {tokens} tokens, must have at most {most}: shorten it",
            param=param,
            code="context_length_exceeded",
        )


def most_characters(served: Served, config: ServerConfig) -> int:
    """Length of the longest prompt that is tokenised; a longer one has more tokens than the model can read."""
    if config.max_prompt_chars is not None:
        return config.max_prompt_chars
    least, most = _CHARACTERS_PER_TOKEN
    return most_tokens(served, config) * max(least, min(served.longest_piece, most))


def most_tokens(served: Served, config: ServerConfig) -> int:
    """Number of tokens in the longest prompt."""
    capacity = served.length if served.encoder_length is None else served.encoder_length
    return min(config.max_prompt_tokens or capacity, capacity)


def check_characters(
    characters: int, served: Served, config: ServerConfig, param: str, is_conversation: bool = False
) -> None:
    """Raises Refusal if a prompt is too long to be tokenised.

    Args:
      characters: length of the prompt.
      served: the model.
      config: the limits.
      param: the parameter that contains it.
      is_conversation: whether the text includes that of a chat template.
    """
    most = most_characters(served, config)
    if characters > (2 * most + _TEMPLATE_CHARACTERS if is_conversation else most):
        tokens = most_tokens(served, config)
        raise Refusal(
            400,
            f"{param} has {characters} characters, must have at most {most} (and {tokens} tokens): shorten it",
            param=param,
            code="context_length_exceeded",
        )


def check_conversation(messages: list[Any], tools: list[Any] | None, served: Served, config: ServerConfig) -> None:
    """Raises Refusal if a conversation has too many messages or characters, or is nested too deeply."""
    if len(messages) > config.max_messages:
        raise Refusal(
            400,
            f"messages has {len(messages)}, must have at most {config.max_messages}: shorten the conversation",
            param="messages",
            code="too_many_messages",
        )
    for param, value in (("messages", messages), ("tools", tools or [])):
        check_characters(_characters(value, param), served, config, param)


def _characters(value: object, param: str) -> int:
    """Number of characters of all text in a value, keys included."""
    total, level, depth = 0, [value], 0
    while level:
        if depth > _DEEPEST:
            raise Refusal(
                400,
                f"{param} nests lists and objects more than {_DEEPEST} deep: flatten it",
                param=param,
                code="invalid_value",
            )
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                total += len(item)
            elif isinstance(item, dict):
                _check_arguments(item, param)
                total += sum(map(len, item))
                below += item.values()
            elif isinstance(item, list):
                below += item
        level, depth = below, depth + 1
    return total


def _check_arguments(value: dict[str, Any], param: str) -> None:
    for key in ("arguments", "parameters"):
        text = value.get(key)
        if isinstance(text, str) and len(text) > _LONGEST_ARGUMENTS:
            raise Refusal(
                400,
                f"{param} has {key} of {len(text)} characters, must have at most {_LONGEST_ARGUMENTS}",
                param=param,
                code="invalid_value",
            )
        if isinstance(text, str):
            check_numbers(text)


def quoted(message: str) -> str:
    """An error's message that may quote the request, of which clients get back at most 200 characters."""
    return message if len(message) <= _MOST_QUOTED else message[: _MOST_QUOTED - 3] + "..."


_MOST_QUOTED = 200
_brief = reprlib.Repr()
_brief.maxstring = 200


def brief(value: object) -> str:
    """A value for an error message; takes constant time."""
    return short(value) if isinstance(value, (int, float)) or value is None else _short_text(value)


def _short_text(value: object) -> str:
    if isinstance(value, str):
        return short(value[:200])
    text = " ".join(_brief.repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
