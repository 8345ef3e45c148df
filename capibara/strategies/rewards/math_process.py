"""Processes in which formulas are read: SymPy evaluates them, and some short ones take for ever or all memory."""

from __future__ import annotations

import functools

from capibara.strategies.rewards.bounded_process import BoundedProcesses

_RECORDS = 4096  # answers of records that are remembered; one has some tens of bytes


class MathProcesses:
    """Several processes of `math_worker`."""

    def __init__(self) -> None:
        self._processes = BoundedProcesses("math_worker.py", "math-verify")

    def equal(self, right: str, answer: str, seconds: float, boxed: bool) -> bool:
        """Whether an answer's last formula equals a record's answer; with `boxed`, only one in a box counts."""
        return self._processes.ask({"right": right, "answer": answer, "boxed": boxed}, seconds) is True

    def readable(self, right: str, seconds: float) -> bool:
        """Whether a record's answer is a formula."""
        return self._processes.ask({"right": right}, seconds) is True

    def close(self) -> None:
        """Ends the processes."""
        self._processes.close()


@functools.lru_cache(maxsize=_RECORDS)
def is_readable(right: str, seconds: float) -> bool:
    """Whether a record's answer is a formula; asked once for the answers of a group, which have the same record."""
    return verifying().readable(right, seconds)


@functools.cache
def verifying() -> MathProcesses:
    """Those of this process."""
    return MathProcesses()
