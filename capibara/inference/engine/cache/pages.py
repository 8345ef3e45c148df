"""Allocates pages of the pool to slots, on the host."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import jax
import numpy as np

from capibara.core.types import UserError
from capibara.inference.engine.cache.batching import EngineConfig
from capibara.models.api import Model, paged


class Pages:
    """Allocates pages as rows grow; a slot frees all of its pages at once.

    Args:
      slots: number of slots that share the pages.
      length: most tokens of a slot.
      sizes: number of pages, and tokens per page.

    Attributes:
      sizes: as passed.
      table: [slots, pages of a slot] int32, the pages of each slot in order, from 1 on; 0: none. Every change makes a
        new array, since the devices may still be reading the old one.
    """

    def __init__(self, slots: int, length: int, sizes: paged.Sizes):
        self.sizes = sizes
        self.table = np.zeros((slots, sizes.of_slot(length)), np.int32)
        self._free = list(range(sizes.pages, 0, -1))  # the last freed are allocated first
        self._taken = [0] * slots
        if sizes.pages < self.table.shape[1]:
            logging.getLogger(__name__).warning(
                "EngineConfig.pages (%d) of %d tokens hold less than one row of %d: a text ends, with its prompt, at %d "
                "tokens; set EngineConfig.pages = %d or more for whole rows",
                *(sizes.pages, sizes.page_size, length, sizes.pages * sizes.page_size + 1, self.table.shape[1]),
            )

    @property
    def busy(self) -> int:
        """Number of allocated pages."""
        return self.sizes.pages - len(self._free)

    def room(self, slot: int) -> int:
        """Number of tokens that fit in the slot's pages."""
        return self._taken[slot] * self.sizes.page_size

    def fits(self, rows: int, tokens: int) -> bool:
        """Whether `rows` rows of `tokens` tokens fit in all pages together."""
        return rows * self.sizes.of_slot(tokens) <= self.sizes.pages

    def begin(self, slot: int, tokens: int) -> bool:
        """Like `grow`, for a slot without pages; leaves some to running rows, so that none is preempted soon."""
        running = [taken for taken in self._taken if taken]
        may_take = len(running) * self.table.shape[1] - sum(running)  # until they are as long as a slot
        return self.grow(slot, tokens, spare=min(-(-len(running) // 4), may_take))

    def grow(self, slot: int, tokens: int, spare: int = 0) -> bool:
        """Grows a slot to `tokens` tokens; returns False without a change if fewer pages plus `spare` are free."""
        taken, needed = self._taken[slot], self.sizes.of_slot(tokens)
        if needed > taken and needed - taken + spare > len(self._free):
            return False
        if needed > taken:
            self.table = self.table.copy()
            self.table[slot, taken:needed] = [self._free.pop() for _ in range(needed - taken)]
            self._taken[slot] = needed
        return True

    def fit(self, rows: Sequence[tuple[int, int]]) -> bool:
        """Whether `grow` would succeed for all these slots and tokens."""
        needed = sum(max(0, self.sizes.of_slot(tokens) - self._taken[slot]) for slot, tokens in rows)
        return needed <= len(self._free)

    def release(self, slot: int) -> None:
        """Frees all pages of a slot."""
        if taken := self._taken[slot]:
            self._free += self.table[slot, :taken][::-1].tolist()
            self.table = self.table.copy()
            self.table[slot], self._taken[slot] = 0, 0

    def most_new(self, prompt: int) -> int:
        """Most new tokens of a single text after a prompt of this length: the last one is not read.

        Raises:
          UserError: the prompt itself does not fit.
        """
        room = self.sizes.pages * self.sizes.page_size
        if prompt > room:
            raise UserError(
                f"a prompt of {prompt} tokens does not fit in EngineConfig.pages ({self.sizes.pages}) of "
                f"{self.sizes.page_size} tokens: shorten it, or set EngineConfig.pages = {self.sizes.of_slot(prompt)}"
            )
        return room - prompt + 1


def sizes_of(model: Model, config: EngineConfig, length: int, encoder_length: int | None) -> paged.Sizes | None:
    """The size of the pool that a configuration asks for; None: no pages.

    Raises:
      UserError: the model has no layer to page.
    """
    if not config.page_size:
        return None
    sizes, leave_out = paged.Sizes(0, config.page_size), "set EngineConfig.page_size = 0"
    if encoder_length is not None:
        raise UserError(
            f"EngineConfig.page_size is {config.page_size}, but pages are for decoders, not for encoder-decoders: {leave_out}"
        )
    rows = jax.eval_shape(lambda: model.start_cache(1, length, spare=config.spare))
    if not any(map(paged.has_keys, rows["layers"])):
        raise UserError(
            f"EngineConfig.page_size is {config.page_size}, but no layer of the model keeps keys and values: {leave_out}"
        )
    if not paged.shares(rows, length):
        raise UserError(
            f"EngineConfig.page_size is {config.page_size}, but every layer of the model has a window "
            f"({getattr(model.config, 'window', None)}) shorter than a slot ({length}), and keeps no more than that: {leave_out}"
        )
    every = config.slots * sizes.of_slot(length)
    return sizes._replace(pages=every if config.pages is None else config.pages)
