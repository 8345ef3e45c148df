"""Exceptions that were raised again, or by others."""

from __future__ import annotations

from collections.abc import Iterator


def unwrap(error: BaseException) -> BaseException:
    """The exception as it was raised first: Gin re-raises it as a proxy with a longer message, once per configurable."""
    while error.__suppress_context__ and (raised := error.__context__) is not None:
        if type(error).__bases__ != (type(raised),) or type(error).__name__ != type(raised).__name__:
            break
        error = raised
    return error


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, its cause, the cause of that, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
