"""Errors of one request: that request gets them, and the engine goes on with all others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from capibara.inference.engine.request import Request
from capibara.inference.engine.stream import ProcessLost

_OF_PROCESS = (KeyboardInterrupt, SystemExit, GeneratorExit, ProcessLost)


def is_of_request(error: BaseException) -> bool:
    """Whether an error while one request was handled is that request's alone.

    Errors of the devices are not, except for a lack of memory. Libraries in Rust panic with a BaseException.
    """
    if isinstance(error, jax.errors.JaxRuntimeError):
        return "RESOURCE_EXHAUSTED" in str(error)
    return not isinstance(error, _OF_PROCESS)


@contextlib.contextmanager
def contained(request: Request) -> Iterator[None]:
    """A context for work on one request: its errors end that request, and are not raised."""
    try:
        yield
    except BaseException as error:
        if not is_of_request(error):
            raise
        request.fail(error)
