"""What Gin may configure, and the objects that it builds."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import gin

if getattr(gin, "__file__", None) is None:
    raise ImportError("the gin library is missing: `import gin` found a folder named gin; run: pip install gin-config")

from capibara.config import search as gin_search
from capibara.core import fields
from capibara.core.errors import unwrap
from capibara.core.types import UserError
from gin import config as gin_config

T = TypeVar("T")

in_scope = gin.config_scope  # a context in which `build` prefers the bindings of a scope to those without one


def is_scope(name: str) -> bool:
    """Whether a Gin file can bind values in a scope of this name."""
    return all(map(gin.config_parser.MODULE_RE.match, name.split("/")))


MODULE = {"capibara": "module"}  # metadata of a dataclass field whose value is a Python module to import

MACRO = "gin.macro"

# (scope, complete selector, parameter) -> "file.gin:12", where it was bound last.
bound_at: dict[tuple[str, str, str], str] = {}
recorded_at: set[str] = set()
"""Where a recorded configuration, of a run or of a model's files, binds parameters."""
registered: set[str] = set()  # selectors that `configurable` registered, not those of other libraries


def configurable(cls: T) -> T:
    """Decorator that lets Gin files bind the fields of a dataclass, or the parameters of a function.

    Python code can construct the class as before. In both cases the fields of a dataclass are checked against their
    annotations before its own __post_init__ (see capibara.core.fields.check).
    """
    assert isinstance(cls, (type, types.FunctionType))
    if isinstance(cls, type) and dataclasses.is_dataclass(cls):
        fields.check_on_creation(cls, _check, gin_search.other_owner)
    selector = f"{cls.__module__}.{cls.__name__}"
    registered.add(selector)
    if selector in gin_config._REGISTRY and gin_config._REGISTRY[selector].wrapped is not cls:
        # The module was imported again (pytest, importlib.reload): the new definition takes the old one's place.
        gin_config._INVERSE_REGISTRY.pop(gin_config._REGISTRY[selector].wrapped, None)
        gin_config._REGISTRY.pop(selector)
    return gin.register(cls)


def _check(instance: Any) -> None:
    cls = type(instance)
    for field in dataclasses.fields(cls):
        if getattr(instance, field.name, None) is gin.REQUIRED:
            raise UserError(_has_no_value(cls.__name__, f"{cls.__module__}.{cls.__name__}", field.name))
    fields.check(instance)


def _has_no_value(name: str, selector: str, parameter: str) -> str:
    """The message for a parameter without a value; suggests the macro that it is bound to, if there is one."""
    for (_, bound), parameters in gin_config._CONFIG.items():
        macro = macro_name(parameters.get(parameter)) if bound == selector else None
        if macro:
            return f"{name}.{parameter} has no value: set it with --gin.{macro}=VALUE"
    others = [bound.rpartition(".")[2] for (_, bound), names in gin_config._CONFIG.items() if parameter in names]
    if hint := gin_search.other_run(name, others):
        return f"{name}.{parameter} has no value, {hint}"
    return f"{name}.{parameter} has no value: bind it in a Gin file or with --gin.{name}.{parameter}=VALUE"


def macro_name(value: object) -> str | None:
    """The name of a reference to a macro; None: the value is none."""
    if isinstance(value, gin_config.ConfigurableReference) and value.configurable.selector == MACRO:
        return "/".join(value.scopes)
    return None


def build(cls: Callable[..., T], **overrides: object) -> T:
    """Creates an instance of a configurable from the parsed bindings; `overrides` win over them.

    Raises:
      UserError: a field of it, or of an object that it refers to, has no value or a wrong one.
    """
    try:
        return gin.get_configurable(cls)(**overrides)
    except Exception as error:
        original = unwrap(error)
        if isinstance(original, fields.FieldError):
            raise UserError(f"{original}{_origin(original)}") from None
        if isinstance(original, UserError):
            raise original from None
        if isinstance(original, RecursionError) and (message := _own_part()):
            raise UserError(message) from None
        if isinstance(original, TypeError) and (message := _missing_arguments(original)):
            raise UserError(message) from None
        raise


def _own_part() -> str | None:
    """The message for a class that is bound as a part of itself, if there is one."""
    for (scope, selector), parameters in gin_config._CONFIG.items():
        for parameter, value in parameters.items():
            for reference in gin_config.iterate_references([value]):
                if reference.configurable.selector == selector:
                    where = bound_at.get((scope, selector, parameter), "")
                    if selector.rpartition(".")[2] == "macro":
                        return (
                            f"{where}: macros lead back to themselves, look at {scope} and {value}: bind another value"
                        )
                    name = f"{selector.rpartition('.')[2]}.{parameter}"
                    return f"{where}: {name} is an object of its own class, {value}, which never ends: bind another"
    return None


def _origin(error: fields.FieldError) -> str:
    for (scope, selector, parameter), where in bound_at.items():
        if parameter == error.field and selector.rpartition(".")[2] == error.owner:
            value = gin_config._CONFIG.get((scope, selector), {}).get(parameter)
            if macro := macro_name(value):
                return f" (from {macro}, {bound_at.get((macro, MACRO, 'value'), where)})"
            return f" ({where})"
    return ""


def _missing_arguments(error: TypeError) -> str | None:
    """Rewords Python's "missing N required arguments"; None: Gin did not make the call."""
    match = re.match(r"(\S+)\(\) missing \d+ required (?:keyword-only|positional) arguments?: (.*)", str(error))
    called_in = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if called_in[-1:] == [fields.__file__]:  # which wraps the constructors
        called_in.pop()
    if not match or not called_in or called_in[-1] not in (gin_config.__file__, __file__):
        return None
    name = match[1].removesuffix(".__init__").rpartition(".")[2]
    parameter = re.findall(r"'(\w+)'", match[2])[0]
    selector = (gin_config._REGISTRY.matching_selectors(name) or [name])[0]
    return _has_no_value(name, selector, parameter)


def reset() -> None:
    """Clears all bindings; configurables stay registered."""
    gin.clear_config()
    bound_at.clear()
    recorded_at.clear()


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Context in which other files may be parsed: afterwards the bindings are those of before."""
    parts = (gin_config._CONFIG, gin_config._SINGLETONS, gin_config._OPERATIVE_CONFIG, bound_at)
    before, names = [dict(part) for part in parts], (gin_config._IMPORTS, recorded_at)
    names_before = [set(part) for part in names]
    try:
        yield
    finally:
        for part, entries in zip(parts, before):
            part.clear()
            part.update(entries)
        for group, members in zip(names, names_before):
            group.clear()
            group.update(members)


def minimal(scope: str, selector: str) -> str:
    """The shortest name of a configurable that is unique, with its scope."""
    return f"{scope}/" * bool(scope) + gin_config._REGISTRY.minimal_selector(selector)
