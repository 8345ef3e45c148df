"""What a request passes to the chat template: chat_template_kwargs and reasoning_effort."""

from __future__ import annotations

from capibara.core.fields import did_you_mean
from capibara.inference.interactive.chat import Chat
from capibara.inference.server.openai.requests import ChatRequest
from capibara.inference.server.service.bounds import brief
from capibara.inference.server.service.http_errors import Refusal
from capibara.inference.server.service.service import Served

# What the server says itself.
_TAKEN = ("messages", "tools", "add_generation_prompt", "documents", "bos_token", "eos_token")


def chat_of(request: ChatRequest, served: Served) -> Chat:
    """The model's chat, with the request's variables of its template.

    Raises:
      Refusal: it has no chat template, or one that does not ask for a variable.
    """
    talk = served.chat
    if talk is None:
        raise Refusal(400, f"{served.name} has no chat template: request completions", code="no_chat_template")
    variables = dict(request.chat_template_kwargs or {})
    if not variables and request.reasoning_effort is None:
        return talk
    asked = talk.template.variable_names - {*_TAKEN}
    for name in variables:
        if name not in asked:
            names = ", ".join(sorted(asked)) or "none"
            raise _refused(
                "chat_template_kwargs",
                f"chat_template_kwargs has {brief(name)}, and the template asks for {names}{did_you_mean(name, asked)}",
            )
    if request.reasoning_effort is not None:
        if "reasoning_effort" not in asked:
            raise _refused(
                "reasoning_effort", "reasoning_effort is nothing that the chat template asks for: leave it out"
            )
        variables["reasoning_effort"] = request.reasoning_effort
    return talk.with_variables(variables)


def _refused(param: str, message: str) -> Refusal:
    return Refusal(400, message, param=param, code="unsupported_parameter")
