"""Chooses the rows of a decode program: all slots, or the active ones and as few others as fill a compiled size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from capibara import sharding
from capibara.inference.engine.cache.pages import Pages
from capibara.inference.engine.requests.request import Request


class StepRows(NamedTuple):
    """The rows of a program.

    Attributes:
      slots: [R] int32, the slot of each row; None: all slots, in order.
      active: (row, request) of the requests that get tokens.
      size: number of rows.
    """

    slots: np.ndarray | None
    active: Sequence[tuple[int, Request]]
    size: int

    def of(self, of_slots: np.ndarray) -> np.ndarray:
        """The rows' part of an array of all slots."""
        return of_slots if self.slots is None else of_slots[self.slots]

    def table(self, pages: Pages | None) -> np.ndarray | None:
        """The rows' part of the page table; None: no pages."""
        return None if pages is None else self.of(pages.table)


def sizes_of(slots: int) -> list[int]:
    """Numbers of rows, besides all slots, to compile programs for.

    On a CPU a product of few rows takes its time for each row. An accelerator reads the same weights for any number of
    rows, and no keys of a free slot: there fewer rows would save nothing. On a mesh the rows of the active slots would
    have to move between devices.
    """
    if sharding.platform() != "cpu":
        return []
    return [1 << power for power in range((slots - 1).bit_length())]


def rows_of(active: Sequence[tuple[int, Request]], slots: int, sizes: Sequence[int]) -> StepRows:
    """The fewest rows that hold the active slots.

    Args:
      active: (slot, request) of the requests that get tokens.
      slots: number of slots.
      sizes: numbers of rows that there are programs for, besides all slots.
    """
    size = min((size for size in sizes if len(active) <= size < slots), default=None)
    # Programs with the likeliest tokens are rare, and are compiled for all slots alone.
    if size is None or any(request.likeliest for _, request in active):
        return StepRows(None, active, slots)
    chosen = [slot for slot, _ in active]
    others = (slot for slot in range(slots) if slot not in chosen)
    chosen += [next(others) for _ in range(size - len(chosen))]
    return StepRows(np.array(chosen, np.int32), [(row, request) for row, (_, request) in enumerate(active)], size)
