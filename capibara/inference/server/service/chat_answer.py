"""One answer of a chat: content, reasoning and tool calls in a model's text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from capibara.inference.calls.message import Message
from capibara.inference.calls.parsing.text import Arguments, Broken, Call, CallEnd, Content, Event, Reasoning
from capibara.inference.engine.requests.stream import Piece
from capibara.inference.server.service.answers import RequestedText
from capibara.inference.server.service.joined import NextTurn
from capibara.inference.server.service.reply import Json

_GAP = "\n\n"  # between the texts of several turns


class ChatAnswer:
    """Reads one answer of a chat, piece by piece; calls of the server's own tool are no part of it.

    Args:
      ask: the requested text.
      tools: of the request.
      parallel: whether there may be several calls.

    Attributes:
      message: what was read.
      reads_thoughts: whether thoughts are apart.
      reasoning_tokens: number of tokens of thoughts and their tags.
    """

    def __init__(self, ask: RequestedText, tools: Sequence[Any], parallel: bool):
        dialect = ask.dialect
        assert dialect is not None, "an answer of a chat has one"
        form = dialect.form
        self.message = Message(None if form is None else form.id_chars, parallel)
        self.reads_thoughts = dialect.tags is not None or (form is not None and form.covers_answer)
        self.reasoning_tokens = 0
        self._dialect, self._tool = dialect, None if ask.tool is None else ask.tool.name
        self._tools = [*tools, *([] if ask.tool is None else [ask.tool.schema])]
        self._reader = dialect.reader(self._tools, ask.thinks)
        self._hides = False  # the call that is read
        self._gap_before: set[type[Event]] = set()

    def add(self, piece: Piece) -> Json:
        """Adds a piece; returns the delta."""
        if isinstance(piece, NextTurn):
            delta = self.close()
            self._reader, self._gap_before = self._dialect.reader(self._tools, piece.thinks), {Content, Reasoning}
            return delta
        thinks = self._reader.thinks
        events = self._reader.add(piece.text)
        self.reasoning_tokens += piece.token is not None and (thinks or self._reader.thinks)
        return self.message.add(self._shown(events))

    def close(self) -> Json:
        """Ends the text; returns the last delta."""
        return self.message.add(self._shown(self._reader.close()))

    def _shown(self, events: Iterable[Event]) -> Iterator[Event]:
        """What the client reads of them."""
        for event in events:
            match event:
                case Call(name):
                    self._hides = name == self._tool
                case Broken(text) if self._hides:  # the client has nothing of it yet
                    event, self._hides = Broken(text, text), False
            if not (self._hides and isinstance(event, Call | Arguments | CallEnd)):
                yield self._after_gap(event)

    def _after_gap(self, event: Event) -> Event:
        kind = type(event)
        if kind in self._gap_before and isinstance(event, Content | Reasoning) and event.text:
            self._gap_before.discard(kind)
            if self.message.has(kind):
                return event._replace(text=_GAP + event.text)
        return event
