"""What a server is busy with, for its metrics."""

from __future__ import annotations

from typing import NamedTuple


class Load(NamedTuple):
    """What a server is busy with.

    Attributes:
      queue_depth: texts that wait for a slot.
      slots_busy, slots: slots in use, and all.
      pages, pages_busy: of the cache, and those in use; 0: it is not paged.
      preempted: texts that lost their slot for lack of pages.
      compiling: programs that are still to be compiled beside serving.
      adapters: that requests can name.
    """

    queue_depth: int = 0
    slots_busy: int = 0
    slots: int = 0
    pages: int = 0
    pages_busy: int = 0
    preempted: int = 0
    compiling: int = 0
    adapters: int = 0
