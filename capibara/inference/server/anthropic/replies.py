"""Responses of Anthropic's Messages API, whole or as events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence

from capibara.inference.engine.requests.stream import Completion, Finish, Piece
from capibara.inference.server.anthropic import requests
from capibara.inference.server.anthropic.requests import MessagesRequest
from capibara.inference.server.service import joined
from capibara.inference.server.service.answers import RequestedText
from capibara.inference.server.service.blocks import Block, Blocks, Change, Kind, blocks_of
from capibara.inference.server.service.chat_answer import ChatAnswer
from capibara.inference.server.service.http_errors import Refusal
from capibara.inference.server.service.reply import Json, TypedReply
from capibara.inference.server.service.service import Served

_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_NAMES = {Change.BEGIN: "start", Change.EXTEND: "delta", Change.END: "stop"}


class MessageReply(TypedReply):
    """The response of POST /v1/messages.

    Args:
      request: the request.
      served: the model.
      asks: the requested text.
    """

    def __init__(self, request: MessagesRequest, served: Served, asks: Sequence[RequestedText]):
        del served
        (self._ask,) = asks
        self._answer = ChatAnswer(self._ask, requests.chat_tools(request), requests.parallel(request))
        self._blocks = Blocks()
        self._about: Json = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
        }

    def whole(self, completions: Sequence[Completion]) -> Json:
        (completion,) = completions
        for piece in completion.pieces:
            self._answer.add(piece)
        self._answer.close()
        content = [_block(block, block.text) for block in blocks_of(self._answer.message.whole())]
        message = self._about | {"content": content, "usage": self._usage(completion)} | self._stop(completion)
        return message | joined.report(completion)

    def begin(self) -> list[Json]:
        usage = {"input_tokens": len(self._ask.ids), "output_tokens": 0}
        empty: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [{"type": "message_start", "message": self._about | empty}]

    def piece(self, index: int, piece: Piece) -> list[Json]:
        return [*self._events(self._blocks.add(self._answer.add(piece)))]

    def end(self, index: int, completion: Completion) -> list[Json]:
        events = [*self._events(self._blocks.add(self._answer.close())), *self._events(self._blocks.close())]
        delta = {"type": "message_delta", "delta": self._stop(completion), "usage": self._usage(completion)}
        return [*events, delta | joined.report(completion), {"type": "message_stop"}]

    def error(self, refusal: Refusal) -> Json:
        return error_of(refusal)

    def _events(self, changes: Iterator[tuple[Change, Block, str]]) -> Iterator[Json]:
        for change, block, text in changes:
            about = {"type": f"content_block_{_NAMES[change]}", "index": block.index}
            match change:
                case Change.BEGIN:
                    yield about | {"content_block": _block(block, "")}
                case Change.EXTEND:
                    yield about | {"delta": _delta(block.kind, text)}
                case Change.END:
                    yield about

    def _stop(self, completion: Completion) -> Json:
        if completion.finish is Finish.LENGTH:
            reason = "max_tokens"
        elif self._answer.message.calls:
            reason = "tool_use"
        else:
            reason = "end_turn" if completion.stop is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": completion.stop}

    def _usage(self, completion: Completion) -> Json:
        cached = completion.cached_tokens
        return {
            "input_tokens": len(self._ask.ids) + joined.more_read(completion) - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": joined.written(completion),
        }


def error_of(refusal: Refusal) -> Json:
    """An error in Anthropic's form."""
    kind = _ERRORS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": refusal.message}}


def _block(block: Block, text: str) -> Json:
    match block.kind:
        case Kind.REASONING:
            return {"type": "thinking", "thinking": text, "signature": ""}
        case Kind.TEXT:
            return {"type": "text", "text": text}
        case Kind.CALL:
            return {
                "type": "tool_use",
                "id": block.call_id,
                "name": block.name,
                "input": json.loads(text) if text else {},
            }


def _delta(kind: Kind, text: str) -> Json:
    match kind:
        case Kind.REASONING:
            return {"type": "thinking_delta", "thinking": text}
        case Kind.TEXT:
            return {"type": "text_delta", "text": text}
        case Kind.CALL:
            return {"type": "input_json_delta", "partial_json": text}
