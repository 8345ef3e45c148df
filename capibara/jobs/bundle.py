"""The files that a job needs, in one folder of a store that its hosts can read, by the hash of their content.

  URL/NAME/HASH/gin/0/...     the working directory of whoever launches: its Gin files, and modules that they import
                gin/1/...     the same of the first --gin_search_paths
                *.whl         capibara, where no image has it
                SHA256SUMS    the hashes, as sha256sum writes them; HASH is the beginning of this file's own

So a job that is launched again with the same files finds them there, and one with others has another folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import posixpath
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from capibara import config
from capibara.core.types import TryAgain, UserError
from capibara.jobs.spec import Bundle
from capibara.storage import stores
from capibara.storage.store import Store

if TYPE_CHECKING:
    from etils import epath

SUMS = "SHA256SUMS"
FOLDER = "gin"
_WHEEL = re.compile(r"capibara_tpu-[A-Za-z0-9_.+-]+\.whl")
_LARGEST = 256 << 20  # bytes of a file: more is data, which belongs in a bucket of its own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sources:
    """The files of a bundle on this machine.

    Attributes:
      paths: path in the bundle -> file.
      gin_files: the run's Gin files, as they are named in the bundle's first folder.
      search_paths: the folders that take the places of --gin_search_paths, from the bundle's first folder.
    """

    paths: Mapping[str, pathlib.Path]
    gin_files: Sequence[str]
    search_paths: Sequence[str]


def collect(
    gin_files: Sequence[str],
    read: Iterable[pathlib.Path],
    search_paths: Sequence[str],
    modules: Iterable[str] = (),
    wheel: str | None = None,
) -> Sources:
    """The files of a bundle.

    Args:
      gin_files: the run's, as the user names them.
      read: all Gin files that were read, included ones too; capibara's own stay where they are.
      search_paths: --gin_search_paths.
      modules: files with the code that the Gin files import.
      wheel: of capibara; None: the image has it.

    Raises:
      UserError: a file lies outside the working directory and the search paths, or is too large; or Gin would not find the
        same files in the bundle.
    """
    roots = _roots([pathlib.Path.cwd(), *map(_absolute, search_paths)])
    shipped = config.search_folders()[-1].resolve()
    local_files = [_absolute(path) for path in read if not path.resolve().is_relative_to(shipped)]
    paths = {_place(path, roots): path for path in [*local_files, *map(_absolute, modules)]}
    names = []
    for name in gin_files:
        result = config.find_file(name, config.search_folders(search_paths))
        is_shipped = result.resolve().is_relative_to(shipped)
        names.append(
            result.resolve().relative_to(shipped).as_posix()
            if is_shipped
            else posixpath.relpath(_place(_absolute(result), roots), f"{FOLDER}/0")
        )
    searched = [posixpath.relpath(roots[_absolute(path)], f"{FOLDER}/0") for path in search_paths]
    if wheel is not None:
        file = pathlib.Path(wheel).expanduser()
        if not (file.is_file() and _WHEEL.fullmatch(file.name)):
            raise UserError(
                f"--wheel={wheel} must be a wheel of capibara, capibara_tpu-*.whl: make one with make wheel"
            )
        paths[file.name] = file
    for name, path in paths.items():
        if not name.isprintable():
            raise UserError(f"the name of {str(path)!r} must be printable: rename it")
        if (size := path.stat().st_size) > _LARGEST:
            raise UserError(f"{path} has {size / 1e6:.0f} MB, must have at most {_LARGEST / 1e6:.0f} ({name} of a job)")
    return Sources(paths=dict(sorted(paths.items())), gin_files=names, search_paths=searched)


def _absolute(path: str | pathlib.Path) -> pathlib.Path:
    """Without "..", but with its links: a file keeps the name by which it was found."""
    return pathlib.Path(os.path.abspath(pathlib.Path(path).expanduser()))


def _roots(folders: Sequence[pathlib.Path]) -> dict[pathlib.Path, str]:
    """Folder -> its place in the bundle: within that of an earlier one, or of its own."""
    result: dict[pathlib.Path, str] = {}
    for folder in folders:
        outer = next((root for root in result if folder.is_relative_to(root)), None)
        target = f"{FOLDER}/{len(result)}"
        result.setdefault(
            folder, target if outer is None else f"{result[outer]}/{folder.relative_to(outer).as_posix()}"
        )
    return result


def _place(path: pathlib.Path, roots: Mapping[pathlib.Path, str]) -> str:
    """A file's path in the bundle: under the first folder that has it."""
    for root, place in roots.items():
        if path.is_relative_to(root):
            return posixpath.normpath(f"{place}/{path.relative_to(root).as_posix()}")
    raise UserError(
        f"{path} lies outside the working directory ({pathlib.Path.cwd()}) and --gin_search_paths, so a job would not find it "
        f"there: add --gin_search_paths={path.parent}"
    )


def check(sources: Sources, parse: Callable[[Sequence[str], Sequence[str]], Sequence[pathlib.Path]]) -> None:
    """Parses the Gin files as a host will, from the bundle's files alone.

    Args:
      sources: the bundle's files.
      parse: parses Gin files, which it finds in search paths; returns the files that it has read.

    Raises:
      UserError: a file is not found there, or another one is.
    """
    before = pathlib.Path.cwd()
    with tempfile.TemporaryDirectory(prefix="capibara-bundle-") as name:
        folder = pathlib.Path(os.path.realpath(name))
        for place in [f"{FOLDER}/0", *(posixpath.normpath(f"{FOLDER}/0/{path}") for path in sources.search_paths)]:
            (folder / place).mkdir(parents=True, exist_ok=True)
        for path, file in sources.paths.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            if not path.endswith(".whl"):
                (folder / path).write_bytes(file.read_bytes())
        os.chdir(folder / FOLDER / "0")
        try:
            read = parse(sources.gin_files, sources.search_paths)
        except UserError as error:
            message = str(error).replace(f"{folder}/", "")
            raise UserError(f"on a host of the job the Gin files would not be found: {message}") from None
        finally:
            os.chdir(before)
        there = {os.path.realpath(folder / FOLDER / "0" / path) for path in read}
        wanted = {str(folder / path) for path in sources.paths if path.endswith(config.ENDINGS)}
        if lost := sorted(wanted - there):
            shown = str(pathlib.Path(lost[0]).relative_to(folder))
            raise UserError(
                f"on a host of the job another file would take the place of {sources.paths[shown]}: give one of them another name"
            )


def describe(sources: Sources, name: str, url: str) -> Bundle:
    """The bundle that the files make, in the folder `url`/`name`/HASH; nothing is written."""
    files = {path: _sha256(result) for path, result in sources.paths.items()}
    digest = hashlib.sha256(sums(files)).hexdigest()[:16]
    return Bundle(url=f"{url.rstrip('/')}/{name}/{digest}", files=files)


def sums(files: Mapping[str, str]) -> bytes:
    """The content of SHA256SUMS."""
    return "".join(f"{digest}  {path}\n" for path, digest in sorted(files.items())).encode()


def stage(bundle: Bundle, sources: Sources) -> None:
    """Writes the files to their folder, the hashes last; files that are there already are not written again.

    Raises:
      UserError: a file has changed since `describe`, or the storage cannot be written.
    """
    folder = stores.folder_of(bundle.url)
    store = stores.of(folder)
    try:
        for path, result in sources.paths.items():
            content = result.read_bytes()
            if hashlib.sha256(content).hexdigest() != bundle.files[path]:
                raise UserError(f"{result} has changed while it was staged: launch again")
            _write(store, folder / path, content)
        _write(store, folder / SUMS, sums(bundle.files))
    except OSError as error:
        raise UserError(f"{bundle.url} cannot be written ({error.strerror or error}): name another --storage") from None


def _write(store: Store, path: epath.Path, content: bytes) -> None:
    with contextlib.suppress(FileNotFoundError):
        if store.read(path, most=len(content)) == content:
            return
    store.make_folder(path.parent)
    store.write_atomic(path, content)


def unpack(url: str, digest: str, folder: pathlib.Path) -> None:
    """Copies a bundle into a folder of this machine.

    Args:
      url: of the bundle.
      digest: SHA-256 of its SHA256SUMS, in hexadecimal digits: nothing with another content is used.
      folder: of this machine.

    Raises:
      UserError: a file is missing or has another hash.
      TryAgain: the storage cannot be read.
    """
    store, source = stores.of(url), stores.folder_of(url)
    try:
        written = store.read(source / SUMS, most=1 << 20)
        if hashlib.sha256(written).hexdigest() != digest:
            raise UserError(f"{source / SUMS} is not the one of this job: launch it again")
        for line in written.decode().removesuffix("\n").split("\n") if written else []:
            expected, _, path = line.partition("  ")
            target = (folder / path).resolve()
            if not target.is_relative_to(folder.resolve()):
                raise UserError(f"{source / SUMS} names {path}, which lies outside the bundle: launch the job again")
            content = store.read(source / path, most=_LARGEST)
            if hashlib.sha256(content).hexdigest() != expected:
                raise UserError(f"{source / path} has another hash than when it was staged: launch the job again")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    except FileNotFoundError as error:
        raise UserError(f"{url} is not whole ({error}): launch the job again") from None
    except OSError as error:
        raise TryAgain(f"{url} cannot be read: {error}") from None


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
