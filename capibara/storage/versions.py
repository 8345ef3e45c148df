"""Files in a bucket that change only where nobody else has changed them.

A request may name the version that it expects, and the bucket refuses it where there is another: of several writers at once
exactly one wins, which no order of looking and waiting gives. Google Cloud Storage numbers every version
(ifGenerationMatch); S3 gives it an ETag (If-Match, and If-None-Match where there must be none).
"""

from __future__ import annotations

from typing import Any, Protocol
from urllib.parse import quote

from etils import epath

from capibara.core.types import TryAgain, UserError
from capibara.storage.store import NONE, Changed

_TRIES = 5  # to read a file that is being written over and over


class Versions(Protocol):
    """As of the methods of `stores.Store`."""

    def read(self, path: epath.Path, most: int) -> tuple[bytes, str]:
        """`read_version`."""
        ...

    def write(self, path: epath.Path, data: bytes, expected: str) -> str:
        """`write_version`."""
        ...

    def remove(self, path: epath.Path, expected: str) -> None:
        """`remove_version`."""
        ...


def of(scheme: str) -> Versions:
    """Those of the buckets of a scheme.

    Raises:
      UserError: it has none.
    """
    match scheme:
        case "gs":
            return GoogleVersions()
        case "s3":
            return S3Versions()
    raise UserError(f"{scheme}:// keeps no versions of files: name a folder in gs://, s3:// or on a disk")


class GoogleVersions:
    """Google Cloud Storage's generations."""

    def read(self, path: epath.Path, most: int) -> tuple[bytes, str]:
        files, bucket, key = _split(path)
        for _ in range(_TRIES):
            try:
                about = files.call("GET", "b/{}/o/{}", bucket, key, json_out=True)
                version = str(about["generation"])
                if int(about["size"]) > most:
                    return b"", version
                _, content = files.call("GET", "b/{}/o/{}", bucket, key, alt="media", generation=version)
                return content, version
            except FileNotFoundError:
                if not self._is_there(files, bucket, key):
                    return b"", NONE
        raise TryAgain(f"{path} is being written by others all the time: end all but one, and run the command again")

    def write(self, path: epath.Path, data: bytes, expected: str) -> str:
        files, bucket, key = _split(path)
        where = f"{files._location}/upload/storage/v1/b/{quote(bucket, safe='')}/o"
        options = {"uploadType": "media", "name": key, "ifGenerationMatch": expected or "0"}
        headers = {"Content-Type": "application/octet-stream"}
        try:
            done = files.call("POST", where, data=data, headers=headers, json_out=True, **options)
            return str(done["generation"])
        except FileExistsError:  # what gcsfs makes of status 412
            return _own(self, path, data)

    def remove(self, path: epath.Path, expected: str) -> None:
        files, bucket, key = _split(path)
        try:
            files.call("DELETE", "b/{}/o/{}", bucket, key, ifGenerationMatch=expected or "0")
        except (FileNotFoundError, FileExistsError):  # gone, or another's
            return

    def _is_there(self, files: Any, bucket: str, key: str) -> bool:
        try:
            files.call("GET", "b/{}/o/{}", bucket, key, json_out=True)
        except FileNotFoundError:
            return False
        return True


class S3Versions:
    """S3's ETags, of files that never hold again what they held before."""

    def read(self, path: epath.Path, most: int) -> tuple[bytes, str]:
        from fsspec import asyn

        files, bucket, key = _split(path)

        async def get() -> tuple[bytes, str]:
            answer = await files._call_s3("get_object", Bucket=bucket, Key=key)
            async with answer["Body"] as body:
                content = b"" if answer["ContentLength"] > most else await body.read()
                return content, answer["ETag"]

        try:
            return asyn.sync(files.loop, get)
        except FileNotFoundError:
            return b"", NONE

    def write(self, path: epath.Path, data: bytes, expected: str) -> str:
        files, bucket, key = _split(path)
        condition = {"IfMatch": expected} if expected else {"IfNoneMatch": "*"}
        try:
            return files.call_s3("put_object", Bucket=bucket, Key=key, Body=data, **condition)["ETag"]
        except OSError as error:
            if not (_is_refused(error) or expected and isinstance(error, FileNotFoundError)):
                raise
            return _own(self, path, data)

    def remove(self, path: epath.Path, expected: str) -> None:
        files, bucket, key = _split(path)
        try:
            files.call_s3("delete_object", Bucket=bucket, Key=key, **({"IfMatch": expected} if expected else {}))
        except FileNotFoundError:  # gone
            return
        except OSError as error:
            if not _is_refused(error):  # another's
                raise


def _own(versions: Versions, path: epath.Path, data: bytes) -> str:
    """The version of a file that was refused: our own, where the answer to it was lost, and it was sent again.

    Raises:
      Changed: it is another's.
    """
    found, version = versions.read(path, len(data))
    if found == data and version:
        return version
    raise Changed(f"{path} was written by another") from None


def _is_refused(error: OSError) -> bool:
    """Whether S3 refused a request because the file is not at the version that it names."""
    answer = getattr(error.__cause__, "response", {})
    return answer.get("ResponseMetadata", {}).get("HTTPStatusCode") in (409, 412)  # 409: another writes just now


def _split(path: epath.Path) -> tuple[Any, str, str]:
    import fsspec

    files, name = fsspec.core.url_to_fs(path.as_posix())
    bucket, _, key = name.partition("/")
    return files, bucket, key
