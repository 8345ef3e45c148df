"""Collective calls between the processes of a run: gather, agree on errors, compute on one, split work."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np

from capibara.core.types import UserError
from capibara.multihost import peers

S = TypeVar("S")
T = TypeVar("T")


def gathered(value: object) -> list[Any]:
    """Gathers a JSON value from every process, ordered by process index; all processes must call it.

    It uses the devices: do not call it while a train step runs.
    """
    if jax.process_count() == 1:
        return [value]
    from jax.experimental import multihost_utils

    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(np.max(multihost_utils.process_allgather(np.array(len(text)))))
    padded = np.pad(text, (0, size - len(text)), constant_values=ord(" "))
    return [json.loads(bytes(row)) for row in multihost_utils.process_allgather(padded)]


def each(make: Callable[[], T]) -> list[T]:
    """Calls `make` on every process and gathers its JSON values, ordered by process index; all processes must call it.

    If `make` raises on one process, all of them raise: none waits for a process that has ended.

    Raises:
      UserError: `make` raised one; that of the process with the lowest index.
      RuntimeError: `make` raised another error on another process.
    """
    if jax.process_count() == 1:
        return [make()]
    value, failed = None, None
    try:
        value = make()
    except Exception as error:
        failed = error
    kind = None if failed is None else "user" if isinstance(failed, UserError) else type(failed).__name__
    result = gathered({"value": value, "kind": kind, "said": None if failed is None else str(failed)})
    for index, item in enumerate(result):
        if item["kind"] == "user":
            raise UserError(item["said"]) from failed
        if item["kind"] is not None and failed is None:
            peers.expect_report()
            raise RuntimeError(f"process {index} ended with {item['kind']}: {item['said']}")
    if failed is not None:
        raise failed
    return [entry["value"] for entry in result]


def of_first(make: Callable[[], T]) -> T:
    """Calls `make` on process 0 and returns its JSON value on all processes; raises as `each`."""
    return cast(T, each(lambda: make() if jax.process_index() == 0 else None)[0])  # the first is never the None


def in_turns(things: Sequence[S], make: Callable[[Sequence[S]], Iterator[T]], every: int) -> Iterator[T]:
    """Splits work between the processes, and yields all results (JSON values) in order on every process.

    Process i of n computes the results of number i, i + n, i + 2n, ...

    Args:
      things: the inputs, the same on all processes.
      make: yields the results of some inputs, in their order, lazily.
      every: results of each process between two exchanges.

    Raises as `each`.
    """
    count, mine = jax.process_count(), make(share(things))
    for first in range(0, len(things), every * count):
        parts = each(lambda: list(itertools.islice(mine, every)))
        in_order = itertools.chain.from_iterable(itertools.zip_longest(*parts))  # the last ones have one less
        yield from itertools.islice(in_order, len(things) - first)


def share(things: Sequence[S]) -> Sequence[S]:
    """The things that are this process's share of the work."""
    return things[jax.process_index() :: jax.process_count()]
