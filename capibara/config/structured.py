"""YAML, JSON and TOML files as Gin statements, so that they are read, checked and explained as Gin files are.

A mapping under a name binds its fields (`Trainer: {seed: 1}` is `Trainer.seed = 1`, a scope stands before it: `qa/EvalTask`); any other
value at the top is a macro (`TRAIN_STEPS: 500`); `include` and `import` name files and modules. A text that begins with @ or % is
a reference, as in Gin: "@Optimizer()", "%TRAIN_STEPS".
"""

from __future__ import annotations

import ast
import json
import pathlib
import re
import tomllib
from typing import Any

import yaml

from capibara.core import limits
from capibara.core.types import UserError

_MOST_VALUES = 10_000
_MACRO = re.compile(r"[A-Za-z_]\w*")
_OWNER = re.compile(r"[A-Za-z_][\w./]*")
_FIELD = re.compile(r"[A-Za-z_]\w*")
_MODULE = re.compile(r"[A-Za-z_][\w.]*")
_REFERENCE = re.compile(r"[@%][\w./]+(\(\))?")
_CONSTANTS = {"true": "True", "false": "False", "null": "None", "~": "None", "": "None", "none": "None"}


def statements(path: pathlib.Path, text: str) -> list[tuple[int, str]]:
    """The Gin statements of a file, each with the line of its key, from 1; those of TOML and JSON are counted.

    Raises:
      UserError: it is no file of its kind, has a key twice, or a value that Gin does not have.
    """
    try:
        if path.suffix in (".toml", ".json"):
            values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text, object_pairs_hook=_once)
            if not isinstance(values, dict):
                raise UserError(f"{path} is no object: write names and values in braces")
            return [
                *enumerate((line for name, value in values.items() for line in _of_value(str(path), name, value)), 1)
            ]
        return _Yaml(str(path)).statements(yaml.compose(text, Loader=yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # of TOML and JSON they are ValueErrors
        raise UserError(f"{path} cannot be read ({limits.cause(error)})") from None


class _Yaml:
    """Turns the nodes of a YAML file into Gin statements; `name` is the file's, for errors."""

    def __init__(self, name: str):
        self._name, self._values = name, 0

    def statements(self, root: yaml.Node | None) -> list[tuple[int, str]]:
        result: list[tuple[int, str]] = []
        for key, value in [] if root is None else self._pairs(root):
            name = str(key.value)
            inner = self._pairs(value) if isinstance(value, yaml.MappingNode) else None
            rows = [(key, _top(self._where(key), name, self._value(value)))] if inner is None else []
            rows += [(k, [_binding(self._where(k), name, str(k.value), self._value(v))]) for k, v in inner or ()]
            result += [(at.start_mark.line + 1, line) for at, lines in rows for line in lines]
        return result

    def _pairs(self, node: yaml.Node) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            raise UserError(f"{self._where(node)} is no mapping: write NAME: VALUE lines")
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in seen:
                raise UserError(
                    f"{self._where(key)}: {limits.shortened(key.value)} is there twice, or is no name: write each once"
                )
            seen.add(key.value)
        return list(node.value)

    def _value(self, node: yaml.Node) -> str:
        self._values += 1
        if self._values > _MOST_VALUES:
            raise UserError(f"{self._name} has more than {_MOST_VALUES:,} values: it is no configuration")
        if isinstance(node, yaml.SequenceNode):
            return f"[{', '.join(self._value(item) for item in node.value)}]"
        if isinstance(node, yaml.MappingNode):
            return f"{{{', '.join(f'{key.value!r}: {self._value(value)}' for key, value in self._pairs(node))}}}"
        text = str(node.value)
        return _text(text) if node.style is not None else _plain(text)

    def _where(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}"


def _plain(text: str) -> str:
    """A value without quotes: what Gin reads as a number or constant is that; 1e-3 too, which YAML 1.1 takes for a text."""
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return _text(text)
    return repr(value) if isinstance(value, int | float) else _text(text)


def _text(text: str) -> str:
    return text if _REFERENCE.fullmatch(text) else repr(text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, whose names must differ."""
    for name, _ in pairs:
        if sum(name == other for other, _ in pairs) > 1:
            raise ValueError(f"{name!r} is there twice")
    return dict(pairs)


def _of_value(name: str, key: str, value: Any) -> list[str]:
    if isinstance(value, dict):
        return [_binding(name, key, field, _literal(name, inner)) for field, inner in value.items()]
    return _top(name, key, _literal(name, value))


def _literal(name: str, value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_literal(name, item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_literal(name, item)}' for key, item in value.items())}}}"
    if not isinstance(value, str | int | float | None):
        raise UserError(
            f"{name} has {value}, a {type(value).__name__}, which Gin does not have: write a text in quotes"
        )
    return _text(value) if isinstance(value, str) else repr(value)


def _top(where: str, name: str, value: str) -> list[str]:
    """The statements of a value at the top: includes, imports or a macro."""
    if name in ("include", "import"):
        named = ast.literal_eval(value)
        named = [named] if isinstance(named, str) else named
        if not isinstance(named, list) or not all(isinstance(item, str) and item for item in named):
            raise UserError(f"{where}: {name} is {value}, must be a name or a list of names")
        if name == "import" and not all(_MODULE.fullmatch(item) for item in named):
            raise UserError(f"{where}: import is {value}, must name modules")
        return [f"include {item!r}" if name == "include" else f"import {item}" for item in named]
    if not _MACRO.fullmatch(name):
        raise UserError(
            f"{where}: {name!r} is no name of a macro: use letters, digits and _, or a mapping of a class's fields"
        )
    return [f"{name} = {value}"]


def _binding(where: str, owner: str, field: str, value: str) -> str:
    if not _OWNER.fullmatch(owner):
        raise UserError(f"{where}: {owner!r} is no name of a class: write Trainer, or scope/Trainer")
    if not _FIELD.fullmatch(field):
        raise UserError(f"{where}: {field!r} is no name of a field of {owner}")
    return f"{owner}.{field} = {value}"
