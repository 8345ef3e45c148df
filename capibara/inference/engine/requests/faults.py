"""Errors of one request, which gets them while the engine goes on, and errors of programs over many requests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import jax

from capibara.inference.engine.requests.request import Request
from capibara.inference.engine.requests.stream import ProcessLost

_OF_PROCESS = (KeyboardInterrupt, SystemExit, GeneratorExit, ProcessLost)


class ProgramFault(Exception):
    """A program failed, or the devices did; the cause is the error. The slots' state may be lost.

    Attributes:
      requests: those whose rows the program had.
    """

    def __init__(self, requests: Sequence[Request]):
        super().__init__(f"a program over {len(requests)} requests failed")
        self.requests = tuple(requests)


def ends_process(error: BaseException) -> bool:
    """Whether an error is a way to end the process, or the loss of another one."""
    return isinstance(error, _OF_PROCESS)


def is_of_request(error: BaseException) -> bool:
    """Whether an error while one request was handled is that request's alone, and left the devices as they were.

    Errors of the devices are not, except for a lack of memory. Libraries in Rust panic with a BaseException.
    """
    if isinstance(error, jax.errors.JaxRuntimeError):
        return "RESOURCE_EXHAUSTED" in str(error)
    return not isinstance(error, (ProgramFault, *_OF_PROCESS))


def cause_of(error: BaseException) -> BaseException:
    """The error itself, or that of the program that failed."""
    return error.__cause__ or error if isinstance(error, ProgramFault) else error


@contextlib.contextmanager
def contained(request: Request) -> Iterator[None]:
    """A context for work on one request: its errors end that request, and are not raised.

    Raises:
      ProgramFault: the devices failed.
    """
    with program_of([request]):
        try:
            yield
        except BaseException as error:
            if not is_of_request(error):
                raise
            request.fail(error)


@contextlib.contextmanager
def program_of(requests: Sequence[Request]) -> Iterator[None]:
    """A context for a program over the rows of these requests: its errors become a ProgramFault."""
    try:
        yield
    except BaseException as error:
        if ends_process(error) or isinstance(error, ProgramFault):
            raise
        raise ProgramFault(requests) from error
