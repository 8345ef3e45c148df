"""An assistant's message of OpenAI's API, whole or as deltas, of what was read in a text."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from capibara.inference.calls.parsing.text import Arguments, Broken, Call, CallEnd, Content, Event, Reasoning

Json = dict[str, Any]
REASONING_KEYS = ("reasoning_content", "reasoning")  # of DeepSeek's API, and of OpenAI's gpt-oss and vLLM


class Message:
    """Collects what was read in one text.

    Args:
      id_chars: length of a call's id; None: any.
      parallel: whether there may be several calls; else those after the first are left out.

    Attributes:
      calls: the complete calls.
    """

    def __init__(self, id_chars: int | None = None, parallel: bool = True):
        self.calls: list[Json] = []
        self._id_chars, self._parallel = id_chars, parallel
        self._content, self._reasoning = "", ""
        self._open: Json | None = None
        self._count = 0

    def add(self, events: Iterable[Event]) -> Json:
        """Adds what was read.

        Returns:
          The delta that says so; empty: there is nothing to say.
        """
        delta: Json = {}
        for event in events:
            if self.calls and not self._parallel and isinstance(event, (Call, Arguments, CallEnd)):
                continue
            match event:
                case Content(text):
                    self._content += text
                    delta["content"] = delta.get("content", "") + text
                case Reasoning(text):
                    self._reasoning += text
                    for key in REASONING_KEYS:
                        delta[key] = delta.get(key, "") + text
                case Call(name, call_id):
                    self._begin(name, call_id, delta)
                case Arguments(text):
                    self._extend(text, delta)
                case CallEnd() if self._open is not None:
                    self.calls.append(self._open)
                case Broken(text, rest):
                    self._content += text
                    delta["content"] = delta.get("content", "") + rest
        return {key: value for key, value in delta.items() if value}

    def _begin(self, name: str, call_id: str | None, delta: Json) -> None:
        number = uuid.uuid4().hex
        new_id = number[: self._id_chars] if self._id_chars else f"call_{number[:24]}"
        self._open = {"id": call_id or new_id, "type": "function", "function": {"name": name, "arguments": ""}}
        first = self._open | {"function": {"name": name, "arguments": ""}}
        delta.setdefault("tool_calls", []).append({"index": self._count, **first})
        self._count += 1

    def _extend(self, text: str, delta: Json) -> None:
        assert self._open is not None, "arguments follow their call"
        self._open["function"]["arguments"] += text
        pieces = delta.setdefault("tool_calls", [])
        if not pieces or pieces[-1]["index"] != self._count - 1:
            pieces.append({"index": self._count - 1, "function": {"arguments": ""}})
        pieces[-1]["function"]["arguments"] += text

    def has(self, kind: type[Event]) -> bool:
        """Whether there is some answer (Content), or some thought (Reasoning), so far."""
        return bool(self._content if kind is Content else self._reasoning)

    def whole(self) -> Json:
        """The message; malformed calls are content, and so are those that were cut off."""
        content = self._content or None if self.calls or self._reasoning else self._content
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message |= dict.fromkeys(REASONING_KEYS, self._reasoning)
        return message | ({"tool_calls": self.calls} if self.calls else {})
