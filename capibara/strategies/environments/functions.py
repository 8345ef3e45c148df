"""An environment of Python functions that the model calls as tools."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.data.chat.formats import Message
from capibara.inference.calls.served_tool import result_of
from capibara.strategies.environments.environment import Environment, Episode


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionTools(Environment):
    """Answers calls with what functions return, and ends a dialogue at the first message without a call.

    A record names the tools that its prompt shows (`tools`, with their JSON schemas); a call of another one, or one that fails, is
    answered with the error. The functions run in the training process: what a model's code may do belongs in a sandbox.

    Attributes:
      functions: called by name with the arguments of a call; in Gin (@my_tool, ...), without ().
      result_chars: a longer result is cut.
    """

    functions: tuple[Callable[..., Any], ...] = dataclasses.field(default=(), repr=False)
    result_chars: int = 2000

    answers_calls = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.functions:
            raise UserError(
                "FunctionTools.functions is empty: name functions, e.g. FunctionTools.functions = (@my_tool,)"
            )
        if self.result_chars < 1:
            raise UserError(f"FunctionTools.result_chars is {self.result_chars}, must be at least 1: try 2000")

    def begin(self, record: Mapping[str, object]) -> Episode:
        del record
        return _Calls({function.__name__: function for function in self.functions}, self.result_chars)


class _Calls(Episode):
    def __init__(self, functions: Mapping[str, Callable[..., Any]], result_chars: int):
        self._functions, self._result_chars = functions, result_chars

    def step(self, messages: Sequence[Message]) -> list[Message]:
        calls = messages[-1].get("tool_calls") or ()
        return [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": call["function"]["name"],
                "content": self._result(call),
            }
            for call in calls
        ]

    def _result(self, call: Mapping[str, Any]) -> str:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        function = self._functions.get(name)
        if function is None:
            return f"error: there is no tool {name!r}, only {', '.join(self._functions)}"
        return result_of(function, arguments, self._result_chars)
