"""The files of a Hugging Face tokenizer, and what those beside tokenizer.json call its special tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from capibara.types import UserError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
MAP_FILE = "special_tokens_map.json"  # older tokenizers' own file of special tokens


def folder_of(tokenizer: str) -> str:
    """The folder of a tokenizer, given that or the file in it."""
    return tokenizer if os.path.isdir(tokenizer) else os.path.dirname(tokenizer)


def read_json(path: str) -> Mapping[str, Any] | None:
    """What a file beside a tokenizer says; None: there is none.

    Raises:
      UserError: it cannot be read, or holds no JSON object.
    """
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from None
    if not isinstance(values, Mapping):
        raise UserError(f"{path} holds no JSON object ({type(values).__name__}): copy it again")
    return values


def special_tokens(folder: str) -> dict[str, str]:
    """The special tokens of a tokenizer's folder by their fields ("eos_token"), as transformers reads them.

    tokenizer_config.json says them. Where it does not list the added tokens it is an older one: then
    special_tokens_map.json counts before it.

    Raises:
      UserError: one of the files cannot be read.
    """
    values = read_json(os.path.join(folder, CONFIG_FILE)) or {}
    older = {} if "added_tokens_decoder" in values else read_json(os.path.join(folder, MAP_FILE)) or {}
    return named(values) | named(older)


def named(values: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a file's values name; a token is its text, or an object with that as its content."""
    told = {field: value.get("content") if isinstance(value, Mapping) else value for field, value in values.items()}
    return {field: token for field, token in told.items() if field.endswith("_token") and isinstance(token, str)}


def one_line(error: BaseException) -> str:
    """What an error says, short."""
    return " ".join(str(error).split())[:200] or type(error).__name__
