"""Reads assistants' turns as a server would, and compares them with the dialogues that they were rendered from."""

from __future__ import annotations

import dataclasses
import json
import random
import re

from capibara.inference.calls.dialect import Dialect
from capibara.inference.calls.forms import table
from capibara.inference.calls.message import Message
from capibara.inference.calls.reasoning import ReasoningIn, tags_of
from tests.inference.calls.dialogues import DIALOGUES, TOOLS

# Tokens that a tokenizer has and its template does not name.
UNNAMED = ("<|python_tag|>", "<|tool_call_start|>", "<|tool_call_end|>")
BEGINS = (
    "助手：",
    "<|header_start|>assistant<|header_end|>\n\n",
    "<|CHATBOT_TOKEN|>",
)  # of turns, not in their prompts
COMMAND_R_INSTRUCTION = "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Write"
ENDS = re.compile(
    r"(?:\s*(?:</s>|<EOS>|<\|(?:im_end|eot_id|eom_id|eot|end|call|return|END_OF_TURN_TOKEN|end_of_text|endoftext"
    r"|role_end|message_sep|calls|assistant|eos|EOT|end_of_msg|user|observation)\|>|<\|tool_response>|<start_function_response>|<\|START_OF_TURN_TOKEN\|><\|CHATBOT_TOKEN\|>|<end_of_turn>|<turn\|>|<seed:eos>"
    r"|<｜end▁of▁sentence｜>|\[e~\[|<end_of_sentence>|<SPECIAL_12>|<sep>|</assistant>))*\s*\Z"
)


@dataclasses.dataclass(frozen=True)
class Model:
    """What a template shows."""

    template: str
    tokens: tuple[str, ...] = ()

    def mentions(self, text: str) -> bool:
        """Whether the template has this text."""
        return text in self.template

    def has_token(self, name: str) -> bool:
        """Whether the tokenizer has this token."""
        return name in self.tokens or (name in self.template and ("[" in name or "<|" in name))


def dialect_of(model: Model) -> Dialect:
    """The dialect of a template without a tokenizer."""
    return Dialect(table.form_of(model), tags_of(model), {}).used(True, ReasoningIn.APART)


def pieces(text: str, how: str, seed: int = 0) -> list[str]:
    """The text in pieces: whole, in characters, or in tokens, where markers may be one token or many."""
    if how == "whole":
        return [text]
    if how == "characters":
        return list(text)
    draw = random.Random(seed)
    parts = re.findall(r"<[^<>\s]{1,40}>|\[[A-Z_]+\]|\s?\w{1,6}|\s+|.", text, re.DOTALL)
    return [piece for part in parts for piece in ([part] if draw.random() < 0.7 else list(part))]


def read(
    dialect: Dialect, text: str, thinks: bool, how: str, seed: int = 0, tools: list = TOOLS
) -> tuple[dict, list[dict]]:
    """The whole message, and the deltas."""
    reader = dialect.reader(tools, thinks)
    message = Message(None if dialect.form is None else dialect.form.id_chars)
    deltas = [message.add(reader.add(piece)) for piece in pieces(text, how, seed)]
    deltas.append(message.add(reader.close()))
    return message.whole(), [*filter(None, deltas)]


def joined(deltas: list[dict]) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, thoughts, and the name and arguments of each call."""
    calls: list[list[str]] = []
    for piece in (piece for delta in deltas for piece in delta.get("tool_calls", ())):
        function = piece["function"]
        if "id" in piece:
            assert piece["index"] == len(calls) and piece["type"] == "function", "each call begins once, in order"
            calls.append([function["name"], ""])
        assert piece["index"] == len(calls) - 1
        calls[-1][1] += function["arguments"]
    texts = ("".join(delta.get(key, "") for delta in deltas) for key in ("content", "reasoning_content"))
    return (*texts, [(name, arguments) for name, arguments in calls])


def in_whole(message: dict) -> tuple[str, str, list[tuple[str, str]]]:
    """The same of a whole message."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [(function["name"], function["arguments"]) for function in functions]
    return message["content"] or "", message.get("reasoning_content", ""), calls


def mistakes(dialect: Dialect, index: int, count: int, prompt: str, turn: str) -> list[str]:
    """How the turn of a dialogue is read otherwise than it was written; `count`: of its calls that the template took."""
    for begin in BEGINS:
        turn = turn.removeprefix(begin)
    text = ENDS.sub("", turn.split(COMMAND_R_INSTRUCTION)[0])
    thinks = dialect.thinks_after(prompt)
    if thinks and dialect.tags.close not in text:  # of a thought that the template left out
        text = dialect.tags.close + text
    content, thought, calls = DIALOGUES[index]
    result = []
    message, _ = read(dialect, text, thinks, "whole")
    answer, reasoning, called = in_whole(message)
    expected = [(name, arguments) for name, arguments in calls[:count]]
    if [(name, json.loads(arguments)) for name, arguments in called] != expected:
        result.append(f"calls {called} of {text!r}")
    if content and f"<|channel|>analysis<|message|>{content}" in text:  # what comes before a call in gpt-oss's template
        content, thought = "", thought or content
    if answer.strip() != (content if content and content in text else ""):
        result.append(f"content {answer!r} of {text!r}")
    if reasoning != (thought if thought and thought in text else ""):
        result.append(f"thought {reasoning!r} of {text!r}")
    for how in ("characters", "tokens"):
        whole, deltas = read(dialect, text, thinks, how)
        if not joined(deltas) == in_whole(whole) == in_whole(message):
            result.append(f"by {how} {joined(deltas)} of {text!r}")
    return result
