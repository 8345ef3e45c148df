"""Reads stores that fsspec knows (gs://, s3://, memory://, ...) with bounded retries and one-line errors."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from capibara.core import extras, limits
from capibara.core.bucket_faults import Denied
from capibara.core.types import TryAgain, UserError
from capibara.storage.store import Entry

ATTEMPTS = 6
TIMEOUT_S = 60.0  # of one request: after so long without an answer it is sent again
FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 16.0  # between two attempts, doubled each time
_BUSY = (408, 425, 429)  # HTTP codes that mean "later"; so do all from 500 on
_DENIED = (401, 403)
_PAST_THE_END = 416
# Errors that do not pass; the libraries map HTTP codes to these system error numbers.
_FINAL = (errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG, getattr(errno, "EREMCHG", errno.ENOENT))
_NO_CREDENTIALS = (  # classes of google.auth and botocore
    "CredentialRetrievalError",
    "DefaultCredentialsError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
)
_VERSIONS = ("generation", "etag", "ETag", "md5Hash", "mtime", "LastModified", "updated", "created")
_EXTRAS = {"gs": ("gcsfs", "gcs"), "gcs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}
_OPTIONS = {"s3": {"config_kwargs": {"retries": {"total_max_attempts": 1}}}}  # the attempts are ours
_LIBRARIES = ("aiohttp", "botocore", "gcsfs", "google", "requests", "urllib3")  # whose faults are the network's

T = TypeVar("T")


def listed(pattern: str) -> list[Entry]:
    """The files that an address or a glob matches, sorted by address; empty: there are none.

    Raises:
      UserError: the store refuses access, or its library is not installed.
      TryAgain: it does not answer.
    """
    filesystem, path = _opened(pattern)

    def look() -> list[dict[str, Any]]:
        filesystem.invalidate_cache()
        if any(character in path for character in "*?["):
            return list(filesystem.glob(path, detail=True).values())
        with contextlib.suppress(FileNotFoundError):
            return [filesystem.info(path)]
        return []

    return _entries(filesystem, _attempted(pattern, look))


def below(folder: str) -> list[Entry]:
    """All files below an address, sorted; empty: it is no folder. Raises like `listed`."""
    filesystem, path = _opened(folder)

    def look() -> list[dict[str, Any]]:
        filesystem.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            return list(filesystem.find(path, detail=True).values())
        return []

    return [entry for entry in _entries(filesystem, _attempted(folder, look)) if entry.url != address(folder)]


def address(url: str) -> str:
    """An address in the form of `listed` and `below`, with any number of slashes."""
    filesystem, path = _opened(url)
    return filesystem.unstrip_protocol(path)


def read(url: str, start: int, stop: int) -> bytes:
    """The bytes from `start` to `stop` of a file, in one request, which is retried.

    Raises:
      UserError: the file has fewer bytes, or the store refuses access.
      TryAgain: all attempts fail.
    """
    if stop <= start:
        return b""
    filesystem, path = _opened(url)

    def get() -> bytes:
        try:
            content = _timed(filesystem, "cat_file", path, start=start, end=stop)
        except Exception as error:
            if _is_past_the_end(error):
                raise UserError(f"{url} is cut short (it has no byte {start:,}): copy it again") from error
            raise
        if len(content) > stop - start:
            raise UserError(f"{url} cannot be read in parts, its server sends all of it: copy it to a bucket or a disk")
        if len(content) < stop - start:
            raise ShortRead(f"{len(content):,} of {stop - start:,} bytes at {start:,}")
        return content

    return _attempted(url, get)


class ShortRead(OSError):
    """A store sent fewer bytes than requested."""


def _entries(filesystem: Any, listing: list[dict[str, Any]]) -> list[Entry]:
    files = [about for about in listing if about["type"] == "file"]
    entries = [
        Entry(filesystem.unstrip_protocol(about["name"]), int(about["size"]), _version(about)) for about in files
    ]
    return sorted(entries)


def _version(about: dict[str, Any]) -> str:
    return next((str(about[name]) for name in _VERSIONS if about.get(name)), "")


def _opened(url: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it."""
    protocol = url.partition("://")[0]
    package, extra = _EXTRAS.get(protocol, (None, None))
    if package is not None:
        extras.require(package, extra=extra, why=url)
    filesystem = _filesystem(url if protocol in ("http", "https") else f"{protocol}://", os.getpid())
    return filesystem, filesystem._strip_protocol(url)


@functools.cache
def _filesystem(url: str, process: int) -> Any:
    """One file system for each store and process: connections do not survive a fork."""
    import fsspec

    for library in ("fsspec", "gcsfs", "s3fs", "aiobotocore"):  # they log errors with tracebacks, and raise them too
        logging.getLogger(library).setLevel(logging.CRITICAL)
    try:
        return fsspec.core.url_to_fs(url, **_OPTIONS.get(url.partition("://")[0], {}))[0]
    except (ImportError, ValueError) as error:
        raise UserError(f"{url} cannot be opened ({limits.cause(error)}): name gs://, s3:// or a local path") from error


def _timed(filesystem: object, name: str, *arguments: object, **options: object) -> Any:
    """Calls a file system; cancels the call after TIMEOUT_S if the file system supports that."""
    from fsspec import asyn

    if isinstance(filesystem, asyn.AsyncFileSystem) and not filesystem.asynchronous:
        call = getattr(filesystem, f"_{name}")
        return asyn.sync(filesystem.loop, call, *arguments, timeout=TIMEOUT_S, **options)
    return getattr(filesystem, name)(*arguments, **options)


def _attempted(url: str, call: Callable[[], T]) -> T:
    """The result of `call`, tried up to ATTEMPTS times if the store's errors can pass."""
    for attempt, wait_s in enumerate(_waits(), 1):
        try:
            return call()
        except (UserError, TryAgain):
            raise
        except Exception as error:  # each store has its own classes
            if not _may_pass(error):
                raise _refusal(url, error) from error
            if attempt == ATTEMPTS:
                fault = f"{type(error).__name__}: {limits.cause(error)}"
                if isinstance(error, ShortRead):
                    raise UserError(f"{url} is cut short ({limits.cause(error)}): copy it again") from error
                raise TryAgain(
                    f"{url} cannot be read: {ATTEMPTS} attempts failed, the last with {fault}: "
                    "run the same command when the store answers"
                ) from error
            fault = f"{type(error).__name__}: {limits.cause(error, 80)}"
            logging.getLogger(__name__).warning("%s: %s; attempt %d of %d follows", url, fault, attempt + 1, ATTEMPTS)
            time.sleep(wait_s)
    raise AssertionError("unreachable")


def _waits() -> Iterator[float]:
    for attempt in range(ATTEMPTS):
        # Random, so that the hosts of a slice do not all retry at once.
        yield min(FIRST_WAIT_S * 2**attempt, _LONGEST_WAIT_S) * random.uniform(0.5, 1.0)


def _code(error: BaseException) -> int | None:
    for name in ("code", "status", "status_code"):
        with contextlib.suppress(TypeError, ValueError):
            return int(getattr(error, name, ""))
    return None


def _is_denied(error: BaseException) -> bool:
    if isinstance(error, PermissionError) or type(error).__name__ in _NO_CREDENTIALS:
        return True
    return _code(error) in _DENIED or str(error).startswith("Forbidden")  # gcsfs has no code for it


def _is_past_the_end(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno == errno.EINVAL and "range" in str(error).lower():  # s3fs
        return True
    return _code(error) == _PAST_THE_END


def _may_pass(error: BaseException) -> bool:
    if _is_denied(error) or isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError)):
        return False
    if (code := _code(error)) is not None:
        return code in _BUSY or code >= 500
    if isinstance(error, OSError) and error.errno in _FINAL:
        return False
    transient = (OSError, EOFError, TimeoutError, asyncio.TimeoutError)
    return isinstance(error, transient) or type(error).__module__.partition(".")[0] in _LIBRARIES


def _refusal(url: str, error: BaseException) -> UserError:
    if isinstance(error, FileNotFoundError):
        return UserError(f"{url} does not exist, or its bucket does not")
    if _is_denied(error):
        return Denied(
            f"{url} may not be read with this machine's credentials ({limits.cause(error)}): give its account the right "
            "to read and list the bucket, or name another one"
        )
    return UserError(f"{url} cannot be read ({type(error).__name__}: {limits.cause(error)})")
