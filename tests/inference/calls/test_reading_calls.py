"""What is no call stays text, and nothing is lost or doubled, whole or in any pieces."""

from __future__ import annotations

import json

import pytest

from capibara.inference.calls.dialect import Dialect
from capibara.inference.calls.forms import table
from capibara.inference.calls.message import Message
from capibara.inference.calls.parsing.tools import Tools
from capibara.inference.calls.reader import Reader
from capibara.inference.calls.reasoning import Tags, tags_of
from tests.inference.calls import turns

TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}, "y": {"type": "string"}}}},
    },
    {"type": "function", "function": {"name": "g"}},
]
FORMS = {form.name: form for form in table.FORMS}
F, G = ("f", {"x": 1, "y": "é"}), ("g", {})
ONE = '<tool_call>\n{"name": "f", "arguments": {"x": 1, "y": "é"}}\n</tool_call>'
TWO = ONE + '\n<tool_call>{"name": "g"}</tool_call>'
LISTED = '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1, "y": "é"}}'
LLAMA_F = '{"name": "f", "parameters": {"x": 1, "y": "é"}}'
XML_F = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=y>\né\n</parameter>\n</function>\n</tool_call>"
# Form, text -> the answer, and the name and arguments of each call.
TEXTS = {
    "hermes": {
        ONE: ("", [F]),
        f"I look it up. {TWO}": ("I look it up.", [F, G]),
        f"{ONE} And so on.": ("And so on.", [F]),
        ONE.removesuffix("</tool_call>"): ("", [F]),  # its last token may be the end token
        '<tool_call>{"arguments": {"x": 1, "y": "é"}, "name": "f"}</tool_call>': ("", [F]),
        '<tool_call>[{"name": "f", "arguments": {"x": 1, "y": "é"}}, {"name": "g"}]</tool_call>': ("", [F, G]),
        "no call, a < b and <tool": ("no call, a < b and <tool", []),
        " \n two\n\n": (" \n two\n\n", []),
        ONE + "<tool_call>{</tool_call>": ("<tool_call>{</tool_call>", [F]),
        "<tool_call>no JSON</tool_call>" + ONE: ("<tool_call>no JSON</tool_call>", [F]),
        "As <tool_call> is a tag," + ONE: ("As <tool_call> is a tag,", [F]),
        '<tool_call>{"name": "f", "arguments": {"x": 1, "y": "</tool_call>"}}</tool_call>': ("", [("f", {"x": 1, "y": "</tool_call>"})]),
        **{
            text: (text, [])
            for text in (
                "", '<tool_call>{"name": "other"}</tool_call>', "<tool_call>not JSON</tool_call>", "<tool_call>[1]</tool_call>",
                '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "<tool_call>" + "[" * 999, LLAMA_F, LISTED + "]",
                '<tool_call>{"name": ["f"]}</tool_call>', '<tool_call>{"name": "f", "arguments": {"x": 01}}</tool_call>',
                '<tool_call>{"name": "f", "arguments": {"x": 1', '<tool_call>{"name": "f", "arguments": {"y": "a\nb"}}</tool_call>',
                '<tool_call>{"name": "f", "arguments": {"x": NaN}}', '<tool_call>{"name": "f", "arguments": ' + '{"x":' * 200,
                '<tool_call>{"name": "f", "arguments": {"y": "\\u12', '<tool_call>{"name": "f", "arguments": {"y": "\\q"}}', "<tool_call>",
            )
        },
    },
    "mistral": {
        LISTED + "]": ("", [F]),
        LISTED.replace("] [", "][") + ', {"name": "g", "arguments": {}, "id": "abcdefghi"}]': ("", [F, G]),
        "Let me see.\n" + LISTED + "]": ("Let me see.", [F]),
        '[TOOL_CALLS]f[ARGS]{"x": 1, "y": "é"}': ("", [F]),
        'Well: [TOOL_CALLS]f[ARGS]{"x": 1, "y": "é"}[TOOL_CALLS]g[ARGS]{}': ("Well:", [F, G]),
        '[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"x": 1, "y": "é"}[TOOL_CALLS]g[CALL_ID]a1B2c3D4f[ARGS]{}': ("", [F, G]),
        '[TOOL_CALLS]f{"x": 1, "y": "é"}': ("", [F]),
        LISTED: ("", [F]),
        LISTED + "] and more": ("and more", [F]),
        LISTED + ", 1]": (", 1]", [F]),
        '[TOOL_CALLS]g[ARGS]{}[TOOL_CALLS]': ("[TOOL_CALLS]", [G]),
        **{
            text: (text, [])
            for text in (
                "", "no [TOOL", "[TOOL_CALLS]", "[TOOL_CALLS] []", "[TOOL_CALLS] [1]", '[TOOL_CALLS]other[ARGS]{}',
                '[TOOL_CALLS]f[ARGS]{"x": ', "[TOOL_CALLS]f[ARGS][1]", "[TOOL_CALLS][" + "[" * 999, ONE, LLAMA_F, 'f[ARGS]{"x": 1}',
                "[TOOL_CALLS]" + "f" * 2000 + "[ARGS]{}",
            )
        },
    },
    "llama": {
        LLAMA_F: ("", [F]),
        "\n " + LLAMA_F.replace('{"name"', '{"type": "function", "name"') + "\n": ("", [F]),
        f"<|python_tag|>{LLAMA_F}": ("", [F]),
        f"I call it. <|python_tag|>{LLAMA_F}; " + '{"name": "g", "parameters": {}}': ("I call it.", [F, G]),
        LLAMA_F + '\n{"name": "g", "arguments": {}}': ("", [F, G]),
        LLAMA_F + " and more": ("and more", [F]),
        **{
            text: (text, [])
            for text in (
                "", "{", '{"x": 1}', '{"name": "f"}', '{"name": "other", "parameters": {}}', "I say " + LLAMA_F, LLAMA_F[:-9], "  ",
                '<|python_tag|>brave_search.call(query="x")', "<|python_tag|>print(1)", '{"a":' * 999, "\n {1}", ONE, LISTED + "]",
                '{"name": "f", "parameters": [1]}', "<|python_tag|>", "a < b and <|pyth", '{"type": "object", "name": 1}',
            )
        },
    },
    "qwen xml": {
        XML_F: ("", [F]),
        "Well.\n\n" + XML_F + "\n" + XML_F: ("Well.", [F, F]),
        XML_F.replace("\n", ""): ("", [F]),
        "<tool_call>\n<function=g>\n</function>\n</tool_call>": ("", [G]),
        "<tool_call><function=f><parameter=y>\n\n a\n\n</parameter></function></tool_call>": ("", [("f", {"y": "\n a\n"})]),
        "<tool_call><function=f><parameter=y></parameter></function>": ("", [("f", {"y": ""})]),
        "<tool_call><function=f><parameter=z>[1, {}]</parameter></function>": ("", [("f", {"z": [1, {}]})]),
        "<tool_call><function=f><parameter=x>one</parameter></function>": ("", [("f", {"x": "one"})]),
        **{
            text: (text, [])
            for text in (
                "<tool_call>\n<function=h>\n</function>", "<tool_call>\n<function=f>\n<parameter=y>\né", ONE, "<tool_call><function=f>?",
                "<tool_call><function=f><parameter=x>1</parameter>", "<tool_call><function=f", XML_F[:-35],
            )
        },
    },
    "lfm2": {
        "<|tool_call_start|>[f(x=1, y='é'), g()]<|tool_call_end|>": ("", [F, G]),
        '<|tool_call_start|>[f(x=1,y="\\u00e9")]<|tool_call_end|> Done.': ("Done.", [F]),
        "<|tool_call_start|>[f(y='it\\'s \\n \\x41 \"')]": ("", [("f", {"y": "it's \n A \""})]),
        "<|tool_call_start|>[f(z={'a': [True, None, -1.5e3, ()]})]": ("<|tool_call_start|>[f(z={'a': [True, None, -1.5e3, ()]})]", []),
        **{
            text: (text, [])
            for text in (
                "<|tool_call_start|>[f(x=1", "<|tool_call_start|>[f(x=one)]", "<|tool_call_start|>f(x=1)", "<|tool_call_start|>[f(1)]",
                "<|tool_call_start|>[f(x=1e999)]", "<|tool_call_start|>[h()]", "<|tool_call_start|>[f(x=" + "[" * 200,
                "<|tool_call_start|>[f(y='a", "[f(x=1)]",
            )
        },
    },
    "harmony": {
        "<|channel|>final<|message|>Hi": ("Hi", []),
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1, "y": "é"}<|call|>': ("", [F]),
        ' to=functions.f<|channel|>commentary json<|message|>{"x": 1, "y": "é"}': ("", [F]),
        "Hi": ("Hi", []),
        "to=functions.f": ("to=functions.f", []),
        "<|channel|>final<|message|>Hi<|end|><|start|>assistant": ("Hi", []),
        "<|channel|>commentary to=functions.h<|message|>{}": ("<|channel|>commentary to=functions.h<|message|>{}", []),
    },
}  # fmt: skip
CASES = [(name, text) for name, texts in TEXTS.items() for text in texts]


@pytest.mark.parametrize("name, text", CASES, ids=range(len(CASES)))
def test_calls_are_taken_out_of_a_text_whole_and_in_pieces(name, text):
    dialect, expected = Dialect(FORMS[name]), TEXTS[name][text]
    message, deltas = turns.read(dialect, text, False, "whole", tools=TOOLS)
    content, _, calls = turns.in_whole(message)
    assert (content, [(called, json.loads(arguments)) for called, arguments in calls]) == expected
    ids = [call["id"] for call in message.get("tool_calls", ())]
    assert len(set(ids)) == len(ids)
    for how, seed in (("characters", 0), *(("tokens", seed) for seed in range(10))):
        again, deltas = turns.read(dialect, text, False, how, seed, tools=TOOLS)
        assert turns.in_whole(again) == (content, "", calls)
        streamed, _, begun = turns.joined(deltas)
        if len(begun) == len(calls):
            assert (streamed, begun) == (content, calls)
        else:  # a call that was cut off after its arguments began: the rest of it is content
            assert begun[: len(calls)] == calls and streamed != content and len(begun) == len(calls) + 1
            assert content.endswith(streamed) and begun[-1][0] in content and begun[-1][1] != ""


def test_text_and_arguments_go_out_as_soon_as_they_can():
    reader, message = Reader(FORMS["hermes"], Tools(TOOLS), None), Message()
    steps = [
        ("Well <", {"content": "Well"}),
        ("b, <tool_", {"content": " <b,"}),
        ('call>{"name": "f", "arguments"', {}),
        (': {"y": "a', {"name": "f", "arguments": '{"y": "a'}),
        ("b\\", {"arguments": "b"}),
        ('n"', {"arguments": '\\n"'}),
        ("}}</tool", {"arguments": "}"}),
        ("_call>", {}),
    ]
    for text, expected in steps:
        delta = message.add(reader.add(text))
        (call,) = delta.pop("tool_calls", [{"function": {}}])
        assert delta | call["function"] == expected, text
    assert message.add(reader.close()) == {}
    assert message.whole()["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"y": "ab\\n"}'}


THINK = Tags("<think>", "</think>", ("<response>", "</response>"))
# Text, whether the prompt has opened a thought -> thought, answer, number of calls.
THOUGHTS = {
    ("<think>\nHm.\n</think>\n\nSo.", False): ("Hm.", "So.", 0),
    ("Hm.\n</think>\n\nSo.\n", True): ("Hm.", "So.\n", 0),
    ("\n<think>Hm. <think></think>", False): ("Hm. <think>", "", 0),
    ("Hm. And", True): ("Hm. And", "", 0),
    ("Hm. </thin", True): ("Hm. </thin", "", 0),
    ("</think>So.", False): ("", "So.", 0),
    ("<think>\n\n</think>\n\nSo.", False): ("", "So.", 0),
    ("So <think> is a tag </think>.", False): ("", "So <think> is a tag </think>.", 0),
    ("<thin ice", False): ("", "<thin ice", 0),
    (f"<think>a</think>So.\n{ONE}", False): ("a", "So.", 1),
    (f"a</think>{ONE}<think>b</think>{ONE}", True): ("ab", "", 2),
    ("<think>\n\n  a\n\nb \n</think> So.", False): ("a\n\nb", "So.", 0),
    ("As <tool_call><think>a</think>", False): ("", "As <tool_call><think>a</think>", 0),
    ("<think>a</think><response>So.</response>", False): ("a", "So.", 0),
    (f"<think>{ONE}</think>So.", False): (ONE, "So.", 0),
}


@pytest.mark.parametrize("case", THOUGHTS, ids=range(len(THOUGHTS)))
def test_thoughts_are_apart(case):
    (text, thinks), (thought, answer, count) = case, THOUGHTS[case]
    for how in ("whole", "characters", "tokens"):
        message, deltas = turns.read(Dialect(FORMS["hermes"], THINK), text, thinks, how, tools=TOOLS)
        assert turns.in_whole(message)[:2] == (answer, thought) == turns.joined(deltas)[:2]
        assert len(message.get("tool_calls", ())) == count
        assert message.get("reasoning") == message.get("reasoning_content")


def test_tags_are_those_of_the_template():
    for mark, opening in (("</think>", "<think>"), ("[/THINK]", "[THINK]"), ("<channel|>", "<|channel>thought\n")):
        tags = tags_of(turns.Model(f"{{{{ x }}}}{mark}"))
        assert tags is not None and tags.open == opening and tags.answer == ()
    assert tags_of(turns.Model("{{ x }}")) is None
    assert tags_of(turns.Model("</think><response>")).answer == ("<response>",)


def test_a_prompt_may_end_inside_a_thought():
    dialect = Dialect(tags=THINK)
    assert dialect.thinks_after("<|im_start|>assistant\n<think>\n")
    assert not dialect.thinks_after("What is <think>?<|im_start|>assistant\n")
    assert not dialect.thinks_after("<think>\n\n</think>\n\n") and not Dialect().thinks_after("<think>")


def test_only_the_first_call_is_given_if_others_are_not_allowed():
    reader, message = Reader(FORMS["hermes"], Tools(TOOLS), None), Message(parallel=False)
    deltas = [message.add([*reader.add(TWO + " End."), *reader.close()])]
    assert len(message.calls) == 1 and turns.joined(deltas) == ("End.", "", [("f", '{"x": 1, "y": "é"}')])


def test_a_long_text_takes_time_in_proportion():
    """Quadratic work over 200,000 characters would take minutes."""
    text = "word " * 20_000 + '<tool_call>{"name": "f", "arguments": {"y": "' + "é\\n" * 20_000 + '"}}</tool_call>'
    message, _ = turns.read(Dialect(FORMS["hermes"], THINK), text, False, "characters", tools=TOOLS)
    assert len(message["tool_calls"]) == 1 and len(message["content"]) == 99_999
