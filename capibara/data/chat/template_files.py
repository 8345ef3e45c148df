"""What the files of a tokenizer say of its special tokens and its chat templates."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from capibara.core.types import UserError
from capibara.data.chat import template_process
from capibara.data.tokenizers import added
from capibara.data.tokenizers.files import (
    CONFIG_FILE,
    MAP_FILE,
    TOKENIZER_FILE,
    folder_of,
    is_folder,
    local,
    one_line,
    read_json,
    special_tokens,
    template_paths,
)

_NAMED = ("name", "template")
_MOST_SPELLED = 1 << 20  # characters of all special tokens


class TemplateFiles:
    """Reads them when they are asked for, once.

    Args:
      tokenizer, template: as of `ChatTemplate`.
    """

    def __init__(self, tokenizer: str, template: str | None):
        self._tokenizer, self._template = tokenizer, template

    @functools.cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """The tokenizer's special tokens, longest first."""
        listed = self._file(TOKENIZER_FILE).get("added_tokens", [])
        try:
            names = {token["content"] for token in listed if token.get("special")}
            if not all(isinstance(name, str) for name in names):
                raise TypeError("a content is no text")
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(
                f"ChatTemplate.tokenizer ({self._tokenizer!r}): added_tokens of {TOKENIZER_FILE} must be a list of objects "
                f"with content ({one_line(error)})"
            ) from None
        if sum(map(len, names)) > _MOST_SPELLED:
            raise UserError(
                f"ChatTemplate.tokenizer ({self._tokenizer!r}): the special tokens of {TOKENIZER_FILE} have more than "
                f"{_MOST_SPELLED} characters together"
            )
        added_tokens = added.special(added.of_folder(self._folder), f"ChatTemplate.tokenizer ({self._tokenizer!r})")
        return tuple(
            sorted({*names, *added_tokens, *self.token_names.values()} - {""}, key=lambda name: (-len(name), name))
        )

    @functools.cached_property
    def token_names(self) -> dict[str, str]:
        """bos_token, eos_token, ...: what templates call them."""
        return special_tokens(self._folder)

    @property
    def _folder(self) -> str:
        return folder_of(self._tokenizer)

    @property
    def has_token_names(self) -> bool:
        """Whether there is a file that could say what templates call the special tokens."""
        return any(os.path.isfile(os.path.join(self._folder, file)) for file in (CONFIG_FILE, MAP_FILE))

    def _file(self, name: str) -> Mapping[str, Any]:
        """A JSON file beside the tokenizer; empty where there is none, but for the tokenizer itself."""
        is_tokenizer = name == TOKENIZER_FILE and not is_folder(self._tokenizer)
        path = local(self._tokenizer) if is_tokenizer else os.path.join(self._folder, name)
        content = read_json(path)
        if content is None and name == TOKENIZER_FILE:
            raise UserError(
                f"ChatTemplate.tokenizer ({self._tokenizer!r}) has no {name}: name a tokenizer's folder, or that of a run, "
                "as TOKENIZER"
            )
        return content or {}

    @functools.cached_property
    def sources(self) -> dict[str, tuple[str, str]]:
        """Of each template, by name, where it is from and its text."""
        if self._template is not None:
            if "{" in self._template:
                return {"default": ("ChatTemplate.template", self._template)}
            return {"default": (self._template, _read(local(self._template), "ChatTemplate.template"))}
        if paths := template_paths(self._folder):
            return {name: (path, _read(path, os.path.basename(path))) for name, path in paths.items()}
        path, result = os.path.join(self._folder, CONFIG_FILE), self._file(CONFIG_FILE)
        templates = result.get("chat_template")
        if isinstance(templates, dict):
            templates = [{"name": name, "template": text} for name, text in templates.items()]
        if isinstance(templates, str):
            return {"default": (f"the template of {path}", templates)}
        if isinstance(templates, list) and templates:
            if not all(
                isinstance(template, dict) and all(isinstance(template.get(k), str) for k in _NAMED)
                for template in templates
            ):
                raise UserError(f"{path}: each chat_template of several must have a name and a template, both text")
            return {
                template["name"]: (f"the template {template['name']!r} of {path}", template["template"])
                for template in templates
            }
        raise UserError(
            f"ChatTemplate.tokenizer ({self._tokenizer!r}) has no chat template (neither chat_template.jinja nor "
            "chat_template in tokenizer_config.json): set ChatTemplate.template to one"
        )


def _read(path: str, name: str) -> str:
    most = template_process.LONGEST_TEMPLATE_KIB * 1024
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(most + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name} ({path!r}) cannot be read: {one_line(error)}") from None
    if len(text) > most:
        raise UserError(f"{name} ({path!r}) has more than {most} characters: no chat template needs so many")
    return text
