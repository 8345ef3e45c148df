"""Fingerprints of files, inputs and data sets, and the version of the code."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import io
import json
import os
import pathlib
import subprocess
from collections.abc import Iterable, Mapping
from typing import cast

import capibara
from capibara.core import limits
from capibara.core.types import UserError

_THREADS = 4
_GIT_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """An input file.

    Attributes:
      path: the file, named as the user named it.
      bytes: its size.
      sha256: of its content, 64 hexadecimal digits.
    """

    path: str
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """A whole file of a data set.

    Attributes:
      name: relative to the output folder.
      bytes: its size.
      sha256: of its content, 64 hexadecimal digits.
      records: how many records it has.
    """

    name: str
    bytes: int
    sha256: str
    records: int


def canonical(value: object) -> str:
    """JSON of one form: sorted keys, no spaces, text as it is; equal values have equal text.

    Raises:
      ValueError: it has a number that JSON does not have.
      TypeError: it has a value that JSON does not have.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a character
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text


def hash_file(path: str | os.PathLike[str]) -> Input:
    """The size and hash of a regular file; uses little memory.

    Raises:
      UserError: it is no regular file, or cannot be read.
      FileNotFoundError: it does not exist.
    """
    with limits.opened(path) as file:
        try:
            digest = hashlib.file_digest(cast(io.BufferedReader, file), "sha256").hexdigest()
            return Input(path=os.fspath(path), bytes=file.tell(), sha256=digest)
        except OSError as error:
            raise UserError(f"{os.fspath(path)} cannot be read ({error.strerror}): copy it again") from None


def check_file(path: str) -> int:
    """The size in bytes of an input file.

    Raises:
      UserError: it is no regular file, or is missing.
    """
    try:
        return limits.check_file(path)
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist, perhaps as a link to nothing: remove it, or name other files"
        ) from None


def inputs_of(paths: Iterable[str | os.PathLike[str]]) -> tuple[Input, ...]:
    """The inputs of a data set, sorted by path.

    Raises:
      UserError: one is no regular file, is missing, or cannot be read.
    """
    names = sorted({os.fspath(path) for path in paths})
    for name in names:
        check_file(name)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:  # hashing releases the interpreter's lock
        return tuple(pool.map(hash_file, names))


def of_files(hashes: Mapping[str, str]) -> str:
    """The fingerprint of a data set: 64 hexadecimal digits.

    It depends on the names and contents of its files alone, in any order, not on where they are.

    Args:
      hashes: sha256 by name, relative to the data set's folder.
    """
    digest = hashlib.sha256()
    for name, value in sorted(hashes.items()):
        digest.update(f"{len(name.encode('utf-8', 'surrogatepass'))}:".encode())
        digest.update(name.encode("utf-8", "surrogatepass"))
        digest.update(f":{value}\n".encode())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CodeVersion:
    """The version of capibara that runs.

    Attributes:
      package: the version of the package.
      commit: the git commit of the checkout that it runs from; None: it is installed, or git is missing.
      is_changed: whether the checkout has changes since the commit.
    """

    package: str
    commit: str | None
    is_changed: bool


@functools.cache
def code_version() -> CodeVersion:
    """The version of the code that runs; asks git where it runs from a checkout."""
    root = pathlib.Path(capibara.__file__).resolve().parent.parent
    commit, is_changed = None, False
    if (root / ".git").exists():
        commit = _git(root, "rev-parse", "--verify", "HEAD")
        is_changed = commit is not None and bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
    return CodeVersion(package=capibara.__version__, commit=commit, is_changed=is_changed)


def _git(root: pathlib.Path, *command: str) -> str | None:
    """The output of git; None where it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "--no-optional-locks", *command],
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()
