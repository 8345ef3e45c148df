"""Turns errors of bucket libraries (gcsfs, google-cloud, TensorStore) into one line for the user."""

from __future__ import annotations

import re
from collections.abc import Iterable

from capibara.core.types import TryAgain, UserError

_SHOWN = 300
_DENIED = (401, 403)
_BUSY = (408, 429, 500, 502, 503, 504)
_BUCKET = re.compile(r"\bb/([^/\s]+)(?:/o\b|$)|gs://([^/\s]+)")
# What S3 answers with other codes than _DENIED and _BUSY.
_S3_DENIED = ("ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "TokenRefreshRequired")
_S3_BUSY = ("RequestTimeout", "SlowDown")
_S3_RIGHTS = "s3:ListBucket, s3:GetObject, s3:PutObject, s3:DeleteObject"


_named: set[str] = set()  # addresses of the buckets that this process works with


class Denied(UserError):
    """The bucket denies this machine's account access."""


def note(url: str) -> None:
    """Notes a path in a bucket: S3's errors name no bucket, but if a process works with one only it is that."""
    scheme, _, path = url.partition("://")
    _named.add(f"{scheme}://{path.partition('/')[0]}")


def explained(errors: Iterable[BaseException]) -> UserError | TryAgain | None:
    """The error to print for a chain of errors (each the cause of the one before); None: no bucket is involved.

    The libraries have already retried by then: gcsfs, s3fs, and those below them.
    """
    for error in errors:
        if (fault := refused([error])) is not None:
            return fault
        text = _text(error)
        if _s3_answer(error)[1] == "NoSuchBucket":
            return UserError(f"{_s3_bucket()} does not exist ({text}): create it, or name another path")
        if isinstance(error, FileNotFoundError) and error.errno is None and re.search(r"(^|/)b/[^/]+/o", text):
            return UserError(f"a bucket or an object in it does not exist ({text}): create it, or name another path")
    return None


def refused(errors: Iterable[BaseException]) -> UserError | TryAgain | None:
    """As `explained`, only where a bucket denies access or does not answer, which says nothing about the file."""
    for error in errors:
        if isinstance(error, (UserError, TryAgain)):  # our own: look at their causes
            continue
        if (fault := _refused_by_s3(error)) is not None:
            return fault
        room, text = type(error).__module__.partition(".")[0], _text(error)
        code = getattr(error, "code", None) if room in ("gcsfs", "google") else None  # some of them an HTTPStatus
        code = int(code) if isinstance(code, int) or isinstance(code, str) and code.isdigit() else None
        nameless = isinstance(error, OSError) and error.errno is None  # raised by gcsfs; the system's have an errno
        if code in _DENIED or (nameless and text.startswith("Forbidden: ")) or "PERMISSION_DENIED" in text:
            named = _BUCKET.search(text)
            where = f"gs://{named[1] or named[2]}" if named else "a bucket"
            return Denied(
                f"permission denied in {where} ({text}): let this machine's account read and write there "
                "(roles/storage.objectUser), or name another path"
            )
        if code in _BUSY or room == "aiohttp" or "UNAVAILABLE: " in text and "storage" in text:
            return TryAgain(
                f"a bucket does not answer after several tries ({text or type(error).__name__}): run the command again"
            )
    return None


def _refused_by_s3(error: BaseException) -> UserError | TryAgain | None:
    status, code = _s3_answer(error)
    name = type(error).__name__ if type(error).__module__.startswith("botocore") else ""
    if status in _DENIED or code in _S3_DENIED or "Credentials" in name or "Token" in name:
        return Denied(
            f"permission denied in {_s3_bucket()} ({_text(error)}): let this machine's account read and write there "
            f"({_S3_RIGHTS}), or name another path"
        )
    if status in _BUSY or code in _S3_BUSY or "Connect" in name or "Timeout" in name:
        return TryAgain(f"S3 does not answer after several tries ({_text(error) or name}): run the command again")
    return None


def _s3_bucket() -> str:
    known = [name for name in _named if name.startswith("s3://")]
    return known[0] if len(known) == 1 else "an S3 bucket"


def _s3_answer(error: BaseException) -> tuple[int | None, str]:
    """The status and the code of S3's answer, of botocore's error or of what s3fs makes of it; None and "": it is neither."""
    for item in (error, error.__cause__ if isinstance(error, OSError) else None):
        answer = getattr(item, "response", None)
        if type(item).__module__.startswith("botocore") and isinstance(answer, dict):
            status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status, str(answer.get("Error", {}).get("Code", ""))
    return None, ""


def _text(error: BaseException) -> str:
    return " ".join(str(error).split())[:_SHOWN]
