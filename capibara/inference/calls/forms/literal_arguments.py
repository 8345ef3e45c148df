"""Calls as NAME(KEY=VALUE, ...) in Python, or as NAME{KEY:VALUE, ...} with quotes that are tokens (Gemma)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from capibara.inference.calls.forms.form import Form, Marks
from capibara.inference.calls.forms.json_objects import Objects
from capibara.inference.calls.forms.rules import Texts, check_name, json_of, rules_of_any, strings
from capibara.inference.calls.parsing import literals
from capibara.inference.calls.parsing.text import Arguments, Call, CallEnd, Malformed, Steps, Text
from capibara.inference.calls.parsing.tools import Tools, dumped


@dataclasses.dataclass(frozen=True, kw_only=True)
class Brackets:
    """How a call is written after its name.

    Attributes:
      open: before the arguments.
      close: after them.
      equals: between a key and its value.
      separator: between arguments in a grammar.
      quote: around strings and keys; empty: as in Python.
      has_types: whether values that are no strings are written without quotes.
    """

    open: str
    close: str
    equals: str
    separator: str = ","
    quote: str = ""
    has_types: bool = True

    def read(self, text: Text, tools: Tools) -> Steps[None]:
        """Reads a call, each of its arguments as a piece."""
        name = (yield from text.head(self.open)).strip()
        if name not in tools:
            raise Malformed
        text.at += len(self.open)
        yield from text.spaces()
        if (yield from text.take(self.close)):
            yield Call(name)
            yield Arguments("{}")
            yield CallEnd()
            return
        before, after = "{", ","
        while after == ",":
            yield from text.spaces()
            key = (yield from literals.read_key(text, self.quote, self.equals)).strip()
            text.at += len(self.equals)
            value = yield from literals.read_value(text, self.quote)
            is_typed = self.has_types or not isinstance(value, str)
            written = tools.coerced(name, key, value) if is_typed else tools.typed(name, key, value)
            if before == "{":
                yield Call(name)
            yield Arguments(f"{before}{dumped(key)}: {written}")
            yield from text.spaces()
            before, after = ", ", (yield from text.expect(",", self.close))
        yield Arguments("}")
        yield CallEnd()

    def rules(self, tools: Tools, marks: Marks, head: str = "", tail: str = "") -> Iterator[str]:
        """Rules of a call of each tool, and what they need."""
        texts = Texts(self.quote, marks)
        if self.quote:
            yield from _quoted_rules(self.quote, texts)
        for number, (name, schema) in enumerate(tools.parameters.items()):
            check_name(name, "the name", name, self.open)
            definitions = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
            names, needed = [], []
            for place, (key, value, required) in enumerate(tools.arguments(name)):
                check_name(name, "the argument", key, self.equals)
                rule = f"argument_{number}_{place}"
                value = {**value, **definitions} if isinstance(value, dict) else value
                yield f"{rule}: {marks(key + self.equals)} {self._value_rule(tools, name, key, value, texts)}"
                names.append(rule)
                needed.append(required)
            body = _sequence(names, sum(needed), marks(self.separator))
            yield f"call_{number}: {marks(head + name + self.open)} {body} {marks(self.close + tail)}"

    def _value_rule(self, tools: Tools, name: str, key: str, schema: object, texts: Texts) -> str:
        types, mark = tools.types(name, key), texts.marks(self.quote)
        if not self.has_types and types and "string" not in types:
            return f"{mark} {json_of(schema)} {mark}"
        if not self.quote:
            return json_of(schema)
        if types in ({"array"}, {"object"}):
            return "quoted_list" if "array" in types else "quoted_object"
        if types & {"array", "object"} or not types:
            return "quoted_value"
        if "string" in types:
            choices = strings(tools, name, schema)
            return "quoted_text" if choices is None else f"{mark} {texts.one_of(choices, self.quote)}"
        return json_of(schema)


def _sequence(names: list[str], required: int, separator: str) -> str:
    """The arguments in order with separators; those after the first `required` may be left out."""
    if required or not names:
        first = f" {separator} ".join(names[:required])
        return first + "".join(f" ({separator} {name})?" for name in names[required:])
    starts = [
        name + "".join(f" ({separator} {other})?" for other in names[place + 1 :]) for place, name in enumerate(names)
    ]
    return f"({' | '.join(starts)})?"


def _quoted_rules(quote: str, texts: Texts) -> Iterator[str]:
    yield f"quoted_text: {texts.marks(quote)} {texts.before(quote)}"
    yield from texts.rules
    yield "quoted_value: quoted_text | NUMBER | WORD | quoted_list | quoted_object"
    yield 'quoted_list: "[" (quoted_value ("," quoted_value)*)? "]"'
    yield 'quoted_object: "{" (KEY ":" quoted_value ("," KEY ":" quoted_value)*)? "}"'
    yield "KEY: /[A-Za-z_][A-Za-z0-9_]*/"
    yield r"NUMBER: /-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?/"
    yield 'WORD: "true" | "false" | "null"'


_PYTHON = Brackets(open="(", close=")", equals="=", separator=", ")
_GEMMA = Brackets(open="{", close="}", equals=":", quote='<|"|>')
_FUNCTION_GEMMA = dataclasses.replace(_GEMMA, quote="<escape>", has_types=False)
_LLAMA_OBJECTS = Objects(arguments="parameters")


def _read_list(text: Text, tools: Tools, end: str) -> Steps[None]:
    """Reads [f(...), g(...)] and what follows it."""
    yield from text.spaces()
    separator = yield from text.expect("[")
    while separator != "]":
        yield from text.spaces()
        yield from _PYTHON.read(text, tools)
        yield from text.spaces()
        separator = yield from text.expect(",", "]")
    if end:
        yield from text.spaces()
        yield from text.take(end)


def _list_rules(begin: str, end: str, tools: Tools, marks: Marks, parallel: bool) -> Iterator[str]:
    yield from rules_of_any(tools, parallel, begin=marks(f"{begin}["), between=marks(", "), end=marks(f"]{end}"))
    yield from _PYTHON.rules(tools, marks)


# LFM2: <|tool_call_start|>[f(x=1)]<|tool_call_end|>.
_LFM, _LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"


def _read_lfm(text: Text, tools: Tools, _: str) -> Steps[None]:
    yield from _read_list(text, tools, _LFM_END)


def _lfm_rules(tools: Tools, marks: Marks, parallel: bool) -> Iterator[str]:
    yield from _list_rules(_LFM, _LFM_END, tools, marks, parallel)


# Llama 4: the whole text is [f(x=1)], or a JSON object as of Llama 3.
_LLAMA_TOKENS = ("<|python_start|>", "<|python_end|>")


def _read_llama(text: Text, tools: Tools, marker: str) -> Steps[None]:
    if marker == "{":
        yield from _LLAMA_OBJECTS.read(text, tools, marker)
    else:
        yield from _read_list(text, tools, "")


def _llama_rules(tools: Tools, marks: Marks, parallel: bool) -> Iterator[str]:
    yield from _list_rules("", "", tools, marks, parallel)


# OLMo 3: a call on each line.
_OLMO, _OLMO_END = "<function_calls>", "</function_calls>"


def _read_olmo(text: Text, tools: Tools, _: str) -> Steps[None]:
    while True:
        yield from text.spaces()
        yield from _PYTHON.read(text, tools)
        yield from text.spaces()
        if (yield from text.take(_OLMO_END)) or not (yield from text.peek()):
            return


def _olmo_rules(tools: Tools, marks: Marks, parallel: bool) -> Iterator[str]:
    yield from rules_of_any(tools, parallel, begin=marks(_OLMO), between=marks("\n"), end=marks(_OLMO_END))
    yield from _PYTHON.rules(tools, marks)


def _gemma_form(name: str, brackets: Brackets, begin: str, end: str, *ends: str) -> Form:
    head = f"{begin}call:"

    def read(text: Text, tools: Tools, _: str) -> Steps[None]:
        yield from text.expect("call:")
        yield from brackets.read(text, tools)
        yield from text.spaces()
        yield from text.take(end)

    def rules(tools: Tools, marks: Marks, parallel: bool) -> Iterator[str]:
        yield from rules_of_any(tools, parallel)
        yield from brackets.rules(tools, marks, head, end)

    return Form(
        name, lambda model: model.mentions(begin), (begin,), read, rules, (begin, end, brackets.quote), (), ends
    )


FORMS = (
    _gemma_form("gemma 4", _GEMMA, "<|tool_call>", "<tool_call|>", "<|tool_response>"),
    _gemma_form(
        "functiongemma", _FUNCTION_GEMMA, "<start_function_call>", "<end_function_call>", "<start_function_response>"
    ),
    Form(
        name="lfm2",
        detect=lambda model: model.mentions(_LFM) or (model.mentions("<|tool_list_start|>") and model.has_token(_LFM)),
        begins=(_LFM,),
        read=_read_lfm,
        rules=_lfm_rules,
        tokens=(_LFM, _LFM_END),
    ),
    Form(
        name="olmo 3",
        detect=lambda model: model.mentions(_OLMO),
        begins=(_OLMO,),
        read=_read_olmo,
        rules=_olmo_rules,
        tokens=(_OLMO, _OLMO_END),
    ),
    Form(
        name="llama 4",
        detect=lambda model: (
            model.has_token(_LLAMA_TOKENS[0]) or model.mentions("[func_name1(params_name1=params_value1")
        ),
        begins=(),
        read=_read_llama,
        rules=_llama_rules,
        silent=_LLAMA_TOKENS,
        ends=("<|eom|>", "<|eom_id|>"),
        bare=("[", "{"),
    ),
)
