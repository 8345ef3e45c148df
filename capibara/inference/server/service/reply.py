"""What every API makes of texts: one response, or the events of a stream."""

from __future__ import annotations

import abc
import json
from collections.abc import Sequence
from typing import Any

from capibara.inference.engine.requests.stream import Completion, Piece
from capibara.inference.server.service.http_errors import Refusal

Json = dict[str, Any]


class Reply(abc.ABC):
    """The response to one request, whole or as the events of a stream.

    Attributes:
      last: what ends a stream.
    """

    last = ""

    @abc.abstractmethod
    def whole(self, completions: Sequence[Completion]) -> Json:
        """The complete response."""

    def begin(self) -> list[Json]:
        """The events before the first piece."""
        return []

    @abc.abstractmethod
    def piece(self, index: int, piece: Piece) -> list[Json]:
        """The events for one piece of a text; empty: it adds nothing yet."""

    @abc.abstractmethod
    def end(self, index: int, completion: Completion) -> list[Json]:
        """The events at the end of a text."""

    def close(self, completions: Sequence[Completion]) -> list[Json]:
        """The events after all texts."""
        del completions
        return []

    def written(self, event: Json) -> str:
        """A server-sent event."""
        return f"data: {json.dumps(event)}\n\n"

    def error(self, refusal: Refusal) -> Json:
        """An error as an event, and as the body of a response."""
        return refusal.body


class TypedReply(Reply):
    """A reply whose events are named by their type."""

    def written(self, event: Json) -> str:
        return f"event: {event['type']}\n{super().written(event)}"
