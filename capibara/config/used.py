"""What objects have used so far: the operative configuration, saved with the run, and bindings without effect."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gin
from capibara.config import record as gin_record
from capibara.config import search as gin_search
from capibara.config.bound import value_of
from capibara.config.registry import MACRO, bound_at, macro_name, minimal
from capibara.config.written import Difference
from capibara.core.types import UserError
from gin import config as gin_config


def operative(changed: Sequence[Difference] = ()) -> str:
    """All parameters used so far, defaults included, as the text that a run records: only bindings, no imports.

    Args:
      changed: fields of objects that were built, whose values have changed since.

    Parameters of functions that are passed as values (`Grpo.rewards = (@exact_answer,)`) count as used: they are called
    later.
    """
    _add_called_later()
    for (_, selector), parameters in gin_config._OPERATIVE_CONFIG.items():
        wrapped = gin_config._REGISTRY[selector].wrapped
        if isinstance(wrapped, type) and dataclasses.is_dataclass(wrapped):
            for field in dataclasses.fields(wrapped):
                # Gin leaves out defaults whose repr is not a literal; the value of an enum is one.
                if field.init and isinstance(field.default, enum.Enum):
                    parameters.setdefault(field.name, field.default.value)
    _change(changed)
    for parameters in gin_config._OPERATIVE_CONFIG.values():
        parameters.update({name: gin_record.literal(value) for name, value in parameters.items()})
    imports, modules = [*gin_config._IMPORTS], imported_modules()
    gin_config._IMPORTS.clear()  # a record has no imports: see record.py
    try:
        text = gin.operative_config_str(max_line_length=100)
    finally:
        gin_config._IMPORTS.update(imports)
    return gin_record.of(text, modules)


def origins(changed: Sequence[Difference] = (), by: str = "") -> dict[str, tuple[str, str]]:
    """Where the values come from that objects have used and that are no defaults.

    Args:
      changed: as for `operative`, which is called first.
      by: what has changed these fields, such as "--emulate=8".

    Returns:
      {"Trainer.steps": ("20", "command line")}: a value as Gin text, and its file and line, its flag, or `by` with these.
    """
    replaced = {(key, field) for key, field, _ in _places(changed)}
    result = {}
    for (scope, selector), parameters in gin_config._OPERATIVE_CONFIG.items():
        if selector == MACRO:
            continue
        for name, value in parameters.items():
            where = _bound_in(scope, selector, name)
            if ((scope, selector), name) in replaced:
                where = f"{by} (was set: {where})" if where else by
            if where:
                result[f"{minimal(scope, selector)}.{name}"] = (repr(_resolved(value)[0]), where)
    return result


def _bound_in(scope: str, selector: str, parameter: str) -> str:
    """Where the binding is that counts in a scope, an outer one included; "" if there is none."""
    parts = scope.split("/") if scope else []
    for count in range(len(parts), -1, -1):
        _, where = value_of("/".join(parts[:count]), selector, parameter)
        if where:
            return gin_search.shown_place(where)
    return ""


def _change(changed: Sequence[Difference]) -> None:
    """Replaces what objects have used by values that they have now, and drops macros that nothing uses any more."""
    noted = gin_config._OPERATIVE_CONFIG
    for key, field, value in _places(changed):
        noted[key][field] = value
    while changed:  # a macro may be used by another alone
        used = {macro_name(item) for item in gin_config.iterate_references(noted)}
        dropped = [key for key in noted if key[1] == MACRO and key[0] not in used]
        for key in dropped:
            del noted[key]
        if not dropped:
            break


def _places(changed: Sequence[Difference]) -> Iterator[tuple[tuple[str, str], str, object]]:
    """For each field that has changed: the scope and selector of its object, its name, and its value.

    Raises:
      UserError: a function of the user's makes the object.
    """
    for item in changed:
        key = ("", gin_config._INVERSE_REGISTRY[item.path[0][0]].selector)
        for (owner, field), (inner, _) in itertools.pairwise(item.path):
            reference, macro = _resolved(gin_config._OPERATIVE_CONFIG[key].get(field))
            made_by = getattr(reference, "configurable", None)
            if made_by is None or made_by.wrapped is not inner:
                source = f"made by {made_by.name}()" if made_by else "a default"
                raise UserError(
                    f"{owner.__name__}.{field} is {source}, so that neither --emulate nor the planner can change it: bind "
                    f"@{inner.__name__}() and its fields"
                )
            # Gin makes the value of a macro in a scope of its name.
            key = ("/".join(reference.scopes) or macro or key[0], made_by.selector)
        yield key, item.path[-1][1], item.literal


def _resolved(value: Any) -> tuple[Any, str]:
    """The value behind macros, and the name of the last of them; "" if there is none."""
    last = ""
    while macro := macro_name(value):
        last = macro
        value = gin_config._CONFIG[macro, MACRO]["value"]
    return value, last


def imported_modules() -> set[str]:
    """The user's own modules that the parsed Gin files import."""
    return {item.module for item in gin_config._IMPORTS if item.module.partition(".")[0] not in ("capibara", "__gin__")}


def _add_called_later() -> None:
    """Marks the parameters of functions that are passed as values as used, as Gin does when they are called."""
    noted = gin_config._OPERATIVE_CONFIG
    waiting = [item for item in gin_config.iterate_references(noted) if not item.evaluate]
    while waiting:
        reference = waiting.pop()
        result, key = reference.configurable, ("/".join(reference.scopes), reference.configurable.selector)
        if key in noted:
            continue
        made_by = gin_config._find_class_construction_fn
        called = made_by(result.wrapped) if inspect.isclass(result.wrapped) else result.wrapped
        with gin.config_scope(key[0] or None):
            bound = gin_config._get_bindings(result.selector)
        defaults = gin_config._get_default_configurable_parameter_values(called, result.allowlist, result.denylist)
        noted[key] = defaults | bound
        waiting += gin_config.iterate_references(bound)


def unused() -> list[str]:
    """Bindings that no object built so far has used, as "Plan.tensor (file.gin:3)"; without macros."""
    return [f"{name} ({where})" for _, name, where in _unread()]


def check_used(later: Sequence[Callable[..., Any]] = ()) -> list[str]:
    """Applies `search.check_used` to all bindings, except those of functions that are called `later`.

    Call it when all configured objects are built.
    """
    built = [gin_config._REGISTRY[selector].wrapped for _, selector in gin_config._OPERATIVE_CONFIG]
    unread = [item for item in _unread() if item[0] not in map(inspect.unwrap, later)]
    return gin_search.check_used(unread, built, [result.wrapped for _, result in gin_config._REGISTRY.items()])


def _unread() -> list[tuple[Any, str, str]]:
    read = {(selector, name) for (_, selector), names in gin_config._OPERATIVE_CONFIG.items() for name in names}
    return [
        (gin_config._REGISTRY[selector].wrapped, f"{minimal(scope, selector)}.{name}", where)
        for (scope, selector, name), where in bound_at.items()
        if selector != MACRO and (selector, name) not in read
    ]
