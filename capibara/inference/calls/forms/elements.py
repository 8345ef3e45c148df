"""Calls whose arguments are elements named after them, which nest as objects and lists do: MiniMax M3's.

Each tag has the model's marker before it, so that text needs no escapes:

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="f">]<]minimax[>[<sizes>]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[</sizes>
    ]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from capibara.core.fields import short
from capibara.core.types import UserError
from capibara.inference.calls.forms.form import Form, Marks, read_each
from capibara.inference.calls.forms.rules import Texts, json_of, json_of_types, rules_of_any, strings
from capibara.inference.calls.parsing.text import Arguments, Call, CallEnd, Malformed, Steps, Text
from capibara.inference.calls.parsing.tools import Tools, dumped

_MARK = "]<]minimax[>["
_BEGIN, _END = f"{_MARK}<tool_call>", f"{_MARK}</tool_call>"
_CALL, _NAME_END, _CALL_END = f'{_MARK}<invoke name="', '">', f"{_MARK}</invoke>"
_OPEN, _CLOSE = f"{_MARK}<", f"{_MARK}</"
_ITEM = "item"  # of a list
_DEEPEST = 16  # elements in each other


def _read(text: Text, tools: Tools, _: str) -> Steps[None]:
    yield from read_each(text, _CALL, _END, lambda: _read_call(text, tools))


def _read_call(text: Text, tools: Tools) -> Steps[None]:
    name = yield from text.head(_NAME_END)
    text.at += len(_NAME_END)
    if name not in tools:
        raise Malformed
    arguments = _Arguments(tools, name)
    has_begun = False
    while True:
        yield from text.spaces()
        if (yield from text.take(_CALL_END)):
            break
        key = yield from _read_tag(text)
        value = yield from _read_value(text, arguments, key, arguments.schema_of(key), 1)
        if not has_begun:
            yield Call(name)
        yield Arguments(f"{', ' if has_begun else '{'}{dumped(key)}: {dumped(value)}")
        has_begun = True
    if not has_begun:
        yield Call(name)
    yield Arguments("}" if has_begun else "{}")
    yield CallEnd()


def _read_tag(text: Text) -> Steps[str]:
    """Reads an opening tag; its name."""
    yield from text.expect(_OPEN)
    name = yield from text.head(">")
    text.at += 1
    if not _is_tag(name):
        raise Malformed
    return name


def _is_tag(name: str) -> bool:
    return bool(name) and not name.startswith("/") and not {"<", ">"} & {*name}


def _read_value(text: Text, arguments: _Arguments, key: str, schema: object, depth: int) -> Steps[Any]:
    """Reads the content of an element and its end."""
    if depth > _DEEPEST:
        raise Malformed
    end, parts = f"{_CLOSE}{key}>", [""]
    for event in text.until((_MARK,), lambda piece: Arguments(piece)):
        if isinstance(event, Arguments):
            parts.append(event.text)
        else:
            yield event
    text.at -= len(_MARK)
    content = "".join(parts)
    if (yield from text.take(end)):
        return arguments.leaf(content, schema)
    if content.strip():
        raise Malformed
    children: list[tuple[str, Any]] = []
    while not (yield from text.take(end)):
        name = yield from _read_tag(text)
        inner = (
            arguments.items_of(schema)
            if name == _ITEM and arguments.is_list(schema)
            else arguments.property(schema, name)
        )
        children.append((name, (yield from _read_value(text, arguments, name, inner, depth + 1))))
        yield from text.spaces()
    return arguments.joined(children, schema)


class _Arguments:
    """The values of a call's elements by the schema of its tool."""

    def __init__(self, tools: Tools, name: str):
        self._tools, self._name = tools, name
        self._root = tools.parameters[name]

    def schema_of(self, key: str) -> Any:
        """The schema of an argument."""
        return self.property(self._root, key)

    def property(self, schema: object, key: str) -> Any:
        """The schema of an object's property."""
        schema = self._tools.resolved(self._name, schema)
        properties = schema.get("properties")
        rest = schema.get("additionalProperties")
        return properties[key] if isinstance(properties, Mapping) and key in properties else rest

    def items_of(self, schema: object) -> Any:
        """The schema of a list's items."""
        return self._tools.resolved(self._name, schema).get("items")

    def is_list(self, schema: object) -> bool:
        """Whether an element with items is a list: so it is unless its schema names that property."""
        schema = self._tools.resolved(self._name, schema)
        properties = schema.get("properties")
        return not (isinstance(properties, Mapping) and _ITEM in properties)

    def leaf(self, content: str, schema: object) -> Any:
        """The value of an element without others in it."""
        types = self._tools.types_of(self._name, schema)
        if not content.strip() and types and "string" not in types:
            for kind, empty in (("array", []), ("object", {}), ("null", None)):
                if kind in types:
                    return empty
        return json.loads(self._tools.typed_as(self._name, schema, content))

    def joined(self, children: list[tuple[str, Any]], schema: object) -> Any:
        """The list or object of elements in an element; those of the same name are a list."""
        if self.is_list(schema) and all(name == _ITEM for name, _ in children):
            return [value for _, value in children]
        values: dict[str, list[Any]] = {}
        for name, value in children:
            values.setdefault(name, []).append(value)
        return {name: each[0] if len(each) == 1 else each for name, each in values.items()}


def _rules(tools: Tools, marks: Marks, parallel: bool) -> Iterator[str]:
    """Rules of a grammar: the arguments in the order of the schema, those that are required first."""
    yield from rules_of_any(tools, parallel, begin=marks(f"{_BEGIN}\n"), end=marks(_END))
    texts = Texts(_MARK, marks)
    # A line break between calls would be the beginning of the lexeme that ends them, which is then all that can follow.
    call_end = marks(f"{_CALL_END}\n")
    for number, name in enumerate(tools.parameters):
        elements = _Elements(tools, name, texts, f"object_{number}")
        body = elements.of_properties(tools.parameters[name], 1)
        yield f"call_{number}: {marks(f'{_CALL}{name}{_NAME_END}')} {body} {call_end}"
        yield from elements.rules
    yield from texts.rules


class _Elements:
    """Expressions of a grammar for the elements of a tool's arguments.

    Attributes:
      rules: of the objects in arguments: each schema has one for each depth, however often it is referred to.
    """

    def __init__(self, tools: Tools, name: str, texts: Texts, prefix: str):
        self._tools, self._name, self._texts, self._prefix = tools, name, texts, prefix
        self._arguments = _Arguments(tools, name)
        self._names: dict[tuple[int, int], str] = {}
        self.rules: list[str] = []

    def of_properties(self, schema: object, depth: int) -> str:
        """Of an object's properties."""
        each = self._tools.properties(self._tools.resolved(self._name, schema))
        return " ".join(f"({self._element(key, value, depth)}){'' if needed else '?'}" for key, value, needed in each)

    def _element(self, key: str, schema: object, depth: int) -> str:
        if not _is_tag(key):
            raise UserError(
                f"tool {self._name} has the argument {short(key)}, which the model's calls cannot name: it must not be empty, begin "
                "with / or have < or >"
            )
        begin, end = self._texts.marks(f"{_OPEN}{key}>"), f"{_CLOSE}{key}>"
        if (content := self._content(schema, depth)) is not None:
            return f"{begin} {content} {self._texts.marks(end)}"
        if (choices := strings(self._tools, self._name, schema)) is None:
            return f"{begin} {self._texts.before(end)}"
        value = self._texts.one_of(choices, end)
        if others := self._tools.types_of(self._name, schema) - {"string"}:
            value = f"({value} | {json_of_types(self._tools, self._name, schema, others)} {self._texts.marks(end)})"
        return f"{begin} {value}"

    def _content(self, schema: object, depth: int) -> str | None:
        """What is between the tags of an element; None: a text."""
        types = self._tools.types_of(self._name, schema)
        resolved = self._tools.resolved(self._name, schema)
        if types == {"array"} and depth < _DEEPEST:
            item = self._element(_ITEM, self._arguments.items_of(resolved), depth + 1)
            least, most = self._count(resolved, "minItems") or 0, self._count(resolved, "maxItems")
            if most is not None and most < least:
                raise UserError(f"tool {self._name} has minItems {least} above maxItems {most}: correct its schema")
            return f"({item}){{{least},{'' if most is None else most}}}"
        if types == {"object"} and depth < _DEEPEST and self._tools.properties(resolved):
            return self._object(resolved, depth)
        if types and "string" not in types:
            return json_of(self._tools.standalone(self._name, resolved))
        return None

    def _object(self, schema: dict[str, Any], depth: int) -> str:
        """The name of an object's rule; without one, a schema with several references to itself would be written 2^16 times."""
        if (name := self._names.get((id(schema), depth))) is None:
            name = self._names[id(schema), depth] = f"{self._prefix}_{len(self._names)}"
            self.rules.append(f"{name}: {self.of_properties(schema, depth + 1)}")
        return name

    def _count(self, schema: dict[str, Any], key: str) -> int | None:
        value = schema.get(key)
        if value is not None and not (type(value) in (int, float) and 0 <= value < 2**31 and value == int(value)):
            raise UserError(
                f"tool {self._name} has {key} {short(value)}, must be a whole number from 0 to 2**31: correct its schema"
            )
        return None if value is None else int(value)


FORMS = (
    Form(
        name="minimax m3",
        detect=lambda model: model.mentions(_MARK),
        begins=(_BEGIN,),
        read=_read,
        rules=_rules,
        tokens=(_MARK,),
    ),
)
