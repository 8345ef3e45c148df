"""PEFT's layer_replication: a base whose layers are ranges of the given ones, each with adapters of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from capibara.core import limits, tree
from capibara.core.types import Params, UserError
from capibara.models import api

_MOST_LAYERS = 10_000  # more than any model has


def replicated(
    model: api.Model, params: Params, ranges: Sequence[Sequence[int]] | None, folder: str
) -> tuple[api.Model, Params]:
    """A model with the layers that the ranges [first, end] name, in their order.

    Args:
      model, params: the base.
      ranges: of layers; None or empty: all, once.
      folder: for errors.

    Raises:
      UserError: there are no such layers, or they are not alike.
    """
    if not ranges:
        return model, params
    config = model.config
    shown = f"{folder} has layer_replication = {limits.shortened(list(ranges))}"
    alike = len(set(getattr(config, "layer_pattern", "1"))) == 1 and not config.module_layers
    if not isinstance(config, api.DecoderConfig) or not alike:
        raise UserError(f"{shown}, which is for decoders whose layers are alike: merge it with PEFT first")
    if max(end for _, end in ranges) > config.num_layers or sum(end - first for first, end in ranges) > _MOST_LAYERS:
        raise UserError(f"{shown}, must be ranges of the base's {config.num_layers} layers: name its base with --base")
    layers = [layer for first, end in ranges for layer in range(first, end)]
    index = np.asarray(layers)

    def taken(name: str, value: jax.Array) -> jax.Array:
        return jnp.take(value, index, axis=0) if name.startswith("layers/") else value

    return api.build(dataclasses.replace(config, num_layers=len(layers))), tree.map_with_names(taken, params)
