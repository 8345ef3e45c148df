"""Models of the Hugging Face Hub by their names, OWNER/NAME; they are kept in the Hub's own cache."""

from __future__ import annotations

import os
import re
import sys

from capibara.core import extras, limits
from capibara.core.types import UserError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# What a model is read from: no code, and no pickles where there are safetensors.
_FILES = (
    "*.json",
    "*.safetensors",
    "*.model",
    "*.jinja",
    "*.txt",
    "README.md",
    "LICENSE*",
    "additional_chat_templates/*",
)
_PICKLES = ("*.bin",)
# Other forms of the same weights, in folders of their own, and in one file beside the shards. (A star matches slashes, too.)
_OTHERS = ("*/*.json", "*/*.safetensors", "*/*.bin", "*/*.model", "*/*.txt", "consolidated*")


def is_name(path: str) -> bool:
    """Whether a path is the name of a model on the Hub: OWNER/NAME, where neither OWNER nor this path is here."""
    return bool(_NAME.fullmatch(path)) and not os.path.lexists(path) and not os.path.lexists(path.partition("/")[0])


def local_path(path: str) -> str:
    """The path itself, or of a model that is named as on the Hub the folder of its copy on this machine.

    A copy that is complete is not downloaded again. HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE are read by the Hub's
    library.

    Args:
      path: of a model.

    Raises:
      UserError: there is no such model, it may not be read, or the Hub cannot be reached.
    """
    if not is_name(path):
        return path
    hub = extras.require(
        "huggingface_hub", extra="hf", why=f"{path}, which is no folder here, from the Hugging Face Hub"
    )
    print(f"note: {path} is no folder here: it is read from the Hugging Face Hub", file=sys.stderr, flush=True)
    try:
        folder = hub.snapshot_download(path, allow_patterns=[*_FILES], ignore_patterns=[*_OTHERS])
        if not any(name.endswith(".safetensors") for name in os.listdir(folder)):
            folder = hub.snapshot_download(path, allow_patterns=[*_FILES, *_PICKLES], ignore_patterns=[*_OTHERS])
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
    ) as error:  # its own are OSErrors; the others are of answers of no Hub
        why = limits.cause(error)
        raise UserError(f"{path} is no folder here, and cannot be read from the Hugging Face Hub ({why})") from None
    return str(folder)


def push(folder: str, name: str, *, private: bool = True) -> str:
    """Uploads a folder as a model of the Hub; returns its address.

    Args:
      folder: on this machine.
      name: OWNER/NAME; it is made if it does not exist.
      private: whether a new one is private.

    Raises:
      UserError: the Hub refuses it, or cannot be reached.
    """
    hub = extras.require("huggingface_hub", extra="hf", why="a model of the Hugging Face Hub")
    try:
        address = hub.create_repo(name, private=private, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message="Add the model")
    except Exception as error:  # whatever its client of HTTP raises
        raise UserError(f"{name} cannot be pushed to the Hugging Face Hub ({limits.cause(error)})") from None
    return str(address)
