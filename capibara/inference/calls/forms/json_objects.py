"""Calls as JSON objects, such as {"name": "f", "arguments": {"x": 1}}: alone, one after another, or in a list."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator

from capibara.inference.calls.forms.form import Evidence, Form, Marks, read_arguments
from capibara.inference.calls.forms.rules import rules_of_calls
from capibara.inference.calls.parsing import json_text
from capibara.inference.calls.parsing.text import Arguments, Call, CallEnd, Malformed, Steps, Text
from capibara.inference.calls.parsing.tools import Tools, dumped

_ARGUMENTS = ("arguments", "parameters")
_BARE_KEYS = ("name", "type", "id", "function", *_ARGUMENTS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objects:
    """How the objects are written.

    Attributes:
      begin: text before them; white space may follow.
      end: text after them, which a model may leave out.
      name: key of the tool's name; None: the name is the only key, and its value the arguments.
      arguments: key of the arguments in a grammar.
      listed: whether a grammar has one list of all calls, or each call by itself.
      before: rule in a grammar for what an object has before the name.
      padding: white space around an object in a grammar.
    """

    begin: str = ""
    end: str = ""
    name: str | None = "name"
    arguments: str = "arguments"
    listed: bool = False
    before: str = ""
    padding: str = ""

    def read(self, text: Text, tools: Tools, marker: str) -> Steps[None]:
        """Reads a list of objects, or objects one after another."""
        is_bare = marker in ("{", "[")
        yield from text.spaces()
        if (yield from text.take("[")):
            separator = ","
            while separator == ",":
                yield from self._read_object(text, tools, is_bare)
                yield from text.spaces()
                separator = yield from text.expect(",", "]")
        else:
            while True:
                yield from self._read_object(text, tools, is_bare)
                yield from text.spaces()
                yield from text.take(";")  # of Llama
                yield from text.spaces()
                if not (yield from text.starts("{")):
                    break
        if self.end:
            yield from text.spaces()
            yield from text.take(self.end)

    def _read_object(self, text: Text, tools: Tools, is_bare: bool) -> Steps[None]:
        yield from text.spaces()
        yield from text.expect("{")
        yield from text.spaces()
        if self.name is None:
            name = yield from json_text.read_string(text)
            yield from text.spaces()
            yield from text.expect(":")
            yield from read_arguments(text, tools, name)
            yield from text.spaces()
            yield from text.expect("}")
        else:
            yield from self._read_pairs(text, tools, self.name, is_bare)

    def _read_pairs(self, text: Text, tools: Tools, name_key: str, is_bare: bool) -> Steps[None]:
        """Reads the keys and values, in any order; an object that is no call may begin like one."""
        name, arguments, is_sent = "", "", False
        while True:
            key = yield from json_text.read_string(text)
            if is_bare and key not in (*_BARE_KEYS, name_key):
                raise Malformed
            yield from text.spaces()
            yield from text.expect(":")
            yield from text.spaces()
            start = text.at
            if key == name_key and not name:
                name = yield from json_text.read_string(text)
                if name not in tools:
                    raise Malformed
            elif key in _ARGUMENTS and not arguments:
                if (yield from text.peek()) != "{":
                    raise Malformed
                if name:
                    yield Call(name)
                    yield from text.streamed(json_text.skip_value(text))
                    is_sent = True
                else:
                    yield from json_text.skip_value(text)
                arguments = text.part(start)
            else:
                yield from json_text.skip_value(text)
            yield from text.spaces()
            if (yield from text.expect(",", "}")) == "}":
                break
            yield from text.spaces()
        if not name or (is_bare and not arguments):
            raise Malformed
        if not is_sent:
            yield Call(name)
            yield Arguments(arguments or "{}")
        yield CallEnd()

    def rules(self, tools: Tools, marks: Marks, parallel: bool) -> Iterator[str]:
        """Rules of a grammar."""

        def call(name: str, arguments: str) -> str:
            quoted = dumped(name)
            head = f"{{{quoted}: " if self.name is None else f"{json.dumps(self.name)}: {quoted}, "
            if self.name is None:
                return f"{marks(head)} {arguments} {marks('}')}"
            head += f"{json.dumps(self.arguments)}: "
            return f"{marks('{')} {self.before} {marks(head)} {arguments} {marks('}')}"

        begin, end = self.begin + self.padding, self.padding + self.end
        if self.listed:
            begin, end = f"{begin}[", f"]{end}"
            yield from rules_of_calls(tools, call, parallel, begin=marks(begin), between=marks(", "), end=marks(end))
        else:
            between = marks(f"{end}\n{begin}")
            yield from rules_of_calls(tools, call, parallel, begin=marks(begin), between=between, end=marks(end))


_HERMES = Objects(begin="<tool_call>", end="</tool_call>", padding="\n")
_LLAMA = Objects(begin="<|python_tag|>", arguments="parameters")
_COMMAND = Objects(
    begin="<|START_ACTION|>",
    end="<|END_ACTION|>",
    name="tool_name",
    arguments="parameters",
    listed=True,
    before=r'"\"tool_call_id\": \"" /[0-9]{1,3}/ "\", "',
)
_COMMAND_R = Objects(
    begin="Action:\n```json", end="```", name="tool_name", arguments="parameters", listed=True, padding="\n"
)
_APERTUS = Objects(begin="<|tools_prefix|>", end="<|tools_suffix|>", name=None, listed=True)
_INTERNLM = Objects(begin="<|action_start|><|plugin|>", end="<|action_end|>", arguments="parameters", padding="\n")
_PHI = Objects(begin="<|tool_call|>", end="<|/tool_call|>", listed=True)


def _form(name: str, objects: Objects, detect: Callable[[Evidence], bool] | None = None) -> Form:
    """A form of these objects; by default a model has it whose template has its first marker."""
    detect = detect or (lambda model: model.mentions(objects.begin))
    begins = (objects.begin,) if objects.begin else ()
    return Form(name, detect, begins, objects.read, objects.rules, (objects.begin, objects.end))


_COMMAND_FORM = dataclasses.replace(
    _form("command", _COMMAND), silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
)
# The template of Llama 3.2 writes calls without the token, which its tokenizer has.
_LLAMA_FORM = dataclasses.replace(
    _form("llama", _LLAMA, lambda model: model.mentions('"parameters":') and model.has_token(_LLAMA.begin)),
    rules=dataclasses.replace(_LLAMA, begin="").rules,
    ends=("<|eom_id|>",),
    bare=("{",),
)
_XLAM_FORM = dataclasses.replace(
    _form("xlam", Objects(listed=True), lambda model: model.mentions('"tool_call_name"')), bare=("[",)
)
FORMS = (
    _COMMAND_FORM,
    _form("command r", _COMMAND_R, lambda model: model.mentions('"tool_name"') and model.mentions("Action:")),
    _form("apertus", _APERTUS),
    _form("phi", _PHI, lambda model: model.has_token(_PHI.end)),  # its template has no calls
    _form("functools", Objects(begin="functools", listed=True)),
    _form("granite", Objects(begin="<|tool_call|>", listed=True)),
    _form("granite code", Objects(begin="<function_call>", padding=" ")),
    _form("gigachat", Objects(begin="<|function_call|>")),
    _form("listed", Objects(begin="<tool_calls>", end="</tool_calls>", listed=True)),
    _form("internlm", _INTERNLM),
    _form("nemotron", Objects(begin="<TOOLCALL>", end="</TOOLCALL>", listed=True)),
    _form("longcat", Objects(begin="<longcat_tool_call>", end="</longcat_tool_call>", padding="\n")),
    _form("hermes", _HERMES),
    _LLAMA_FORM,
    _XLAM_FORM,
)
