"""Renders conversations with a tokenizer's own chat template, as `transformers` would.

The templates are Jinja programs that come with models, so they run in Jinja's sandbox, in a process of their own that
has bounds on memory and time (`template_process`). In their text special tokens
become ids, while a user's text that spells one must not: every string of a conversation has `GUARD` put into such
spellings, which `TokenizerJsonVocabulary.encode_rendered` takes out again after the special tokens were found. Tags
of reasoning (<think>) are left as they are: templates and models know them in messages.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import hashlib
import itertools
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from capibara.config import configurable
from capibara.core.fields import FilePath, did_you_mean
from capibara.core.types import UserError
from capibara.data.chat import template_process
from capibara.data.chat.dropped import Dropped, DroppedParts
from capibara.data.chat.formats import Conversation
from capibara.data.chat.template_files import TemplateFiles
from capibara.data.chat.template_process import Template, TemplateError
from capibara.data.chat.template_worker import BEGIN, END
from capibara.data.tokenizers.files import one_line
from capibara.data.tokenizers.vocabulary import GUARD

# What no text may hold, and would not come through: these and lone surrogates are dropped from messages.
_NO_TEXT = f"[{GUARD}{BEGIN}{END}\ud800-\udfff]"
_REASONING = ("<think>", "</think>")
_DEEPEST = 100  # lists and objects within each other, of a message or a tool
_DEEPEST_CHOICE = 20  # groups within each other, of a regular expression


class TemplateFails(UserError):
    """A template failed for a conversation.

    Args:
      message: names the template's file and line.
      why: what the template said, without them.
      is_bound: it was ended, for its time or its memory; it will be again.
    """

    def __init__(self, message: str, why: str, is_bound: bool = False):
        super().__init__(message)
        self.why, self.is_bound = why, is_bound


class Rendered(NamedTuple):
    """A conversation as text.

    Attributes:
      text: with guards where a message spells a special token.
      generated: character ranges of the template's {% generation %} blocks; None: it has no such blocks.
    """

    text: str
    generated: tuple[tuple[int, int], ...] | None


class AfterTurn(enum.StrEnum):
    """What of the template's text after the tokens that end a turn the assistant has to say, too.

    nothing: none of it. newline: the line break, as with the training templates that TRL has for Gemma, Qwen 3 and others.
    all: that, and after the last turn whatever the template ends with (the <|endoftext|> of Phi-3), as TRL's DPO and its
    template for Phi-3 have it.
    """

    NOTHING = "nothing"
    NEWLINE = "newline"
    ALL = "all"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A tokenizer's chat template.

    Attributes:
      tokenizer: the folder of a model's tokenizer, a tokenizer.json file (the files beside it are read as well), or a run
        folder that carries one.
      template: a .jinja file, or the template itself; None: chat_template.jinja beside the tokenizer, or what
        tokenizer_config.json holds.
      name: which of several templates; None is "tool_use" for conversations with tools where there is one of that
        name, else "default".
      date: what strftime_now says, as year-month-day: the same in all runs, or one that is resumed would read other
        rows. (Templates of Llama 3 tell the model today's date; 26 July 2024 is what they say without a clock.)
      end_of_turn: the text that ends an assistant's turn, where this is no special token of the tokenizer, or where a turn
        before the last ends otherwise than the last: "<|end|>" of gpt-oss.
      after_turn: what more the assistant says where the template has no {% generation %} blocks.
      spelled_tokens: whether a message that spells a special token, such as "</s>", shall have its id. By default it
        is text, as everything that a user writes.
      variables: more of what the template may ask for, such as {"enable_thinking": False}.
      dropped: what happens if the template leaves out a part of a conversation that is trained on: a thought, tools, a
        system message.
    """

    tokenizer: FilePath
    template: FilePath | None = None
    name: str | None = None
    date: str = "2024-07-26"
    end_of_turn: str | None = None
    after_turn: AfterTurn = AfterTurn.NOTHING
    spelled_tokens: bool = False
    variables: dict[str, Any] = dataclasses.field(default_factory=dict)
    dropped: Dropped = Dropped.WARN

    def __post_init__(self) -> None:
        try:
            datetime.date.fromisoformat(self.date)
        except ValueError:
            raise UserError(f"ChatTemplate.date ({self.date!r}) must be a day: try '2024-07-26'") from None

    def render(
        self, conversation: Conversation, where: str, *, add_generation_prompt: bool = False, guard: bool = True
    ) -> Rendered:
        """The conversation as text.

        Args:
          conversation: what was said.
          where: its file and line, for errors.
          add_generation_prompt: end with what an assistant's answer follows.
          guard: put guards into special tokens that messages spell; not again where that was done.

        Raises:
          TemplateFails: the template has a mistake, or refuses the conversation; it names the template's line.
        """
        conversation = self.guarded(conversation) if guard else conversation
        (result,) = self.render_each([(conversation, add_generation_prompt)], where)
        if isinstance(result, TemplateFails):
            raise result
        return result

    def render_each(
        self, conversations: Sequence[tuple[Conversation, bool]], where: str
    ) -> list[Rendered | TemplateFails]:
        """Renders variants of one conversation, which takes less time than one after another.

        Args:
          conversations: guarded, with the same tools, each with whether what an assistant's answer follows is at its end.
          where: as of `render`.

        Raises:
          TemplateFails: the template needs too much time or memory.
        """
        name, variables = self._name_for(first := conversations[0][0]), first.variables or {}
        _check_asked(variables, self._compiled(name)[2], self._files.token_names, where)
        names = {"documents": None, **self.variables, **variables, "tools": first.tools}
        each = [{"messages": item.messages, "add_generation_prompt": prompt} for item, prompt in conversations]
        try:
            texts = template_process.render(*self._compiled(name)[:2], self._files.token_names | names, each)
        except TemplateError as error:
            raise self._failure(error, name, where) from None
        marked = self.has_generation_blocks(name)
        return [
            self._failure(text, name, where)
            if isinstance(text, TemplateError)
            else _without_marks(text)
            if marked
            else Rendered(text, None)
            for text in texts
        ]

    def _failure(self, error: TemplateError, name: str, where: str) -> TemplateFails:
        place = f"{self._where(name)}{f':{error.line}' if error.line else ''}"
        return TemplateFails(f"{place} fails for {where}: {one_line(error)}", one_line(error), error.is_bound)

    def guarded(self, conversation: Conversation) -> Conversation:
        """The conversation with guards in the special tokens that it spells.

        Raises:
          UserError: it is nested too deeply.
        """
        return Conversation(*(_guarded(part, self._spelled, _DEEPEST) for part in conversation))

    @functools.cached_property
    def _spelled(self) -> re.Pattern:
        tokens = () if self.spelled_tokens else self.special_tokens
        # Tokens of one character cannot be broken up; there are none in use.
        names = [token for token in tokens if len(token) > 1 and token not in _REASONING]
        return re.compile(f"({_any_of(names)})|{_NO_TEXT}")

    @functools.cached_property
    def turn_ends(self) -> re.Pattern:
        """Finds one or more special tokens (or `end_of_turn`) in a row."""
        names = [*self.special_tokens, *([self.end_of_turn] if self.end_of_turn else [])]
        return re.compile(f"(?:{_any_of(names)})+")

    def mentions(self, text: str) -> bool:
        """Whether this text is in one of the tokenizer's templates."""
        return any(text in template for _, template in self._files.sources.values())

    @property
    def variable_names(self) -> frozenset[str]:
        """The variables that its templates ask for, with those that `render` sets."""
        names = [name for name in (self.name, "default", "tool_use") if name in self._files.sources]
        return frozenset().union(*(self._compiled(name)[2] for name in names))

    def with_variables(self, variables: Mapping[str, object]) -> ChatTemplate:
        """The same template, with more variables; its files are not read again."""
        changed = dataclasses.replace(self, variables={**self.variables, **variables})
        changed.__dict__.update(_files=self._files, _checked=self._checked)
        return changed

    def has_generation_blocks(self, name: str) -> bool:
        """Whether the template of this name marks what the assistant says."""
        return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", self._files.sources[name][1]) is not None

    def fingerprint(self) -> str:
        """Changes with everything that decides a text."""
        texts = {name: text for name, (_, text) in self._files.sources.items()}  # wherever they are
        parts: list[object] = [texts, self._files.token_names, sorted(self.special_tokens)]
        parts += [self.variables, self.name, self.date]
        parts += [self.end_of_turn, self.spelled_tokens]
        return hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        # What was read from files is in cached properties: a worker process reads its own.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The tokenizer's special tokens, longest first."""
        return self._files.special_tokens

    @functools.cached_property
    def dropped_parts(self) -> DroppedParts:
        """Counts what this template leaves out."""
        return DroppedParts(self.dropped)

    @functools.cached_property
    def _files(self) -> TemplateFiles:
        return TemplateFiles(self.tokenizer, self.template)

    def _name_for(self, conversation: Conversation) -> str:
        name, sources = self.name, self._files.sources
        if name is None:
            name = "tool_use" if conversation.tools and "tool_use" in sources else "default"
        if name not in sources:
            known = ", ".join(sources)
            raise UserError(f"ChatTemplate.name ({name!r}) is no template of {self.tokenizer!r}: known are {known}")
        return name

    def _where(self, name: str) -> str:
        return self._files.sources[name][0]

    def _compiled(self, name: str) -> tuple[Template, str, frozenset[str]]:
        """The template of this name, which is known to be one, its key, and the variables that it asks for."""
        if name not in self._checked:
            template = Template(self._files.sources[name][1], self.date)
            try:
                variables = template_process.asked_by(template)
            except TemplateError as error:
                place = f"{self._where(name)}{f':{error.line}' if error.line else ''}"
                fault = "is no Jinja template" if error.is_syntax else "is no template that can be used"
                raise UserError(f"{place} {fault}: {one_line(error)}") from None
            self._check_tokens(set(variables), name)
            self._checked[name] = template, template.key, frozenset(variables)
        return self._checked[name]

    def _check_tokens(self, names: set[str], name: str) -> None:
        """A template without the names of its tokens would silently leave them out."""
        missing = sorted(({"bos_token", "eos_token"} & names) - {*self._files.token_names, *self.variables})
        if missing and not self._files.has_token_names:
            raise UserError(
                f"{self._where(name)} asks for {' and '.join(missing)}, and there is no tokenizer_config.json beside the "
                f"tokenizer to say: set ChatTemplate.variables = {{{', '.join(f'{item!r}: ...' for item in missing)}}}"
            )

    @functools.cached_property
    def _checked(self) -> dict[str, tuple[Template, str, frozenset[str]]]:
        return {}


def _check_asked(
    variables: Mapping[str, object], names: frozenset[str], token_names: Collection[str], where: str
) -> None:
    """Raises UserError for a variable of a record that the template does not ask for, or that is of the tokenizer or conversation."""
    if not variables:
        return
    names = names - {"messages", "tools", "add_generation_prompt", *token_names}
    for name in variables:
        if name not in names:
            raise UserError(
                f"{where} has {name!r} for the chat template (in chat_template_kwargs, or documents), which asks for "
                f"{', '.join(sorted(names)) or 'no variable'}: leave it out{did_you_mean(name, names)}"
            )


def _guarded(value: object, spelled: re.Pattern[str], deepest: int) -> Any:
    """A part of a conversation with guards in the special tokens that it spells."""
    if isinstance(value, str):
        return spelled.sub(lambda result: result[0][0] + GUARD + result[0][1:] if result[1] else "", value)
    if not isinstance(value, (Mapping, list)):
        return value
    if not deepest:
        raise UserError(f"a message or tool nests lists and objects more than {_DEEPEST} deep: write it flatter")
    if isinstance(value, list):
        return [_guarded(item, spelled, deepest - 1) for item in value]
    return {_guarded(key, spelled, 0): _guarded(item, spelled, deepest - 1) for key, item in value.items()}


def _without_marks(text: str) -> Rendered:
    pieces, ranges, at, begin = [], [], 0, 0
    for piece in re.split(f"([{BEGIN}{END}])", text):
        if piece == BEGIN:
            begin = at
        elif piece == END:
            ranges.append((begin, at))
        else:
            pieces.append(piece)
            at += len(piece)
    return Rendered("".join(pieces), tuple(ranges))


def _any_of(names: Iterable[str]) -> str:
    """A regular expression that finds the longest of these; common beginnings are tried once, however many there are."""
    names = sorted(set(names))
    return _choice(names, _DEEPEST_CHOICE) if names else "(?!)"


def _choice(names: Sequence[str], deepest: int) -> str:
    if not deepest or len(names) == 1:
        return "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    result, ends = [], "" in names
    for _, group in itertools.groupby(filter(None, names), key=lambda name: name[0]):
        members = list(group)
        shared = os.path.commonprefix(members)
        rest = [member[len(shared) :] for member in members]
        result.append(re.escape(shared) + (f"(?:{_choice(rest, deepest - 1)})" if len(rest) > 1 else rest[0]))
    return "|".join([*result, *([""] if ends else [])])
