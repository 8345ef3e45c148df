"""Imports the user's own modules: reward functions, metrics and SeqIO tasks that a Gin file or a flag names.

Their folders are appended to sys.path only when such a module is requested: opening a downloaded file imports nothing
from its folder.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import types

_folders: list[str] = []


def search(*folders: str | os.PathLike) -> None:
    """Sets the folders that are searched after sys.path."""
    _folders[:] = [os.path.abspath(os.path.expanduser(folder)) for folder in folders]


def add_folders() -> None:
    """Appends the folders to sys.path; call it when the user has named a module to import."""
    known = {*map(os.path.abspath, sys.path)}
    sys.path += [folder for folder in dict.fromkeys(_folders) if folder not in known]


def load(name: str) -> types.ModuleType:
    """Imports a module that the user has named.

    Raises:
      ModuleNotFoundError: there is no module of that name.
    """
    add_folders()
    return importlib.import_module(name)


def without_working_directory() -> None:
    """Removes the working directory from the head of sys.path, where `python -m capibara.VERB` puts it.

    Otherwise a file beside a downloaded model would be imported in place of a module of the same name. The directory stays
    if capibara itself can only be imported from there.
    """
    asked = sys.orig_argv[1:]
    module = next(
        (asked[at + 1] if arg == "-m" else arg[2:] for at, arg in enumerate(asked[:-1]) if arg[:2] == "-m"), ""
    )
    if module.partition(".")[0] != "capibara" or sys.flags.safe_path or not sys.path:
        return
    if os.path.abspath(sys.path[0] or ".") == os.getcwd():
        own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        elsewhere = importlib.machinery.PathFinder.find_spec("capibara", sys.path[1:])
        if own != os.getcwd() or (elsewhere is not None and elsewhere.origin is not None):
            del sys.path[0]
