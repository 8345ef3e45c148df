"""An environment in which the model searches an index by a tool."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from capibara.config import configurable
from capibara.retrieval.index import Index
from capibara.retrieval.tool import IndexSearch, SearchTool
from capibara.strategies.environments.environment import Environment, Episode
from capibara.strategies.environments.functions import FunctionTools


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Search(SearchTool, Environment):
    """Answers calls of the tool `search(query)` with the nearest chunks of an index.

    Each record of the data says so to the model: "tools": [{"type": "function", "function": {"name": "search", "parameters":
    {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}}}].
    """

    answers_calls = True

    def __post_init__(self) -> None:
        Environment.__post_init__(self)
        SearchTool.__post_init__(self)

    def of_index(self, index: Index) -> FunctionTools:
        """The environment once its index is open."""
        tool = IndexSearch(index, self.k, self.result_chars)
        return FunctionTools(functions=(tool.search,), turns=self.turns, result_chars=self.result_chars)

    def begin(self, record: Mapping[str, object]) -> Episode:
        raise AssertionError("the run opens the index before its first dialogue")
