"""Reads adapters that clients of a server name, from the folders that its settings allow."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator

from capibara.checkpoints.policy import Checkpointing
from capibara.core import limits
from capibara.core.types import UserError
from capibara.data.tokenizers import files
from capibara.interop import peft_runs
from capibara.interop.open_model import LoadedModel
from capibara.interop.peft import folder as peft
from capibara.loading import adapters
from capibara.loading.adapters import Adapters
from capibara.models.api import Adapter

_LONGEST_PATH = 4096
_MOST_FILES = 10_000
_COPIED = (peft.CONFIG, peft.WEIGHTS, *files.FILES)


class AdapterFolders:
    """Reads adapters in `Adapters.folders`, while their model is served; thread-safe.

    Links are resolved before a path is checked, those in a folder, too. A PEFT folder is read as a copy, so that writers of its
    files cannot change them meanwhile; the checkpoints of a run have checksums.

    Args:
      loaded: the model; its parameters are not used.
      settings: the folders, and the largest size.
      checkpointing: how adapters of runs are read, if the base model is no run, which says so itself.

    Attributes:
      roots: the real paths of the folders.
    """

    def __init__(self, loaded: LoadedModel, settings: Adapters, checkpointing: Checkpointing):
        self._loaded, self._checkpointing = dataclasses.replace(loaded, params={}, adapters=()), checkpointing
        self.roots = tuple(os.path.realpath(folder) for folder in settings.folders)
        self._most_bytes = settings.max_mib * 2**20

    def read(self, name: str, path: str) -> Adapter:
        """The adapter at a path, which is absolute or relative to one of the folders.

        Raises:
          PermissionError: it is not in one of the folders.
          FileNotFoundError: it is not there.
          UserError: it cannot be read, is too large, or is of another model.
        """
        folder = self._folder(path)
        with tempfile.TemporaryDirectory(prefix="capibara-adapter-") as copy:
            is_peft = peft_runs.is_adapter(folder)
            source = copy if is_peft else folder
            try:
                if is_peft:
                    self._copy(folder, copy)
                else:
                    self._check_size(folder)
                return adapters.read(name, source, self._loaded, self._checkpointing)
            except UserError as error:
                raise UserError(str(error).replace(source, path).replace(folder, path)) from None

    def _folder(self, path: str) -> str:
        """The real path of a folder that may be read; errors as for `read`."""
        if not 0 < len(path) <= _LONGEST_PATH or "\0" in path:
            raise UserError(f"the path has {len(path)} characters, must have 1 to {_LONGEST_PATH} without NUL")
        candidates = [path] if os.path.isabs(path) else [os.path.join(root, path) for root in self.roots]
        allowed = [real for real in map(os.path.realpath, candidates) if self._allows(real)]
        if not allowed:
            raise PermissionError(
                f"{path[:200]!r} is not in a folder that adapters may be loaded from (Adapters.folders)"
            )
        result = next(filter(os.path.isdir, allowed), None)
        if result is None:
            raise FileNotFoundError(f"{path[:200]!r} is not here: name a PEFT folder or a run folder with adapters")
        return result

    def _allows(self, real: str) -> bool:
        return any(os.path.commonpath((real, root)) == root for root in self.roots)

    def _copy(self, folder: str, target: str) -> None:
        """Copies the files of a PEFT folder that are read."""
        left = self._most_bytes
        for name in _COPIED:
            if not os.path.lexists(path := os.path.join(folder, name)):
                continue
            with limits.opened(self._checked(path), left) as source, open(os.path.join(target, name), "wb") as copy:
                left -= os.fstat(source.fileno()).st_size
                shutil.copyfileobj(source, copy)

    def _check_size(self, folder: str) -> None:
        """Checks the files of a run folder."""
        total = 0
        for count, path in enumerate(_paths(folder), 1):
            if not os.path.isdir(real := self._checked(path)):
                total += limits.check_file(real)
            elif os.path.islink(path):
                raise UserError(f"{path} is a link to a folder: put a copy in its place")
            if total > self._most_bytes or count > _MOST_FILES:
                raise UserError(
                    f"{folder} has more than {self._most_bytes // 2**20:,} MiB or {_MOST_FILES:,} files: raise Adapters.max_mib, "
                    "and start again, or convert the adapter (capibara convert --format=peft)"
                )

    def _checked(self, path: str) -> str:
        """The real path of a file, after a check."""
        if not self._allows(real := os.path.realpath(path)):
            raise UserError(f"{path} is a link to another folder: put a copy in its place")
        return real


def _paths(folder: str) -> Iterator[str]:
    for where, folders, names in os.walk(folder):
        yield from (os.path.join(where, name) for name in (*folders, *names))
