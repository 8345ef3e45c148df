"""Where Gin files are found (here, in the user's folders, in capibara's gin/) and which modules define their names."""

from __future__ import annotations

import functools
import os
import pathlib
import re
from collections.abc import Iterable, Sequence

from capibara import fields
from capibara.types import UserError


def search_folders(search_paths: Sequence[str | os.PathLike] = ()) -> list[pathlib.Path]:
    """The folders in which Gin files are looked for, in order: here, `search_paths`, capibara's own."""
    package = pathlib.Path(__file__).resolve().parent
    # The wheel carries gin/ inside the package; beside an installed package stands the gin library instead.
    own = package / "gin_files" if (package / "gin_files").is_dir() else package.parent / "gin"
    return [pathlib.Path(), *(pathlib.Path(path).expanduser() for path in search_paths), own]


def find_file(name: str | os.PathLike, folders: Sequence[pathlib.Path], where: str = "") -> pathlib.Path:
    """The first of `folders` that holds Gin file `name` (which may be absolute or contain folders).

    Raises:
      UserError: none does; the message lists the folders and the nearest names in them.
    """
    path = pathlib.Path(name).expanduser()
    for folder in folders:
        if (folder / path).is_file():
            return folder / path
    prefix = f"{where}: " if where else ""
    if path.is_absolute():
        folders = [path.parent]
    looked = ", ".join(dict.fromkeys(str(folder.resolve()) for folder in folders))
    choices = {
        str(found.relative_to(folder)) for folder in folders for found in _gin_files(folder, folder == folders[-1])
    }
    names = {choice: choice for choice in choices} | {pathlib.Path(choice).name: choice for choice in choices}
    close = [names[found] for found in fields.nearest(str(path) if str(path) in names else path.name, names)]
    hint = f", did you mean {' or '.join(dict.fromkeys(close))}?" if close else ""
    raise UserError(f"{prefix}no Gin file {name} in {looked}{hint}")


def _gin_files(folder: pathlib.Path, deep: bool) -> Iterable[pathlib.Path]:
    return folder.glob("**/*.gin" if deep else "*.gin")


@functools.cache
def defining_modules() -> dict[str, str]:
    """Name -> module of everything that capibara marks @configurable, read from the source without importing it."""
    marked = re.compile(r"^@(?:config\.)?configurable\n(?:@.*\n)*(?:class|def) (\w+)", re.MULTILINE)
    package = pathlib.Path(__file__).resolve().parent
    modules = {}
    for path in sorted(package.rglob("*.py")):
        module = ".".join([package.name, *path.relative_to(package).with_suffix("").parts]).removesuffix(".__init__")
        modules.update(dict.fromkeys(marked.findall(path.read_text(encoding="utf-8")), module))
    return modules
