"""Tools that are called here and not by a client: what they are, and how a call is answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from capibara.inference.calls.parsing.tools import dumped

Json = dict[str, Any]


class ToolResult(NamedTuple):
    """The answer to a call: what the model reads, and what the client is told of it."""

    text: str
    report: Json


class ServedTool(Protocol):
    """A tool that a server calls itself."""

    @property
    def name(self) -> str:
        """As the model calls it."""

    @property
    def schema(self) -> Json:
        """The tool in the form of OpenAI's API."""

    def answer(self, arguments: str) -> ToolResult:
        """The answer to a call with these arguments as JSON, which may be an error; thread-safe."""


def result_of(function: Callable[..., Any], arguments: Any, most: int) -> str:
    """What a function returns for the arguments of a call, as a text of at most `most` characters; or the error.

    Args:
      function: is called with the arguments by their names.
      arguments: an object, or its JSON.
      most: a longer text is cut.
    """
    try:
        # A model may write half of a surrogate pair, which no tokenizer and no response can have.
        values = json.loads(dumped(json.loads(arguments))) if isinstance(arguments, str) else arguments
        result = function(**values)
    except Exception as error:  # whatever a tool raises is what the model is told
        return f"error: {type(error).__name__}: {error}"[:most]
    text = result if isinstance(result, str) else json.dumps(result, default=str)
    return text[:most]
