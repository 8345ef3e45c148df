"""Answers of chats whose model calls the server's own tool: each call is answered, and the model goes on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from capibara.inference.calls.served_tool import ServedTool
from capibara.inference.engine.requests.stream import Completion, Finish, Piece
from capibara.inference.server.service import threads
from capibara.inference.server.service.answers import Course, LongAnswer, RequestedText
from capibara.inference.server.service.chat_answer import ChatAnswer
from capibara.inference.server.service.joined import JoinedCompletion, NextTurn
from capibara.inference.server.service.reply import Json

REPORT = "searches"  # the field of a response that tells of the calls


@dataclasses.dataclass(frozen=True)
class Searching(Course):
    """The answer after calls of a tool.

    Attributes:
      tool: that the server calls.
      rounds: how often it is called, all calls of one text together.
      tools: those of the request.
      parallel: whether a text may have several calls.
      limit: most tokens of all texts; None: as many as fit.
      asking: the text that is requested after more messages, when so many tokens are written.
    """

    tool: ServedTool
    rounds: int
    tools: Sequence[Any]
    parallel: bool
    limit: int | None
    asking: Callable[[Sequence[Json], int], RequestedText]

    @property
    def texts(self) -> int:
        return 1

    async def items(self, ask: RequestedText, answer: LongAnswer) -> AsyncIterator[Piece | Completion]:
        asks, ends, messages, reports = [ask], list[Completion](), list[Json](), list[Json]()
        while True:
            async for _, item in answer.draw(asks[-1:]):
                if isinstance(item, Completion):
                    ends.append(item)
                else:
                    yield item
            message = self._message(asks[-1], ends[-1])
            calls = [call for call in message.get("tool_calls", ()) if call["function"]["name"] == self.tool.name]
            written = sum(len(end.tokens) for end in ends)
            if why := self._unanswered(message, len(calls), len(ends), written):
                reports += [_arguments(call) | {"error": f"not answered: {why}"} for call in calls]
            if why or not calls:
                break
            # One by one: searches of others go between them, and none follows a client that has left.
            answering = [functools.partial(self.tool.answer, _text(call)) for call in calls]
            results = [await answer.call(threads.READING, function) for function in answering]
            reports += [result.report for result in results]
            messages += [message, *(_result(call, result.text) for call, result in zip(calls, results))]
            asks.append(await answer.call(threads.PREPARING, lambda: self.asking(messages, written)))
            yield NextTurn(thinks=asks[-1].thinks)
        yield _joined(asks, ends, reports, is_cut=why == self._no_room)

    def _message(self, ask: RequestedText, end: Completion) -> Json:
        """The model's message with all its calls."""
        answer = ChatAnswer(dataclasses.replace(ask, tool=None), [*self.tools, self.tool.schema], self.parallel)
        for piece in end.pieces:
            answer.add(piece)
        answer.close()
        return answer.message.whole()

    @property
    def _no_room(self) -> str:
        return f"at most {self.rounds} rounds (ServerConfig.search_rounds), and the tokens of the request"

    def _unanswered(self, message: Json, calls: int, turns: int, written: int) -> str:
        """Why the calls of a message are not answered; empty: they are."""
        if not calls:
            return ""
        if len(message["tool_calls"]) > calls:
            return "the message also calls tools of the client"
        is_full = self.limit is not None and written >= self.limit
        return self._no_room if turns > self.rounds or is_full else ""


def _text(call: Json) -> str:
    arguments: str = call["function"]["arguments"]
    return arguments


def _arguments(call: Json) -> Json:
    return {"arguments": _text(call)}


def _result(call: Json, text: str) -> Json:
    return {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}


def _joined(
    asks: Sequence[RequestedText], ends: Sequence[Completion], reports: Sequence[Json], is_cut: bool
) -> JoinedCompletion:
    """The end of an answer from several texts."""
    pieces: list[Piece] = []
    for number, (ask, end) in enumerate(zip(asks, ends)):
        pieces += [*([NextTurn(thinks=ask.thinks)] if number else []), *end.pieces]
    last = ends[-1]
    return JoinedCompletion(
        text="".join(end.text for end in ends),
        pieces=tuple(pieces),
        finish=Finish.LENGTH if is_cut else last.finish,
        prompt_tokens=sum(end.prompt_tokens for end in ends),
        unread=sum(end.unread for end in ends),
        cached_tokens=sum(end.cached_tokens for end in ends),
        waited_s=ends[0].waited_s,
        elapsed_s=sum(end.elapsed_s for end in ends),
        ending=last.ending,
        stop=last.stop,
        more_read=sum(len(ask.ids) for ask in asks[1:]),
        report={REPORT: list(reports)},
    )
