"""Checks the fields of a config dataclass against their annotations; errors suggest the right value.

Gin files hold plain literals, so these are converted: int to float, list to tuple, str to Enum or Path.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import difflib
import enum
import functools
import inspect
import json
import math
import numbers
import os
import pathlib
import sys
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

from capibara.core.types import AUTO, Auto, Dataclass, UserError

_LONGEST_VALUE = 60  # characters of a value shown in an error
_HOME = "~"
FilePath = typing.Annotated[str, _HOME]  # a path of a field, in which ~ is the home folder


class FieldError(UserError):
    """A field whose value does not fit. Attributes `owner` (class name) and `field` say which."""

    def __init__(self, owner: str, field: str, message: str):
        super().__init__(message)
        self.owner = owner
        self.field = field


class UnknownField(FieldError, TypeError):
    """A keyword that is no field."""


class _Mismatch(Exception):
    """The value does not fit the annotation; the message is a hint for the user, or empty."""


class _WrongChoice(_Mismatch):
    """A string that is none of the choices; the message does not mention their type."""

    def __init__(self, value: str, hint: str):
        super().__init__(hint)
        self.value = value


def unset(choice: object) -> Any:
    """A dataclass field that is AUTO by default; `choice` is its value where nothing chooses another one."""
    return dataclasses.field(default=AUTO, metadata={"choice": choice})


def chosen(instance: Dataclass, name: str) -> Any:
    """The value of a field of `unset`: as it is set, or else its choice."""
    value = getattr(instance, name)
    return type(instance).__dataclass_fields__[name].metadata["choice"] if value is AUTO else value


def nearest(name: str, choices: Iterable[str], least: float = 0.6) -> list[str]:
    """Up to three of `choices` that are most similar to `name` (at least `least` of 1), best first, ignoring case."""
    by_lower = {choice.lower(): choice for choice in choices}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=least)
    ratios = {match: difflib.SequenceMatcher(None, match, name.lower()).ratio() for match in matches}
    # Usually one choice was meant: name others only if they are about as similar.
    return [by_lower[match] for match in matches if ratios[match] > ratios[matches[0]] - 0.08]


def did_you_mean(name: str, choices: Iterable[str], known: str = "known") -> str:
    """The end of an error about an unknown name: ": did you mean a or b?", or all choices if there are few."""
    choices = sorted(set(choices))
    if close := nearest(name, choices):
        return f": did you mean {' or '.join(close)}?"
    if 0 < len(choices) <= 15:
        return f": {known} are {', '.join(choices)}"
    return ""


def type_name(annotation: object) -> str:
    """An annotation as a user would write it: `int | None`, `tuple[int, ...]`, `Optimizer`."""
    if annotation is None or annotation is type(None):
        return "None"
    if annotation is Ellipsis:
        return "..."
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(args[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_name(arg) for arg in args)
    if annotation is Auto:
        return repr(str(AUTO))
    if origin is typing.Literal:
        return " or ".join(map(repr, args))
    if origin is collections.abc.Callable:
        return "a function"
    if origin is not None:
        return f"{type_name(origin)}[{', '.join(type_name(arg) for arg in args)}]" if args else type_name(origin)
    return getattr(annotation, "__name__", None) or str(annotation).replace("typing.", "")


def short(value: object) -> str:
    """repr(value) on one line, cut to what an error message can hold."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


_T = TypeVar("_T")


def returned(value: object, cls: type[_T] | tuple[type[_T], ...], name: str) -> _T:
    """What a method of the user's has returned, if it is of a class.

    Args:
      value: what it returned.
      cls: what it must return; several: any of them.
      name: of the method, for the error: "MyLoss.objective".

    Raises:
      UserError: it is something else.
    """
    if not isinstance(value, cls):
        shown = f"the class {value.__name__}" if isinstance(value, type) else short(value)
        kinds = " or ".join(_article(item.__name__) for item in (cls if isinstance(cls, tuple) else (cls,)))
        raise UserError(f"{name} returned {shown}, must return {kinds}: see docs/extending.md")
    return value


def as_json(value: object, name: str) -> str:
    """The JSON text of what a method of the user's has returned; raises UserError if it is no JSON value."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} returned {short(value)}, must return a JSON value: {error}") from None


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


@functools.cache
def annotations_of(cls: type) -> dict[str, Any]:
    """The resolved annotations of a dataclass's fields; Any where a name is only imported for type checkers."""
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except (NameError, AttributeError, TypeError):
        return {field.name: _resolve(cls, field.name) for field in dataclasses.fields(cls)}


def _resolve(cls: type, name: str) -> Any:
    for base in cls.__mro__:
        if name in base.__dict__.get("__annotations__", {}):
            alone = types.SimpleNamespace(__annotations__={name: base.__dict__["__annotations__"][name]})
            try:
                return typing.get_type_hints(
                    alone, vars(sys.modules[base.__module__]), dict(vars(base)), include_extras=True
                )[name]
            except (NameError, AttributeError, TypeError):
                return Any
    return Any


def in_home(path: str) -> str:
    """A path with ~ or ~USER at its beginning replaced by the home folder; no other path changes."""
    return os.path.expanduser(path) if path.startswith("~") else path


def check_on_creation(
    cls: type,
    check: Callable[[Any], None],
    hint: Callable[[type, str, Iterable[str]], str] = lambda cls, name, known: did_you_mean(
        name, known, "its parameters"
    ),
) -> None:
    """Makes a dataclass call `check(self)` when an instance is created, before its own __post_init__.

    A keyword that it does not have is a UserError, unless capibara itself has given it.

    Args:
      cls: the dataclass.
      check: raises for a value that does not fit.
      hint: (class, unknown keyword, its keywords) -> the end of the error.
    """
    init: Callable[..., None] = inspect.getattr_static(cls, "__init__")
    validate = getattr(cls, "__post_init__", None)
    signature = inspect.signature(init)
    known = [*signature.parameters][1:]
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    if validate is not None and not getattr(validate, "_checks_fields", False):  # it is not inherited

        @functools.wraps(validate)
        def __post_init__(self: Any, *init_vars: Any) -> None:
            check(self)
            validate(self, *init_vars)

        vars(__post_init__)["_checks_fields"] = True
        type.__setattr__(cls, "__post_init__", __post_init__)

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        unknown = next((item for item in kwargs if item not in known and not is_open), None)
        if unknown is not None and not _is_ours(sys._getframe(1)):
            name = type(self).__name__
            raise UnknownField(name, unknown, f"{name} has no parameter {unknown}{hint(cls, unknown, known)}")
        init(self, *args, **kwargs)
        if validate is None:  # dataclass() calls __post_init__ only if it was defined before
            check(self)

    vars(__init__)["__signature__"] = signature  # Gin reads names and defaults from it
    type.__setattr__(cls, "__init__", __init__)


def _is_ours(frame: types.FrameType | None) -> bool:
    """Whether a call comes from capibara's own code."""
    while frame is not None and frame.f_globals.get("__name__") == dataclasses.__name__:  # dataclasses.replace
        frame = frame.f_back
    return frame is not None and f"{frame.f_globals.get('__name__')}.".startswith("capibara.")


def check(instance: object) -> None:
    """Checks every field of a dataclass instance and replaces converted values, also in a frozen dataclass.

    Raises:
      FieldError: a value does not fit; the message names the field, the value, its type and the expected type.
    """
    cls: type = type(instance)
    hints = annotations_of(cls)
    for field in dataclasses.fields(cls):
        if not hasattr(instance, field.name):  # init=False, set later by __post_init__
            continue
        value = getattr(instance, field.name)
        annotation = hints.get(field.name, Any)
        try:
            converted = convert(value, annotation)
        except _Mismatch as mismatch:
            message = _message(f"{cls.__name__}.{field.name}", value, annotation, mismatch)
            raise FieldError(cls.__name__, field.name, message) from None
        if converted is not value:
            object.__setattr__(instance, field.name, converted)


def _message(name: str, value: object, annotation: object, mismatch: _Mismatch) -> str:
    hint = str(mismatch)
    if isinstance(mismatch, _WrongChoice):
        verb = "is" if isinstance(value, str) else "has"
        return f"{name} {verb} {short(mismatch.value)}{', must be ' if hint.startswith('one of') else ': '}{hint}"
    return f"{name} ({_shown(value)}) must be {type_name(annotation)}, not {_kind(value)}{': ' + hint if hint else ''}"


def _shown(value: object) -> str:
    return value.__name__ if isinstance(value, type) else short(value)


def _kind(value: object) -> str:
    if isinstance(value, type):
        return "a class"
    return "None" if value is None else type(value).__name__


def convert(value: object, annotation: object) -> Any:
    """Converts a value to the type of an annotation; returns the value itself if it fits already.

    Raises:
      _Mismatch: it does not fit.
    """
    if annotation is Any or isinstance(annotation, (typing.TypeVar, str, typing.ForwardRef, dataclasses.InitVar)):
        return value
    if annotation is None or annotation is type(None):
        return _expect(value is None, value)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        text = convert(value, args[0])
        if _HOME not in args[1:]:
            return text
        if "\0" in text:
            raise _Mismatch("no path has a NUL character, take it out")
        return in_home(text)
    if origin is typing.ClassVar or origin is typing.Final:
        return convert(value, args[0])
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, args)
    if origin is typing.Literal:
        return value if value in args else _refuse_choice(value, map(str, args))
    if annotation is collections.abc.Callable or origin is collections.abc.Callable:
        return _expect(callable(value), value)
    if origin is type:
        return _expect(isinstance(value, type), value)
    if origin is not None and isinstance(origin, type):
        return _convert_container(value, origin, args)
    if isinstance(annotation, type):
        return _convert_class(value, annotation)
    return value  # another construct of typing: not checked


def _expect(fits: bool, value: object, hint: str = "") -> Any:
    if not fits:
        raise _Mismatch(hint)
    return value


def _convert_union(value: object, args: tuple[Any, ...]) -> Any:
    converted, mismatches = [], []
    for arg in args:
        try:
            candidate = convert(value, arg)
        except _Mismatch as mismatch:
            mismatches += [mismatch] if arg is not Auto else []
            continue
        if candidate is value:  # fits without conversion
            return value
        converted.append(candidate)
    if converted:
        return converted[0]
    raise next(filter(str, mismatches), _Mismatch())


def _convert_container(value: Any, origin: type, args: tuple[Any, ...]) -> Any:
    if issubclass(origin, collections.abc.Mapping):
        _expect(isinstance(value, collections.abc.Mapping), value)
        if len(args) != 2:
            return value
        mapped = {convert(key, args[0]): convert(item, args[1]) for key, item in value.items()}
        same = all(value.get(key) is item for key, item in mapped.items())
        return value if same and len(mapped) == len(value) else mapped
    if not issubclass(origin, (tuple, list, collections.abc.Set, collections.abc.Iterable)):
        return _convert_class(value, origin)
    if not isinstance(value, (tuple, list, collections.abc.Set)):
        # Iterators and instances of the expected class are kept; a single string is never a sequence of names.
        hint = f"write ({_alone(value, args)},)" if isinstance(value, (str, int, float)) else ""
        fits = isinstance(value, origin) and not isinstance(value, (str, bytes, collections.abc.Mapping))
        return _expect(fits, value, hint)
    if origin is tuple and args and args[-1] is not Ellipsis:
        _expect(len(value) == len(args), value, f"give {len(args)} values, got {len(value)}")
        items = [convert(item, arg) for item, arg in zip(value, args)]
    else:
        items = [convert(item, args[0]) for item in value] if args else list(value)
    target = origin if origin in (list, set, frozenset) else tuple
    same = isinstance(value, target) and all(new is old for new, old in zip(items, value))
    return value if same else target(items)


def _alone(value: object, args: tuple[Any, ...]) -> str:
    """A value as the only one of a container, without the quotes of a number."""
    with contextlib.suppress(ValueError):
        if isinstance(value, str) and args and args[0] in (int, float):
            return str(args[0](value))
    return short(value)


def _convert_class(value: Any, cls: type) -> Any:
    if cls in (int, float) and _is_number(value):
        if cls is float or isinstance(value, numbers.Integral):
            return value if type(value) is cls else cls(value)
        raise _Mismatch(f"write {int(value)}" if value == value // 1 and abs(value) < 1e18 else "")
    if cls in (int, float):
        raise _Mismatch(_of_text(value) if isinstance(value, str) else "")
    if issubclass(cls, enum.Enum):
        return _convert_enum(value, cls)
    if cls in (tuple, list):
        return _convert_container(value, cls, ())
    if cls is pathlib.Path and isinstance(value, str):
        return pathlib.Path(value)
    if cls is bool:
        meant = {"true": "True", "false": "False"}.get(value.lower()) if isinstance(value, str) else None
        return _expect(isinstance(value, bool), value, f"write {meant}" if meant else "True or False")
    if getattr(cls, "_is_protocol", False) and not getattr(cls, "_is_runtime_protocol", False):
        return value
    if isinstance(value, type) and not issubclass(cls, type) and issubclass(value, cls):
        raise _Mismatch(f"the class was not called, write @{value.__name__}() with the brackets")
    hint = "quote it" if cls is str and isinstance(value, (int, float)) else ""
    if isinstance(value, types.FunctionType) and cls is not types.FunctionType:
        hint = f"the function was not called, write @{value.__name__}() with the brackets"
    return _expect(isinstance(value, cls), value, hint)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _convert_enum(value: object, cls: type[enum.Enum]) -> enum.Enum:
    if isinstance(value, cls):
        return value
    for member in cls:
        if type(member.value) is type(value) and member.value == value or member.name == value:
            return member
    if isinstance(value, str) and (renamed := cls._missing_(value)) is not None:  # an old name of a member
        return renamed
    _refuse_choice(value, (str(member.value) for member in cls))


def _refuse_choice(value: object, choices: Iterable[str]) -> NoReturn:
    choices = list(choices)
    listed = f"one of {', '.join(map(repr, choices))}"
    if not isinstance(value, str):
        raise _Mismatch(listed)
    close = nearest(value, choices)
    raise _WrongChoice(value, f"did you mean {close[0]!r}? ({listed})" if close else listed)


def _of_text(text: str) -> str:
    """A hint for text where a number is expected."""
    try:
        return "leave out the quotes" if math.isfinite(float(text)) else "give a finite number"
    except ValueError:
        return ""
