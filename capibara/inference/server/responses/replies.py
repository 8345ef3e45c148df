"""Responses of OpenAI's Responses API, whole or as events."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Iterator, Sequence

from capibara.inference.engine.requests.stream import Completion, Finish, Piece
from capibara.inference.server.openai.log_probabilities import token_log_probabilities
from capibara.inference.server.responses import requests
from capibara.inference.server.responses.requests import ResponsesRequest
from capibara.inference.server.service import joined
from capibara.inference.server.service.answers import RequestedText
from capibara.inference.server.service.blocks import Block, Blocks, Change, Kind, blocks_of
from capibara.inference.server.service.chat_answer import ChatAnswer
from capibara.inference.server.service.http_errors import Refusal
from capibara.inference.server.service.reply import Json, TypedReply
from capibara.inference.server.service.service import Served

_PREFIXES = {Kind.REASONING: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}
_EVENTS = {
    Kind.REASONING: "response.reasoning_text",
    Kind.TEXT: "response.output_text",
    Kind.CALL: "response.function_call_arguments",
}


class ResponseReply(TypedReply):
    """The response of POST /v1/responses.

    Args:
      request: the request.
      served: the model.
      asks: the requested text.
    """

    def __init__(self, request: ResponsesRequest, served: Served, asks: Sequence[RequestedText]):
        (self._ask,) = asks
        parallel = request.parallel_tool_calls is not False
        self._request, self._served = request, served
        self._answer = ChatAnswer(self._ask, requests.chat_tools(request), parallel)
        self._blocks, self._ids = Blocks(), dict[int, str]()
        self._unnamed: list[Piece] = []  # those of the next delta
        self._sequence = 0
        self._about: Json = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": {},
            "model": request.model,
            "output": [],
            "parallel_tool_calls": parallel,
            "previous_response_id": None,
            "reasoning": {"effort": None if request.reasoning is None else request.reasoning.effort, "summary": None},
            "status": "in_progress",
            "store": False,
            "temperature": self._ask.sampling.temperature,
            "text": {"format": (request.text and request.text.format) or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_p": self._ask.sampling.top_p or 1.0,
            "truncation": "disabled",
            "usage": None,
        }

    def whole(self, completions: Sequence[Completion]) -> Json:
        (completion,) = completions
        for piece in completion.pieces:
            self._answer.add(piece)
        self._answer.close()
        return self._finished(completion, blocks_of(self._answer.message.whole()))

    def begin(self) -> list[Json]:
        return [
            self._event("response.created", response=self._about),
            self._event("response.in_progress", response=self._about),
        ]

    def piece(self, index: int, piece: Piece) -> list[Json]:
        self._unnamed.append(piece)
        return [*self._changed(self._blocks.add(self._answer.add(piece)))]

    def end(self, index: int, completion: Completion) -> list[Json]:
        events = [*self._changed(self._blocks.add(self._answer.close())), *self._changed(self._blocks.close())]
        response = self._finished(completion, self._blocks.blocks)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def error(self, refusal: Refusal) -> Json:
        return self._event("error", code=refusal.code, message=refusal.message, param=refusal.param)

    def _event(self, kind: str, **fields: object) -> Json:
        event = {"type": kind, "sequence_number": self._sequence} | fields
        self._sequence += 1
        return event

    def _changed(self, changes: Iterator[tuple[Change, Block, str]]) -> Iterator[Json]:
        for change, block, text in changes:
            match change:
                case Change.BEGIN:
                    yield from self._opened(block)
                case Change.EXTEND:
                    named = token_log_probabilities(
                        self._served.vocabulary, self._unnamed if self._request.has_logprobs else ()
                    )
                    self._unnamed.clear()
                    extra: Json = {"logprobs": named} if block.kind is Kind.TEXT else {}
                    yield self._event(f"{_EVENTS[block.kind]}.delta", **self._place(block), delta=text, **extra)
                case Change.END:
                    yield from self._ended(block)

    def _opened(self, block: Block) -> Iterator[Json]:
        empty = dataclasses.replace(block, text="")
        item = self._item(empty, "in_progress") | ({} if block.kind is Kind.CALL else {"content": []})
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind is not Kind.CALL:
            yield self._event("response.content_part.added", **self._place(block), part=_part(empty))

    def _ended(self, block: Block) -> Iterator[Json]:
        place, name = self._place(block), _EVENTS[block.kind]
        if block.kind is Kind.CALL:
            yield self._event(f"{name}.done", **place, name=block.name, arguments=block.text)
        else:
            extra: Json = {"logprobs": []} if block.kind is Kind.TEXT else {}
            yield self._event(f"{name}.done", **place, text=block.text, **extra)
            yield self._event("response.content_part.done", **place, part=_part(block))
        item = self._item(block, "completed")
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _place(self, block: Block) -> Json:
        inner: Json = {} if block.kind is Kind.CALL else {"content_index": 0}
        return {"item_id": self._id(block), "output_index": block.index} | inner

    def _id(self, block: Block) -> str:
        return self._ids.setdefault(block.index, f"{_PREFIXES[block.kind]}_{uuid.uuid4().hex}")

    def _item(self, block: Block, status: str) -> Json:
        about: Json = {"id": self._id(block), "status": status}
        match block.kind:
            case Kind.REASONING:
                return about | {"type": "reasoning", "summary": [], "content": [_part(block)]}
            case Kind.TEXT:
                return about | {"type": "message", "role": "assistant", "content": [_part(block)]}
            case Kind.CALL:
                return about | {
                    "type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": block.text,
                }  # fmt: skip

    def _finished(self, completion: Completion, blocks: Sequence[Block]) -> Json:
        is_cut = completion.finish is Finish.LENGTH
        output = [self._item(block, "completed") for block in blocks]
        if is_cut and output:
            output[-1]["status"] = "incomplete"
        texts = [item for item in output if item["type"] == "message"]
        if self._request.has_logprobs and texts:
            texts[-1]["content"][0]["logprobs"] = token_log_probabilities(self._served.vocabulary, completion.pieces)
        return (
            self._about
            | {
                "status": "incomplete" if is_cut else "completed",
                "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
                "output": output,
                "usage": self._usage(completion),
            }
            | joined.report(completion)
        )

    def _usage(self, completion: Completion) -> Json:
        read, written = len(self._ask.ids) + joined.more_read(completion), joined.written(completion)
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": completion.cached_tokens},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": self._answer.reasoning_tokens},
            "total_tokens": read + written,
        }


def _part(block: Block) -> Json:
    if block.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
