"""Configures structured output: what a text must match."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from capibara.config import configurable
from capibara.core.types import UserError

_KINDS = ("json_schema", "regex", "lark", "choice")


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Grammar:
    """What a text must match; exactly one field is set.

    Tokens that would leave the grammar are masked before one is chosen, and the text ends where the grammar does. A text
    that reaches Sampling.max_new_tokens first is cut off. If the prompt ends inside a thought (Sampling.thinking_tags), the
    grammar begins after it.

    Attributes:
      json_schema: the text is JSON that a JSON Schema (draft 2020-12) allows: the schema as text or as an object, or True
        for any JSON object. Formats that llguidance does not know are annotations, as the standard says; keywords that it
        does not know are refused.
      regex: a regular expression of Rust's regex crate, which the whole text matches.
      lark: a context-free grammar in Lark's notation with llguidance's additions, such as %json {...}, or in llama.cpp's
        GBNF (`root ::= ...`).
      choice: the text is one of these.
    """

    json_schema: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    lark: str | None = None
    choice: Sequence[str] | None = None

    def __post_init__(self) -> None:
        kinds = [name for name in _KINDS if getattr(self, name) is not None]
        if len(kinds) != 1:
            raise UserError(
                f"Grammar has {' and '.join(kinds) or 'no field'} set, must have exactly one of {', '.join(_KINDS)}"
            )
        if self.choice is not None:
            if not self.choice or not all(self.choice):
                raise UserError(
                    f"Grammar.choice is {self.choice!r}, must be a list of texts that are not empty: try ('yes', 'no')"
                )
            object.__setattr__(self, "choice", tuple(self.choice))
        if self.json_schema is False:
            raise UserError(
                "Grammar.json_schema is False, which no text matches: leave it out, or set True for any object"
            )
        if isinstance(self.json_schema, Mapping):  # as text, so that equal grammars are equal and have a hash
            object.__setattr__(self, "json_schema", json.dumps(self.json_schema))
