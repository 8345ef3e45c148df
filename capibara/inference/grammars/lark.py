"""Texts in Lark's notation, as llguidance reads it."""

from __future__ import annotations

import json


def quoted(text: str) -> str:
    """A text as a literal.

    A lone surrogate, which no text of a model has, is left out.
    """
    # DEL is a control character in Lark, but not in JSON.
    written = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    return written.encode("utf-8", "ignore").decode()
