"""Kimi K3's calls: elements between three tokens, each argument with its type.

    <|open|>tools<|sep|>
    <|open|>call tool="f" index="1"<|sep|><|open|>argument key="x" type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|>
    <|close|>tools<|sep|>

A string is written as it is; in names `&` and `"` are escaped. Arguments may be one JSON object in an element `json` instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from capibara.core.fields import short
from capibara.core.types import UserError
from capibara.inference.calls.forms.form import Form, Marks, read_each
from capibara.inference.calls.forms.rules import Texts, check_name, json_of, json_of_types, rules_of_any, strings
from capibara.inference.calls.parsing.text import Arguments, Call, CallEnd, Malformed, Steps, Text
from capibara.inference.calls.parsing.tools import Tools, dumped

_OPEN, _CLOSE, _SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
_BEGIN, _END = f"{_OPEN}tools{_SEPARATOR}", f"{_CLOSE}tools{_SEPARATOR}"
_CALL, _CALL_END = f"{_OPEN}call ", f"{_CLOSE}call{_SEPARATOR}"
_ARGUMENT, _ARGUMENT_END = f"{_OPEN}argument ", f"{_CLOSE}argument{_SEPARATOR}"
_OBJECT, _OBJECT_END = f"{_OPEN}json ", f"{_CLOSE}json{_SEPARATOR}"
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_TYPES = ("string", "number", "boolean", "null", "array", "object")


def _read(text: Text, tools: Tools, _: str) -> Steps[None]:
    yield from read_each(text, _CALL, _END, lambda: _read_call(text, tools))


def _read_call(text: Text, tools: Tools) -> Steps[None]:
    name = (yield from _read_attributes(text)).get("tool", "")
    if name not in tools:
        raise Malformed
    before = "{"
    while True:
        yield from text.spaces()
        mark = yield from text.expect(_ARGUMENT, _CALL_END, *([_OBJECT] if before == "{" else []))
        if mark != _ARGUMENT:
            break
        attributes = yield from _read_attributes(text)
        if before == "{":
            yield Call(name)
        yield Arguments(f"{before}{dumped(attributes.get('key', ''))}: ")
        yield from _read_value(text, tools, name, attributes)
        before = ", "
    if mark == _OBJECT:
        yield from _read_object(text, name)
        yield from text.spaces()
        yield from text.expect(_CALL_END)
    else:
        if before == "{":
            yield Call(name)
        yield Arguments("{}" if before == "{" else "}")
    yield CallEnd()


def _read_attributes(text: Text) -> Steps[dict[str, str]]:
    """Reads the attributes of an opening tag, and its end."""
    written = yield from text.head(_SEPARATOR)
    text.at += len(_SEPARATOR)
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in _ATTRIBUTE.findall(written)}


def _read_value(text: Text, tools: Tools, name: str, attributes: Mapping[str, str]) -> Steps[None]:
    """Reads a value: of a string each piece as it arrives, else all of it."""
    kind, key = attributes.get("type"), attributes.get("key", "")
    if kind == "string":
        yield Arguments('"')
        if not (yield from text.until((_ARGUMENT_END,), lambda piece: Arguments(dumped(piece)[1:-1]))):
            raise Malformed
        yield Arguments('"')
        return
    written = yield from text.head(_ARGUMENT_END, most=None)
    text.at += len(_ARGUMENT_END)
    types = tools.types(name, key) if kind is None else {kind}
    yield Arguments(tools.typed_by(types, written))


def _read_object(text: Text, name: str) -> Steps[None]:
    """Reads all arguments as one JSON object."""
    yield from _read_attributes(text)
    written = yield from text.head(_OBJECT_END, most=None)
    text.at += len(_OBJECT_END)
    try:
        arguments = json.loads(written)
        shown = dumped(arguments)
    except (ValueError, RecursionError):
        raise Malformed from None
    if not isinstance(arguments, dict):
        raise Malformed
    yield Call(name)
    yield Arguments(shown)


def _escaped(name: str) -> str:
    return name.replace("&", "&amp;").replace('"', "&quot;")


def _rules(tools: Tools, marks: Marks, parallel: bool) -> Iterator[str]:
    """Rules of a grammar: the arguments in the order of the schema, those that are required first."""
    yield from rules_of_any(tools, parallel, begin=marks(_BEGIN), end=marks(_END))
    texts = Texts(_CLOSE, marks)
    for number, name in enumerate(tools.parameters):
        arguments = []
        for place, (key, schema, required) in enumerate(tools.arguments(name)):
            yield f"value_{number}_{place}: {' | '.join(_choices(tools, name, key, schema, texts))}"
            arguments.append(f"value_{number}_{place}{'' if required else '?'}")
        head = marks(f'{_CALL}tool="{_escaped(name)}" index="')
        head += f" /[1-9][0-9]?/ {marks(chr(34) + _SEPARATOR)}"
        yield f"call_{number}: {head} {' '.join(arguments)} {marks(_CALL_END)}"
    yield from texts.rules


def _choices(tools: Tools, name: str, key: str, schema: Any, texts: Texts) -> Iterator[str]:
    """An argument in each type that its schema allows."""
    types = {"number" if kind == "integer" else kind for kind in tools.types(name, key)} or {"string"}
    if unknown := types - {*_TYPES}:
        raise UserError(
            f"tool {short(name)} has the argument {short(key)} of type {min(unknown)}, must be a type of JSON Schema: correct it"
        )
    check_name(name, "the argument", key, _SEPARATOR)
    for kind in filter(types.__contains__, _TYPES):
        before = texts.marks(f'{_ARGUMENT}key="{_escaped(key)}" type="{kind}"{_SEPARATOR}')
        if kind == "string":
            choices = strings(tools, name, schema)
            yield f"{before} {texts.before(_ARGUMENT_END) if choices is None else texts.one_of(choices, _ARGUMENT_END)}"
        else:
            kinds = {"integer", "number"} if kind == "number" else {kind}
            value = (
                json_of_types(tools, name, schema, kinds) if types - kinds else json_of(tools.standalone(name, schema))
            )
            yield f"{before} ({value}) {texts.marks(_ARGUMENT_END)}"


FORMS = (
    Form(
        name="kimi k3",
        detect=lambda model: model.mentions(_CLOSE) and model.mentions(_SEPARATOR),
        begins=(_BEGIN,),
        read=_read,
        rules=_rules,
        tokens=(_OPEN, _CLOSE, _SEPARATOR),
    ),
)
