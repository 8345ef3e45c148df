"""Where the files of a model are that a function takes: a path, a name, or a loaded model."""

from __future__ import annotations

import os
from typing import Protocol, runtime_checkable

from capibara.core.types import UserError
from capibara.interop import hub


@runtime_checkable
class Loaded(Protocol):
    """A loaded model: where its files are, and how it was loaded otherwise than they are read."""

    path: str
    changes: tuple[str, ...]


def file_path(path: object, name: str, example: str) -> str:
    """The path of a file or folder that is no model, and so is never on the Hub; `name` is the argument's, for errors.

    Raises:
      UserError: it is no path.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise UserError(f"{name} is {path!r}, must be a path: try {example!r}")
    return os.path.expanduser(os.fspath(path))


def path_of(path: object, name: str = "model") -> str:
    """A path as text, of a model on the Hub that of its copy; `name` is the argument's, for errors.

    Raises:
      UserError: it is no path, or cannot be had.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise UserError(f"{name} is {path!r}, must be a path or a name: try 'runs/mine'")
    return hub.local_path(os.path.expanduser(os.fspath(path)))


def stored_path(model: Loaded | str | os.PathLike[str], name: str = "model") -> str:
    """The path from which a function reads a model again, whatever is in memory.

    Raises:
      UserError: it is neither a path nor a loaded model; or it was loaded in a way that its files do not say.
    """
    if isinstance(model, Loaded):
        if model.changes:
            changes = ", ".join(model.changes)
            raise UserError(
                f"{name} was loaded with {changes}, and its files are read again: load it without, or pass its path"
            )
        return model.path
    return path_of(model, name)
