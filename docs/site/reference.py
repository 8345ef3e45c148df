"""The reference, made from the code: what Gin and Python can name, the verbs and their flags, the functions of Python."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import importlib
import inspect
import io
import re
import typing
from collections.abc import Callable, Iterator
from unittest import mock

import docstrings

import capibara
from capibara.__main__ import VERBS
from capibara.cli import launch, prepare
from capibara.config.search import defining_modules
from capibara.core import fields
from capibara.core.types import AUTO
from capibara.jobs import backends

_ROOMS = {
    "training": "the run: `Trainer`, its evaluation and its training methods",
    "models": "decoders, encoders and their parts",
    "data": "sources, tokenizers, rows",
    "optim": "optimizers and schedules",
    "objectives": "losses",
    "sharding": "mesh, batch, recomputation",
    "checkpoints": "saving, retention, encryption",
    "loading": "initial weights",
    "inference": "sampling, engine, server",
    "evaluation": "tasks, metrics, judges",
    "strategies": "consensus, groups, GRPO",
    "consensus": "aggregation, merging, outer optimizers, privacy",
    "interop": "experts rewired",
    "monitoring": "callbacks, trackers, dashboard, profiles",
    "jobs": "launch: systems for jobs, sweeps",
    "builders": "preparation of data sets",
    "retrieval": "indexes of documents",
    "sandbox": "programs that a model wrote",
}


class _Shown(Exception):
    """Carries the parser whose help a verb would print."""

    def __init__(self, parser: argparse.ArgumentParser):
        super().__init__(parser.prog)
        self.parser = parser


def _summary(text: str | None) -> str:
    return docstrings.prose(docstrings.sections(text)[""].strip())


def _meanings(cls: type) -> dict[str, str]:
    """Field -> its text in the docstring of the class, or of the nearest base class that has one."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        texts |= docstrings.items(docstrings.sections(base.__doc__).get("Attributes", ""))
    return texts


def _choices(annotation: object) -> str:
    """An annotation as a user writes its values: those of an enum are its strings."""
    name = fields.type_name(annotation)
    for part in (annotation, *typing.get_args(annotation)):
        if isinstance(part, type) and issubclass(part, enum.Enum):
            name = name.replace(part.__name__, " or ".join(repr(member.value) for member in part), 1)
    return name


def _value(value: object) -> str:
    """A default as Gin or Python would write it."""
    if isinstance(value, enum.Enum):
        return repr(value.value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = []
        for field in dataclasses.fields(value):
            default = field.default_factory() if callable(field.default_factory) else field.default
            if field.init and getattr(value, field.name) != default:
                changed.append(f"{field.name}={_value(getattr(value, field.name))}")
        return f"{type(value).__name__}({', '.join(changed)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_value, value))}{',' * (len(value) == 1)})"
    return value.__name__ if inspect.isroutine(value) or isinstance(value, type) else repr(value)


def _default(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return docstrings.code(_value(field.default_factory()))
    if field.default is dataclasses.MISSING:
        return "required"
    if field.default is AUTO:
        return f"chosen, else {docstrings.code(_value(field.metadata['choice']))}" if field.metadata else "chosen"
    return docstrings.code(_value(field.default))


def _field_rows(cls: type) -> list[tuple[str, ...]]:
    meanings, annotations = _meanings(cls), fields.annotations_of(cls)
    assert dataclasses.is_dataclass(cls)
    if missing := [field.name for field in dataclasses.fields(cls) if field.init and not meanings.get(field.name)]:
        raise KeyError(f"{cls.__name__}.{missing[0]} is not in the docstring's Attributes: say there what it means")
    return [
        (
            docstrings.code(field.name),
            docstrings.code(_choices(annotations[field.name])),
            _default(field),
            docstrings.escaped(meanings[field.name]),
        )
        for field in dataclasses.fields(cls)
        if field.init
    ]


def _parameter_rows(function: Callable[..., object]) -> list[tuple[str, ...]]:
    texts = docstrings.items(docstrings.sections(function.__doc__).get("Args", ""))
    rows = []
    for name, parameter in inspect.signature(function).parameters.items():
        # As it is written: some names are imported for type checkers alone.
        kind = "" if parameter.annotation is parameter.empty else docstrings.code(str(parameter.annotation))
        default = "required" if parameter.default is parameter.empty else docstrings.code(_value(parameter.default))
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            default = "none"
        rows.append((docstrings.code(name), kind, default, docstrings.escaped(texts.get(name, ""))))
    return rows


def _configurable(name: str, module: str) -> str:
    """The section of a class or function that Gin files can name."""
    item = getattr(importlib.import_module(module), name)
    if dataclasses.is_dataclass(item):
        head, rows = "field", _field_rows(item)
    elif isinstance(item, type) and item.__init__ is object.__init__:
        head, rows = "field", []
    else:
        head, rows = "parameter", _parameter_rows(item)
        rows = [row for row in rows if row[0] != docstrings.code("self")]
    reference = f"`@{name}()`" if isinstance(item, type) else f"`@{name}`"
    lines = [f"## {name}", f"In Gin {reference}, in Python `cb.{name}`, from `{module}`.", _summary(item.__doc__)]
    if rows:
        lines.append(docstrings.table((head, "type", "default", "meaning"), rows))
    return "\n\n".join(filter(None, lines))


def configurable_pages() -> dict[str, str]:
    """Page -> its text, one for each room, with all that Gin files can name."""
    by_room: dict[str, list[tuple[str, str]]] = {room: [] for room in _ROOMS}
    for name, module in sorted(defining_modules().items()):
        by_room[module.split(".")[1]].append((name, module))
    index = [
        "# Gin and Python names",
        "Each class is configured by Gin or by Python, with the same names and fields.",
        "",
    ]
    pages = {}
    for room, entries in by_room.items():
        body = "\n\n".join(_configurable(*entry) for entry in entries)
        pages[f"reference/{room}.md"] = f"# {room}\n\n{_ROOMS[room][0].upper()}{_ROOMS[room][1:]}.\n\n{body}\n"
        links = ", ".join(f"[{name}]({room}.md#{name.lower()})" for name, _ in entries)
        index.append(f"- **[{room}]({room}.md)**: {_ROOMS[room]}. {links}")
    pages["reference/index.md"] = "\n".join(index) + "\n"
    return pages


def _parser_of(argv: list[str]) -> argparse.ArgumentParser | str:
    """The parser behind a command's --help, or the text that it prints where it has no parser."""

    def shown(parser: argparse.ArgumentParser, file: object = None) -> typing.NoReturn:
        raise _Shown(parser)

    main = importlib.import_module(f"capibara.cli.{argv[0].replace('-', '_')}").main
    printed = io.StringIO()
    try:
        with mock.patch.object(argparse.ArgumentParser, "print_help", shown), contextlib.redirect_stdout(printed):
            main([*argv[1:], "--help"])
    except _Shown as error:
        return error.parser
    return printed.getvalue()


def commands() -> Iterator[list[str]]:
    """Every command with a help of its own: the verbs, and the words of `prepare` and `launch`."""
    for verb in VERBS:
        yield [verb]
        words = {"prepare": prepare.MODULES, "launch": launch.MODULES}.get(verb, {})
        yield from ([verb, word] for word in words if [verb, word] != ["launch", "sweep"])
        if verb == "launch":
            yield from ([verb, "sweep", where] for where in ("local", *sorted(backends.NAMES)))


def _flag_rows(parser: argparse.ArgumentParser) -> list[tuple[str, ...]]:
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else "")
        name = ", ".join(action.option_strings) or str(value or action.dest)
        takes_value = action.nargs != 0 and action.option_strings and not name.startswith("--gin.")
        name = f"{name}={value or action.dest.upper()}" if takes_value else name
        text = (action.help or "") % {"default": action.default, "prog": parser.prog}
        rows.append((docstrings.code(name), docstrings.escaped(text)))
    return rows


def verb_pages() -> dict[str, str]:
    """Page -> its text, one for each verb, and their index."""
    lines = ["# Commands", "`capibara VERB` and `python -m capibara.VERB` are the same.", ""]
    pages: dict[str, str] = {}
    for argv in commands():
        parser = _parser_of(argv)
        page = f"reference/commands/{argv[0]}.md"
        text = parser if isinstance(parser, str) else parser.description or ""
        parts = [f"{'#' * min(len(argv), 2)} capibara {' '.join(argv)}"]
        parts.append(f"```text\n{text.strip()}\n```")
        if isinstance(parser, argparse.ArgumentParser):
            parts.append(docstrings.table(("flag", "meaning"), _flag_rows(parser)))
        pages[page] = pages.get(page, "") + "\n\n".join(parts) + "\n\n"
        if len(argv) == 1:
            lines.append(f"- [`{argv[0]}`]({argv[0]}.md): {VERBS[argv[0]]}")
    return {"reference/commands/index.md": "\n".join(lines) + "\n", **pages}


def _function(name: str, item: Callable[..., object], level: int = 2) -> str:
    parts = docstrings.sections(item.__doc__)
    lines = [f"{'#' * level} {name}", _summary(item.__doc__)]
    rows = [row for row in _parameter_rows(item) if row[0] != docstrings.code("self")]
    if rows:
        columns = 4 if any(row[3] for row in rows) else 3  # one line may say what all parameters are
        head = ("parameter", "type", "default", "meaning")[:columns]
        lines.append(docstrings.table(head, [row[:columns] for row in rows]))
    lines += [
        f"**{head}**: {docstrings.prose(parts[head])}" for head in ("Returns", "Yields", "Raises") if head in parts
    ]
    return "\n\n".join(filter(None, lines))


def _class(name: str, item: type) -> str:
    """A class of Python alone, with its attributes, public methods and properties, inherited ones included."""
    lines = [f"## {name}", _summary(item.__doc__)]
    rows = [(docstrings.code(field), docstrings.escaped(what)) for field, what in _meanings(item).items()]
    lines.append(docstrings.table(("attribute", "meaning"), rows) if rows else "")
    bases = [base for base in item.__mro__ if base.__module__.startswith("capibara.")]
    members = {key: value for base in reversed(bases) for key, value in vars(base).items() if not key.startswith("_")}
    for member, value in members.items():
        if isinstance(value, property):
            lines.append(f"### {name}.{member}\n\n{_summary(value.__doc__)}")
        elif inspect.isfunction(value):
            lines.append(_function(f"{name}.{member}", value, 3))
    return "\n\n".join(filter(None, lines))


def python_page() -> dict[str, str]:
    """The page of what Python alone has: functions and the classes that they return."""
    names = sorted({*capibara._listed()} - {*defining_modules()})
    items = {name: getattr(capibara, name) for name in names}
    body = [_class(name, item) if isinstance(item, type) else _function(name, item) for name, item in items.items()]
    head = "# Python functions\n\n`import capibara as cb`: the verbs as functions, and what they return. [Python](../python.md) is the guide.\n\n"
    return {"reference/python.md": head + "\n\n".join(body) + "\n"}


def pages() -> dict[str, str]:
    """All pages of the reference: path -> text."""
    return {**configurable_pages(), **verb_pages(), **python_page()}


if __name__ == "__main__":
    for path, text in pages().items():
        print(path, len(text), len(re.findall("^##", text, re.MULTILINE)))
