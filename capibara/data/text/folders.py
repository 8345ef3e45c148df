"""The files of folders, on this machine and in buckets: which are read, and which are left out and why."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from capibara.core.types import UserError
from capibara.data.text import splits
from capibara.data.text.splits import Use
from capibara.storage import remote, stores
from capibara.storage.store import Entry

BUILD_RECORDS = (  # of a builder, beside the manifest; no documents to read
    "manifest.json",
    "index.json",
    "lineage.jsonl",
    "statistics.json",
    "leaks.jsonl",
    "contaminated.jsonl",
)
_HIDDEN = "is hidden, by its name"

IsRead = Callable[[str], bool]
"""Whether a file of a folder is read, by its name."""


class Member(NamedTuple):
    """A file of a folder.

    Attributes:
      name: its path below the folder, with slashes.
      path: its path or address.
      entry: of a file in a bucket.
    """

    name: str
    path: str
    entry: Entry | None = None


def is_folder(pattern: str) -> bool:
    """Whether a path is a folder, and whether an address is no file or glob that matches something."""
    store = stores.of(pattern)
    return os.path.isdir(pattern) if store.has_local_paths else not store.matching(pattern)


def inside(parameter: str, folder: str, is_read: IsRead, subject: str, use: Use) -> tuple[list[Member], int]:
    """The files of a folder, and of the folders in it, that are read, and how many others it has, which is logged.

    Args:
      parameter: names the folder, for errors.
      folder: a path or address.
      is_read: whether a file is read, by its name.
      subject: what such files have, for errors.
      use: what they are read for.

    Returns:
      The files, none if there is nothing at this address, and the number of others.

    Raises:
      UserError: there is none among others, or a folder cannot be read.
    """
    members, left_out = _members(parameter, folder, is_read)
    if not members and not left_out and not stores.of(folder).has_local_paths:
        return [], 0
    if not members:
        raise UserError(f"{parameter} ({folder!r}) is a folder without a file of {subject}: name files, or a glob")
    if left_out:
        line = "%s (%s): %d files read, %d left out for their name or kind, such as %s"
        logging.getLogger(__name__).warning(line, parameter, folder, len(members), len(left_out), left_out[0])
    is_chosen = splits.chosen(parameter, folder, [member.name for member in members], use)
    chosen = [member for member, is_of_use in zip(members, is_chosen, strict=True) if is_of_use]
    return chosen, len(left_out) + len(members) - len(chosen)


def of_use(parameter: str, folder: str, is_read: IsRead, use: Use) -> list[Member]:
    """As `inside`, but logs nothing, and is empty where there are no such files."""
    members, _ = _members(parameter, folder, is_read)
    labels = splits.of_use(parameter, folder, [member.name for member in members], use)
    return [member for member, is_of_use in zip(members, labels, strict=True) if is_of_use]


def held_out(parameter: str, patterns: Sequence[str], is_read: IsRead) -> list[Member]:
    """The files of the validation splits of the folders among training files; none: a fraction is held out."""
    result: list[Member] = []
    for folder in filter(is_folder, patterns):
        members, _ = _members(parameter, folder, is_read)
        labels = splits.of_folder(parameter, folder, [member.name for member in members])
        result += [member for member in members if labels.get(member.name) is splits.Split.VALIDATION]
    return result


def _members(parameter: str, folder: str, is_read: IsRead) -> tuple[list[Member], list[str]]:
    """The files that are read, and the paths of the others."""
    if not stores.of(folder).has_local_paths:
        return _in_bucket(folder, is_read)

    def refuse(error: OSError) -> None:
        raise UserError(
            f"{parameter} ({error.filename!r}) cannot be read ({error.strerror}): make it a folder that you may read"
        )

    left_out: list[str] = []
    paths = walked(folder, is_read, lambda path, _: left_out.append(path), refuse)
    files = [path for path in paths if os.path.isfile(path)]
    left_out += sorted({*paths} - {*files})  # a pipe, a link to nothing
    return [Member(os.path.relpath(path, folder).replace(os.sep, "/"), path) for path in files], left_out


def _in_bucket(folder: str, is_read: IsRead) -> tuple[list[Member], list[str]]:
    entries = remote.below(folder)
    names = [entry.url.removeprefix(remote.address(folder)).strip("/") for entry in entries]
    built = {name.rpartition("/")[0] for name in names if name.rpartition("/")[2] == "manifest.json"}
    members: list[Member] = []
    left_out: list[str] = []
    for name, entry in zip(names, entries, strict=True):
        above, _, last = name.rpartition("/")
        is_hidden = any(part.startswith(".") for part in above.split("/"))
        if is_hidden or _why_left_out(last, is_read, above in built):
            left_out.append(entry.url)
        else:
            members.append(Member(name, entry.url, entry))
    return members, left_out


def walked(
    folder: str,
    is_read: Callable[[str], bool],
    leave_out: Callable[[str, str], None],
    refuse: Callable[[OSError], None],
    without: Collection[str] = (),
) -> list[str]:
    """The files of a folder and of the folders in it that are read by their names; hidden ones and links to folders are not.

    Args:
      folder: on this machine.
      is_read: whether a file is read, by its name.
      leave_out: called with each path that is not, and why.
      refuse: called with the error of a folder that cannot be read.
      without: paths that are neither read nor left out.
    """
    files: list[str] = []
    for above, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if os.path.join(above, name) not in without)
        for name in [*folders, *sorted(names)]:
            path = os.path.join(above, name)
            if name in folders:
                if name.startswith("."):
                    leave_out(path, _HIDDEN)
                elif os.path.islink(path):
                    leave_out(path, "is a link to a folder")
            elif path not in without:
                if why := _why_left_out(name, is_read, "manifest.json" in names):
                    leave_out(path, why)
                else:
                    files.append(path)
        folders[:] = [name for name in folders if not name.startswith(".")]
    return files


def _why_left_out(name: str, is_read: Callable[[str], bool], is_built: bool) -> str:
    """Why a folder's file is not read, by its name; empty: it is. `is_built`: a manifest is beside it."""
    if name.startswith("."):
        return _HIDDEN
    if is_built and name in BUILD_RECORDS:
        return "is a record of what was built here"
    return "" if is_read(name) else "has another ending"
