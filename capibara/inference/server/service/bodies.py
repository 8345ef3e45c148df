"""Bodies of requests: parameters, their types, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import pydantic

from capibara.core.fields import did_you_mean
from capibara.inference.server.service import bounds
from capibara.inference.server.service.bounds import brief
from capibara.inference.server.service.http_errors import Refusal
from capibara.inference.server.service.service import Served, no_model

T = TypeVar("T", bound="Parameters")

_LONGEST_NAME = 60  # characters of a parameter's name in an error
# A grammar is compiled, and the prompt's tokens are scored by a program, before the text is requested.
_WAITED_FOR = {
    "echo",
    "output_config",
    "prompt_logprobs",
    "response_format",
    "structured_outputs",
    "tool_choice",
    "text",
}


class Parameters(pydantic.BaseModel):
    """The parameters of any request; None: not set, and the model is the only one.

    Attributes:
      unsupported: parameters -> their values that request nothing.
      ignored: parameters that change nothing.
      of_reward_models: whether only a reward model can answer; None: any model can, False: only others.
    """

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    ignored: ClassVar[tuple[str, ...]] = ()
    of_reward_models: ClassVar[bool | None] = None

    model: str | None = None

    @property
    def waits(self) -> bool:
        """Whether its preparation may take long: for the devices, or for a compiler."""
        return any(name in _WAITED_FOR or name.startswith("guided_") for name in self.model_fields_set)

    def check(self) -> None:
        """Raises Refusal if parameters do not fit together."""


class TextParameters(Parameters):
    """Of a request for texts, whole or as a stream."""

    of_reward_models = False

    stream: bool | None = None


def read(kind: type[T], body: bytes, most_tokens: int) -> T:
    """Parses a request's body, which may have at most `most_tokens` tokens as numbers.

    Raises:
      Refusal: it is not JSON in UTF-8, has too many values, or a parameter is missing, unknown, unsupported or invalid.
    """
    values = bounds.parse(body, most_tokens)
    for name, nothing in kind.unsupported.items():
        value = values.pop(name, None)
        if value is not None and value not in nothing:
            raise Refusal(
                400, f"{name} is not supported: leave it out", param=name, code="unsupported_parameter"
            )  # fmt: skip
    for name in kind.ignored:
        values.pop(name, None)
    try:
        request = kind.model_validate(values)
    except pydantic.ValidationError as error:
        raise _explained(error.errors(include_url=False)[0], kind) from None
    request.check()
    return request


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
    """Raises Refusal if the request names neither the model nor one of its adapters, or is for a model of another kind."""
    if request.model is not None and request.model not in (served.name, *served.adapters):
        raise no_model(request.model, served)
    is_reward_model = served.scorer is not None
    if request.of_reward_models in (None, is_reward_model):
        return
    message = (
        f"{served.name} is a reward model and generates no text: ask /v1/score, or serve a language model"
        if is_reward_model
        else f"{served.name} is a language model and has no scores: serve a reward model, or ask for logprobs"
    )
    raise Refusal(400, message, param="model", code="unsupported_model")
