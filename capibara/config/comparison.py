"""Compares recorded configurations."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from capibara.config.literals import Literals
from capibara.config.moved import selector_now
from capibara.config.registry import minimal
from capibara.config.search import without_macros
from capibara.core.types import AUTO
from gin import config as gin_config
from gin import config_parser


def changes(old: str, new: str) -> dict[str, tuple[str | None, str | None]]:
    """Parameters whose values differ between two operative configurations, with macros resolved.

    A field that the old one lacks and that has its default is no change: the class did not have it then.

    Returns:
      {"Trainer.seed": ("0", "1")}, values as Gin text, None on the side where the parameter is not bound.
    """
    before, after = _values(old), _values(new)
    return {
        name: (before.get(name), after.get(name))
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name) and not (name not in before and after.get(name) == _default(name))
    }


def diff(old: str, new: str) -> list[str]:
    """`changes` as lines to print, "Trainer.seed: 0 -> 1", sorted by parameter."""
    return [
        f"{name}: {'(not set)' if was is None else was} -> {'(not set)' if now is None else now}"
        for name, (was, now) in changes(old, new).items()
    ]


def _values(text: str) -> Mapping[str, str]:
    """Parameter -> value as text, for a Gin file without includes."""
    statements = [
        statement
        for statement in config_parser.ConfigParser(text, Literals())
        if isinstance(statement, config_parser.BindingStatement)
    ]
    macros = {
        "/".join(filter(None, (statement.scope, statement.selector))): statement.value
        for statement in statements
        if not statement.arg_name
    }
    values = {}
    for statement in statements:
        if statement.arg_name:
            matches = gin_config._REGISTRY.matching_selectors(selector_now(statement.selector))
            selector = minimal("", matches[0]) if len(matches) == 1 else statement.selector
            name = f"{'/'.join(filter(None, (statement.scope, selector)))}.{statement.arg_name}"
            value = without_macros(statement.value, macros)
            values[name] = repr(
                _choice(matches[0], statement.arg_name) if value == AUTO and len(matches) == 1 else value
            )
    return values


def _default(name: str) -> str | None:
    """The default of a field, by its name in Gin, as text; None: it has none."""
    owner, _, parameter = name.rpartition("/")[2].rpartition(".")
    matches = gin_config._REGISTRY.matching_selectors(owner)
    if len(matches) != 1:
        return None
    result = getattr(gin_config._REGISTRY[matches[0]].wrapped, "__dataclass_fields__", {}).get(parameter)
    return None if result is None or result.default is dataclasses.MISSING else repr(result.default)


def _choice(selector: str, parameter: str) -> object:
    """The value of a field that is not set, for comparison with records in which it is."""
    result = getattr(gin_config._REGISTRY[selector].wrapped, "__dataclass_fields__", {}).get(parameter)
    choice = AUTO if result is None else result.metadata.get("choice", AUTO)
    return choice.value if isinstance(choice, enum.Enum) else choice
