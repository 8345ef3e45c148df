"""The tool `search(query)`, by which a model searches an index."""

from __future__ import annotations

import dataclasses
from typing import Any

from capibara.config import configurable
from capibara.core.fields import FilePath
from capibara.core.types import UserError
from capibara.inference.calls.served_tool import ToolResult, result_of
from capibara.retrieval import contexts
from capibara.retrieval.index import Hit, Index

NAME = "search"
_SCHEMA = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Searches documents and returns the passages that are nearest to the query.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchTool:
    """The index that a model searches.

    Attributes:
      index: a folder of `capibara prepare index`.
      k: chunks of a result.
      result_chars: a longer result is cut.
      model: path of the model that has embedded the index; None: where it was then.
    """

    index: FilePath
    k: int = 4
    result_chars: int = 4000
    model: FilePath | None = None

    def __post_init__(self) -> None:
        for name in ("k", "result_chars"):
            if (value := getattr(self, name)) < 1:
                fix = getattr(SearchTool, name)
                raise UserError(f"{type(self).__name__}.{name} is {value}, must be at least 1: try {fix}")


@dataclasses.dataclass(frozen=True)
class IndexSearch:
    """The tool with an open index; thread-safe.

    Attributes:
      index: it.
      k: chunks of a result.
      result_chars: a longer result is cut.
    """

    index: Index
    k: int
    result_chars: int

    name = NAME
    schema = _SCHEMA

    def search(self, query: str) -> str:
        """The nearest chunks, with the files where they are."""
        return contexts.shown(self.index.search(query, self.k))

    def answer(self, arguments: str) -> ToolResult:
        """The answer to a call; the report has the query and where the chunks are, or the arguments and the error."""
        report: dict[str, Any] = {"arguments": arguments}

        def search(query: str) -> str:
            hits = self.index.search(query, self.k)
            report.pop("arguments")
            report.update(query=query, results=[_place(hit) for hit in hits])
            return contexts.shown(hits)

        text = result_of(search, arguments, self.result_chars)
        return ToolResult(text, report if "results" in report else report | {"error": text})


def _place(hit: Hit) -> dict[str, Any]:
    """Where a chunk is, without its text, which the model has."""
    return {key: getattr(hit, key) for key in ("path", "document", "start", "end", "score")}
