"""One answer of a chat: content, reasoning and tool calls in a model's text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from capibara.inference.calls.message import Message
from capibara.inference.engine.requests.stream import Piece
from capibara.inference.server.service.reply import Json
from capibara.inference.server.service.service import RequestedText


class ChatAnswer:
    """Reads one answer of a chat, piece by piece.

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
        self._reader = dialect.reader(tools, ask.thinks)

    def add(self, piece: Piece) -> Json:
        """Adds a piece; returns the delta."""
        thinks = self._reader.thinks
        events = self._reader.add(piece.text)
        self.reasoning_tokens += piece.token is not None and (thinks or self._reader.thinks)
        return self.message.add(events)

    def close(self) -> Json:
        """Ends the text; returns the last delta."""
        return self.message.add(self._reader.close())
