"""Predicts an engine's memory on the devices in bytes, and checks whether it fits."""

from __future__ import annotations

from collections.abc import Callable

import jax

from capibara.core import tree
from capibara.core.types import UserError
from capibara.inference.engine.cache import pages
from capibara.inference.engine.cache.batching import CacheDtype, EngineConfig
from capibara.inference.engine.programs import programs
from capibara.models.api import Model


def sizes_of(model: Model, config: EngineConfig, length: int, encoder_length: int | None) -> programs.Sizes:
    """The sizes of an engine's programs; arguments as in `Engine`.

    Raises:
      UserError: pages are requested, and the model has no layer to page.
    """
    dtype = None if config.cache_dtype is CacheDtype.COMPUTE else str(config.cache_dtype)
    pool = pages.sizes_of(model, config, length, encoder_length)
    spare = config.spare if getattr(model.config, "window", None) else 0  # else programs are shared
    return programs.Sizes(config.slots, length, encoder_length, dtype, spare, config.most_steps, pool)


def parameters_bytes(model: Model) -> int:
    """Bytes of the engine's copy of the parameters, with adapters merged."""
    return tree.byte_count(
        jax.eval_shape(lambda params: model.plain.serving(model.merge(params)), model.abstract_params)
    )


def state_bytes(model: Model, config: EngineConfig, length: int, encoder_length: int | None = None) -> int:
    """Bytes of all slots' rows and of a full prefix cache; arguments as in `Engine`."""
    sizes = sizes_of(model, config, length, encoder_length)
    state = jax.eval_shape(programs.build(model, model.config.vocab_size, sizes).start)
    return tree.byte_count(state) + (config.prefix_cache_mib * 2**20 if encoder_length is None else 0)


def allocated(start: Callable[[], programs.State], config: EngineConfig, length: int) -> programs.State:
    """Allocates an engine's state by calling `start`; `length` is that of a slot.

    Raises:
      UserError: it does not fit in memory.
    """
    try:
        return start()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        capacity, fewer = f"EngineConfig.slots ({config.slots}) of {length} tokens", "fewer slots"
        if config.page_size:
            number = "" if config.pages is None else f"EngineConfig.pages ({config.pages}), "
            capacity += f" with {number}EngineConfig.page_size ({config.page_size})"
            fewer += " or pages"
        raise UserError(
            f"{capacity} need {tree.byte_count(jax.eval_shape(start)) / 2**30:,.1f} GiB, more memory than is free: use "
            f"{fewer}, or a shorter Dataset.length"
        ) from None
