"""Splits a text into a program and the tests at its end.

`jail` loads this file in the tests' process, where a text that crashes Python's parser does no other harm. It imports only
the standard library, and `ast`, which is slow to import, inside functions. In some versions of Python the parser is not
thread-safe.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ast


def split(text: str) -> tuple[str, str]:
    """Splits a text; returns the program and its tests, which are empty if there are none.

    The tests begin at the function that the last statement calls, if it has assertions or gets another function of the text
    as an argument (`check(add)`). Otherwise they are the assertions at the end that call functions of the text.
    """
    import ast

    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text, ""
    defined = {
        item.name: n
        for n, item in enumerate(body)
        if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    }
    begins = _checked_from(body, defined)
    if begins is None:
        begins = len(body)
        while begins and isinstance(body[begins - 1], ast.Assert) and _calls(body[begins - 1], defined):
            begins -= 1
    if begins == len(body):
        return text, ""
    first = body[begins]
    line = min([first.lineno, *(item.lineno for item in getattr(first, "decorator_list", ()))]) - 1
    if begins and (body[begins - 1].end_lineno or 0) > line:  # program and tests share a line
        return text, ""
    lines = io.StringIO(text, newline=None).readlines()
    return "".join(lines[:line]), "".join(lines[line:])


def _checked_from(body: list[ast.stmt], defined: dict[str, int]) -> int | None:
    """The index of the function that the last statement calls; None: it is not a test."""
    import ast

    call = getattr(body[-1], "value", None) if body and isinstance(body[-1], ast.Expr) else None
    if not isinstance(call, ast.Call) or (index := defined.get(getattr(call.func, "id", ""))) is None:
        return None
    passed = any(isinstance(arg, ast.Name) and arg.id in defined for arg in call.args)
    return index if passed or any(isinstance(item, ast.Assert) for item in ast.walk(body[index])) else None


def _calls(node: ast.AST, names: Mapping[str, int]) -> bool:
    import ast

    calls = (item.func for item in ast.walk(node) if isinstance(item, ast.Call))
    return any(isinstance(func, ast.Name) and func.id in names for func in calls)
