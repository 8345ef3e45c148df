"""The files of a tokenizer: where they are, and what those beside tokenizer.json call its special tokens."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Mapping
from typing import Any

from capibara.core import limits
from capibara.core.types import UserError
from capibara.storage import copies, outputs, remote

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
MAP_FILE = "special_tokens_map.json"  # older tokenizers' own file of special tokens
TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"  # which tokens end a text, and how it is sampled
MODEL_FILE = "config.json"  # of a model in transformers, whose token ids count where there is no GENERATION_FILE
SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model")
# All that a tokenizer may come in, by its kind.
FILES = (
    TOKENIZER_FILE, CONFIG_FILE, MAP_FILE, "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt",
    *SENTENCEPIECE_FILES, TEMPLATE_FILE, "chat_template.json", GENERATION_FILE,
)  # fmt: skip
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_MOST_ENDS = 1024
OWN = "tokenizer"  # the folder in a run folder that has the run's tokenizer
ORIGIN = "origin"  # the folder in a run folder that has what its initial weights came with
PATHS = "paths.json"  # in a run folder: {path that Gin gives: where the run folder has what was there}


def located(tokenizer: str) -> str:
    """A tokenizer's folder or file, given that or a run folder that has one; of one in a bucket a copy on this machine."""
    tokenizer = local(tokenizer)
    own = os.path.join(tokenizer, OWN)
    is_run = os.path.isdir(own) and not any(map(os.path.isfile, _main_files(tokenizer)))
    return own if is_run else tokenizer


@functools.cache
def local(path: str) -> str:
    """A file or folder on this machine; of one in a bucket (gs://) a copy, of a folder of the tokenizer's files in it.

    Raises:
      UserError: it cannot be read; of what is not there, what comes back is not there either.
    """
    if not outputs.is_remote(path):
        return path
    if any(entry.url == remote.address(path) for entry in remote.listed(path)):  # a file, which others are beside
        folder, _, name = path.rpartition("/")
        return os.path.join(copies.local_folder(folder, {name, *FILES}), name)
    return copies.local_folder(path, {*FILES, *(f"{OWN}/{name}" for name in FILES)})


def is_folder(tokenizer: str) -> bool:
    """Whether a path, as Gin gives it, is a folder."""
    return os.path.isdir(local(tokenizer))


def is_there(tokenizer: str) -> bool:
    """Whether a path, as Gin gives it, leads to a tokenizer, or is any file."""
    return os.path.isfile(tokenizer) or any(map(os.path.isfile, _main_files(located(tokenizer))))


def _main_files(folder: str) -> list[str]:
    return [os.path.join(folder, name) for name in (TOKENIZER_FILE, *SENTENCEPIECE_FILES)]


def folder_of(tokenizer: str) -> str:
    """The folder of a tokenizer, given that, the file in it, or a run folder."""
    tokenizer = located(tokenizer)
    return tokenizer if os.path.isdir(tokenizer) else os.path.dirname(tokenizer)


def file_of(tokenizer: str, *names: str) -> str:
    """The main file of a tokenizer, given as of `folder_of`: in a folder the first of `names` that it has."""
    tokenizer = located(tokenizer)
    if not os.path.isdir(tokenizer):
        return tokenizer
    paths = [os.path.join(tokenizer, name) for name in names]
    return next(filter(os.path.isfile, paths), paths[0])


def carried(folder: str) -> dict[str, bytes]:
    """The files of a folder that are a tokenizer's, by name; with a generation_config.json where config.json has its ids."""
    files = {}
    for name in FILES:
        with contextlib.suppress(FileNotFoundError):
            files[name] = limits.read(limits.own_file(folder, name))
    if GENERATION_FILE not in files and (made := generation(read_json(os.path.join(folder, MODEL_FILE)) or {})):
        files[GENERATION_FILE] = made
    return files


def beside(tokenizer: str) -> dict[str, bytes]:
    """The files of a tokenizer.json, which may have any name, and those beside it."""
    return carried(folder_of(tokenizer)) | {TOKENIZER_FILE: read_bytes(file_of(tokenizer, TOKENIZER_FILE))}


def place_of(tokenizer: str) -> str:
    """Where a run folder has what Gin names so: its folder of the tokenizer, or the tokenizer.json in it."""
    return OWN if is_folder(tokenizer) else f"{OWN}/{TOKENIZER_FILE}"


def read_bytes(path: str) -> bytes:
    """The content of a file on this machine."""
    with open(path, "rb") as file:
        return file.read()


def generation(config: Mapping[str, Any]) -> bytes:
    """What transformers' generate starts from, of a config.json: its token ids; empty where it has none."""
    ids = {name: config[name] for name in _TOKEN_IDS if config.get(name) is not None}
    return (json.dumps(ids, indent=2) + "\n").encode() if ids else b""


def end_ids(folder: str) -> tuple[int, ...]:
    """The tokens that end a text of a model, as transformers' generate takes them from the folder of its tokenizer.

    Raises:
      UserError: the file cannot be read, or they are no numbers of tokens.
    """
    for name in (GENERATION_FILE, MODEL_FILE):
        if (values := read_json(os.path.join(folder, name))) is not None:
            return ids_of(values.get("eos_token_id"), os.path.join(folder, name))
    return ()


def ids_of(value: Any, where: str) -> tuple[int, ...]:
    """The numbers of an eos_token_id: none, one or several.

    Raises:
      UserError: it is something else.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > _MOST_ENDS or not all(type(one) is int for one in ids):
        shown = limits.shortened(value)
        raise UserError(f"{where} has eos_token_id = {shown}, must be a token's number or a list of them: correct it")
    return tuple(ids)


def read_json(path: str) -> Mapping[str, Any] | None:
    """What a file beside a tokenizer says; None: there is none.

    Raises:
      UserError: it cannot be read, or holds no JSON object.
    """
    try:
        return limits.read_json(path)
    except FileNotFoundError:
        return None


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
