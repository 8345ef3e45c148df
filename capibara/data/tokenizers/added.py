"""Tokens that the files beside a tokenizer.json give it: it is read with them, as transformers 5.24 reads a folder."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from capibara.core import limits
from capibara.core.types import UserError
from capibara.data.tokenizers import limits as tokenizer_limits
from capibara.data.tokenizers.files import ADDED_FILE, CONFIG_FILE, MAP_FILE, TOKENIZER_FILE, read_json

FILES = (CONFIG_FILE, MAP_FILE, ADDED_FILE)
# In the order in which transformers adds them, and so gives them ids.
_FIELDS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_LISTS = ("extra_special_tokens", "additional_special_tokens")  # the first one that is there
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word")
_MOST, _MOST_CHARACTERS, _SHOWN = 100_000, 65_536, 8

Files = Mapping[str, Mapping[str, Any]]


class Token(NamedTuple):
    """A token of one of the files.

    Attributes:
      content: its text.
      flags: of tokenizers.AddedToken; None: those of the tokenizer.json, if it has the token.
      number: its id, as far as the file has one.
    """

    content: str
    flags: Mapping[str, bool] | None
    number: int | None = None


def of_folder(folder: str) -> Files:
    """The contents of the files that are in a folder."""
    result = {name: read_json(os.path.join(folder, name)) for name in FILES}
    return {name: values for name, values in result.items() if values is not None}


def of_files(files: Mapping[str, bytes], where: str) -> Any:
    """The tokenizers.Tokenizer of a tokenizer.json and the files beside it, from their contents by name.

    Args:
      files: the contents.
      where: names the folder in errors.

    Raises:
      UserError: one of them cannot be read; as `complete`.
    """
    tokenizer = tokenizer_limits.load_json(files[TOKENIZER_FILE], f"{where}: {TOKENIZER_FILE}")
    complete(tokenizer, {name: _parsed(files[name], f"{where}: {name}") for name in FILES if name in files}, where)
    return tokenizer


def _parsed(content: bytes, name: str) -> Mapping[str, Any]:
    try:
        values = limits.parse_json(content)
    except ValueError as error:
        raise UserError(f"{name} cannot be read ({limits.cause(error)}): copy it again") from None
    if not isinstance(values, Mapping):
        raise UserError(f"{name} is no JSON object: copy it again")
    return values


def complete(tokenizer: Any, files: Files, where: str) -> None:
    """Adds the tokens of the files to a tokenizers.Tokenizer, with a warning.

    Args:
      tokenizer: changed in place.
      files: the contents of FILES, by name.
      where: names the folder in errors.

    Raises:
      UserError: a token is none, or would have another id than its file says; or special tokens are to be read as text.
    """
    if files.get(CONFIG_FILE, {}).get("split_special_tokens"):
        raise UserError(
            f"{where}: {CONFIG_FILE} has split_special_tokens = True, by which special tokens are read as text: set it to false"
        )
    has = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    result = list(_tokens(files, where))
    if len(result) > _MOST:
        raise UserError(
            f"{where}: {CONFIG_FILE} names {len(result):,} tokens, must name at most {_MOST:,}: remove some"
        )
    added = []
    for token in result:
        old = has.get(token.content)
        if not token.content or old is not None and (token.flags is None or _flags_of(old) == token.flags):
            continue
        has[token.content] = _added_token(token)
        tokenizer.add_tokens([has[token.content]])
        if old is not None:
            continue
        added.append(token.content)
        number = tokenizer.token_to_id(token.content)
        if token.number not in (None, number):
            raise UserError(
                f"{where}: {token.content!r} is token {token.number} by its {_source(files)}, and {number} is the next id of its "
                f"{TOKENIZER_FILE}: put the files of one tokenizer there"
            )
    if added:
        more = f" and {len(added) - _SHOWN} more" if len(added) > _SHOWN else ""
        _warn(
            f"{where}: {TOKENIZER_FILE} does not have {', '.join(map(repr, added[:_SHOWN]))}{more}, which the files beside it "
            "name: it is read with them"
        )


def special(files: Files, where: str) -> set[str]:
    """The special tokens that the files name."""
    return {token.content for token in _tokens(files, where) if token.flags is None or token.flags["special"]}


@functools.cache
def _warn(line: str) -> None:
    logging.getLogger(__name__).warning("%s", line)


def _source(files: Files) -> str:
    return CONFIG_FILE if "added_tokens_decoder" in files.get(CONFIG_FILE, {}) else ADDED_FILE


def _tokens(files: Files, where: str) -> Iterator[Token]:
    config = dict(files.get(CONFIG_FILE, {}))
    recorded = config.pop("added_tokens_decoder", None)
    if recorded is None:
        config |= files.get(MAP_FILE, {})
    named = [*_fields(config)]
    if recorded is None:
        specials = {_content(value, where) for value in named}
        recorded = {
            number: {"content": content, "special": content in specials, "normalized": content not in specials}
            for content, number in files.get(ADDED_FILE, {}).items()
        }
    if not isinstance(recorded, Mapping) or not all(_is_id(number) for number in recorded):
        raise UserError(f"{where}: {_source(files)} must have ids of tokens: copy it again")
    for number, value in sorted(recorded.items(), key=lambda pair: int(pair[0])):
        yield Token(_content(value, where), _flags(value) if isinstance(value, Mapping) else None, int(number))
    for value in named:
        yield Token(_content(value, where), None)


def _fields(config: Mapping[str, object]) -> Iterator[Any]:
    """The values of special tokens, in transformers' order."""
    extra: Any = next((config[name] for name in _LISTS if config.get(name)), [])
    yield from (config[name] for name in _FIELDS if config.get(name))
    yield from (
        value
        for name, value in config.items()
        if name.endswith("_token") and name not in _FIELDS and isinstance(value, str)
    )
    yield from extra.values() if isinstance(extra, Mapping) else extra if isinstance(extra, list) else []


def _is_id(number: object) -> bool:
    return type(number) is int or (
        isinstance(number, str) and number.isascii() and number.isdigit() and len(number) < 10
    )


def _content(value: object, where: str) -> str:
    content = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(content, str) or len(content) > _MOST_CHARACTERS:
        raise UserError(
            f"{where}: {limits.shortened(value)} is named as a token, must be a text: copy the folder again"
        )
    return content


def _flags(value: Mapping[str, object]) -> dict[str, bool]:
    is_special = bool(value.get("special", False))
    return {name: bool(value.get(name, name == "normalized" and not is_special)) for name in _FLAGS} | {
        "special": is_special
    }


def _flags_of(token: object) -> dict[str, bool]:
    return {name: getattr(token, name) for name in (*_FLAGS, "special")}


def _added_token(token: Token) -> Any:
    import tokenizers

    return tokenizers.AddedToken(token.content, **({"special": True} if token.flags is None else token.flags))
