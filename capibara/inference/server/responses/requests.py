"""Bodies of OpenAI's Responses API, and the chats that they are."""

from __future__ import annotations

from typing import Any, Literal

import pydantic

from capibara.inference.engine.requests.request import LIKELIEST
from capibara.inference.server.openai.requests import IGNORED, ChatRequest, SampledParameters
from capibara.inference.server.openai.texts import chat_texts
from capibara.inference.server.service.answers import RequestedText
from capibara.inference.server.service.bounds import brief
from capibara.inference.server.service.http_errors import Refusal
from capibara.inference.server.service.service import Served, ServerConfig

Json = dict[str, Any]

_LOGPROBS = "message.output_text.logprobs"
_TEXTS = ("input_text", "output_text", "text")


class _Reasoning(pydantic.BaseModel):
    """reasoning."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class _Text(pydantic.BaseModel):
    """text."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    format: dict[str, Any] | None = None


class ResponsesRequest(SampledParameters):
    """The body of POST /v1/responses."""

    unsupported = {
        **dict.fromkeys(("previous_response_id", "conversation", "prompt", "max_tool_calls", "background"), (False,)),
        "truncation": ("disabled",),
    }
    ignored = IGNORED

    model: str
    input: Any
    instructions: str | None = None
    max_output_tokens: int | None = pydantic.Field(None, ge=1)
    top_logprobs: int | None = pydantic.Field(None, ge=0, le=LIKELIEST)
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    reasoning: _Reasoning | None = None
    include: list[str] | None = None
    thinking_strategy: Any = None

    def check(self) -> None:
        for name in self.include or ():
            if name not in (_LOGPROBS, "reasoning.encrypted_content"):
                message = f"include has {brief(name)}, and there is only {_LOGPROBS!r} here: leave it out"
                raise Refusal(400, message, param="include", code="unsupported_value")

    @property
    def has_logprobs(self) -> bool:
        """Whether the log probabilities of tokens are asked for."""
        return _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


def response_texts(request: ResponsesRequest, served: Served, config: ServerConfig) -> list[RequestedText]:
    """The answer to a conversation.

    Raises:
      Refusal: a parameter is invalid, the chat template rejects the messages, or they are too long.
    """
    tools = chat_tools(request)
    values = {
        "model": request.model,
        "messages": _messages(
            request, keeps_developer=served.chat is not None and served.chat.template.mentions("developer")
        ),
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": request.has_logprobs or None,
        "top_logprobs": request.top_logprobs,
        "tools": tools or None,
        "tool_choice": _choice(request.tool_choice, tools),
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _format(request.text),
        "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
        "thinking_strategy": request.thinking_strategy,
    }
    values |= {
        name: getattr(request, name) for name in SampledParameters.model_fields if name not in ("model", "stream")
    }
    return chat_texts(ChatRequest.model_validate(values), served, config)


def chat_tools(request: ResponsesRequest) -> list[Json]:
    """The tools in the chat API's form.

    Raises:
      Refusal: a tool is no function.
    """
    tools: list[Json] = []
    for number, tool in enumerate(request.tools or []):
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            message = (
                f"tools[{number}] is {brief(tool)}, must be a function with a name: other kinds are not executed here"
            )
            raise Refusal(400, message, param="tools", code="unsupported_value")
        about = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
        tools.append({"type": "function", "function": about})
    return tools


def _choice(choice: object, tools: list[Json]) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return None if choice == "auto" and not tools else choice  # OpenAI's client sends "auto" without tools


def _format(text: _Text | None) -> Any:
    if text is None or text.format is None or text.format.get("type") != "json_schema":
        return None if text is None else text.format
    return {
        "type": "json_schema",
        "json_schema": {"name": text.format.get("name"), "schema": text.format.get("schema")},
    }


def _messages(request: ResponsesRequest, keeps_developer: bool) -> list[Json]:
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    if not isinstance(items, list) or not items:
        raise _invalid(f"input is {brief(request.input)}, must be a text or a list of items")
    messages: list[Json] = []
    if request.instructions is not None:
        messages.append({"role": "developer" if keeps_developer else "system", "content": request.instructions})
    for number, item in enumerate(items):
        _add(item, f"input[{number}]", messages, keeps_developer)
    if not messages:
        raise _invalid(f"input is {brief(request.input)}, must have a message or a thought with text")
    return messages


def _add(item: Any, where: str, messages: list[Json], keeps_developer: bool) -> None:
    """Adds an item to the messages; thoughts and calls belong to one message of the assistant."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    match kind:
        case "message" if item.get("role") in ("user", "assistant", "system", "developer"):
            role, content = item["role"], _text(item.get("content"), where)
            role = "system" if role == "developer" and not keeps_developer else role
            if role == "assistant":
                _assistant(messages, has_content=True)["content"] = content
            elif role == "system" and messages and messages[-1]["role"] == "system":
                messages[-1]["content"] += f"\n\n{content}"  # many templates know one system message
            else:
                messages.append({"role": role, "content": content})
        case "function_call" if isinstance(item.get("name"), str) and isinstance(item.get("arguments"), str):
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output" if isinstance(item.get("call_id"), str):
            output = _text(item.get("output"), where)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            if thought := _text(parts, where, ("reasoning_text", "summary_text", "text")):
                messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
        case _:
            raise _invalid(
                f"{where} is {brief(item)}, must be a message, function_call, function_call_output or reasoning"
            )


def _assistant(messages: list[Json], has_content: bool = False) -> Json:
    """The assistant's message that the next item belongs to."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or (has_content and (last["content"] or "tool_calls" in last)):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(value: object, where: str, kinds: tuple[str, ...] = _TEXTS) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(
        isinstance(item, dict) and item.get("type") in kinds and isinstance(item.get("text"), str) for item in value
    ):
        return "".join(item["text"] for item in value)
    raise _invalid(f"{where} has {brief(value)}, must have a text or parts of the types {', '.join(kinds)}")


def _invalid(message: str) -> Refusal:
    return Refusal(400, message, param="input", code="invalid_messages")
