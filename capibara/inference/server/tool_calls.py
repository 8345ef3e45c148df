"""Tool calls in a model's text, as Hermes and Qwen models write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Sequence
from typing import Any

_BEGIN = "<tool_call>"
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def names_of(tools: Sequence[Any]) -> set[str]:
    """The names of a request's tools."""
    return {str((tool.get("function") or tool).get("name")) for tool in tools if isinstance(tool, dict)}


def split(text: str, names: Collection[str]) -> tuple[str, list[dict[str, Any]]]:
    """The text without its calls, and the calls in OpenAI's form; the whole text and none if one of them is not well-formed.

    Args:
      text: of the model.
      names: of the tools that it may call.
    """
    found = [_call(match[1], names) for match in _CALL.finditer(text)]
    calls = [call for call in found if call is not None]
    if not calls or len(calls) < len(found):
        return text, []
    return _CALL.sub("", text).strip(), calls


def _call(text: str, names: Collection[str]) -> dict[str, Any] | None:
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(read, dict) or read.get("name") not in names or not isinstance(read.get("arguments", {}), dict):
        return None
    function = {"name": read["name"], "arguments": json.dumps(read.get("arguments", {}), ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


class CallStream:
    """Holds back the rest of a streamed text from where a call begins, or may begin."""

    def __init__(self) -> None:
        self._text = ""

    def add(self, text: str) -> str:
        """What may be sent of the text until now, with its next part."""
        self._text += text
        end = self._text.find(_BEGIN)
        if end < 0:
            longest = min(len(_BEGIN) - 1, len(self._text))
            partial = (size for size in range(longest, 0, -1) if self._text.endswith(_BEGIN[:size]))
            end = len(self._text) - next(partial, 0)
        sent, self._text = self._text[:end], self._text[end:]
        return sent

    def rest(self, names: Collection[str]) -> tuple[str, list[dict[str, Any]]]:
        """What was held back, as of `split`."""
        return split(self._text, names)
