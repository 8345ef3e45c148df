"""Conversations of requests as the text that a chat template makes of them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from capibara.core.fields import did_you_mean, nearest
from capibara.core.types import UserError
from capibara.data.chat.dropped import dropped, unread
from capibara.data.chat.formats import Conversation, Format, read_conversation
from capibara.data.chat.template import TemplateFails
from capibara.inference.interactive.chat import Chat
from capibara.inference.server.openai import template_variables
from capibara.inference.server.openai.requests import ChatRequest
from capibara.inference.server.service import bounds
from capibara.inference.server.service.bounds import brief, quoted
from capibara.inference.server.service.http_errors import Refusal
from capibara.inference.server.service.service import Served, ServerConfig

_MESSAGE_KEYS = (
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking", "refusal",
    "function_call", "audio", "annotations", "weight", "context",
)  # fmt: skip
_MISSPELLED = 0.85  # how similar: below are keys of other servers and templates, such as tool_plan, reasoning_details
_LEAVES_OUT = "the model's chat template leaves out"
_MOST_KEYS = 100  # of messages that are compared, which takes 0.1 ms each


def rendered(request: ChatRequest, served: Served, config: ServerConfig) -> tuple[Chat, str]:
    """The chat of a request, and its conversation up to the next answer, or to that which is continued, as the template writes it.

    Raises:
      Refusal: the model has no chat template, or the template rejects the messages or leaves a part of them out.
    """
    talk = template_variables.chat_of(request, served)
    tools = request.tools if request.tool_choice != "none" else None
    bounds.check_conversation(request.messages, tools, served, config)
    conversation = conversation_of({"messages": request.messages, "tools": tools})
    write = _writer(request, talk, conversation)
    with rendering("messages"):
        text = write(conversation, "the request")
    check_complete(lambda other: write(other, "the request"), conversation, text)
    bounds.check_characters(len(text), served, config, "messages", is_conversation=True)
    return talk, text


@contextlib.contextmanager
def rendering(param: str) -> Iterator[None]:
    """A context in which the chat template's errors become refusals of a parameter."""
    try:
        yield
    except UserError as error:  # its message may have local paths, which clients must not see
        why = f": {quoted(error.why)}" if isinstance(error, TemplateFails) else ""
        raise Refusal(400, f"the chat template fails{why}", param=param, code="invalid_messages") from None


def conversation_of(record: dict[str, Any], where: str = "the request") -> Conversation:
    """The conversation of a request; `where` is its name in errors.

    Raises:
      Refusal: it is malformed.
    """
    _check_keys(record["messages"])
    try:
        return read_conversation(record, where, Format.MESSAGES)
    except UserError as error:
        raise Refusal(400, quoted(str(error)), param="messages", code="invalid_messages") from None
    except RecursionError:  # JSON within JSON
        raise Refusal(400, "a tool call is nested too deeply", param="messages", code="invalid_messages") from None


def _writer(request: ChatRequest, talk: Chat, conversation: Conversation) -> Callable[[Conversation, str], str]:
    """What writes the conversation as the request asks for it."""
    if not request.continue_final_message:
        return talk.text_so_far if request.add_generation_prompt is False else talk.text_after
    last = conversation.messages[-1]
    if last["role"] != "assistant" or not last["content"] or last.get("tool_calls"):
        message = "continue_final_message needs a last message of the assistant with a text and no tool calls"
        raise Refusal(400, message, param="continue_final_message", code="invalid_value")
    return talk.text_to_continue


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


def check_complete(write: Callable[[Conversation], str], conversation: Conversation, text: str) -> None:
    """Raises Refusal if the text that the template writes lacks a part of the conversation."""
    for part in dropped(conversation, text):
        if part == "the tools":
            message = f"{_LEAVES_OUT} tools: leave them out"
            raise Refusal(400, message, param="tools", code="unsupported_parameter")
        if "a tool call" in part:
            message = f"{_LEAVES_OUT} tool calls: leave them out"
            raise Refusal(400, message, param="messages", code="invalid_messages")
    for number in unread(conversation, text, write):
        # Templates such as Llama 3's have no place for what an assistant says beside its calls.
        if not conversation.messages[number].get("tool_calls"):
            message = f"{_LEAVES_OUT} the content of messages[{number}]: leave that message out"
            raise Refusal(400, message, param="messages", code="invalid_messages")
