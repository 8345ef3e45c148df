"""Bodies of Anthropic's Messages API, and the chats that they are in OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pydantic

from capibara.inference.server.openai.conversations import rendered
from capibara.inference.server.openai.courses import with_tool
from capibara.inference.server.openai.requests import ChatRequest
from capibara.inference.server.openai.texts import chat_texts
from capibara.inference.server.service.answers import RequestedText
from capibara.inference.server.service.bodies import Parameters, TextParameters
from capibara.inference.server.service.bounds import brief
from capibara.inference.server.service.http_errors import Refusal
from capibara.inference.server.service.service import Served, ServerConfig

Json = dict[str, Any]

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("container", "context_management", "mcp_servers"), ({}, [])),
}


class _Thinking(pydantic.BaseModel):
    """thinking; how much an adaptive model thinks is its own."""

    model_config = pydantic.ConfigDict(extra="ignore", strict=True)

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = pydantic.Field(None, ge=1)


class _OutputConfig(pydantic.BaseModel):
    """output_config: the schema of a text that is JSON, and how much the model thinks."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    format: dict[str, Any] | None = None
    effort: str | None = None


class CountRequest(Parameters):
    """The body of POST /v1/messages/count_tokens."""

    unsupported = _UNSUPPORTED
    ignored = ("metadata", "service_tier", "cache_control", "betas")

    model: str
    messages: list[Any] = pydantic.Field(min_length=1)
    system: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    thinking: _Thinking | None = None


class MessagesRequest(CountRequest, TextParameters):
    """The body of POST /v1/messages."""

    max_tokens: int = pydantic.Field(ge=1)
    temperature: float | None = pydantic.Field(None, ge=0, le=1)
    top_p: float | None = pydantic.Field(None, ge=0, le=1)
    top_k: int | None = pydantic.Field(None, ge=0)
    stop_sequences: list[str] | None = None
    output_config: _OutputConfig | None = None
    thinking_strategy: Any = None


class _Choice(pydantic.BaseModel):
    """tool_choice."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


def message_texts(request: MessagesRequest, served: Served, config: ServerConfig) -> list[RequestedText]:
    """The answer to a conversation.

    Raises:
      Refusal: a parameter is invalid, the chat template rejects the messages, or they are too long.
    """
    options = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k or None,  # 0: no limit
        "stop": request.stop_sequences or None,
        "response_format": _format(request.output_config),
        "reasoning_effort": request.output_config and request.output_config.effort,
        "thinking_tokens": None if request.thinking is None else request.thinking.budget_tokens,
        "thinking_strategy": request.thinking_strategy,
    }
    return chat_texts(_chat(request, options), served, config)


def _format(output: _OutputConfig | None) -> Json | None:
    """The form of an answer as the chat API has it."""
    if output is None or output.format is None:
        return None
    if output.format.get("type") != "json_schema":
        message = f"output_config.format is {brief(output.format)}, must have type json_schema and a schema"
        raise Refusal(400, message, param="output_config", code="invalid_value")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": output.format.get("schema")}}


def count_tokens(request: CountRequest, served: Served, config: ServerConfig) -> Json:
    """The number of tokens of a conversation.

    Raises:
      Refusal: a parameter is invalid, or the chat template rejects the messages.
    """
    talk, text = rendered(with_tool(_chat(request, {}), served), served, config)
    return {"input_tokens": len(talk.ids_of(text))}


def parallel(request: CountRequest) -> bool:
    """Whether an answer may have several calls."""
    choice = _read_choice(request.tool_choice)
    return choice is None or not choice.disable_parallel_tool_use


def chat_tools(request: CountRequest) -> list[Json]:
    """The tools in OpenAI's form.

    Raises:
      Refusal: a tool is none that a client executes.
    """
    tools: list[Json] = []
    for number, tool in enumerate(request.tools or []):
        if (
            not isinstance(tool, dict)
            or not isinstance(tool.get("name"), str)
            or tool.get("type", "custom") != "custom"
        ):
            message = f"tools[{number}] is {brief(tool)}, must have name, description and input_schema"
            raise Refusal(400, message, param="tools", code="invalid_value")
        function = {"name": tool["name"], "description": tool.get("description", "")}
        tools.append({"type": "function", "function": function | {"parameters": tool.get("input_schema", {})}})
    return tools


def _chat(request: CountRequest, options: Json) -> ChatRequest:
    messages: list[Json] = []
    if request.system is not None:
        messages.append({"role": "system", "content": _text(request.system, "system")})
    for number, message in enumerate(request.messages):
        messages += _messages(message, f"messages[{number}]")
    tools = chat_tools(request) or None
    choice = _chat_choice(_read_choice(request.tool_choice))
    values = {"model": request.model, "messages": messages, "tools": tools, "tool_choice": choice}
    if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):  # the beginning of the answer
        _check_continued(request, messages[-1])
        values |= {"continue_final_message": True, "add_generation_prompt": False}
    return ChatRequest.model_validate(values | options | {"parallel_tool_calls": parallel(request)})


def _check_continued(request: CountRequest, last: Json) -> None:
    """Raises Refusal unless an answer can go on where the last message ends."""
    where = f"messages[{len(request.messages) - 1}]"
    if not last["content"]:
        raise _invalid(f"{where} has no text that the answer could continue: leave it out")
    if request.thinking is not None and request.thinking.type == "enabled" and "reasoning_content" not in last:
        raise _invalid(
            f"{where} begins the answer, before which a thought belongs (thinking.type = 'enabled'): leave one of them out"
        )


def _read_choice(value: object) -> _Choice | None:
    if value is None:
        return None
    try:
        choice = _Choice.model_validate(value)
    except pydantic.ValidationError:
        choice = None
    if choice is None or (choice.type == "tool") != (choice.name is not None):
        message = f"tool_choice is {brief(value)}, must have the type auto, any, none, or tool with a name"
        raise Refusal(400, message, param="tool_choice", code="invalid_value")
    return choice


def _chat_choice(choice: _Choice | None) -> Any:
    """The choice in OpenAI's form."""
    if choice is None:
        return None
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _messages(message: object, where: str) -> Iterator[Json]:
    """A message in OpenAI's form, results of tools first, each as a message of its own."""
    role, content = (message.get(key) for key in ("role", "content")) if isinstance(message, dict) else (None, None)
    if role not in ("user", "assistant", "system") or not isinstance(content, (str, list)) or content == []:
        raise _invalid(f"{where} is {brief(message)}, must have the role user or assistant, and content")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        place = f"{where}.content[{number}]"
        match kind:
            case "text" if isinstance(block.get("text"), str):
                texts.append(block["text"])
            case "thinking" if role == "assistant" and isinstance(block.get("thinking"), str):
                thoughts.append(block["thinking"])
            case "tool_use" if role == "assistant":
                calls.append(_call(block, place))
            case "tool_result" if role == "user" and isinstance(block.get("tool_use_id"), str):
                result = _text(block.get("content", ""), place)
                yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": result}
            case _:
                known = "text" + (", thinking or tool_use" if role == "assistant" else " or tool_result")
                raise _invalid(f"{place} is {brief(block)}, must have the type {known}")
    if texts or thoughts or calls:
        extra: Json = {"reasoning_content": "".join(thoughts)} if thoughts else {}
        extra |= {"tool_calls": calls} if calls else {}
        yield {"role": role, "content": "\n".join(texts)} | extra


def _call(block: Json, where: str) -> Json:
    if not isinstance(block.get("name"), str) or not isinstance(block.get("input"), dict):
        raise _invalid(f"{where} is {brief(block)}, must have a name and an input")
    function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
    return {"id": str(block.get("id", "")), "type": "function", "function": function}


def _text(value: object, where: str) -> str:
    """A text, or the texts of blocks."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, dict) and isinstance(item.get("text"), str) for item in value):
        return "\n".join(item["text"] for item in value)
    raise _invalid(f"{where} is {brief(value)}, must be a text or a list of texts", where.partition("[")[0])


def _invalid(message: str, param: str = "messages") -> Refusal:
    return Refusal(400, message, param=param, code="invalid_messages")
