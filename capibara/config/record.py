"""What a run records of its configuration: bindings as data, and what keeps them so when they are read again.

A run folder may come from anyone. So nothing that its config.gin names is imported, included or registered; the modules
that the run did import stand in it as names, which the user may vouch for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from typing import Any

import gin
from capibara.core.types import UserError
from gin import config as gin_config

NEVER = ("capibara.evaluation.", "capibara.inference.server.service")  # modules of which training binds nothing
MOST_VALUES = 100_000  # that a recorded configuration comes to with all macros and references put in
_MOST_BYTES = 1 << 20
_IMPORTS = "RECORDED_IMPORTS"  # a macro that nothing refers to
_NAMED = re.compile(rf"^{_IMPORTS} = (\(.*\))$", re.MULTILINE)


def of(operative: str, modules: Iterable[str]) -> str:
    """An operative configuration without imports as a run records it: with the names of the modules that it needs."""
    if not (named := tuple(sorted({*modules}))):
        return operative
    return (
        "# The user's own modules of this run; reading this file imports none of them (see --trust_config).\n"
        f"{_IMPORTS} = {named!r}\n\n{operative}"
    )


def modules_named(text: str) -> Sequence[str]:
    """The user's own modules that a recorded configuration names."""
    try:
        found = [ast.literal_eval(literal) for literal in _NAMED.findall(text)]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return ()
    return tuple(name for names in found for name in names if isinstance(name, str))


def check_size(text: str, where: str) -> None:
    """Raises UserError where a recorded configuration is larger than any run writes."""
    if len(text) > _MOST_BYTES:
        raise UserError(f"{where} has {len(text):,} characters, must be at most {_MOST_BYTES:,}: it is no run's record")


def check_growth(where: str) -> None:
    """Raises UserError where the bindings refer to themselves, or come to very many values with all references put in."""
    counts: dict[tuple[tuple[str, ...], str], int] = {}
    open_: set[tuple[tuple[str, ...], str]] = set()

    def count(value: Any, scopes: tuple[str, ...]) -> int:
        if isinstance(value, gin_config.ConfigurableReference):
            return count_reference(value, tuple(value.scopes) or scopes)
        if isinstance(value, dict):
            value = [inner for pair in value.items() for inner in pair]
        return 1 + (sum(count(inner, scopes) for inner in value) if isinstance(value, (list, tuple)) else 0)

    def count_reference(reference: gin_config.ConfigurableReference, scopes: tuple[str, ...]) -> int:
        key = (scopes, reference.configurable.selector)
        if key in open_:
            raise UserError(f"{where}: {reference} refers to itself: it is no run's record")
        if key not in counts:
            open_.add(key)
            with gin.config_scope(list(scopes) or None):
                bound = gin_config._get_bindings(reference.configurable.selector)
            counts[key] = 1 + sum(count(inner, scopes) for inner in bound.values())
            open_.discard(key)
            if counts[key] > MOST_VALUES:
                raise UserError(
                    f"{where}: {reference} comes to more than {MOST_VALUES:,} values: it is no run's record"
                )
        return counts[key]

    try:
        for parameters in [*gin_config._CONFIG.values()]:
            for value in parameters.values():
                count(value, ())
    except RecursionError:
        raise UserError(f"{where}: its references are nested too deep: it is no run's record") from None


def refused(what: str) -> str:
    """The end of a message on a statement that is no data."""
    return f"{what} is refused: a recorded configuration is data; bind it in a Gin file of your own (--gin_file)"


def way_in(modules: Sequence[str]) -> str:
    """What to do where a recorded configuration needs modules of the user's."""
    names = ", ".join(modules)
    return (
        f"the run imported {names}: name a Gin file that imports {'it' if len(modules) == 1 else 'them'} (--gin_file), "
        "or give --trust_config if you trust this folder"
    )
