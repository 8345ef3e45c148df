"""A checkpoint store: each file of a checkpoint is kept on two disks, and a resume reads what the first has lost.

cd examples/extend && python -m capibara.train --gin_file=my_store.gin --emulate=2
"""

import dataclasses
import os
import shutil

from etils import epath

from capibara.config import configurable
from capibara.storage.disk import DiskStore


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class MirroredStore(DiskStore):
    """A disk with a mirror. Checkpoints are read, written and removed by these methods; `Store` describes them.

    Attributes:
      mirror: a folder on another disk.
    """

    mirror: str

    def write_atomic(self, path, data):
        super().write_atomic(self._in_mirror(path), data)
        super().write_atomic(path, data)

    def write_hashed(self, path, data):
        super().write_hashed(self._in_mirror(path), data)
        return super().write_hashed(path, data)

    def read(self, path, most=None):
        return super().read(self._found(path), most)

    def open(self, path):
        return super().open(self._found(path))

    def size(self, path):
        return super().size(self._found(path))

    def sync(self, folder):
        super().sync(self._in_mirror(folder))
        super().sync(folder)

    def rename_folder(self, folder, target):
        super().rename_folder(folder, target)
        shutil.rmtree(self._in_mirror(folder), ignore_errors=True)

    def remove_folder(self, folder, *, aside, last):
        super().remove_folder(folder, aside=aside, last=last)
        shutil.rmtree(self._in_mirror(folder), ignore_errors=True)

    def _in_mirror(self, path):
        """Where the mirror has a file, by its whole path; the folders above it are made."""
        found = epath.Path(os.path.abspath(self.mirror) + os.path.abspath(path))
        self.make_folder(found.parent)
        return found

    def _found(self, path):
        return path if os.path.exists(path) else self._in_mirror(path)
