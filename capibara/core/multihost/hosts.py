"""What all processes of a run must know of each other, and what one of them finds out for all."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np

from capibara.core.types import UserError

S = TypeVar("S")
T = TypeVar("T")


def gathered(value: Any) -> list[Any]:
    """Every process's JSON value, in the order of the processes; all of them call it, in the same order.

    By the devices: not while a train step runs.
    """
    if jax.process_count() == 1:
        return [value]
    from jax.experimental import multihost_utils

    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(np.max(multihost_utils.process_allgather(np.array(len(text)))))
    padded = np.pad(text, (0, size - len(text)), constant_values=ord(" "))
    return [json.loads(bytes(row)) for row in multihost_utils.process_allgather(padded)]


def each(make: Callable[[], T]) -> list[T]:
    """What `make` gives on every process, a JSON value, in the order of the processes; all of them call it.

    What one of them raises ends all of them, at once: nobody waits for a process that has ended.

    Raises:
      UserError: that of the first process that had one.
      RuntimeError: another process ended with some other error, which it raises itself.
    """
    if jax.process_count() == 1:
        return [make()]
    value, failed = None, None
    try:
        value = make()
    except Exception as error:
        failed = error
    kind = None if failed is None else "user" if isinstance(failed, UserError) else type(failed).__name__
    found = gathered({"value": value, "kind": kind, "said": None if failed is None else str(failed)})
    for index, one in enumerate(found):
        if one["kind"] == "user":
            raise UserError(one["said"]) from failed
        if one["kind"] is not None and failed is None:
            raise RuntimeError(f"process {index} ended with {one['kind']}: {one['said']}")
    if failed is not None:
        raise failed
    return [one["value"] for one in found]


def of_first(make: Callable[[], T]) -> T:
    """What `make` gives on process 0, a JSON value, on all of them; errors as of `each`."""
    return cast(T, each(lambda: make() if jax.process_index() == 0 else None)[0])  # the first is never the None


def in_turns(things: Sequence[S], make: Callable[[Sequence[S]], Iterator[T]], every: int) -> Iterator[T]:
    """What `make` gives for each of the things, a JSON value, in their order, on all processes.

    Process i of n makes those of number i, i + n, i + 2n, ...

    Args:
      things: the same on all processes.
      make: gives the results of some of them, in their order, each when it is asked for.
      every: results of each process between two exchanges.

    Raises:
      as `each`.
    """
    count, mine = jax.process_count(), make(share(things))
    for first in range(0, len(things), every * count):
        parts = each(lambda: list(itertools.islice(mine, every)))
        in_order = itertools.chain.from_iterable(itertools.zip_longest(*parts))  # the last ones have one less
        yield from itertools.islice(in_order, len(things) - first)


def share(things: Sequence[S]) -> Sequence[S]:
    """Those of the things that this process makes."""
    return things[jax.process_index() :: jax.process_count()]
