"""The files of a sweep.

SWEEP/sweep.json          what the sweep is
SWEEP/trials/007.json     a trial: values, state, metric by step
SWEEP/trials/007/         its run folder
SWEEP/trials/007.log      what it has printed, where `local` runs it
SWEEP/results.*           the results so far, as txt, json, csv and png
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from capibara.core import limits
from capibara.core.types import UserError
from capibara.jobs.sweeps import sweep as sweeps
from capibara.jobs.sweeps import trial as trials_
from capibara.jobs.sweeps.sweep import Sweep
from capibara.jobs.sweeps.trial import Trial
from capibara.storage import copies, stores
from capibara.storage.store import Locked

if TYPE_CHECKING:
    from etils import epath

_MOST = 16 * limits.MIB  # bytes of a file


class Folder:
    """A sweep's folder, on a disk or in a bucket.

    Args:
      url: its address.
    """

    def __init__(self, url: str):
        self._path = stores.folder_of(url.rstrip("/"))
        self._store = stores.of(self._path)

    def __str__(self) -> str:
        return str(self._path)

    def write(self, name: str, content: str | bytes) -> None:
        """Writes a file, whole or not at all.

        Raises:
          UserError: it cannot be written.
        """
        path = self._path / name
        try:
            self._store.make_folder(path.parent)
            self._store.write_atomic(path, content.encode() if isinstance(content, str) else content)
        except OSError as error:
            raise UserError(
                f"{path} cannot be written ({error.strerror or error}): mend that, or name another --sweep_dir"
            ) from None

    def sweep(self) -> Sweep | None:
        """The sweep that it has; None: none. Raises UserError for a file that is not one of a sweep."""
        path = self._path / "sweep.json"
        text = self._read(path)
        with _named(path):
            return None if text is None else sweeps.read_text(text)

    def trials(self) -> list[Trial]:
        """The trials that it has, by number; raises UserError for a file that is not one of a trial."""
        result = []
        folder = self._path / "trials"
        for path in folder.glob("*.json") if folder.exists() else ():
            text = self._read(path)
            if text is not None and path.stem.isdecimal():
                number = int(path.stem)
                with _named(path):
                    result.append(trials_.read_text(text, number, self.model_dir(number)))
        return sorted(result, key=lambda trial: trial.number)

    def save(self, trial: Trial) -> None:
        """Writes a trial's file; raises as `write`."""
        self.write(f"trials/{trial.name}.json", trial.text())

    def model_dir(self, number: int) -> str:
        """The run folder of a trial."""
        return str(self._path / "trials" / trials_.name_of(number))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lets no other process of this machine run the sweep; on a disk, no process of a machine that shares it.

        Raises:
          UserError: another process runs it.
        """
        place = self._path
        if not self._store.has_local_paths:  # a bucket has no locks
            place = stores.folder_of(copies.cache_folder(f"sweeps/{name_of(str(self._path))}"))
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(stores.of(place).lock(place, 0.0))
            except Locked as error:
                who = f"process {error.args[0]}" if error.args and error.args[0] else "another process"
                raise UserError(f"{self} is run by {who}: wait for its end, or name another --sweep_dir") from None
            yield

    def _read(self, path: epath.Path) -> str | None:
        try:
            return self._store.read(path, most=_MOST).decode()
        except FileNotFoundError:
            return None
        except (limits.Refused, UnicodeDecodeError) as error:
            raise UserError(f"{path} is no file of a sweep ({error}): name another --sweep_dir") from None
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def name_of(url: str) -> str:
    """A name for what this machine has of a sweep in a bucket."""
    return url.replace("://", "-").replace("/", "-")


@contextlib.contextmanager
def _named(path: epath.Path) -> Iterator[None]:
    """Puts a file's name before what is wrong with it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
