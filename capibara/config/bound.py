"""What the parsed files and flags bind, and where."""

from __future__ import annotations

import enum
from typing import Any

from capibara.config import search as gin_search
from capibara.config.registry import MACRO, bound_at, macro_name, recorded_at
from gin import config as gin_config


class _Required(enum.Enum):
    REQUIRED = "%gin.REQUIRED"  # as a file writes it


REQUIRED = _Required.REQUIRED  # the value of a macro that must still be given
_REQUIRED = REQUIRED.value


def is_bound(name: str) -> bool:
    """Whether the parsed files or flags bind a class ("DecoderConfig") or a field ("Trainer.model")."""
    return bool(scopes(name))


def scopes(name: str) -> list[str]:
    """The scopes in which a class or field (as in `is_bound`) is bound: "qa" for qa/EvalTask.files, "" for no scope."""
    cls, _, parameter = name.partition(".")
    unset = {m: repr(v["value"]) == _REQUIRED for (m, kind), v in gin_config._CONFIG.items() if kind == MACRO}
    result = [(scope, v) for (scope, kind), v in gin_config._CONFIG.items() if kind.rpartition(".")[2] == cls]
    is_set = lambda v: not unset.get(macro_name(v[parameter])) if parameter in v else v and not parameter  # noqa: E731
    return [scope for scope, v in result if is_set(v)]


def values_of(name: str) -> list[object]:
    """The values to which a field ("Trainer.steps") is bound in any scope, with macros resolved."""
    return [value for value, _ in _bindings(name)]


def macro(name: str) -> object:
    """The value of a macro, with macros in it resolved; None: no file or flag defines it.

    A macro that is `%gin.REQUIRED` still has the value `REQUIRED`.
    """
    value, _ = value_of(name, MACRO, "value")
    return REQUIRED if repr(value) == _REQUIRED else value


def given_at(name: str) -> str | None:
    """Where the user binds a field ("Trainer.steps"); "": nobody does, None: only capibara's own Gin files do."""
    return gin_search.place_of_user([where for _, where in _bindings(name)])


def is_given(name: str) -> bool:
    """Whether Gin files or flags bind a field ("Dataset.length"), and not a recorded configuration alone."""
    return any(where not in recorded_at for _, where in _bindings(name))


def _bindings(name: str) -> list[tuple[Any, str]]:
    cls, parameter = name.split(".")
    named = [at for at, bound in gin_config._CONFIG.items() if at[1].split(".")[-1] == cls and parameter in bound]
    return [value_of(scope, selector, parameter) for scope, selector in named]


def value_of(scope: str, selector: str, parameter: str) -> tuple[Any, str]:
    """A parameter's value with macros resolved, and where it is bound; "" if it is not bound."""
    value = gin_config._CONFIG.get((scope, selector), {}).get(parameter)
    where, seen = bound_at.get((scope, selector, parameter), ""), set()
    while (macro := macro_name(value)) and macro not in seen:
        seen.add(macro)
        where = bound_at.get((macro, MACRO, "value"), where)
        value = gin_config._CONFIG.get((macro, MACRO), {}).get("value")
    return value, where
