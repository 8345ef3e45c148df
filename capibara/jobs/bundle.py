"""The files that a job needs, in one folder of a store that its hosts can read, by the hash of their content.

  URL/NAME/HASH/gin/0/...     the working directory of whoever launches: its Gin files, and modules that they import
                gin/1/...     the same of the first --gin_search_paths
                *.whl         capibara, where no image has it
                SHA256SUMS    the hashes, as sha256sum writes them; HASH is the beginning of this file's own

So a job that is launched again with the same files finds them there, and one with others has another folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from capibara import config
from capibara.config import search
from capibara.core import user_modules
from capibara.core.types import UserError
from capibara.jobs.spec import Bundle
from capibara.storage import stores

SUMS = "SHA256SUMS"
FOLDER = "gin"
_LARGEST = 256 << 20  # bytes of a file: more is data, which belongs in a bucket of its own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sources:
    """The files of a bundle on this machine.

    Attributes:
      paths: path in the bundle -> file.
      roots: folders in the order in which Gin files are searched; the first is the working directory.
    """

    paths: Mapping[str, pathlib.Path]
    roots: Sequence[pathlib.Path]

    @property
    def search_paths(self) -> list[str]:
        """The folders of the bundle that take the places of --gin_search_paths."""
        return [f"{FOLDER}/{number}" for number in range(1, len(self.roots))]

    def name_of(self, gin_file: str) -> str:
        """How a Gin file that the command line names is named from the bundle's first folder."""
        path = pathlib.Path(gin_file).expanduser()
        return self._within(path)[1] if path.is_absolute() else gin_file

    def _within(self, path: pathlib.Path) -> tuple[int, str]:
        return within(path, self.roots)


def collect(
    read: Iterable[pathlib.Path], search_paths: Sequence[str], modules: Iterable[str] = (), wheel: str | None = None
) -> Sources:
    """The files of a bundle.

    Args:
      read: the Gin files that were read, included ones too; capibara's own stay where they are.
      search_paths: --gin_search_paths.
      modules: files with the code that the Gin files import.
      wheel: of capibara; None: the image has it.

    Raises:
      UserError: a file lies outside the working directory and the search paths, or is too large.
    """
    roots = [pathlib.Path.cwd(), *(pathlib.Path(path).expanduser().resolve() for path in search_paths)]
    shipped = shipped_folder()
    paths: dict[str, pathlib.Path] = {}
    for path in [*read, *map(pathlib.Path, modules)]:
        path = path.resolve()
        if path.is_relative_to(shipped):
            continue
        number, name = within(path, roots)
        paths[f"{FOLDER}/{number}/{name}"] = path
    if wheel is not None:
        found = pathlib.Path(wheel).expanduser()
        if not (found.is_file() and found.name.startswith("capibara-") and found.suffix == ".whl"):
            raise UserError(f"--wheel={wheel} must be a wheel of capibara, capibara-*.whl: make one with make wheel")
        paths[found.name] = found
    for name, path in paths.items():
        if (size := path.stat().st_size) > _LARGEST:
            raise UserError(f"{path} has {size / 1e6:.0f} MB, must have at most {_LARGEST / 1e6:.0f} ({name} of a job)")
    return Sources(paths=dict(sorted(paths.items())), roots=roots)


def within(path: pathlib.Path, roots: Sequence[pathlib.Path]) -> tuple[int, str]:
    """The index of the folder that has a file, the deepest if several do, and the file's path in it.

    Raises:
      UserError: none does.
    """
    path = path.resolve()
    having = [(len(root.parts), number) for number, root in enumerate(roots) if path.is_relative_to(root)]
    if not having:
        raise UserError(
            f"{path} lies outside the working directory ({roots[0]}) and --gin_search_paths, so a job would not find it "
            f"there: add --gin_search_paths={path.parent}"
        )
    number = max(having)[1]
    return number, path.relative_to(roots[number]).as_posix()


def shipped_folder() -> pathlib.Path:
    """The folder with the Gin files that belong to capibara, which every job has."""
    return search.search_folders()[-1].resolve()


def own_modules() -> list[str]:
    """The files of the modules that the parsed Gin files import and that no package installs."""
    return user_modules.files_of(config.imported_modules())


def describe(sources: Sources, name: str, url: str) -> Bundle:
    """The bundle that the files make, in the folder `url`/`name`/HASH; nothing is written."""
    files = {path: _sha256(found) for path, found in sources.paths.items()}
    digest = hashlib.sha256(sums(files)).hexdigest()[:16]
    return Bundle(url=f"{url.rstrip('/')}/{name}/{digest}", files=files)


def sums(files: Mapping[str, str]) -> bytes:
    """The content of SHA256SUMS."""
    return "".join(f"{digest}  {path}\n" for path, digest in sorted(files.items())).encode()


def stage(bundle: Bundle, sources: Sources) -> None:
    """Writes the files to their folder, the hashes last; files that are there already are not written again.

    Raises:
      UserError: a file has changed since `describe`, or the store cannot be written.
    """
    folder = stores.folder_of(bundle.url)
    store = stores.of(folder)
    wanted = sums(bundle.files)
    if (folder / SUMS).exists() and store.read(folder / SUMS) == wanted:
        return
    for path, found in sources.paths.items():
        content = found.read_bytes()
        if hashlib.sha256(content).hexdigest() != bundle.files[path]:
            raise UserError(f"{found} has changed while it was staged: launch again")
        store.make_folder((folder / path).parent)
        store.write_atomic(folder / path, content)
    store.make_folder(folder)
    store.write_atomic(folder / SUMS, wanted)


def unpack(url: str, digest: str, folder: pathlib.Path) -> None:
    """Copies a bundle into a folder of this machine.

    Args:
      url: of the bundle.
      digest: SHA-256 of its SHA256SUMS, in hexadecimal digits: nothing with another content is used.
      folder: of this machine.

    Raises:
      UserError: a file is missing or has another hash.
    """
    store, source = stores.of(url), stores.folder_of(url)
    written = store.read(source / SUMS, most=1 << 20)
    if hashlib.sha256(written).hexdigest() != digest:
        raise UserError(f"{source / SUMS} is not the one of this job: launch it again")
    for line in written.decode().splitlines():
        expected, _, path = line.partition("  ")
        target = (folder / path).resolve()
        if not target.is_relative_to(folder.resolve()):
            raise UserError(f"{source / SUMS} names {path}, which lies outside the bundle: launch the job again")
        content = store.read(source / path, most=_LARGEST)
        if hashlib.sha256(content).hexdigest() != expected:
            raise UserError(f"{source / path} has another hash than when it was staged: launch the job again")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
