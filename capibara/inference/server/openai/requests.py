"""Bodies of OpenAI's completions and chat API: parameters, their types, and what is refused.

Parameters beyond OpenAI's: top_k, min_p, repetition_penalty, min_tokens, stop_token_ids, ignore_eos, structured_outputs and
guided_* as in vLLM, thinking_tokens as in `Sampling`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import pydantic

from capibara.core.fields import did_you_mean
from capibara.inference.engine.requests.request import LIKELIEST
from capibara.inference.server.service import bounds
from capibara.inference.server.service.bounds import brief
from capibara.inference.server.service.http_errors import Refusal
from capibara.inference.server.service.service import Served

T = TypeVar("T", bound="Parameters")

_LONGEST_NAME = 60  # characters of a parameter's name in an error
# Unsupported parameters -> their values that request nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("functions", "suffix", "web_search_options", "prediction", "audio"), ({}, [], "")),
    **{"function_call": ("none",), "modalities": (["text"],)},
    **{"verbosity": (), "moderation": ()},
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


class Parameters(pydantic.BaseModel):
    """The parameters of any request; None: not set, and the model is the only one."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = None


class ApiRequest(Parameters):
    """The parameters common to completions and chat; None: not set."""

    model: str
    max_tokens: int | None = pydantic.Field(None, ge=1)
    temperature: float | None = pydantic.Field(None, ge=0, le=2)
    top_p: float | None = pydantic.Field(None, ge=0, le=1)
    top_k: int | None = pydantic.Field(None, ge=1)
    min_p: float | None = pydantic.Field(None, ge=0, le=1)
    repetition_penalty: float | None = pydantic.Field(None, ge=0.01, le=100)
    presence_penalty: float | None = pydantic.Field(None, ge=-2, le=2)
    frequency_penalty: float | None = pydantic.Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    thinking_tokens: int | None = pydantic.Field(None, ge=1)
    min_tokens: int | None = pydantic.Field(None, ge=0)
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_grammar: Any = None
    guided_choice: Any = None
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

    @property
    def drawn(self) -> int:
        """How many texts are drawn for each prompt."""
        return self.n or 1

    @property
    def structured(self) -> dict[str, Any]:
        """What the text must match, by the parameters' names."""
        return {
            "response_format": self.response_format,
            "structured_outputs": self.structured_outputs,
            "guided_json": self.guided_json,
            "guided_regex": self.guided_regex,
            "guided_grammar": self.guided_grammar,
            "guided_choice": self.guided_choice,
        }


class CompletionRequest(ApiRequest):
    """The body of POST /v1/completions."""

    prompt: Any
    echo: bool | None = None
    best_of: int | None = pydantic.Field(None, ge=1)
    logprobs: int | None = pydantic.Field(None, ge=0, le=LIKELIEST)

    @property
    def likeliest(self) -> int:
        return self.logprobs or 0

    @property
    def drawn(self) -> int:
        return self.best_of or self.n or 1


class ChatRequest(ApiRequest):
    """The body of POST /v1/chat/completions."""

    messages: list[Any] = pydantic.Field(min_length=1)
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = pydantic.Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = pydantic.Field(None, ge=0, le=LIKELIEST)
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

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
    if isinstance(request, CompletionRequest):
        _check_best_of(request)
    if isinstance(request, ApiRequest) and request.stream_options is not None and not request.stream:
        raise Refusal(
            400, "stream_options needs stream = true: leave it out", param="stream_options", code="invalid_value"
        )
    return request


def _check_best_of(request: CompletionRequest) -> None:
    drawn, n = request.drawn, request.n or 1
    if drawn < n:
        raise Refusal(400, f"best_of is {drawn}, must be at least n ({n})", param="best_of", code="invalid_value")
    if drawn > n and request.stream:
        message = f"best_of is {drawn}, and a stream has texts before the best is known: set it to n ({n})"
        raise Refusal(400, message, param="best_of", code="invalid_value")


def _explained(error: Any, kind: type[Parameters]) -> Refusal:
    name = ".".join(map(str, error["loc"]))[:_LONGEST_NAME] or "the body"
    param = str(error["loc"][0]) if error["loc"] else None
    if error["type"] == "missing":
        return Refusal(400, f"{name} is missing", param=param, code="missing_required_parameter")
    if error["type"] == "extra_forbidden":
        hint = did_you_mean(name, kind.model_fields)
        return Refusal(400, f"{name} is not a parameter{hint}", param=param, code="unknown_parameter")
    message = error["msg"][:1].lower() + error["msg"][1:]
    return Refusal(400, f"{name} is {brief(error['input'])}: {message}", param=param, code="invalid_value")


def check_model(request: Parameters, served: Served) -> None:
    """Raises Refusal if the request names neither the model nor one of its adapters."""
    if request.model is not None and request.model not in (served.name, *served.adapters):
        names = ", ".join(map(repr, (served.name, *served.adapters)))
        raise Refusal(
            404,
            f"model is {brief(request.model)}, the {'models here are' if served.adapters else 'model here is'} {names}",
            param="model",
            code="model_not_found",
        )
