"""The files of a tokenizer: their paths, and the special tokens that the files beside tokenizer.json name."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Mapping
from typing import Any

from capibara.core import limits
from capibara.core.types import UserError
from capibara.storage import copies, remote, stores

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
MAP_FILE = "special_tokens_map.json"  # special tokens of older tokenizers
ADDED_FILE = "added_tokens.json"  # ids of added tokens of older tokenizers
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"  # folder of further templates, NAME.jinja
GENERATION_FILE = "generation_config.json"  # end tokens and sampling options
START_ID = "decoder_start_token_id"
MODEL_FILE = "config.json"  # config of a transformers model; its token ids are used if there is no GENERATION_FILE
SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model")
# The files of a tokenizer, by its kind.
FILES = (
    TOKENIZER_FILE, CONFIG_FILE, MAP_FILE, ADDED_FILE, "vocab.json", "merges.txt", "vocab.txt",
    *SENTENCEPIECE_FILES, TEMPLATE_FILE, "chat_template.json", GENERATION_FILE,
)  # fmt: skip
_SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_MOST_ENDS = 1024
_MOST_TEMPLATES = 64
OWN = "tokenizer"  # folder in a run folder: the run's tokenizer
ORIGIN = "origin"  # folder in a run folder: files that came with the pretrained weights
PATHS = "paths.json"  # file in a run folder: {path in the Gin configuration: path of the copy in the run folder}


def located(tokenizer: str) -> str:
    """The path of a tokenizer's folder or file, from that or from a run folder; one in a bucket is copied first."""
    tokenizer = local(tokenizer)
    copies = os.path.join(tokenizer, OWN)
    is_run = os.path.isdir(copies) and not any(map(os.path.isfile, _main_files(tokenizer)))
    return copies if is_run else tokenizer


@functools.cache
def local(path: str) -> str:
    """The path on this machine of a file or folder; copies it from a bucket (gs://), from folders only tokenizer files.

    If the original does not exist, neither does the returned path.

    Raises:
      UserError: it cannot be read.
    """
    if stores.of(path).has_local_paths:
        return path
    if any(entry.url == remote.address(path) for entry in remote.listed(path)):  # a file, not a folder
        folder, _, name = path.rpartition("/")
        return os.path.join(copies.local_folder(folder, {name, *FILES}), name)
    further = {f"{TEMPLATES}/{entry.url.rpartition('/')[2]}" for entry in remote.listed(f"{path}/{TEMPLATES}/*.jinja")}
    return copies.local_folder(path, {*FILES, *further, *(f"{OWN}/{name}" for name in FILES)})


def is_folder(tokenizer: str) -> bool:
    """Whether a path of the Gin configuration is a folder."""
    return os.path.isdir(local(tokenizer))


def is_there(tokenizer: str) -> bool:
    """Whether a path of the Gin configuration is a file, or a folder with a tokenizer."""
    return os.path.isfile(tokenizer) or any(map(os.path.isfile, _main_files(located(tokenizer))))


def _main_files(folder: str) -> list[str]:
    return [os.path.join(folder, name) for name in (TOKENIZER_FILE, *SENTENCEPIECE_FILES)]


def folder_of(tokenizer: str) -> str:
    """The folder of a tokenizer, from that, a file in it, or a run folder."""
    tokenizer = located(tokenizer)
    return tokenizer if os.path.isdir(tokenizer) else os.path.dirname(tokenizer)


def file_of(tokenizer: str, *names: str) -> str:
    """The main file of a tokenizer, from the same as `folder_of`; in a folder, the first of `names` that exists."""
    tokenizer = located(tokenizer)
    if not os.path.isdir(tokenizer):
        return tokenizer
    paths = [os.path.join(tokenizer, name) for name in names]
    return next(filter(os.path.isfile, paths), paths[0])


def carried(folder: str) -> dict[str, bytes]:
    """The contents of a folder's tokenizer files, by name.

    config.json's token ids become a generation_config.json, and several templates a list in tokenizer_config.json.
    """
    files = {}
    for name in FILES:
        with contextlib.suppress(FileNotFoundError):
            files[name] = limits.read(limits.own_file(folder, name))
    if several := _named_templates(folder, files):
        files.pop(TEMPLATE_FILE, None)  # it would be the only one
        files |= several
    model = read_json(os.path.join(folder, MODEL_FILE)) or {}
    if GENERATION_FILE not in files and (created := generation(model)):
        files[GENERATION_FILE] = created
    elif GENERATION_FILE in files and model.get(START_ID) is not None:
        stated = limits.parse_json(files[GENERATION_FILE], unlimited=True)
        if isinstance(stated, dict) and stated.get(START_ID) is None:  # as decoder_start.start_id reads both files
            files[GENERATION_FILE] = (json.dumps({**stated, START_ID: model[START_ID]}, indent=2) + "\n").encode()
    return files


def over(base: Mapping[str, bytes], folder: str) -> dict[str, bytes]:
    """The tokenizer files of an adapter's folder, and as far as it has none those of its base.

    A tokenizer is taken whole, as transformers reads one folder: another's files would add tokens or a template to it.

    Args:
      base: the base's files by name.
      folder: of the adapter.
    """
    copies = carried(folder)
    if any(name in copies for name in (TOKENIZER_FILE, *SENTENCEPIECE_FILES)):
        base = {name: base[name] for name in (GENERATION_FILE,) if name in base}
    elif "chat_template" in (read_json(os.path.join(folder, CONFIG_FILE)) or {}):
        base = {name: content for name, content in base.items() if name != TEMPLATE_FILE}  # it would come first
    return {**base, **copies}


def template_paths(folder: str) -> dict[str, str]:
    """The paths of a folder's files with chat templates by the templates' names, as transformers 5 saves them.

    Raises:
      UserError: there are too many.
    """
    default, further = os.path.join(folder, TEMPLATE_FILE), os.path.join(folder, TEMPLATES)
    paths = {"default": default} if os.path.isfile(default) else {}
    if os.path.isdir(further):
        names = sorted(name for name in os.listdir(further) if name.endswith(".jinja"))
        if len(names) > _MOST_TEMPLATES:
            raise UserError(f"{further} has {len(names)} templates, must have at most {_MOST_TEMPLATES}: remove some")
        paths |= {name.removesuffix(".jinja"): os.path.join(further, name) for name in names}
    return paths


def _named_templates(folder: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """A tokenizer_config.json with all templates of a folder; empty if there are no further ones beside the default."""
    paths = template_paths(folder)
    if not paths.keys() - {"default"}:
        return {}
    texts = {name: limits.read(limits.own_file(folder, os.path.relpath(path, folder))) for name, path in paths.items()}
    try:
        each = [{"name": name, "template": text.decode()} for name, text in texts.items()]
    except UnicodeDecodeError as error:
        raise UserError(f"a chat template of {folder} is not text in UTF-8 ({error}): convert it") from None
    config = {**(limits.parse_json(files[CONFIG_FILE]) if CONFIG_FILE in files else {}), "chat_template": each}
    return {CONFIG_FILE: (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()}


def contents(tokenizer: str) -> dict[str, bytes]:
    """The contents of a tokenizer.json, which may have another name, and of the tokenizer files beside it."""
    return carried(folder_of(tokenizer)) | {TOKENIZER_FILE: read_bytes(file_of(tokenizer, TOKENIZER_FILE))}


def place_of(tokenizer: str) -> str:
    """The path in a run folder of the copy of a Gin path: its tokenizer folder, or the tokenizer.json in it."""
    return OWN if is_folder(tokenizer) else f"{OWN}/{TOKENIZER_FILE}"


def read_bytes(path: str) -> bytes:
    """The content of a file on this machine."""
    with open(path, "rb") as file:
        return file.read()


def generation(config: Mapping[str, object]) -> bytes:
    """A generation_config.json with the token ids of a config.json; empty if it has none."""
    ids = {name: config[name] for name in _TOKEN_IDS if config.get(name) is not None}
    return (json.dumps(ids, indent=2) + "\n").encode() if ids else b""


def unread_generation(folder: str) -> dict[str, Any]:
    """What the generation_config.json of a folder says of how to sample: transformers' generate and vLLM begin from that.

    Raises:
      UserError: the file cannot be read.
    """
    values = read_json(os.path.join(folder, GENERATION_FILE)) or {}
    neutral: tuple[Any, ...] = (None, False, 0, 1, "", [], {})
    about = (*_TOKEN_IDS, "transformers_version", "use_cache", "cache_implementation")
    return {
        name: value
        for name, value in values.items()
        if name not in about and not name.startswith("_") and (value is True or value not in neutral)
    }


def end_ids(folder: str) -> tuple[int, ...]:
    """The ids of a model's end tokens, as transformers' generate reads them from the tokenizer's folder.

    Raises:
      UserError: the file cannot be read, or the values are not token ids.
    """
    for name in (GENERATION_FILE, MODEL_FILE):
        if (values := read_json(os.path.join(folder, name))) is not None:
            return ids_of(values.get("eos_token_id"), os.path.join(folder, name))
    return ()


def ids_of(value: object, where: str) -> tuple[int, ...]:
    """The ids in an eos_token_id: none, one or several.

    Raises:
      UserError: it is something else.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > _MOST_ENDS or not all(type(item) is int for item in ids):
        shown = limits.shortened(value)
        raise UserError(f"{where} has eos_token_id = {shown}, must be a token id or a list of them: correct it")
    return tuple(ids)


def read_json(path: str) -> Mapping[str, Any] | None:
    """The content of a JSON file beside a tokenizer; None: it does not exist.

    Raises:
      UserError: it cannot be read, or is not a JSON object.
    """
    try:
        return limits.read_json(path, unlimited=True)
    except FileNotFoundError:
        return None


def special_tokens(folder: str) -> dict[str, str]:
    """The special tokens of a tokenizer's folder by their fields ("eos_token"), as transformers reads them.

    They are in tokenizer_config.json. If that does not list the added tokens, it is of an older version, and
    special_tokens_map.json takes precedence.

    Raises:
      UserError: one of the files cannot be read.
    """
    values = read_json(os.path.join(folder, CONFIG_FILE)) or {}
    older = {} if "added_tokens_decoder" in values else read_json(os.path.join(folder, MAP_FILE)) or {}
    return named(values, os.path.join(folder, CONFIG_FILE)) | named(older, os.path.join(folder, MAP_FILE))


def named(values: Mapping[str, object], where: str = CONFIG_FILE) -> dict[str, str]:
    """The special tokens in a file's values; a token is a text, or an object with the text as its content.

    Raises:
      UserError: one is something else.
    """
    for field in _SPECIAL:
        if not isinstance(token := values.get(field), str | Mapping | None):
            shown = limits.shortened(token)
            raise UserError(
                f"{where} has {field} = {shown}, must be a text, or an object with one as its content: correct it"
            )
    reported = {field: value.get("content") if isinstance(value, Mapping) else value for field, value in values.items()}
    return {field: token for field, token in reported.items() if field.endswith("_token") and isinstance(token, str)}


def one_line(error: BaseException) -> str:
    """An error's message on one line, shortened."""
    return " ".join(str(error).split())[:200] or type(error).__name__
