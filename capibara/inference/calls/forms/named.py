"""Calls as a name and a JSON object of arguments, with tokens between them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from capibara.inference.calls.forms.form import Form, Marks, read_arguments, read_each
from capibara.inference.calls.forms.json_objects import Objects
from capibara.inference.calls.forms.rules import check_name, rules_of_calls
from capibara.inference.calls.parsing.text import Malformed, Steps, Text
from capibara.inference.calls.parsing.tools import Tools

# Mistral: a list of objects, since v11 [TOOL_CALLS]NAME[ARGS]{...} for each call, in v11 with [CALL_ID]ID after the name.
_MISTRAL, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_MISTRAL_ID_CHARS = 9  # its templates refuse others
_MISTRAL_LIST = Objects(begin=_MISTRAL, listed=True)


def _read_mistral(text: Text, tools: Tools, marker: str) -> Steps[None]:
    yield from text.spaces()
    if (yield from text.starts("[{", "[ ", "[\n", "{")):
        yield from _MISTRAL_LIST.read(text, tools, marker)
        return
    name = (yield from text.head(_ARGS, _CALL_ID, "{")).strip()
    if (yield from text.take(_CALL_ID)):
        yield from text.head(_ARGS, "{")
    yield from text.take(_ARGS)
    yield from read_arguments(text, tools, name)


def _mistral_rules(tools: Tools, marks: Marks, parallel: bool) -> Iterator[str]:
    def call(name: str, arguments: str) -> str:
        check_name(name, "the name", name, "{")
        return f"{marks(_MISTRAL + name + _ARGS)} {arguments}"

    yield from rules_of_calls(tools, call, parallel)


# DeepSeek V3, R1 and V3.1.
_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = "```json"


def _read_deepseek(text: Text, tools: Tools, _: str) -> Steps[None]:
    yield from read_each(text, _BEGIN, _SECTION_END, lambda: _read_deepseek_call(text, tools))


def _read_deepseek_call(text: Text, tools: Tools) -> Steps[None]:
    name = (yield from text.head(_SEPARATOR)).strip()
    text.at += len(_SEPARATOR)
    yield from text.spaces()
    if not (yield from text.starts("{")):  # until V3.1 the name follows the word function
        name = (yield from text.head("\n", _FENCE)).strip()
        yield from text.spaces()
        yield from text.take(_FENCE)
    yield from read_arguments(text, tools, name)
    yield from text.spaces()
    yield from text.take("```")
    yield from text.spaces()
    yield from text.take(_END)


def _deepseek_rules(head: str, tail: str, tools: Tools, marks: Marks, parallel: bool) -> Iterator[str]:
    def call(name: str, arguments: str) -> str:
        return f"{marks(_BEGIN + head.format(name))} {arguments} {marks(tail + _END)}"

    between = marks("\n") if tail else ""
    yield from rules_of_calls(tools, call, parallel, begin=marks(_SECTION), between=between, end=marks(_SECTION_END))


_DEEPSEEK_TOKENS = (_SECTION, _SECTION_END, _BEGIN, _SEPARATOR, _END)

# Kimi K2: its template writes the id alone, which has the name.
_KIMI, _KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL, _KIMI_ARGUMENTS, _KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


def _read_kimi(text: Text, tools: Tools, _: str) -> Steps[None]:
    yield from read_each(text, _KIMI_CALL, _KIMI_END, lambda: _read_kimi_call(text, tools))


def _read_kimi_call(text: Text, tools: Tools) -> Steps[None]:
    call_id = (yield from text.head(_KIMI_ARGUMENTS)).strip()
    text.at += len(_KIMI_ARGUMENTS)
    if (match := _KIMI_ID.fullmatch(call_id)) is None:
        raise Malformed
    yield from read_arguments(text, tools, match[1], call_id)
    yield from text.spaces()
    yield from text.take(_KIMI_CALL_END)


def _kimi_rules(tools: Tools, marks: Marks, parallel: bool) -> Iterator[str]:
    def call(name: str, arguments: str) -> str:
        head = f"{marks(f'{_KIMI_CALL}functions.{name}:')} /[0-9]{{1,4}}/ {marks(_KIMI_ARGUMENTS)}"
        return f"{head} {arguments} {marks(_KIMI_CALL_END)}"

    yield from rules_of_calls(tools, call, parallel, begin=marks(_KIMI), end=marks(_KIMI_END))


# PLaMo 3, whose marks are several tokens.
_PLAMO, _PLAMO_END = "<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>"
_PLAMO_CALL, _PLAMO_CALL_END = "<|plamo:begin_tool_request:plamo|>", "<|plamo:end_tool_request:plamo|>"
_PLAMO_NAME, _PLAMO_NAME_END = "<|plamo:begin_tool_name:plamo|>", "<|plamo:end_tool_name:plamo|>"
_PLAMO_ARGUMENTS = "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
_PLAMO_ARGUMENTS_END = "<|plamo:end_tool_arguments:plamo|>"


def _read_plamo(text: Text, tools: Tools, _: str) -> Steps[None]:
    yield from read_each(text, _PLAMO_CALL, _PLAMO_END, lambda: _read_plamo_call(text, tools))


def _read_plamo_call(text: Text, tools: Tools) -> Steps[None]:
    yield from text.spaces()
    yield from text.expect(_PLAMO_NAME)
    name = (yield from text.head(_PLAMO_NAME_END)).strip()
    text.at += len(_PLAMO_NAME_END)
    yield from text.spaces()
    yield from text.expect(_PLAMO_ARGUMENTS)
    yield from read_arguments(text, tools, name)
    for mark in (_PLAMO_ARGUMENTS_END, _PLAMO_CALL_END):
        yield from text.spaces()
        yield from text.take(mark)


def _plamo_rules(tools: Tools, marks: Marks, parallel: bool) -> Iterator[str]:
    def call(name: str, arguments: str) -> str:
        head = marks(_PLAMO_CALL + _PLAMO_NAME + name + _PLAMO_NAME_END + _PLAMO_ARGUMENTS)
        return f"{head} {arguments} {marks(_PLAMO_ARGUMENTS_END + _PLAMO_CALL_END)}"

    yield from rules_of_calls(tools, call, parallel, begin=marks(_PLAMO), end=marks(_PLAMO_END))


# Functionary 3.1: <function=NAME>{...}</function>.
def _read_functionary(text: Text, tools: Tools, _: str) -> Steps[None]:
    name = yield from text.head(">")
    text.at += 1
    yield from read_arguments(text, tools, name)
    yield from text.spaces()
    yield from text.take("</function>")


def _functionary_rules(tools: Tools, marks: Marks, parallel: bool) -> Iterator[str]:
    def call(name: str, arguments: str) -> str:
        check_name(name, "the name", name, ">")
        return f"{marks(f'<function={name}>')} {arguments} {marks('</function>')}"

    yield from rules_of_calls(tools, call, parallel)


FORMS = (
    Form(
        name="mistral list",
        # Later tokenizers have [ARGS], which later templates write.
        detect=lambda model: model.has_token(_MISTRAL) and model.mentions(_MISTRAL) and not model.mentions(_ARGS),
        begins=(_MISTRAL,),
        read=_read_mistral,
        rules=_MISTRAL_LIST.rules,
        tokens=(_MISTRAL, _CALL_ID, _ARGS),
        id_chars=_MISTRAL_ID_CHARS,
    ),
    Form(
        name="mistral",
        detect=lambda model: model.has_token(_MISTRAL) and model.mentions(_MISTRAL),
        begins=(_MISTRAL,),
        read=_read_mistral,
        rules=_mistral_rules,
        tokens=(_MISTRAL, _CALL_ID, _ARGS),
        id_chars=_MISTRAL_ID_CHARS,
    ),
    Form(
        name="deepseek v3",
        detect=lambda model: model.mentions(_SECTION) and model.mentions(_FENCE),
        begins=(_SECTION,),
        read=_read_deepseek,
        rules=functools.partial(_deepseek_rules, f"function{_SEPARATOR}{{}}\n{_FENCE}\n", "\n```"),
        tokens=_DEEPSEEK_TOKENS,
    ),
    Form(
        name="deepseek v3.1",
        detect=lambda model: model.mentions(_SECTION),
        begins=(_SECTION,),
        read=_read_deepseek,
        rules=functools.partial(_deepseek_rules, f"{{}}{_SEPARATOR}", ""),
        tokens=_DEEPSEEK_TOKENS,
    ),
    Form(
        name="kimi k2",
        detect=lambda model: model.mentions(_KIMI),
        begins=(_KIMI,),
        read=_read_kimi,
        rules=_kimi_rules,
        tokens=(_KIMI, _KIMI_END, _KIMI_CALL, _KIMI_ARGUMENTS, _KIMI_CALL_END),
    ),
    Form(
        name="plamo 3",
        detect=lambda model: model.mentions(_PLAMO),
        begins=(_PLAMO,),
        read=_read_plamo,
        rules=_plamo_rules,
        tokens=(
            _PLAMO_END,
            _PLAMO_CALL,
            _PLAMO_CALL_END,
            _PLAMO_NAME,
            _PLAMO_NAME_END,
            _PLAMO_ARGUMENTS,
            _PLAMO_ARGUMENTS_END,
        ),
    ),
    Form(
        name="functionary",
        detect=lambda model: model.mentions("<function=") and not model.mentions("<parameter="),
        begins=("<function=",),
        read=_read_functionary,
        rules=_functionary_rules,
        ends=("<|eom_id|>",),
    ),
)
