"""How a model writes calls and thoughts, as its template and its tokenizer show."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence
from typing import Any

from capibara.core.types import UserError
from capibara.data.chat.dropped import dropped
from capibara.data.chat.formats import Conversation
from capibara.data.tokenizers.vocabulary import Vocabulary
from capibara.inference.calls.forms import table
from capibara.inference.calls.forms.form import Form
from capibara.inference.calls.forms.rules import check_name
from capibara.inference.calls.parsing.tools import Tools
from capibara.inference.calls.reader import Reader
from capibara.inference.calls.reasoning import ReasoningIn, Tags, tags_of
from capibara.inference.grammars import schemas
from capibara.inference.grammars.lark import quoted
from capibara.inference.interactive.chat import Chat
from capibara.inference.sampling.grammar import Grammar

_PROBE = "probe"  # in a conversation by which a template is tried


@dataclasses.dataclass(frozen=True)
class Dialect:
    """How a model writes calls and thoughts.

    Attributes:
      form: of its calls; None: in no known form.
      tags: of its thoughts; None: it has none that are known.
      ids: of its special tokens, by their spelling.
    """

    form: Form | None = None
    tags: Tags | None = None
    ids: dict[str, int] = dataclasses.field(default_factory=dict)

    def used(self, has_tools: bool, reasoning: ReasoningIn) -> Dialect:
        """What of it is read in a reply.

        Args:
          has_tools: whether the request has tools that may be called.
          reasoning: where thoughts are in the reply.
        """
        is_apart = reasoning is ReasoningIn.APART
        reads_calls = has_tools or (is_apart and self.form is not None and self.form.covers_answer)
        return Dialect(self.form if reads_calls else None, self.tags if is_apart else None, self.ids)

    def after(self, prompt: str) -> Dialect:
        """The dialect in an answer to a prompt: its tags are those that the prompt has opened."""
        return self if self.tags is None else dataclasses.replace(self, tags=self.tags.after(prompt))

    def reader(self, tools: Sequence[object], thinks: bool) -> Reader:
        """A reader of one text; `thinks`: whether its prompt ends inside a thought."""
        return Reader(self.form, Tools(tools), self.tags, thinks)

    def thinks_after(self, prompt: str) -> bool:
        """Whether a prompt ends inside a thought."""
        return self.tags is not None and prompt.rstrip().endswith(self.tags.open.rstrip())

    @property
    def spelled(self) -> tuple[int, ...]:
        """Ids of the special tokens that are read as text."""
        form, tags = self.form, self.tags
        marks = () if form is None else (*form.begins, *form.tokens, *form.silent)
        marks += () if tags is None else (tags.open, tags.close, *tags.answer)
        return tuple(token for name, token in self.ids.items() if any(name in mark for mark in marks))

    def ends_of(self, chat: Chat) -> tuple[int, ...]:
        """Ids of the tokens that end an answer; a template may write markers in an answer, which do not."""
        names, spelled = (() if self.form is None else self.form.ends), self.spelled
        ends = (*chat.ends, *(self.ids[name] for name in names if name in self.ids))
        return tuple(token for token in ends if token not in spelled)

    def grammar(
        self, tools: Sequence[object], names: Collection[str], parallel: bool, answer: str | bool | None = None
    ) -> Grammar:
        """What a text matches that calls tools, or answers.

        Args:
          tools: of the request.
          names: of the tools that it may call.
          parallel: whether it may have several calls.
          answer: the JSON Schema of an answer without calls; None: there is a call.

        Raises:
          UserError: the form of the model's calls is not known, or a schema is malformed.
        """
        if self.form is None:
            raise UserError("the form of the model's calls is not known: leave tool_choice out, or set it to 'auto'")
        known = Tools(tools)
        known.parameters = {name: known.parameters[name] for name in known.parameters if name in names}
        for name in known.parameters:
            check_name(name, "the name", name, *self.form.begins, *self.form.tokens)
        answers = [] if answer is None else [f"answer: {schemas.embedded(schemas.prepared(answer))}"]
        start = "start: calls | answer" if answers else "start: calls"
        return Grammar(lark="\n".join([start, *answers, *self.form.rules(known, self._mark, parallel)]))

    def _mark(self, text: str) -> str:
        special = "|".join(re.escape(name) for name in sorted(self.ids, key=len, reverse=True))
        parts = re.split(f"({special})", text) if special else [text]
        written = [f"<[{self.ids[part]}]>" if part in self.ids else quoted(part) for part in parts if part]
        return " ".join(written)


@dataclasses.dataclass(frozen=True)
class _Model:
    """What a model's template and tokenizer have."""

    chat: Chat
    tokens: Collection[str]

    def mentions(self, text: str) -> bool:
        """Whether the template has this text."""
        return self.chat.template.mentions(text)

    def has_token(self, name: str) -> bool:
        """Whether the tokenizer has this special token."""
        return name in self.tokens


def dialect_of(chat: Chat) -> Dialect:
    """How a model writes calls and thoughts."""
    ids = special_ids(chat.vocabulary)
    model = _Model(chat, ids)
    return Dialect(table.form_of(model), tags_of(model), ids)


def writes_calls(chat: Chat, tool: dict[str, Any]) -> bool:
    """Whether a chat's template writes a tool, a call of it and its result, in a form that is known."""
    name = tool["function"]["name"]
    call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": {_PROBE: "argument"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "name": name, "content": _PROBE},
    ]
    for count in (1, len(messages)):  # the name in a call would hide that the tool is not written
        conversation = Conversation(messages[:count], [tool])
        try:
            text = chat.text_after(conversation, "a call")
        except UserError:
            return False
        if any(dropped(conversation, text)):
            return False
    return dialect_of(chat).form is not None


def special_ids(vocabulary: Vocabulary) -> dict[str, int]:
    """The ids of a tokenizer's special tokens, by their spelling."""
    return {name: token for token in range(vocabulary.size) if (name := vocabulary.spelling(token))}
