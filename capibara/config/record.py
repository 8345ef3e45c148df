"""Writes a run's configuration as plain bindings (config.gin), and checks one before it is read.

A run folder may come from anyone, so nothing that its config.gin names is imported, included or registered. The file lists
the names of the modules that the run had imported; the user can allow them with --trust_config.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Sequence

import gin
from capibara.core.types import UserError
from gin import config as gin_config

NEVER = ("capibara.evaluation.", "capibara.inference.server.service")  # modules that training never binds ...
BUT = ("capibara.evaluation.seqio_tasks.",)  # ... but for these: Evaluation.task_metrics records SeqioEvaluation
MOST_VALUES = 100_000  # in a recorded configuration after macros and references are expanded
_MOST_BYTES = 1 << 20
_IMPORTS = "RECORDED_IMPORTS"  # a macro that nothing refers to
_NAMED = re.compile(rf"^{_IMPORTS} = (\(.*\))$", re.MULTILINE)


def of(operative: str, modules: Iterable[str]) -> str:
    """The text that a run records: the operative configuration and the names of the user's modules that it needs."""
    if not (named := tuple(sorted({*modules}))):
        return operative
    return (
        "# The user's own modules of this run; reading this file imports none of them (see --trust_config).\n"
        f"{_IMPORTS} = {named!r}\n\n{operative}"
    )


def modules_named(text: str) -> Sequence[str]:
    """The user's own modules that a recorded configuration names."""
    try:
        result = [ast.literal_eval(literal) for literal in _NAMED.findall(text)]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return ()
    return tuple(name for names in result for name in names if isinstance(name, str))


class _Infinity(float):
    """Infinity as a Gin literal, which Gin writes; it leaves out values whose repr is none."""

    def __repr__(self) -> str:
        return f"{'-' * (self < 0)}1e999"


def literal(value: object) -> object:
    """A value whose infinities are written as literals."""
    if isinstance(value, float) and math.isinf(value):
        return _Infinity(value)
    if type(value) is tuple:
        return tuple(map(literal, value))
    if type(value) is list:
        return [*map(literal, value)]
    if type(value) is dict:
        return {key: literal(item) for key, item in value.items()}
    return value


def check_size(text: str, where: str) -> None:
    """Raises UserError if a recorded configuration is larger than any run writes."""
    if len(text) > _MOST_BYTES:
        raise UserError(f"{where} has {len(text):,} characters, must have at most {_MOST_BYTES:,}: no run wrote it")


def check_growth(where: str) -> None:
    """Raises UserError if the bindings are cyclic, or expand to more than MOST_VALUES values."""
    counts: dict[tuple[tuple[str, ...], str], int] = {}
    open_: set[tuple[tuple[str, ...], str]] = set()

    def count(value: object, scopes: tuple[str, ...]) -> int:
        if isinstance(value, gin_config.ConfigurableReference):
            return count_reference(value, tuple(value.scopes) or scopes)
        if isinstance(value, dict):
            value = [inner for pair in value.items() for inner in pair]
        return 1 + (sum(count(inner, scopes) for inner in value) if isinstance(value, (list, tuple)) else 0)

    def count_reference(reference: gin_config.ConfigurableReference, scopes: tuple[str, ...]) -> int:
        key = (scopes, reference.configurable.selector)
        if key in open_:
            raise UserError(f"{where}: {reference} refers to itself: no run wrote this file")
        if key not in counts:
            open_.add(key)
            with gin.config_scope(list(scopes) or None):
                bound = gin_config._get_bindings(reference.configurable.selector)
            counts[key] = 1 + sum(count(inner, scopes) for inner in bound.values())
            open_.discard(key)
            if counts[key] > MOST_VALUES:
                raise UserError(
                    f"{where}: {reference} expands to more than {MOST_VALUES:,} values: no run wrote this file"
                )
        return counts[key]

    try:
        for parameters in [*gin_config._CONFIG.values()]:
            for value in parameters.values():
                count(value, ())
    except RecursionError:
        raise UserError(f"{where}: its references are nested too deep: no run wrote this file") from None


def refused(key: str) -> str:
    """The message on a statement that is not a plain binding."""
    return f"{key} is refused in a recorded configuration: write it in a Gin file of your own (--gin_file)"


def imports_before(modules: Sequence[str]) -> str:
    """A hint for a recorded configuration that is named as a Gin file, and needs modules of the user."""
    names = ", ".join(modules)
    return f"the run imported {names}: name a Gin file before this one that imports {'it' if len(modules) == 1 else 'them'}"


def way_in(modules: Sequence[str]) -> str:
    """A hint for a recorded configuration that needs modules of the user."""
    names = ", ".join(modules)
    return (
        f"the run imported {names}: name a Gin file that imports {'it' if len(modules) == 1 else 'them'} (--gin_file), "
        "or pass --trust_config if you trust this folder"
    )
