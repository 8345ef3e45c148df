"""Calls as XML-like tags around a name and each argument: the arguments' types are those of the tool's schema."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from capibara.inference.calls.forms.form import Evidence, Form, Marks, read_each
from capibara.inference.calls.forms.json_objects import Objects
from capibara.inference.calls.forms.rules import Texts, check_name, json_of, json_of_types, rules_of_any, strings
from capibara.inference.calls.parsing.text import Arguments, Call, CallEnd, Malformed, Steps, Text
from capibara.inference.calls.parsing.tools import Tools, dumped
from capibara.inference.grammars.lark import quoted


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallTags:
    """How calls are written.

    Attributes:
      begin: before one call, or before all.
      call: before a tool's name; empty: `begin` is.
      name_end: after the name; empty: the name ends before a line break, an argument or the end.
      key: before an argument's name.
      key_ends: after it, each with whether the argument is text; None: its schema says.
      value: before its value, after white space; empty: nothing.
      value_end: after the value.
      call_end: after a call.
      end: after `call_end`, of what `begin` begins.
      is_section: whether `begin` and `end` are around all calls.
      padding: one white space at both sides of a value that is none of it.
      layout: white space between tags in a grammar.
      type: around an argument's type, which a model may write between its name and its value; empty: it never does.
      raw: around a value that a model may put between them as it is; empty: it never does.
      header: before `begin` in a grammar, with NAME for the tool's; empty: nothing.
      between: between two calls in a grammar; empty: the layout.
      reads_objects: whether a call may be a JSON object instead, with "name" and "arguments".
    """

    begin: str
    call: str = ""
    name_end: str = ""
    key: str
    key_ends: dict[str, bool | None]
    value: str = ""
    value_end: str
    call_end: str
    end: str = ""
    is_section: bool = False
    padding: str = ""
    layout: str = "\n"
    type: tuple[str, str] = ("", "")
    raw: tuple[str, str] = ("", "")
    header: str = ""
    between: str = ""
    reads_objects: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """All that may be a special token."""
        names = (self.begin, self.call, self.name_end, self.key, *self.key_ends)
        return (*names, self.value, self.value_end, self.call_end, self.end, *self.type)

    def read(self, text: Text, tools: Tools, marker: str) -> Steps[None]:
        """Reads one call, or all of a section."""
        if self.is_section and marker == self.begin:
            yield from read_each(text, self.call, self.end, lambda: self._read_call(text, tools))
            return
        if self.call and marker != self.call:
            yield from text.spaces()
            yield from text.expect(self.call)
        yield from self._read_call(text, tools)
        yield from text.spaces()
        if self.end:
            yield from text.take(self.end)

    def _read_call(self, text: Text, tools: Tools) -> Steps[None]:
        if self.reads_objects:
            yield from text.spaces()
            if (yield from text.starts("{")):
                yield from Objects(end=self.call_end).read(text, tools, self.call)
                return
        stops = (self.name_end,) if self.name_end else ("\n", self.key, self.call_end)
        name = (yield from text.head(*stops)).strip()
        yield from text.take(self.name_end)
        if name not in tools:
            raise Malformed
        before = "{"
        while True:
            yield from text.spaces()
            if (yield from text.expect(self.key, self.call_end)) == self.call_end:
                break
            key = yield from text.head(*self.key_ends)
            is_text = self.key_ends[(yield from text.take(*self.key_ends))]
            kind, types = (yield from self._read_type(text)), tools.types(name, key)
            if kind == "string" and (not types or "string" in types):
                is_text = True
            if self.value:
                yield from text.spaces()
                yield from text.expect(self.value)
            if before == "{":
                yield Call(name)
            yield Arguments(f"{before}{dumped(key)}: ")
            yield from self._read_value(text, tools, name, key, is_text)
            before = ", "
        if before == "{":
            yield Call(name)
        yield Arguments("{}" if before == "{" else "}")
        yield CallEnd()

    def _read_type(self, text: Text) -> Steps[str]:
        """Reads an argument's type; empty: it has none."""
        begin, end = self.type
        if not begin:
            return ""
        yield from text.spaces()
        if not (yield from text.take(begin)):
            return ""
        kind = yield from text.head(end)
        text.at += len(end)
        return kind.strip()

    def _read_value(self, text: Text, tools: Tools, name: str, key: str, is_text: bool | None) -> Steps[None]:
        """Reads a value: of a text each piece as it arrives, else all of it."""
        if self.padding:
            yield from text.take(self.padding)
        if is_text is None:
            is_text = tools.types(name, key) == {"string"}
        if is_text:
            yield Arguments('"')
            yield from self._read_text(text, lambda piece: Arguments(dumped(piece)[1:-1]))
            yield Arguments('"')
            return
        parts: list[str] = []
        for event in self._read_text(text, lambda piece: Arguments(piece)):
            if isinstance(event, Arguments):
                parts.append(event.text)
            else:
                yield event
        yield Arguments(tools.typed(name, key, "".join(parts)))

    def _read_text(self, text: Text, event: Callable[[str], Arguments]) -> Steps[None]:
        """Reads up to an end after which another argument follows, or the end of the call: others are a part of it."""
        raw, raw_end = self.raw
        if raw and (yield from text.take(raw)):
            if not (yield from text.until((raw_end,), event)):
                raise Malformed
            yield from text.expect(self.value_end)
            return
        ends = tuple(dict.fromkeys((self.padding + self.value_end, self.value_end)))
        while end := (yield from text.until(ends, event)):
            after = text.at
            yield from text.spaces()
            if (yield from text.starts(self.key, self.call_end)):
                return
            text.at = after
            yield event(end)
        raise Malformed

    def rules(self, tools: Tools, marks: Marks, parallel: bool) -> Iterator[str]:
        """Rules of a grammar: the arguments in the order of the schema, those that are required first."""
        line = self.layout
        end = f"{line}{self.end}" if self.end else ""
        if self.is_section:
            yield from rules_of_any(tools, parallel, begin=marks(self.begin), end=marks(end))
            begin, end = line + self.call, ""
        else:
            begin = self.begin + (line + self.call if self.call else "")
            yield from rules_of_any(tools, parallel, between=marks(self.between or line))
        texts, raw_texts = Texts(self.value_end, marks, self.raw[0]), Texts(self.raw[1], marks, name="raw")
        for number, name in enumerate(tools.parameters):
            arguments = []
            for place, (key, value, required) in enumerate(tools.arguments(name)):
                rule = f"value_{number}_{place}"
                yield f"{rule}: {self._value_rule(tools, name, key, value, texts, raw_texts)}"
                arguments.append(f"({self._head(key, tools, name, marks)} {rule}){'' if required else '?'}")
            check_name(name, "the name", name, *((" ", "<") if self.header else ()))
            head = f"{self.header.replace('NAME', name)}{begin}{name}{self.name_end}"
            after = marks(line + self.call_end + end)
            yield f"call_{number}: {marks(head)} {' '.join(arguments)} {after}"

        yield from (*texts.rules, *raw_texts.rules)

    def _head(self, key: str, tools: Tools, name: str, marks: Marks) -> str:
        is_text = tools.types(name, key) in ({"string"}, set())
        check_name(name, "the argument", key, *self.key_ends)
        key_end = next(end for end, kind in self.key_ends.items() if kind in (None, is_text))
        value = self.layout + self.value if self.value else ""
        return marks(f"{self.layout}{self.key}{key}{key_end}{value}{self.padding}")

    def _value_rule(self, tools: Tools, name: str, key: str, value: Any, texts: Texts, raw_texts: Texts) -> str:
        """A value with its end; a text may have the padding before its end, or not."""
        types, end = tools.types(name, key), texts.marks(self.padding + self.value_end)
        if types and "string" not in types:
            return f"{json_of(tools.standalone(name, value))} {end}"
        if (choices := strings(tools, name, value)) is None:
            rule, (raw, raw_end) = texts.before(self.value_end), self.raw
            return f"{rule} | {quoted(raw)} {raw_texts.before(raw_end)} {end}" if raw else rule
        rule = texts.one_of(choices, self.padding + self.value_end)
        others = types - {"string"}
        return f"{rule} | {json_of_types(tools, name, value, others)} {end}" if others else rule


# What ends an argument's name, and whether the argument is text.
_BY_SCHEMA: dict[str, bool | None] = {'">': None}
_BY_ATTRIBUTE: dict[str, bool | None] = {'" string="true">': True, '" string="false">': False}
_QWEN = CallTags(
    begin="<tool_call>",
    call="<function=",
    name_end=">",
    key="<parameter=",
    key_ends={">": None},
    value_end="</parameter>",
    call_end="</function>",
    end="</tool_call>",
    padding="\n",
)
_SEED = dataclasses.replace(_QWEN, begin="<seed:tool_call>", end="</seed:tool_call>", padding="")


def invokes(section: str, mark: str = "", key_ends: dict[str, bool | None] = _BY_SCHEMA) -> CallTags:
    """Elements invoke and parameter, each with a name, in a section of calls; `mark` is before the word of each tag."""
    return CallTags(
        begin=f"<{mark}{section}>",
        call=f'<{mark}invoke name="',
        name_end='">',
        key=f'<{mark}parameter name="',
        key_ends=key_ends,
        value_end=f"</{mark}parameter>",
        call_end=f"</{mark}invoke>",
        end=f"</{mark}{section}>",
        is_section=True,
    )


_MINIMAX = invokes("minimax:tool_call")
_DOTS = invokes("dots_function_call")
_DEEPSEEK = invokes("function_calls", "｜DSML｜", _BY_ATTRIBUTE)
_DEEPSEEK_V4 = invokes("tool_calls", "｜DSML｜", _BY_ATTRIBUTE)
_DEEPSEEK_V41 = invokes("calls", "｜DSML｜ ", _BY_ATTRIBUTE)
_GLM = CallTags(
    begin="<tool_call>",
    key="<arg_key>",
    key_ends={"</arg_key>": None},
    value="<arg_value>",
    value_end="</arg_value>",
    call_end="</tool_call>",
)
_HY = dataclasses.replace(
    _GLM,
    begin="<tool_calls>",
    call="<tool_call>",
    name_end="<tool_sep>",
    end="</tool_calls>",
    is_section=True,
)
_STEP = dataclasses.replace(
    invokes("", "steptml:"),
    begin="<｜tool_calls_begin｜>",
    call='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
    call_end="</steptml:invoke><｜tool_call_end｜>",
    end="<｜tool_calls_end｜>",
    layout="",
)
_MINICPM = CallTags(
    begin='<function name="',
    name_end='">',
    key='<param name="',
    key_ends=_BY_SCHEMA,
    value_end="</param>",
    call_end="</function>",
    layout="",
    raw=("<![CDATA[", "]]>"),
)
_IFM = CallTags(
    begin="<ifm|tool_calls>",
    call="<ifm|tool_call>",
    key="<ifm|arg_key>",
    key_ends={"</ifm|arg_key>": None},
    value="<ifm|arg_value>",
    value_end="</ifm|arg_value>",
    call_end="</ifm|tool_call>",
    end="</ifm|tool_calls>",
    is_section=True,
    type=("<ifm|arg_type>", "</ifm|arg_type>"),
    reads_objects=True,
)


def _form(name: str, tags: CallTags, detect: Callable[[Evidence], bool]) -> Form:
    begins = (tags.begin, tags.call) if tags.reads_objects else (tags.begin,)
    return Form(name, detect, begins, tags.read, tags.rules, tags.marks)


FORMS = (
    _form("deepseek v4.1", _DEEPSEEK_V41, lambda model: model.mentions("｜DSML｜") and model.mentions(" invoke name=")),
    _form(
        "deepseek v4", _DEEPSEEK_V4, lambda model: model.mentions("｜DSML｜") and not model.mentions("function_calls")
    ),
    _form("deepseek v3.2", _DEEPSEEK, lambda model: model.mentions("｜DSML｜")),
    _form("minimax m2", _MINIMAX, lambda model: model.mentions(_MINIMAX.begin)),
    _form("dots", _DOTS, lambda model: model.mentions(_DOTS.begin)),
    _form("step 3", _STEP, lambda model: model.mentions("steptml")),
    _form("minicpm 5", _MINICPM, lambda model: model.mentions(_MINICPM.begin) and model.mentions(_MINICPM.key)),
    _form("k2 horizon", _IFM, lambda model: model.mentions(_IFM.call)),
    _form("hy 3", _HY, lambda model: model.mentions(_HY.name_end)),
    _form("glm", _GLM, lambda model: model.mentions(_GLM.key)),
    _form("seed", _SEED, lambda model: model.mentions(_SEED.begin)),
    _form("qwen xml", _QWEN, lambda model: model.mentions(_QWEN.key) and model.mentions(_QWEN.begin)),
)
