"""Objects as Gin text: the way back from a configuration that Python code has made to the bindings that build it."""

from __future__ import annotations

import collections
import dataclasses
import enum
import inspect
import itertools
import json
import math
import pathlib
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeGuard, TypeVar

from capibara.config.parsing import parse
from capibara.config.registry import build
from capibara.core import fields
from capibara.core.types import Dataclass, UserError
from gin import config as gin_config

T = TypeVar("T")


def text_of(*objects: Dataclass) -> str:
    """A Gin file that builds objects equal to these, each by its class: imports, and fields that are not the defaults.

    Args:
      objects: of configurable dataclasses, one of each class.

    Raises:
      UserError: Gin text cannot hold a value.
    """
    written = _of(objects)
    for item in objects:
        if written.scope(item):
            raise UserError(
                f"{type(item).__name__} is there several times, and at most one of each class can be configured: leave out others"
            )
    imports = "".join(f"import {module}\n" for module in sorted(written.modules))
    return imports + "\n\n".join("\n".join(part) for part in written.parts()) + "\n"


def read(cls: type[T], text: Sequence[str]) -> T:
    """The object of a class that the lines of a text of `text_of` hold; clears all bindings."""
    parse((), text)
    return build(cls)


def unnamed(*objects: Dataclass) -> list[str]:
    """Names of the classes and functions in these objects that no module defines: those of a script, a notebook or a function."""
    written = _of(objects)
    collections.deque(written.parts(), maxlen=0)
    return sorted(written.unnamed)


def check_same(built: Dataclass, expected: Dataclass) -> None:
    """Raises UserError that names the first field in which an object differs from the one whose Gin text built it."""
    for field in dataclasses.fields(expected):
        got, value = getattr(built, field.name), getattr(expected, field.name)
        if _same(got, value):
            continue
        if _is_object(got) and _is_object(value) and type(got) is type(value):
            check_same(got, value)
        raise UserError(
            f"{type(expected).__name__}.{field.name} is {fields.short(value)}, and Gin text makes {fields.short(got)} of it: set "
            "another value, or train from Gin files"
        )


@dataclasses.dataclass(frozen=True)
class Difference:
    """A field in which two objects differ.

    Attributes:
      path: (class, field) pairs from the root to the field, such as (Trainer, "model"), (DecoderConfig, "embed_dim").
      value: the new value.
    """

    path: tuple[tuple[type, str], ...]
    value: object

    @property
    def literal(self) -> object:
        """The value as Gin has it."""
        return self.value.value if isinstance(self.value, enum.Enum) else self.value

    @property
    def line(self) -> str:
        """The difference as Gin text."""
        owner, field = self.path[-1]
        return f"{owner.__name__}.{field} = {self.literal!r}"


def differences(old: Dataclass, new: Dataclass) -> list[Difference]:
    """The fields in which an object differs from an older one; those of objects of one class are compared in turn."""
    result = []
    for field in dataclasses.fields(new):
        before, after = getattr(old, field.name), getattr(new, field.name)
        step = (type(new), field.name)
        if _is_object(before) and _is_object(after) and type(before) is type(after):
            result += [Difference((step, *item.path), item.value) for item in differences(before, after)]
        elif not _same(before, after):
            result.append(Difference((step,), after))
    return result


def bindings(instance: Dataclass, scope: str = "") -> list[str]:
    """The lines that bind a dataclass and those in it, as far as they differ from the defaults, without imports.

    Args:
      instance: the dataclass.
      scope: in which they are bound, such as "teacher": then with the defaults too, so that no binding outside of the scope
        counts.
    """
    written = _Written(scope)
    written.add(instance, "", type(instance).__name__)
    return [line for part in written.parts() for line in ("", *part)][1:]


def _of(objects: Iterable[Dataclass]) -> _Written:
    written = _Written()
    for item in objects:
        written.add(item, "", type(item).__name__)
    return written


class _Written:
    """The objects of a configuration, with the scopes in which they are bound.

    Attributes:
      modules: the user's own ones that define the classes and functions.
      unnamed: the classes and functions that no module defines.
    """

    def __init__(self, scope: str = "") -> None:
        self._outer = f"{scope}/" if scope else ""
        self._objects: list[tuple[Dataclass, str]] = []  # in the order of the text, with the name of their field
        self.modules: set[str] = set()
        self.unnamed: set[str] = set()

    def add(self, instance: Dataclass, field: str, where: str) -> None:
        """Adds an object and those in it; equal objects are one."""
        self._selector(type(instance), where)
        if any(_same(instance, other) for other, _ in self._objects):
            return
        self._objects.append((instance, field))
        for name, value in self._fields(instance):
            for inner in _objects_in(value):
                self.add(inner, name, f"{type(instance).__name__}.{name}")

    def scope(self, instance: Dataclass) -> str:
        """The scope of an object's bindings, with a slash; within the outer one empty if no other object is of its class."""
        of_class = [(entry, field) for entry, field in self._objects if type(entry) is type(instance)]
        if len(of_class) == 1:
            return self._outer
        used: list[str] = []
        for item, field in of_class:
            names = (f"{field or 'main'}{'' if n == 1 else n}" for n in itertools.count(1))
            used.append(next(name for name in names if name not in used))
            if _same(item, instance):
                break
        return f"{self._outer}{used[-1]}/"

    def parts(self) -> Iterator[list[str]]:
        """The bindings of each object that has any."""
        for instance, _ in self._objects:
            selector, scope = self._selector(type(instance), ""), self.scope(instance)
            lines = [
                f"{scope}{selector}.{name} = {self._literal(value, f'{type(instance).__name__}.{name}')}"
                for name, value in self._fields(instance)
            ]
            if lines:
                yield lines

    def _fields(self, instance: Dataclass) -> Iterator[tuple[str, object]]:
        """Names and values of the fields that are bound."""
        if not self._outer:
            yield from _changed(instance)
            return
        yield from ((field.name, getattr(instance, field.name)) for field in dataclasses.fields(instance) if field.init)

    def _literal(self, value: object, where: str) -> str:
        match value:
            case enum.Enum():
                return self._literal(value.value, where)
            case str() | pathlib.PurePath():
                return _string(str(value), where)
            case None | True | False:
                return repr(value)
            case int():
                return int.__repr__(value)
            case float() if not math.isnan(value):
                return float.__repr__(value) if math.isfinite(value) else f"{'-' * (value < 0)}1e999"
            case tuple():
                inner = [self._literal(item, where) for item in value]
                return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
            case list():
                return f"[{', '.join(self._literal(item, where) for item in value)}]"
            case dict():
                pairs = (f"{self._literal(key, where)}: {self._literal(item, where)}" for key, item in value.items())
                return f"{{{', '.join(pairs)}}}"
            case types.FunctionType():
                return f"@{self._selector(value, where)}"
        if _is_object(value):
            return f"@{self.scope(value)}{self._selector(type(value), where)}()"
        raise UserError(
            f"{where} is {fields.short(value)}, which Gin text cannot hold: it holds numbers but nan, strings, sequences, and objects of "
            "dataclasses and functions that are marked with @capibara.config.configurable"
        )

    def _selector(self, target: type | types.FunctionType, where: str) -> str:
        """The shortest name of a class or function that Gin knows."""
        target = inspect.unwrap(target)  # Gin wraps functions that it has resolved
        if (known := gin_config._INVERSE_REGISTRY.get(target)) is None:
            raise UserError(
                f"{where} has {target.__name__} of {target.__module__}, which Gin does not know: mark it with "
                "@capibara.config.configurable, and make the object after that"
            )
        is_bound = any(selector == known.selector for _, selector in gin_config._CONFIG)
        if is_bound and isinstance(target, types.FunctionType):
            raise UserError(
                f"{where} has {target.__name__}, whose parameters Gin has bound, which are not part of it: train from Gin files"
            )
        if target.__module__ == "__main__" or "<locals>" in target.__qualname__:
            self.unnamed.add(target.__name__)
        elif not target.__module__.startswith("capibara."):
            self.modules.add(target.__module__)
        return str(gin_config._REGISTRY.minimal_selector(known.selector))


def _string(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where} is {value!r}, which has half a character (a surrogate): remove it") from None
    plain = json.dumps(value)
    return plain if plain[1:-1] == value else repr(value)  # JSON splits what is beyond 16 bits


def _changed(instance: Dataclass) -> Iterator[tuple[str, object]]:
    """Names and values of the fields that are not the defaults."""
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if field.init and not _same(value, default):
            yield field.name, value


def _objects_in(value: object) -> Iterator[Dataclass]:
    if _is_object(value):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _objects_in(item)
    elif isinstance(value, dict):
        for pair in value.items():
            yield from _objects_in(pair)


def _is_object(value: object) -> TypeGuard[Dataclass]:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _same(first: object, other: object) -> bool:
    """Whether two values are the same to the bit, whatever `==` of their classes says."""
    if isinstance(first, float) and isinstance(other, float):  # numpy's, too
        return float.__repr__(first) == float.__repr__(other)
    if isinstance(first, types.FunctionType) and isinstance(other, types.FunctionType):
        return inspect.unwrap(first) is inspect.unwrap(other)
    if type(first) is not type(other):
        return False
    if _is_object(first):
        return all(_same(getattr(first, field.name), getattr(other, field.name)) for field in dataclasses.fields(first))
    if isinstance(first, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(first) == len(other) and all(map(_same, first, other))
    if isinstance(first, dict) and isinstance(other, dict):
        return _same([*first.items()], [*other.items()])
    return bool(first == other)
