"""Numbers of calls that no float64 holds: Python reads 1e400 as infinity, which JSON has not, and 400 digits break it."""

from __future__ import annotations

import json

import pytest

from capibara.inference.calls.dialect import Dialect
from capibara.inference.calls.forms import table
from capibara.inference.calls.parsing import literals
from capibara.inference.calls.parsing.json_text import is_number
from capibara.inference.calls.parsing.text import Malformed
from tests.inference.calls import turns

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "number"}}}}}]
LARGE = ["1e400", "-1E+400", "9" * 400, "-" + "9" * 400, "9" * 5000, "1" + "0" * 308 + ".5e9", "NaN", "Infinity"]
HELD = ["1e308", "-1E+308", "9" * 308, "1e-400", "0", "-0.5"]
# Form -> how it writes a call with the argument X.
CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"x": X}}\n</tool_call>',
    "mistral": '[TOOL_CALLS]f[ARGS]{"x": X}',
    "llama": '{"name": "f", "parameters": {"x": X}}',
    "llama 4": "[f(x=X)]",
    "lfm2": "<|tool_call_start|>[f(x=X)]<|tool_call_end|>",
    "minimax m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">X</parameter>\n</invoke>\n</minimax:tool_call>',
    "gemma 4": "<|tool_call>call:f{x:X}<tool_call|>",
    "qwen xml": "<tool_call>\n<function=f>\n<parameter=x>\nX\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>X</arg_value>\n</tool_call>",
    "deepseek v3.1": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": X}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "harmony": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": X}<|call|>',
}
FORMS = {form.name: form for form in table.FORMS}


@pytest.mark.parametrize("number", [*LARGE, *HELD], ids=lambda number: f"{number[:7]} of {len(number)}")
@pytest.mark.parametrize("form", CALLS)
def test_arguments_of_a_call_are_json_that_every_reader_takes(form, number):
    for how in ("whole", "characters"):
        message, _ = turns.read(Dialect(FORMS[form]), CALLS[form].replace("X", number), False, how, tools=TOOLS)
        calls = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        if number in HELD:
            assert calls == [{"x": json.loads(number)}]
        else:  # the call is content, or the value a text, as all that is no value of its type
            assert calls in ([], [{"x": number}])


@pytest.mark.parametrize("number", LARGE, ids=lambda number: f"{number[:7]} of {len(number)}")
def test_literals_are_held_by_a_float64(number):
    assert not is_number(number)
    for text in (number, f"[{number}]", f"{{x: {number}}}"):
        with pytest.raises(Malformed):
            literals.parse(text)
