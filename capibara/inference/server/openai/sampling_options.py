"""How a request's texts are sampled."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

from capibara.core.fields import short
from capibara.core.types import UserError
from capibara.data.tokenizers import model_rows
from capibara.inference.sampling.grammar import Grammar
from capibara.inference.sampling.restrictions import Restrictions, word_ids
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.server.openai.requests import ApiRequest
from capibara.inference.server.service.bounds import brief, quoted
from capibara.inference.server.service.http_errors import Refusal
from capibara.inference.server.service.service import Served, ServerConfig

_GREEDY_BELOW = 1e-4  # dividing the logits by less may overflow
SEEDS = 2**31
_LONGEST_STOP = 1000
_MOST_BIASES = 1024
_MOST_SHOWN = 3  # tokens in an error
_MOST_WORDS = 256
_LONGEST_WORD = 100
_LARGEST_BIAS = 100  # OpenAI's
_PLAIN = (
    "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "thinking_tokens",
)  # fmt: skip


def sampling_of(
    request: ApiRequest, served: Served, config: ServerConfig, room: int, grammar: Grammar | None
) -> Sampling:
    """The sampling of a text that may have at most `room` tokens.

    Raises:
      Refusal: a parameter is invalid.
    """
    name, limit = request.longest
    most = min(config.max_tokens or room, room)
    if limit is not None and limit > most:
        why = "" if most < room else f" ({served.length} tokens of prompt and text together)"
        raise Refusal(
            400, f"{name} is {short(limit)}, must be at most {most}{why}", param=name, code="context_length_exceeded"
        )
    usual = most if request.answers else min(served.sampling.max_new_tokens, most)
    most_new = usual if limit is None else limit
    options: dict[str, Any] = {name: value for name in _PLAIN if (value := getattr(request, name)) is not None}
    if request.temperature is not None:
        options["temperature"] = request.temperature if request.temperature >= _GREEDY_BELOW else 0.0
    if request.top_p is not None:
        options["top_p"] = max(request.top_p, 1e-9)
    if "top_k" in options:
        options["top_k"] = min(options["top_k"], served.vocabulary.size) if options["top_k"] > 0 else None
    if (budget := request.thinking_token_budget) is not None:
        options["thinking_tokens"] = budget if budget > 0 else None
    if options.get("thinking_tokens") is not None:
        options["thinking_tokens"] = min(options["thinking_tokens"], served.length)
    if request.logit_bias:
        options["logit_bias"] = _biases(request.logit_bias, served)
    if request.allowed_token_ids is not None:
        options["allowed_ids"] = _allowed(request.allowed_token_ids, served)
    if request.bad_words:
        options["bad_words"] = _words(request.bad_words)
    if request.include_stop_str_in_output is not None:
        options["include_stop"] = request.include_stop_str_in_output
    if grammar is not None:
        options["grammar"] = grammar
    result = dataclasses.replace(
        served.sampling,
        **options,
        max_new_tokens=most_new,
        min_new_tokens=_least(request, most_new),
        seed=secrets.randbelow(SEEDS) if request.seed is None else request.seed % SEEDS,
        stop=_stops(request.stop, config) or served.sampling.stop,
    )
    _check_restrictions(result, served)
    return result


def _check_restrictions(sampling: Sampling, served: Served) -> None:
    """Raises Refusal for words without tokens, or if no token is left."""
    try:
        words = word_ids(sampling.bad_words, served.vocabulary)
        Restrictions(sampling, words, served.rows, served.vocabulary.size)
    except UserError as error:
        message = str(error).replace("Sampling.allowed_ids", "allowed_token_ids").replace("Sampling.", "")
        raise _invalid("bad_words" if sampling.bad_words else "allowed_token_ids", quoted(message)) from None


def end_ids(request: ApiRequest, served: Served) -> tuple[int, ...]:
    """The ids of `stop_token_ids`.

    Raises:
      Refusal: one has no row in the model.
    """
    ids = request.stop_token_ids or []
    if len(ids) > _MOST_BIASES:
        raise _invalid("stop_token_ids", f"stop_token_ids has {len(ids)} ids, must have at most {_MOST_BIASES}")
    return _rows_of("stop_token_ids", ids, served)


def _rows_of(name: str, ids: list[int], served: Served) -> tuple[int, ...]:
    try:
        model_rows.check_ids(ids, served.rows, served.vocabulary, name)
    except UserError as error:
        raise _invalid(name, quoted(str(error))) from None
    return tuple(ids)


def _allowed(ids: list[int], served: Served) -> tuple[int, ...]:
    if not 0 < len(ids) <= served.rows:
        raise _invalid("allowed_token_ids", f"allowed_token_ids has {len(ids)} ids, must have from 1 to {served.rows}")
    return _rows_of("allowed_token_ids", ids, served)


def _words(words: list[str]) -> tuple[str, ...]:
    if len(words) > _MOST_WORDS or not all(0 < len(word) <= _LONGEST_WORD for word in words):
        must = f"at most {_MOST_WORDS} strings, each of 1 to {_LONGEST_WORD} characters"
        raise _invalid("bad_words", f"bad_words is {brief(words)}, must have {must}")
    return tuple(words)


def _least(request: ApiRequest, most: int) -> int:
    """The fewest tokens of a text of at most `most`."""
    if request.ignore_eos:  # an end token is then never chosen
        return most
    if (least := request.min_tokens or 0) > most:
        raise _invalid("min_tokens", f"min_tokens is {short(least)}, must be at most {request.longest[0]} ({most})")
    return least


def _is_row(name: str, rows: int) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10 and int(name) < rows


def _biases(values: dict[str, float], served: Served) -> dict[int, float]:
    if len(values) > _MOST_BIASES:
        raise _invalid("logit_bias", f"logit_bias has {len(values)} tokens, must have at most {_MOST_BIASES}")
    others = [name for name in values if not _is_row(name, served.rows)]
    if others:
        shown = ", ".join(map(brief, others[:_MOST_SHOWN])) + (", ..." if len(others) > _MOST_SHOWN else "")
        tokens = "the token" if len(others) == 1 else "the tokens"
        raise _invalid("logit_bias", f"logit_bias has {tokens} {shown}, must have ids from 0 to {served.rows - 1}")
    biases: dict[int, float] = {}
    for name, bias in values.items():
        if abs(bias) > _LARGEST_BIAS:
            raise _invalid("logit_bias", f"logit_bias of {name} is {short(bias)}, must be from -100 to 100")
        biases[int(name)] = bias
    return biases


def _stops(value: object, config: ServerConfig) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(
        isinstance(stop, str) and 0 < len(stop) <= _LONGEST_STOP for stop in stops
    ):
        must = f"a string or a list of strings, each of 1 to {_LONGEST_STOP} characters"
        raise _invalid("stop", f"stop is {brief(value)}, must be {must}")
    if len(stops) > config.max_stops:
        raise _invalid("stop", f"stop has {len(stops)} strings, must have at most {config.max_stops}")
    return tuple(stops)


def _invalid(param: str, message: str) -> Refusal:
    return Refusal(400, message, param=param, code="invalid_value")
