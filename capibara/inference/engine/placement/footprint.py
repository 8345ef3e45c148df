"""What an engine holds on the devices, in bytes, before there is one; and whether there is room for it."""

from __future__ import annotations

from collections.abc import Callable

import jax

from capibara.core import tree
from capibara.core.types import UserError
from capibara.inference.engine.batching import CacheDtype, EngineConfig
from capibara.inference.engine.cache import pages
from capibara.inference.engine.runner import programs
from capibara.models.api import Model


def sizes_of(model: Model, config: EngineConfig, length: int, encoder_length: int | None) -> programs.Sizes:
    """What an engine's programs are compiled for; arguments as of `Engine`.

    Raises:
      UserError: pages are asked for, and there is nothing in the model to share.
    """
    dtype = None if config.cache_dtype is CacheDtype.COMPUTE else str(config.cache_dtype)
    pool = pages.sizes_of(model, config, length, encoder_length)
    spare = config.spare if getattr(model.config, "window", None) else 0  # so that engines without share their programs
    return programs.Sizes(config.slots, length, encoder_length, dtype, spare, config.most_steps, pool)


def parameters_bytes(model: Model) -> int:
    """Of its own copy of the parameters, as it reads them; adapters are merged into them."""
    return tree.byte_count(
        jax.eval_shape(lambda params: model.plain.serving(model.merge(params)), model.abstract_params)
    )


def state_bytes(model: Model, config: EngineConfig, length: int, encoder_length: int | None = None) -> int:
    """Of the rows of all slots, and of what is kept of earlier prompts when that is full; arguments as of `Engine`."""
    sizes = sizes_of(model, config, length, encoder_length)
    state = jax.eval_shape(programs.build(model, model.config.vocab_size, sizes).start)
    return tree.byte_count(state) + (config.prefix_cache_mib * 2**20 if encoder_length is None else 0)


def allocated(start: Callable[[], programs.State], config: EngineConfig, length: int) -> programs.State:
    """What `start` gives, an engine's state of slots of so many tokens.

    Raises:
      UserError: there is no memory for it.
    """
    try:
        return start()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        asked, fewer = f"EngineConfig.slots ({config.slots}) of {length} tokens", "fewer slots"
        if config.page_size:
            number = "" if config.pages is None else f"EngineConfig.pages ({config.pages}), "
            asked += f" with {number}EngineConfig.page_size ({config.page_size})"
            fewer += " or pages"
        raise UserError(
            f"{asked} need {tree.byte_count(jax.eval_shape(start)) / 2**30:,.1f} GiB, more memory than there is: ask for "
            f"{fewer}, or a shorter Dataset.length"
        ) from None
