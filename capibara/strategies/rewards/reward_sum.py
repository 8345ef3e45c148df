"""The weighted sum of an answer's rewards, and threads for those that may be computed beside each other."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from capibara.core.types import UserError
from capibara.strategies.rewards.reward import Reward

_THREADS = 16  # most wait, for a process or a server

Total = tuple[float, tuple[float, ...]]
"""The weighted sum, and the rewards."""
T = TypeVar("T")


class RewardSum:
    """Computes rewards and their sum.

    Args:
      rewards: the functions.
      weights: of each; None: 1.
    """

    def __init__(self, rewards: Sequence[Reward], weights: Sequence[float] | None):
        self._rewards, self._weights = rewards, weights or (1.0,) * len(rewards)
        self._concurrent = [bool(getattr(reward, "concurrent", False)) for reward in rewards]

    @contextlib.contextmanager
    def threads(self) -> Iterator[ThreadPoolExecutor | None]:
        """Threads for `begin`; None: no reward is computed in one. What has not begun at the end is left."""
        pool = ThreadPoolExecutor(_THREADS, "rewards") if any(self._concurrent) else None
        try:
            yield pool
        finally:
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)

    def begin(
        self, pool: ThreadPoolExecutor | None, prompt: str, answer: str, record: Mapping[str, object], where: str
    ) -> Callable[[], Total]:
        """Begins with those that run in threads; the function that it returns computes the others, and waits.

        The function raises UserError if a reward is not a finite number; `where` is the record's place, for this error.
        """
        calls: list[Callable[[], object]] = []
        for reward, concurrent in zip(self._rewards, self._concurrent):
            if concurrent and pool is not None:
                calls.append(pool.submit(reward, prompt, answer, record).result)
            else:
                calls.append(functools.partial(reward, prompt, answer, record))

        def total() -> Total:
            parts = tuple(_number(call(), reward, where) for call, reward in zip(calls, self._rewards))
            return sum(weight * part for weight, part in zip(self._weights, parts)), parts

        return total


def each(calls: Sequence[Callable[[], T]], concurrent: bool) -> list[T]:
    """The results of calls, in threads if they may run beside each other."""
    if not concurrent or len(calls) < 2:
        return [call() for call in calls]
    with ThreadPoolExecutor(_THREADS, "environment") as pool:
        return [*pool.map(lambda call: call(), calls)]


def name_of(reward: object) -> str:
    """The name of a reward."""
    return getattr(reward, "__name__", type(reward).__name__)


def _number(value: object, reward: Reward, where: str) -> float:
    if not isinstance(value, (int, float, np.number)) or not math.isfinite(value):
        raise UserError(
            f"Grpo.rewards: {name_of(reward)} returned {value!r} for an answer to {where}: it must return a finite number"
        )
    return float(value)
