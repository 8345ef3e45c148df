"""Files in a bucket that change only where nobody else has changed them: Google Cloud Storage numbers every version.

A request may name the version that it expects (ifGenerationMatch), and the bucket refuses it where there is another: of
several writers at once exactly one wins, which no order of looking and waiting gives.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from etils import epath

from capibara.core.types import TryAgain

NONE = 0  # the version of a file that is not there
_MOST_BYTES = 1 << 16  # of a file: those that are written so have some hundred
_TRIES = 5  # to read a file that is being written over and over


class Changed(Exception):
    """The file is not at the version that was expected: another has written or removed it."""


def read(path: epath.Path) -> tuple[bytes, int]:
    """A file's content and its version; b"" and NONE where there is none, b"" of one that is larger than any of ours.

    Raises:
      OSError: the bucket cannot be read.
      TryAgain: others write it so often that it cannot be read whole.
    """
    files, bucket, key = _split(path)
    for _ in range(_TRIES):
        try:
            about = files.call("GET", "b/{}/o/{}", bucket, key, json_out=True)
            version = int(about["generation"])
            if int(about["size"]) > _MOST_BYTES:
                return b"", version
            _, content = files.call("GET", "b/{}/o/{}", bucket, key, alt="media", generation=str(version))
            return content, version
        except FileNotFoundError:
            if not _is_there(files, bucket, key):
                return b"", NONE
    raise TryAgain(f"{path} is being written by others all the time: end all but one, and run the command again")


def write(path: epath.Path, content: bytes, expected: int) -> int:
    """Writes a file that is at the version `expected`; returns the new one.

    Raises:
      Changed: it is at another, and stays as it is.
      OSError: the bucket cannot be written.
    """
    files, bucket, key = _split(path)
    where = f"{files._location}/upload/storage/v1/b/{quote(bucket, safe='')}/o"
    options = {"uploadType": "media", "name": key, "ifGenerationMatch": str(expected)}
    headers = {"Content-Type": "application/octet-stream"}
    try:
        return int(files.call("POST", where, data=content, headers=headers, json_out=True, **options)["generation"])
    except FileExistsError:  # what gcsfs makes of status 412
        found, version = read(path)
        if found == content:  # our own: the answer to it was lost, and it was sent again
            return version
        raise Changed(f"{path} was written by another") from None


def remove(path: epath.Path, expected: int) -> None:
    """Removes a file that is at the version `expected`; another is left alone."""
    files, bucket, key = _split(path)
    try:
        files.call("DELETE", "b/{}/o/{}", bucket, key, ifGenerationMatch=str(expected))
    except (FileNotFoundError, FileExistsError):  # gone, or another's
        return


def _split(path: epath.Path) -> tuple[Any, str, str]:
    import fsspec

    files, name = fsspec.core.url_to_fs(path.as_posix())
    bucket, _, key = name.partition("/")
    return files, bucket, key


def _is_there(files: Any, bucket: str, key: str) -> bool:
    try:
        files.call("GET", "b/{}/o/{}", bucket, key, json_out=True)
    except FileNotFoundError:
        return False
    return True
