"""How long the rows of a server are, and in which pages: the model's own length, in the memory of the configured slots."""

from __future__ import annotations

import dataclasses

from capibara import config
from capibara.core.types import UserError
from capibara.inference.engine.cache import pages
from capibara.inference.engine.cache.batching import EngineConfig, WhenFull
from capibara.interop.open_model import LoadedModel
from capibara.models.api import paged
from capibara.sharding import platform

_PAGE = 32
# A turn of a CPU's loop over pages costs as much as reading 100 tokens.
_PAGE_ON_CPU = 128


def served_rows(loaded: LoadedModel, batching: EngineConfig) -> tuple[int, EngineConfig]:
    """The length of the slots of a server, and its batching, with pages if the model can have them.

    A slot has the model's own length, max_length, unless Gin files or flags bind Dataset.length. All slots share the memory that
    they would need with Dataset.length each, and at least that of one whole row.

    Args:
      loaded: the model.
      batching: as configured; a page size that is bound stays, with rows of Dataset.length.
    """
    length, model = loaded.dataset.length, loaded.model
    # A run's recorded Dataset.length is that of its training rows.
    is_set = config.is_given("Dataset.length")
    # Rotary frequencies by the length of rows would be those of the longest one for every request.
    fixed = is_set or model.of_length(length) is not model
    longest = length if fixed else max(length, model.config.max_length or length)
    if config.is_bound("EngineConfig.page_size") or batching.when_full is WhenFull.SLIDE:
        return length, batching
    on_cpu = platform() == "cpu"
    if longest == length and not on_cpu:
        return length, batching
    size = paged.Sizes(0, _PAGE_ON_CPU if on_cpu else _PAGE)
    budget = max(batching.slots * size.of_slot(length), size.of_slot(longest))
    batched = dataclasses.replace(batching, page_size=size.page_size, pages=budget)
    try:
        pages.sizes_of(model.of_length(longest), batched, longest, loaded.dataset.encoder_length)
    except UserError:  # no layer can be paged: whole rows
        return length, batching
    return longest, batched
