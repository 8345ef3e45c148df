"""Requests of OpenAI's completions and chat API.

Parameters beyond OpenAI's: top_k, min_p, repetition_penalty and thinking_tokens, as in `Sampling`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import pydantic

from capibara.core.fields import did_you_mean, nearest, short
from capibara.core.types import UserError
from capibara.data.chat.dropped import dropped, unread
from capibara.data.chat.formats import Conversation, Format, read_conversation
from capibara.data.chat.template import TemplateFails
from capibara.data.tokenizers import model_rows
from capibara.inference.engine.requests.request import LIKELIEST
from capibara.inference.interactive.chat import Chat
from capibara.inference.sampling import sentinels
from capibara.inference.sampling.sampling import Sampling
from capibara.inference.server import bounds
from capibara.inference.server.bounds import brief, quoted
from capibara.inference.server.http_errors import Refusal
from capibara.inference.server.service import RequestedText, Served, ServerConfig

T = TypeVar("T", bound="ApiRequest")

_GREEDY_BELOW = 1e-4  # dividing the logits by less may overflow
_SEEDS = 2**31
_LONGEST_STOP = 1000
_MESSAGE_KEYS = (
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking", "refusal",
    "function_call", "audio", "annotations", "weight", "context",
)  # fmt: skip
_MISSPELLED = 0.85  # how similar: below are keys of other servers and templates, such as tool_plan, reasoning_details
_LEAVES_OUT = "the model's chat template leaves out"
_MOST_KEYS = 100  # of messages that are compared, which takes 0.1 ms each
_LONGEST_NAME = 60  # characters of a parameter's name in an error
_OWN = ("top_k", "min_p", "repetition_penalty", "thinking_tokens")
# Unsupported parameters -> their values that request nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (0,)),
    **dict.fromkeys(("logit_bias", "functions", "suffix", "web_search_options", "prediction", "audio"), ({}, [], "")),
    **{"best_of": (1,), "parallel_tool_calls": (True,), "function_call": ("none",), "modalities": (["text"],)},
    **{"response_format": ({"type": "text"},), "reasoning_effort": (), "verbosity": (), "moderation": ()},
}
# Parameters that do not change the text.
_IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options",
)  # fmt: skip


class StreamOptions(pydantic.BaseModel):
    """Options of a stream."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False


class ApiRequest(pydantic.BaseModel):
    """The parameters common to both APIs; None: not set."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    max_tokens: int | None = pydantic.Field(None, ge=1)
    temperature: float | None = pydantic.Field(None, ge=0, le=2)
    top_p: float | None = pydantic.Field(None, ge=0, le=1)
    top_k: int | None = pydantic.Field(None, ge=1)
    min_p: float | None = pydantic.Field(None, ge=0, le=1)
    repetition_penalty: float | None = pydantic.Field(None, ge=0.01, le=100)
    thinking_tokens: int | None = pydantic.Field(None, ge=1)
    n: int | None = pydantic.Field(None, ge=1)
    stop: Any = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def longest(self) -> tuple[str, int | None]:
        """The parameter that limits the text's length, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def likeliest(self) -> int:
        """How many of the likeliest tokens to return."""
        return 0


class CompletionRequest(ApiRequest):
    """The body of POST /v1/completions."""

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = pydantic.Field(None, ge=0, le=LIKELIEST)

    @property
    def likeliest(self) -> int:
        return self.logprobs or 0


class ChatRequest(ApiRequest):
    """The body of POST /v1/chat/completions."""

    messages: list[Any] = pydantic.Field(min_length=1)
    tools: list[Any] | None = None
    tool_choice: Any = None
    max_completion_tokens: int | None = pydantic.Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = pydantic.Field(None, ge=0, le=LIKELIEST)

    @property
    def longest(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().longest
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def likeliest(self) -> int:
        return self.top_logprobs or 0


def read(kind: type[T], body: bytes, most_tokens: int) -> T:
    """Parses a request's body, which may have at most `most_tokens` tokens as numbers.

    Raises:
      Refusal: it is not JSON in UTF-8, has too many values, or a parameter is missing, unknown, unsupported or invalid.
    """
    values = bounds.parse(body, most_tokens)
    for name, nothing in _UNSUPPORTED.items():
        value = values.pop(name, None)
        if value is not None and value not in nothing:
            raise Refusal(
                400, f"{name} is not supported: leave it out", param=name, code="unsupported_parameter"
            )  # fmt: skip
    for name in _IGNORED:
        values.pop(name, None)
    try:
        request = kind.model_validate(values)
    except pydantic.ValidationError as error:
        raise _explained(error.errors(include_url=False)[0], kind) from None
    if request.stream_options is not None and not request.stream:
        raise Refusal(
            400, "stream_options needs stream = true: leave it out", param="stream_options", code="invalid_value"
        )
    return request


def _explained(error: Any, kind: type[ApiRequest]) -> Refusal:
    name = ".".join(map(str, error["loc"]))[:_LONGEST_NAME] or "the body"
    param = str(error["loc"][0]) if error["loc"] else None
    if error["type"] == "missing":
        return Refusal(400, f"{name} is missing", param=param, code="missing_required_parameter")
    if error["type"] == "extra_forbidden":
        hint = did_you_mean(name, kind.model_fields)
        return Refusal(400, f"{name} is not a parameter{hint}", param=param, code="unknown_parameter")
    message = error["msg"][:1].lower() + error["msg"][1:]
    return Refusal(400, f"{name} is {brief(error['input'])}: {message}", param=param, code="invalid_value")


def check_model(request: ApiRequest, served: Served) -> None:
    """Raises Refusal if the request names neither the model nor one of its adapters."""
    if request.model not in (served.name, *served.adapters):
        names = ", ".join(map(repr, (served.name, *served.adapters)))
        raise Refusal(
            404,
            f"model is {brief(request.model)}, the {'models here are' if served.adapters else 'model here is'} {names}",
            param="model",
            code="model_not_found",
        )


def completion_texts(request: CompletionRequest, served: Served, config: ServerConfig) -> list[RequestedText]:
    """The texts of a completion: n for the first prompt, n for the second, ...

    Raises:
      Refusal: a parameter is invalid, or a prompt is too long.
    """
    if request.echo and request.logprobs is not None:
        raise Refusal(400, "echo with logprobs is not supported: leave one out", param="echo", code="unsupported_value")
    bounds.check_prompt(request.prompt, served, config)
    prompts = _prompts(request.prompt)
    _check_count(request, len(prompts), config)
    asks: list[RequestedText] = []
    for prompt in prompts:
        asks += _asks(request, _prompt_ids(prompt, served), (), served, config, "prompt")
    return asks


def chat_texts(request: ChatRequest, served: Served, config: ServerConfig) -> list[RequestedText]:
    """The n answers to a conversation.

    Raises:
      Refusal: a parameter is invalid, the chat template rejects the messages, or they are too long.
    """
    if request.top_logprobs is not None and not request.logprobs:
        raise Refusal(400, "top_logprobs needs logprobs = true", param="top_logprobs", code="invalid_value")
    if None not in (limits := (request.max_tokens, request.max_completion_tokens)) and limits[0] != limits[1]:
        both = " and max_completion_tokens is ".join(map(short, limits))
        raise Refusal(
            400, f"max_tokens is {both}: they mean the same, leave one out", param="max_tokens", code="invalid_value"
        )  # fmt: skip
    if request.tool_choice not in (None, "auto", "none"):
        raise Refusal(
            400,
            f"tool_choice is {brief(request.tool_choice)}, must be 'auto' or 'none'",
            param="tool_choice",
            code="unsupported_value",
        )
    if request.tool_choice == "auto" and not request.tools:
        raise Refusal(
            400, "tool_choice is 'auto', which needs tools: leave it out", param="tool_choice", code="invalid_value"
        )
    _check_count(request, 1, config)
    talk = served.chat
    if talk is None:
        raise Refusal(400, f"{served.name} has no chat template: request completions", code="no_chat_template")
    tools = request.tools if request.tool_choice != "none" else None
    bounds.check_conversation(request.messages, tools, served, config)
    _check_keys(request.messages)
    try:
        record = {"messages": request.messages, "tools": tools}
        conversation = read_conversation(record, "the request", Format.MESSAGES)
    except UserError as error:
        raise Refusal(400, quoted(str(error)), param="messages", code="invalid_messages") from None
    except RecursionError:  # JSON within JSON
        raise Refusal(400, "a tool call is nested too deeply", param="messages", code="invalid_messages") from None
    try:
        text = talk.text_after(conversation, "the request")
    except UserError as error:  # its message may have local paths, which clients must not see
        why = f": {quoted(error.why)}" if isinstance(error, TemplateFails) else ""
        raise Refusal(400, f"the chat template fails{why}", param="messages", code="invalid_messages") from None
    _check_complete(talk, conversation, text)
    bounds.check_characters(len(text), served, config, "messages", own=True)
    calls = served.calls if tools else None
    ends, spelled = (talk.ends, ()) if calls is None else ((*talk.ends, *calls.ends), calls.spelled)
    return _asks(request, talk.ids_of(text), ends, served, config, "messages", spelled)


def _check_keys(messages: list[Any]) -> None:
    """Raises Refusal if a message has a key that is one that templates read, misspelled."""
    others = {
        key: number
        for number, message in enumerate(messages)
        for key in (message if isinstance(message, dict) else ())
        if key not in _MESSAGE_KEYS
    }
    for key, number in itertools.islice(others.items(), _MOST_KEYS):
        if nearest(key, _MESSAGE_KEYS, _MISSPELLED):
            hint = did_you_mean(key, _MESSAGE_KEYS)
            message = f"messages[{number}] has {brief(key)}, which is no key of a message{hint}"
            raise Refusal(400, message, param="messages", code="invalid_messages")


def _check_complete(talk: Chat, conversation: Conversation, text: str) -> None:
    """Raises Refusal if the rendered text lacks a part of the conversation."""
    for part in dropped(conversation, text):
        if part == "the tools":
            message = f"{_LEAVES_OUT} tools: leave them out"
            raise Refusal(400, message, param="tools", code="unsupported_parameter")
        if "a tool call" in part:
            message = f"{_LEAVES_OUT} tool calls: leave them out"
            raise Refusal(400, message, param="messages", code="invalid_messages")
    for number in unread(conversation, text, lambda other: talk.text_after(other, "the request")):
        # Templates such as Llama 3's have no place for what an assistant says beside its calls.
        if not conversation.messages[number].get("tool_calls"):
            message = f"{_LEAVES_OUT} the content of messages[{number}]: leave that message out"
            raise Refusal(400, message, param="messages", code="invalid_messages")


def _check_count(request: ApiRequest, prompts: int, config: ServerConfig) -> None:
    texts = prompts * (request.n or 1)
    if texts > config.max_texts:
        shown = f"{prompts} prompts, n = {short(request.n or 1)}" if prompts > 1 else f"n is {short(request.n)}"
        raise Refusal(400, f"{shown}: at most {config.max_texts} texts in all", param="n", code="too_many_texts")


def _asks(
    request: ApiRequest,
    ids: Sequence[int],
    ends: tuple[int, ...],
    served: Served,
    config: ServerConfig,
    param: str,
    spelled: tuple[int, ...] = (),
) -> list[RequestedText]:
    bounds.check_tokens(len(ids), served, config, param)
    room = served.length + 1 - (len(ids) if served.encoder_length is None else 1)
    sampling = _sampling(request, served, config, room)
    seeds = [(sampling.seed + k) % _SEEDS for k in range(request.n or 1)]
    adapter = None if request.model == served.name else request.model
    return [
        RequestedText(ids, dataclasses.replace(sampling, seed=seed), ends, request.likeliest, adapter, spelled)
        for seed in seeds
    ]


def _sampling(request: ApiRequest, served: Served, config: ServerConfig, room: int) -> Sampling:
    """The sampling of a text that may have at most `room` tokens."""
    name, limit = request.longest
    most = min(config.max_tokens or room, room)
    if limit is not None and limit > most:
        why = "" if most < room else f" ({served.length} tokens of prompt and text together)"
        raise Refusal(
            400, f"{name} is {short(limit)}, must be at most {most}{why}", param=name, code="context_length_exceeded"
        )
    options = {name: value for name in _OWN if (value := getattr(request, name)) is not None}
    if request.temperature is not None:
        options["temperature"] = request.temperature if request.temperature >= _GREEDY_BELOW else 0.0
    if request.top_p is not None:
        options["top_p"] = max(request.top_p, 1e-9)
    if "top_k" in options:
        options["top_k"] = min(options["top_k"], served.vocabulary.size)
    if "thinking_tokens" in options:
        options["thinking_tokens"] = min(options["thinking_tokens"], served.length)
    return dataclasses.replace(
        served.sampling,
        **options,
        max_new_tokens=min(served.sampling.max_new_tokens, most) if limit is None else limit,
        seed=secrets.randbelow(_SEEDS) if request.seed is None else request.seed % _SEEDS,
        stop=_stops(request.stop, config) or served.sampling.stop,
    )


def _stops(value: object, config: ServerConfig) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(
        isinstance(stop, str) and 0 < len(stop) <= _LONGEST_STOP for stop in stops
    ):
        raise Refusal(
            400,
            f"stop is {brief(value)}, must be a string or a list of strings, each of 1 to {_LONGEST_STOP} characters",
            param="stop",
            code="invalid_value",
        )
    if len(stops) > config.max_stops:
        raise Refusal(
            400, f"stop has {len(stops)} strings, must have at most {config.max_stops}", param="stop", code="invalid_value"
        )  # fmt: skip
    return tuple(stops)


def _prompts(value: Any) -> list[str | list[int]]:
    """Parses the prompts: a string, strings, token ids, or lists of token ids."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(_is_id(one) for one in value)):
        return [value]
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        return value
    lists = isinstance(value, list) and all(isinstance(one, list) and one for one in value)
    if lists and value and all(_is_id(token) for one in value for token in one):
        return value
    raise Refusal(
        400,
        f"prompt is {brief(value)}, must be a string, a list of strings, a list of token ids or a list of such lists",
        param="prompt",
        code="invalid_value",
    )


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _prompt_ids(prompt: str | list[int], served: Served) -> list[int]:
    vocabulary = served.vocabulary
    if isinstance(prompt, list):
        with _invalid_prompt():
            model_rows.check_ids(prompt, served.engine.rows, vocabulary, "prompt")
        return prompt
    with _invalid_prompt():
        reads = served.encoder_length is not None
        ids = sentinels.ids_of(prompt, vocabulary) if reads else vocabulary.prompt_ids(prompt)
        model_rows.check_ids(ids, served.engine.rows, vocabulary, "prompt")
    return ids


@contextlib.contextmanager
def _invalid_prompt() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise Refusal(400, quoted(str(error)), param="prompt", code="invalid_value") from None
