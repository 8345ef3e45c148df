"""What a form of calls is, and what several have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Protocol

from capibara.inference.calls.parsing import json_text
from capibara.inference.calls.parsing.text import Call, CallEnd, Malformed, Steps, Text
from capibara.inference.calls.parsing.tools import Tools

Marks = Callable[[str], str]  # writes a text in a grammar, its special tokens as ids


class Evidence(Protocol):
    """What a model's template and tokenizer have."""

    def mentions(self, text: str) -> bool:
        """Whether the template has this text."""

    def has_token(self, name: str) -> bool:
        """Whether the tokenizer has this special token."""


@dataclasses.dataclass(frozen=True)
class Form:
    """How a family of models writes calls.

    Attributes:
      name: of the form.
      detect: whether a model has it.
      begins: texts with which calls begin.
      read: reads calls of the tools after one of `begins` or `bare`, which it is given.
      rules: of a grammar in Lark's notation for calls of the tools, whose start is `calls`; the last argument is whether
        several are allowed.
      tokens: special tokens of calls.
      silent: special tokens around an answer, which are no part of it.
      ends: special tokens that end a text with calls.
      bare: with which a text begins that may consist of calls alone.
      id_chars: length of a call's id; None: any.
      covers_answer: the form has markers of thoughts and answers, too.
    """

    name: str
    detect: Callable[[Evidence], bool]
    begins: tuple[str, ...]
    read: Callable[[Text, Tools, str], Steps[None]]
    rules: Callable[[Tools, Marks, bool], Iterator[str]]
    tokens: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    id_chars: int | None = None
    covers_answer: bool = False


def read_arguments(text: Text, tools: Tools, name: str, call_id: str | None = None) -> Steps[None]:
    """Reads the arguments of a call, which are a JSON object.

    Raises:
      Malformed: no tool has this name, or they are no object.
    """
    if name not in tools:
        raise Malformed
    yield from text.spaces()
    if (yield from text.peek()) != "{":
        raise Malformed
    yield Call(name, call_id)
    yield from text.streamed(json_text.skip_value(text))
    yield CallEnd()


def read_each(text: Text, begin: str, end: str, read: Callable[[], Steps[None]]) -> Steps[None]:
    """Reads calls, each after `begin`, up to `end` or to something else.

    Raises:
      Malformed: there is no call.
    """
    yield from text.spaces()
    yield from text.expect(begin)
    while True:
        yield from read()
        yield from text.spaces()
        if not (yield from text.take(begin)):
            yield from text.take(end)
            return
