"""The search tool: what a call returns, and what is refused."""

from __future__ import annotations

import types

import pytest

from capibara.core.types import UserError
from capibara.retrieval.index import Hit
from capibara.strategies.environments.search import Search


def hits(query, k):
    return [Hit(chunk=i, score=1.0, path="a.md", document=1, start=0, end=9, text=f"{query} {i}") for i in range(k)]


def call(name, arguments):
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "assistant", "content": None, "tool_calls": [call]}]


def test_a_call_returns_the_nearest_chunks():
    environment = Search(index="data/docs", k=2, turns=3).of_index(types.SimpleNamespace(search=hits))
    (message,) = environment.begin({}).step(call("search", '{"query": "locks"}'))
    assert message["content"] == "[1] a.md:\nlocks 0\n\n[2] a.md:\nlocks 1"
    assert environment.turns == 3 and environment.answers_calls
    (message,) = environment.begin({}).step(call("search", "{}"))
    assert message["content"].startswith("error: TypeError")
    assert environment.begin({}).step([{"role": "assistant", "content": "done"}]) == []


def test_a_result_is_cut_where_the_options_say():
    for result_chars in (5, 3000):
        environment = Search(index="data/docs", k=1, result_chars=result_chars)
        environment = environment.of_index(types.SimpleNamespace(search=hits))
        (message,) = environment.begin({}).step(call("search", '{"query": "' + "x" * 4000 + '"}'))
        assert len(message["content"]) == result_chars


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"k": 0}, "Search.k is 0, must be at least 1"),
        ({"result_chars": 0}, "Search.result_chars is 0"),
        ({"turns": 0}, "Search.turns is 0"),
    ],
)
def test_options_are_checked(options, error):
    with pytest.raises(UserError, match=error):
        Search(index="data/docs", **options)
