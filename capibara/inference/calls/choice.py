"""Which tools a request demands: OpenAI's tool_choice and parallel_tool_calls."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from capibara.core.types import UserError
from capibara.inference.calls.dialect import Dialect
from capibara.inference.calls.parsing.tools import Tools
from capibara.inference.sampling.grammar import Grammar
from capibara.inference.sampling.sampling import Sampling

_LONGEST = 60  # characters of a value in an error


def check(choice: object, tools: Sequence[object]) -> None:
    """Checks tool_choice.

    Args:
      choice: None, 'none', 'auto', 'required', or {"type": "function", "function": {"name": NAME}}.
      tools: of the request.

    Raises:
      UserError: it is another value, or there is no such tool.
    """
    if choice is None or choice == "none":
        return
    name = _name(choice)
    if name is None and choice not in ("auto", "required"):
        shown = json.dumps(choice)[:_LONGEST]
        raise UserError(
            f"tool_choice is {shown}, must be 'none', 'auto', 'required' or "
            '{"type": "function", "function": {"name": ...}}'
        )
    if not tools:
        raise UserError(f"tool_choice is {json.dumps(choice)[:_LONGEST]}, which needs tools: leave it out")
    known = Tools(tools).parameters
    if name is not None and name not in known:
        raise UserError(f"tool_choice names {name[:_LONGEST]!r}, the tools are {', '.join(map(repr, known))}"[:300])


def grammar(
    dialect: Dialect, choice: object, tools: Sequence[object], parallel: bool, asked: Grammar | None, is_format: bool
) -> Grammar | None:
    """What a text must match: a call that is demanded, what the request asks for, or either; None: anything.

    As by OpenAI, a format is that of an answer: the model may call tools first, and a call that is demanded has none.

    Args:
      dialect: of the model.
      choice: a tool_choice that was checked.
      tools: that may be called.
      parallel: whether several calls are allowed.
      asked: what the request asks for; None: nothing.
      is_format: whether that is a format, a JSON Schema, or else the text itself, calls included.

    Raises:
      UserError: the form of the model's calls is not known, a tool's schema is malformed, or a call is demanded beside a
        text.
    """
    name = _name(choice)
    names = Tools(tools).parameters if name is None else (name,)
    if name is None and choice != "required":
        if asked is None or not is_format or dialect.form is None or not names:
            return asked
        schema = asked.json_schema
        assert isinstance(schema, str | bool), "a grammar has objects as text"
        return dialect.grammar(tools, names, parallel, schema)
    if asked is not None and not is_format:
        raise UserError("tool_choice demands a call, and a text can follow one grammar: leave the other one out")
    # A named tool is called once, as by OpenAI.
    return dialect.grammar(tools, names, parallel and name is None)


def forced(sampling: Sampling, grammar: Grammar | None, dialect: Dialect, thinks: bool) -> Sampling:
    """The sampling with this grammar, and with the model's tags of thoughts.

    Args:
      sampling: of the request.
      grammar: that the text must match; None: anything.
      dialect: of the model.
      thinks: whether the prompt ends inside a thought, which comes first.
    """
    if grammar is None:
        if dialect.tags is None or sampling.thinking_tokens is None:
            return sampling
        return dataclasses.replace(sampling, thinking_tags=(dialect.tags.open.strip(), dialect.tags.close))
    if dialect.tags is None:
        return dataclasses.replace(sampling, grammar=grammar)
    # The engine looks for an opening tag after the last closing one: where both are one tag, it finds none, and takes no tag
    # that a user's message mentions for a thought.
    opening = dialect.tags.open.strip() if thinks else dialect.tags.close
    return dataclasses.replace(sampling, grammar=grammar, thinking_tags=(opening, dialect.tags.close))


def _name(choice: object) -> str | None:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None
