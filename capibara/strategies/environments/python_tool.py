"""An environment in which the model runs Python by a tool."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.sandbox import sandbox
from capibara.sandbox.sandbox import Program, Sandbox
from capibara.strategies.environments.environment import Environment, Episode
from capibara.strategies.environments.functions import FunctionTools

# Runs a text as an interpreter does, in the sandbox: parsing it may need all memory, too. A sandbox keeps one stream, of errors.
_INTERPRETER = """
import ast, io, sys
sys.stdout = sys.stderr = io.TextIOWrapper(open(2, "wb", buffering=0, closefd=False), "utf-8", write_through=True)
names = {{"__name__": "__main__"}}
tree = ast.parse({code!r}, "<python>")
last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
exec(compile(tree, "<python>", "exec"), names)
if last is not None and (value := eval(compile(ast.Expression(last.value), "<python>", "eval"), names)) is not None:
    print(repr(value))
"""


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class PythonTool(Environment):
    """Answers calls of the tool `python(code)` with what the code prints, and the value of its last expression.

    Each call is a process of its own in a `sandbox`, which remembers nothing of earlier calls. Each record of the data says so
    to the model: "tools": [{"type": "function", "function": {"name": "python", "parameters": {"type": "object", "properties":
    {"code": {"type": "string"}}, "required": ["code"]}}}].

    Attributes:
      limits: of a program.
      result_chars: a longer result is cut.
    """

    limits: Sandbox = Sandbox()
    result_chars: int = 2000

    answers_calls = concurrent = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.result_chars < 1:
            raise UserError(f"PythonTool.result_chars is {self.result_chars}, must be at least 1: try 2000")

    def begin(self, record: Mapping[str, object]) -> Episode:
        def python(code: str) -> str:
            return self.result(code)

        return FunctionTools(functions=(python,), turns=self.turns, result_chars=self.result_chars).begin(record)

    def result(self, code: str) -> str:
        """What a program prints, and its error."""
        outcome = sandbox.run(Program(code=_INTERPRETER.format(code=code)), self.limits)
        printed = outcome.errors
        if not outcome.passed and outcome.reason not in printed:
            printed += f"error: {outcome.reason}"
        return printed
