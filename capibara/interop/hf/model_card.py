"""Names and licences of models: the model card (README.md) and licence files, and GGUF's general.* metadata.

The card begins with YAML between two "---" lines; only names with a text or a list of texts are parsed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from capibara.core import limits

CARD = "README.md"
_LICENCES = tuple(
    f"{name}{ending}"
    for name in ("LICENSE", "LICENCE", "COPYING", "NOTICE", "USE_POLICY", "Notice")
    for ending in ("", ".txt", ".md")
)
# Names in the card -> GGUF keys, as in llama.cpp's converter.
_GENERAL = {
    "model_name": "name",
    "model_author": "author",
    "model_version": "version",
    "model_organization": "organization",
    "model_description": "description",
    "model_finetune": "finetune",
    "model_basename": "basename",
    "model_size_label": "size_label",
    "model_url": "source.url",
    "model_repo_url": "source.repo_url",
    "license": "license",
    "license_name": "license.name",
    "license_link": "license.link",
    "tags": "tags",
    "language": "languages",
}
_KEPT = ("license", "license_name", "license_link", "language", "tags")  # inherited by a fine-tuned model
_LINE = re.compile(r"([A-Za-z_][\w.-]*):(?:\s+(.*))?")
_PLAIN = re.compile(r"[A-Za-z0-9][\w ./+-]*")
_WORDS = ("true", "false", "null", "yes", "no", "on", "off")  # YAML keywords, which a text must not equal
_MOST_LINES, _MOST_CHARACTERS = 10_000, 100_000

Facts = dict[str, str | list[str]]


def carried(folder: str) -> dict[str, bytes]:
    """The model card and the licence files of a folder, by name."""
    files = {}
    for name in (CARD, *_LICENCES):
        with contextlib.suppress(FileNotFoundError):
            files[name] = limits.read(limits.own_file(folder, name), limits.SMALL_BYTES)
    return files


def facts(card: bytes) -> Facts:
    """The texts and lists of texts in a model card's YAML, by name."""
    result: Facts = {}
    lines = card.decode("utf-8", errors="replace").replace("\r\n", "\n").split("\n")[:_MOST_LINES]
    if "---" not in lines[1:] or lines[0].strip() != "---":
        return result
    name = ""
    for line in lines[1 : lines.index("---", 1)]:
        if match := _LINE.fullmatch(line.rstrip()):
            name, value = match[1], (match[2] or "").strip()
            if value.startswith("[") and value.endswith("]"):
                result[name] = [text for part in value[1:-1].split(",") if (text := _text(part.strip()))]
            elif value not in ("", "|", ">", "|-", ">-"):
                result[name] = _text(value)
        elif line.lstrip().startswith("- ") and name and isinstance(result.setdefault(name, []), list):
            result[name] = [*result[name], _text(line.lstrip()[2:].strip())]
    return result


def card(head: Mapping[str, str | list[str]], body: str) -> bytes:
    """A model card."""
    lines = []
    for name, value in head.items():
        if isinstance(value, list):
            lines += [f"{name}:", *(f"- {_yaml(item)}" for item in value)]
        else:
            lines.append(f"{name}: {_yaml(value)}")
    return "\n".join(["---", *lines, "---", "", body, ""]).encode()


def of_fine_tuned(about: Mapping[str, bytes], config: Mapping[str, object]) -> dict[str, bytes]:
    """The files of a fine-tuned model: its base's licence, and a card that names the base.

    Args:
      about: the base's files, from `carried`.
      config: its config.json.
    """
    known = facts(about.get(CARD, b""))
    name = name_of(known, config)
    head = {key: known[key] for key in _KEPT if key in known}
    head |= {"model_name": name, "base_model": name} if name else {}
    others = {key: content for key, content in about.items() if key != CARD}
    if not head:
        return others
    return others | {CARD: card(head, f"Fine-tuned with capibara from {name or 'another model'}.")}


def of_merged(models: Mapping[str, tuple[Mapping[str, bytes], Mapping[str, Any]]], method: str) -> dict[str, bytes]:
    """The files of a merged model: a card that names the models, and the licences of all.

    Args:
      models: path -> files of each model, from `carried`, and its config.json.
      method: how they were merged.
    """
    known = {path: facts(about.get(CARD, b"")) for path, (about, _) in models.items()}
    names = [
        name_of(known[path], config) or os.path.basename(os.path.normpath(path)) for path, (_, config) in models.items()
    ]
    first, *others = known.values()
    head: dict[str, str | list[str]] = {
        key: first[key] for key in _KEPT if key in first and all(other.get(key) == first[key] for other in others)
    }
    files: dict[str, bytes] = {}
    for number, (about, _) in enumerate(models.values(), 1):
        for name, content in about.items():
            if name != CARD and files.setdefault(name, content) != content:
                files[f"{name}.{number}"] = content
    tags = head.get("tags", [])
    tags = [tags] if isinstance(tags, str) else tags
    head |= {"base_model": names, "tags": [*tags, *(["merge"] if "merge" not in tags else [])]}
    return files | {CARD: card(head, f"Merged with capibara by {method} from {', '.join(names)}.")}


def name_of(known: Facts, config: Mapping[str, object]) -> str:
    """A model's name; "": unknown."""
    for value in (known.get("model_name"), config.get("_name_or_path")):
        if isinstance(value, str) and value.strip("/. "):
            return value
    return ""


def general(about: Mapping[str, bytes], config: Mapping[str, object]) -> dict[str, str | list[str]]:
    """A GGUF file's metadata under "general." (without that prefix), from a model's card and config.json."""
    known = facts(about.get(CARD, b""))
    result: dict[str, str | list[str]] = {}
    for name, key in _GENERAL.items():
        value, is_list = known.get(name), key in ("tags", "languages")
        if value:
            result[key] = ([value] if isinstance(value, str) else value) if is_list else _joined(value)
    name = name_of(known, config)
    return (
        {"name": os.path.basename(name.rstrip("/")) if "model_name" not in known else name} if name else {}
    ) | result


def of_general(values: Mapping[str, Any]) -> dict[str, bytes]:
    """The model card from a GGUF file's metadata under "general." (without that prefix), if they have any facts."""
    head: Facts = {}
    for name, key in _GENERAL.items():
        value = values.get(key)
        texts = value if isinstance(value, list) else [value]
        if value and all(isinstance(text, str) and len(text) <= _MOST_CHARACTERS for text in texts):
            head[name] = value
    return {CARD: card(head, f"# {head['model_name']}" if "model_name" in head else "")} if head else {}


def _joined(value: str | list[str]) -> str:
    return value if isinstance(value, str) else ", ".join(value)


def _text(value: str) -> str:
    """A YAML scalar as a text."""
    if len(value) > 1 and value[0] == value[-1] == "'":
        return value[1:-1].replace("''", "'")
    if len(value) > 1 and value[0] == value[-1] == '"':
        with contextlib.suppress(ValueError):
            return str(json.loads(value))
    return value.split(" #")[0].rstrip()


def _yaml(value: str) -> str:
    return (
        value
        if _PLAIN.fullmatch(value) and value.lower() not in _WORDS and not value[0].isdigit()
        else json.dumps(value)
    )
