"""What went wrong with a bucket, in one line: who may not read it, and who gave up asking."""

from __future__ import annotations

import re
from collections.abc import Iterable

from capibara.core.types import TryAgain, UserError

_SHOWN = 300
_DENIED = (401, 403)
_BUSY = (408, 429, 500, 502, 503, 504)
_BUCKET = re.compile(r"\bb/([^/\s]+)(?:/o\b|$)|gs://([^/\s]+)")


class Denied(UserError):
    """A store does not let this machine's account read or write there."""


def explained(errors: Iterable[BaseException]) -> UserError | TryAgain | None:
    """What to tell of errors, each the cause of the one before, if one is of a bucket's library; else None.

    These libraries have tried several times by then: gcsfs, which reads and lists, and Google's own, by which Orbax writes.
    """
    for error in errors:
        if (fault := refused([error])) is not None:
            return fault
        text = _text(error)
        if isinstance(error, FileNotFoundError) and error.errno is None and re.search(r"(^|/)b/[^/]+/o", text):
            return UserError(f"a bucket, or what was to be in it, is not there ({text}): make it, or name another path")
    return None


def refused(errors: Iterable[BaseException]) -> UserError | TryAgain | None:
    """The same of a bucket that denies or does not answer: nothing is known of the file that was asked for."""
    for error in errors:
        if isinstance(error, (UserError, TryAgain)):  # in our own words: their causes count
            continue
        room, text = type(error).__module__.partition(".")[0], _text(error)
        code = getattr(error, "code", None) if room in ("gcsfs", "google") else None  # some of them an HTTPStatus
        code = int(code) if isinstance(code, int) or isinstance(code, str) and code.isdigit() else None
        nameless = isinstance(error, OSError) and error.errno is None  # gcsfs's; the system's have a number
        if code in _DENIED or (nameless and text.startswith("Forbidden: ")) or "PERMISSION_DENIED" in text:
            named = _BUCKET.search(text)
            where = f"gs://{named[1] or named[2]}" if named else "a bucket"
            return Denied(
                f"permission denied in {where} ({text}): let this machine's account read and write there "
                "(roles/storage.objectUser), or name another path"
            )
        if code in _BUSY or room == "aiohttp" or "UNAVAILABLE: " in text and "storage" in text:
            return TryAgain(
                f"a bucket does not answer, though it was asked several times ({text or type(error).__name__}): run the "
                "command again"
            )
    return None


def _text(error: BaseException) -> str:
    return " ".join(str(error).split())[:_SHOWN]
