"""Reads Gin values without resolving their references."""

from __future__ import annotations

import tokenize
from typing import Any

from capibara.config.search import Text
from gin import config_parser


class Literals(config_parser.ParserDelegate):
    """Returns references as Text instead of resolving them."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Any:
        return Text(f"@{scoped_configurable_name}{'()' if evaluate else ''}")

    def macro(self, macro_name: str) -> Any:
        return Text(f"%{macro_name}")


def quoted(binding: str) -> str:
    """The statement `NAME = VALUE` of a flag; VALUE is quoted if it is not Gin and does not begin like a Gin value."""
    name, equals, value = (part.strip() for part in binding.partition("="))
    if not equals or value[:1] in ("@", "%", "(", "[", "{", "'", '"'):
        return binding
    parser = config_parser.ConfigParser(f"value = {value}\n", Literals())
    try:
        if value and parser.parse_statement() is not None and parser.parse_statement() is None:
            return binding
    except (SyntaxError, tokenize.TokenError):
        pass
    return f"{name} = {value!r}"
