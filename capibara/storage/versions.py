"""Conditional writes of files in a bucket: a write succeeds only if nobody else has changed the file.

A request can name the expected version, and the bucket refuses it if the file has another: of several concurrent
writers exactly one wins. Reading again after a delay could not guarantee this. Google Cloud Storage numbers every version
(ifGenerationMatch); S3 has an ETag (If-Match, and If-None-Match if the file must not exist).
"""

from __future__ import annotations

from typing import Any, Protocol
from urllib.parse import quote

from etils import epath

from capibara.core.types import TryAgain, UserError
from capibara.storage.store import NONE, Changed

_TRIES = 5  # reads of a file that is being rewritten


class Versions(Protocol):
    """`read_version`, `write_version` and `remove_version` of `stores.Store`."""

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
    """The versions of a scheme's buckets.

    Raises:
      UserError: they have none.
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
        except FileExistsError:  # gcsfs raises it for status 412
            return _written_version(self, path, data)

    def remove(self, path: epath.Path, expected: str) -> None:
        files, bucket, key = _split(path)
        try:
            files.call("DELETE", "b/{}/o/{}", bucket, key, ifGenerationMatch=expected or "0")
        except (FileNotFoundError, FileExistsError):  # already removed, or another process's
            return

    def _is_there(self, files: Any, bucket: str, key: str) -> bool:
        try:
            files.call("GET", "b/{}/o/{}", bucket, key, json_out=True)
        except FileNotFoundError:
            return False
        return True


class S3Versions:
    """S3's ETags, for files whose content never repeats."""

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
            return _written_version(self, path, data)

    def remove(self, path: epath.Path, expected: str) -> None:
        files, bucket, key = _split(path)
        try:
            files.call_s3("delete_object", Bucket=bucket, Key=key, **({"IfMatch": expected} if expected else {}))
        except FileNotFoundError:  # already removed
            return
        except OSError as error:
            if not _is_refused(error):  # another process's
                raise


def _written_version(versions: Versions, path: epath.Path, data: bytes) -> str:
    """The version of a file after a refused write: ours, if the write had succeeded and only its answer was lost.

    Raises:
      Changed: another process wrote it.
    """
    result, version = versions.read(path, len(data))
    if result == data and version:
        return version
    raise Changed(f"{path} was written by another") from None


def _is_refused(error: OSError) -> bool:
    """Whether S3 refused a request because the file has another version than the request names."""
    answer = getattr(error.__cause__, "response", {})
    return answer.get("ResponseMetadata", {}).get("HTTPStatusCode") in (409, 412)  # 409: another write is in progress


def _split(path: epath.Path) -> tuple[Any, str, str]:
    import fsspec

    files, name = fsspec.core.url_to_fs(path.as_posix())
    bucket, _, key = name.partition("/")
    return files, bucket, key
