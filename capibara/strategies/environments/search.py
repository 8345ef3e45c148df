"""An environment in which the model searches an index by a tool."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from capibara.config import configurable
from capibara.core.fields import FilePath
from capibara.core.types import UserError
from capibara.retrieval.index import Index
from capibara.retrieval.tool import IndexSearch
from capibara.strategies.environments.environment import Environment, Episode
from capibara.strategies.environments.functions import FunctionTools


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Search(Environment):
    """Answers calls of the tool `search(query)` with the nearest chunks of an index.

    Each record of the data says so to the model: "tools": [{"type": "function", "function": {"name": "search", "parameters":
    {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}}}].

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

    answers_calls = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 1:
            raise UserError(f"Search.k is {self.k}, must be at least 1: try 4")
        if self.result_chars < 1:
            raise UserError(f"Search.result_chars is {self.result_chars}, must be at least 1: try 4000")

    def of_index(self, index: Index) -> FunctionTools:
        """The environment once its index is open."""
        tool = IndexSearch(index, self.k, self.result_chars)
        return FunctionTools(functions=(tool.search,), turns=self.turns, result_chars=self.result_chars)

    def begin(self, record: Mapping[str, Any]) -> Episode:
        raise AssertionError("the run opens the index before its first dialogue")
