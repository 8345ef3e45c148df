"""Renders conversations with a tokenizer's own chat template, as `transformers` would.

The templates are Jinja programs that come with models, so they run in Jinja's sandbox. In their text special tokens
become ids, while a user's text that spells one must not: every string of a conversation has `GUARD` put into such
spellings, which `TokenizerJsonVocabulary.encode_rendered` takes out again after the special tokens were found. Tags
of reasoning (<think>) are left as they are: templates and models know them in messages.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from capibara.config import configurable
from capibara.data.chat_formats import Conversation
from capibara.data.tokenizer_files import (
    CONFIG_FILE,
    MAP_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    folder_of,
    one_line,
    read_json,
    special_tokens,
)
from capibara.data.vocabulary import GUARD
from capibara.types import UserError

# Unicode noncharacters, around a {% generation %} block.
_BEGIN, _END = "\ufdd1", "\ufdd2"
# What no text may hold, and would not come through: these and lone surrogates are dropped from messages.
_NO_TEXT = f"[{GUARD}{_BEGIN}{_END}\ud800-\udfff]"
_REASONING = ("<think>", "</think>")
_SHOWN = "<template>"  # the file name that Jinja gives to a template's code


class TemplateFails(UserError):
    """A template failed for a conversation.

    Args:
      message: names the template's file and line.
      why: what the template said, without them.
    """

    def __init__(self, message: str, why: str):
        super().__init__(message)
        self.why = why


class Rendered(NamedTuple):
    """A conversation as text.

    Attributes:
      text: with guards where a message spells a special token.
      generated: character ranges of the template's {% generation %} blocks; None: it has no such blocks.
    """

    text: str
    generated: tuple[tuple[int, int], ...] | None


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
      end_of_turn: the text that ends an assistant's turn, where this is no special token of the tokenizer.
      spelled_tokens: whether a message that spells a special token, such as "</s>", shall have its id. By default it
        is text, as everything that a user writes.
      variables: more of what the template may ask for, such as {"enable_thinking": False}.
    """

    tokenizer: str
    template: str | None = None
    name: str | None = None
    date: str = "2024-07-26"
    end_of_turn: str | None = None
    spelled_tokens: bool = False
    variables: dict[str, Any] = dataclasses.field(default_factory=dict)

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
        import jinja2

        conversation = self.guarded(conversation) if guard else conversation
        name, template = self._template_for(conversation)
        given = {**self._token_names, **self.variables, **conversation._asdict(), "documents": None}
        try:
            text = template.render(given, add_generation_prompt=add_generation_prompt)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            line = _line_of(error)
            place = f"{self._where(name)}{f':{line}' if line else ''}"
            raise TemplateFails(f"{place} fails for {where}: {one_line(error)}", one_line(error)) from None
        return _without_marks(text) if self.has_generation_blocks(name) else Rendered(text, None)

    def guarded(self, conversation: Conversation) -> Conversation:
        """The conversation with guards in the special tokens that it spells."""
        return Conversation(*(self._guarded(part) for part in conversation))

    def _guarded(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._spelled.sub(lambda found: found[0][0] + GUARD + found[0][1:] if found[1] else "", value)
        if isinstance(value, Mapping):
            return {self._guarded(key): self._guarded(item) for key, item in value.items()}
        return [self._guarded(item) for item in value] if isinstance(value, list) else value

    @functools.cached_property
    def _spelled(self) -> re.Pattern:
        tokens = () if self.spelled_tokens else self.special_tokens
        # Tokens of one character cannot be broken up; there are none in use.
        names = [re.escape(token) for token in tokens if len(token) > 1 and token not in _REASONING]
        return re.compile(f"({'|'.join(names) or '(?!)'})|{_NO_TEXT}")

    @functools.cached_property
    def turn_ends(self) -> re.Pattern:
        """Finds one or more special tokens (or `end_of_turn`) in a row."""
        names = [*self.special_tokens, *([self.end_of_turn] if self.end_of_turn else [])]
        return re.compile(f"(?:{'|'.join(map(re.escape, names)) or '(?!)'})+")

    def has_generation_blocks(self, name: str) -> bool:
        """Whether the template of this name marks what the assistant says."""
        return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", self._sources[name][1]) is not None

    def fingerprint(self) -> str:
        """Changes with everything that decides a text."""
        texts = {name: text for name, (_, text) in self._sources.items()}  # wherever they are
        parts = [texts, self._token_names, sorted(self.special_tokens), self.variables, self.name, self.date]
        parts += [self.end_of_turn, self.spelled_tokens]
        return hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        # Compiled templates are cached properties: a worker process compiles its own.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    # Files.

    @functools.cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """The tokenizer's special tokens, longest first."""
        names = {
            token["content"] for token in self._file(TOKENIZER_FILE).get("added_tokens", []) if token.get("special")
        }
        return tuple(sorted({*names, *self._token_names.values()} - {""}, key=lambda name: (-len(name), name)))

    @functools.cached_property
    def _token_names(self) -> dict[str, str]:
        """bos_token, eos_token, ...: what templates call them."""
        return special_tokens(self._folder)

    @property
    def _folder(self) -> str:
        return folder_of(self.tokenizer)

    def _file(self, name: str) -> Mapping[str, Any]:
        """A JSON file beside the tokenizer; empty where there is none, but for the tokenizer itself."""
        is_tokenizer = name == TOKENIZER_FILE and not os.path.isdir(self.tokenizer)
        path = self.tokenizer if is_tokenizer else os.path.join(self._folder, name)
        content = read_json(path)
        if content is None and name == TOKENIZER_FILE:
            raise UserError(
                f"ChatTemplate.tokenizer ({self.tokenizer!r}) has no {name}: name a tokenizer's folder, or that of a run, "
                "as TOKENIZER"
            )
        return content or {}

    # Templates.

    @functools.cached_property
    def _sources(self) -> dict[str, tuple[str, str]]:
        """Of each template, by name, where it is from and its text."""
        if self.template is not None:
            if "{" in self.template:
                return {"default": ("ChatTemplate.template", self.template)}
            return {"default": (self.template, _read(self.template, "ChatTemplate.template"))}
        path = os.path.join(self._folder, TEMPLATE_FILE)
        if os.path.isfile(path):
            return {"default": (path, _read(path, TEMPLATE_FILE))}
        path, found = os.path.join(self._folder, CONFIG_FILE), self._file(CONFIG_FILE)
        given = found.get("chat_template")
        if isinstance(given, str):
            return {"default": (f"the template of {path}", given)}
        if isinstance(given, list) and given:
            return {one["name"]: (f"the template {one['name']!r} of {path}", one["template"]) for one in given}
        raise UserError(
            f"ChatTemplate.tokenizer ({self.tokenizer!r}) has no chat template (neither chat_template.jinja nor "
            "chat_template in tokenizer_config.json): set ChatTemplate.template to one"
        )

    def _template_for(self, conversation: Conversation) -> tuple[str, Any]:
        name = self.name
        if name is None:
            name = "tool_use" if conversation.tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            known = ", ".join(self._sources)
            raise UserError(f"ChatTemplate.name ({name!r}) is no template of {self.tokenizer!r}: known are {known}")
        return name, self._compiled(name)

    def _where(self, name: str) -> str:
        return self._sources[name][0]

    def _compiled(self, name: str) -> Any:
        if name not in self._compiled_templates:
            import jinja2.meta

            environment, source = self._environment, self._sources[name][1]
            try:
                asked = jinja2.meta.find_undeclared_variables(environment.parse(source))
                self._compiled_templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise UserError(f"{self._where(name)}:{error.lineno} is no Jinja template: {one_line(error)}") from None
            self._check_tokens(asked, name)
        return self._compiled_templates[name]

    def _check_tokens(self, asked: set[str], name: str) -> None:
        """A template without the names of its tokens would silently leave them out."""
        missing = sorted(({"bos_token", "eos_token"} & asked) - {*self._token_names, *self.variables})
        if missing and not any(os.path.isfile(os.path.join(self._folder, file)) for file in (CONFIG_FILE, MAP_FILE)):
            raise UserError(
                f"{self._where(name)} asks for {' and '.join(missing)}, and there is no tokenizer_config.json beside the "
                f"tokenizer to say: set ChatTemplate.variables = {{{', '.join(f'{one!r}: ...' for one in missing)}}}"
            )

    @functools.cached_property
    def _compiled_templates(self) -> dict[str, Any]:
        return {}

    @functools.cached_property
    def _environment(self) -> Any:
        import jinja2.sandbox

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_generation_blocks(), "jinja2.ext.loopcontrols"]
        )
        day = datetime.date.fromisoformat(self.date)
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": day.strftime}
        return environment


def _generation_blocks() -> type:
    """The extension that puts marks around what is in {% generation %} ... {% endgeneration %}."""
    from jinja2 import ext, nodes

    class GenerationBlocks(ext.Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> list[Any]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (_BEGIN, _END))
            return [begin, *body, end]

    return GenerationBlocks


def _without_marks(text: str) -> Rendered:
    pieces, ranges, at, begin = [], [], 0, 0
    for piece in re.split(f"([{_BEGIN}{_END}])", text):
        if piece == _BEGIN:
            begin = at
        elif piece == _END:
            ranges.append((begin, at))
        else:
            pieces.append(piece)
            at += len(piece)
    return Rendered("".join(pieces), tuple(ranges))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own would write < and > as escapes, for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _line_of(error: BaseException) -> int | None:
    """The line of the template that raised."""
    line, trace = getattr(error, "lineno", None), error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _SHOWN:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _read(path: str, name: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name} ({path!r}) cannot be read: {one_line(error)}") from None
