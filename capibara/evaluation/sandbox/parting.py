"""Parts a text into a program and the tests at its end.

`jail` loads this file in the tests' process, where a text that breaks Python's parser breaks nothing else: Python's
library alone, `ast` (slow to import) where it is needed. Some versions' parsers must not run in two threads at a time.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ast


def parted(text: str) -> tuple[str, str]:
    """A program's own text and that of its tests, which is empty where there are none.

    They begin at the function that the text's last statement calls, where that asserts something or is given another one
    of the text's names (`check(add)`); else they are the assertions at its end that call what the text defines.
    """
    import ast

    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text, ""
    places = {
        one.name: n
        for n, one in enumerate(body)
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    }
    begins = _checked_from(body, places)
    if begins is None:
        begins = len(body)
        while begins and isinstance(body[begins - 1], ast.Assert) and _calls(body[begins - 1], places):
            begins -= 1
    if begins == len(body):
        return text, ""
    first = body[begins]
    line = min([first.lineno, *(one.lineno for one in getattr(first, "decorator_list", ()))]) - 1
    if begins and (body[begins - 1].end_lineno or 0) > line:  # two statements on a line
        return text, ""
    lines = io.StringIO(text, newline=None).readlines()
    return "".join(lines[:line]), "".join(lines[line:])


def _checked_from(body: list[ast.stmt], places: dict[str, int]) -> int | None:
    """Where the function stands that the last statement calls; None where that is no test."""
    import ast

    call = getattr(body[-1], "value", None) if body and isinstance(body[-1], ast.Expr) else None
    if not isinstance(call, ast.Call) or (place := places.get(getattr(call.func, "id", ""))) is None:
        return None
    given = any(isinstance(one, ast.Name) and one.id in places for one in call.args)
    return place if given or any(isinstance(one, ast.Assert) for one in ast.walk(body[place])) else None


def _calls(node: ast.AST, names: Mapping[str, int]) -> bool:
    import ast

    calls = (one.func for one in ast.walk(node) if isinstance(one, ast.Call))
    return any(isinstance(func, ast.Name) and func.id in names for func in calls)
