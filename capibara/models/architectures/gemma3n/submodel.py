"""A smaller Gemma 3n inside a larger one, as its training left it there: E2B inside E4B.

The MLPs of a MatFormer (Devvrit et al. 2023, arXiv:2310.07707) are trained so that their first hidden units alone are an
MLP too, and Gemma 3n so that some of its last layers can be skipped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from capibara.core import tree
from capibara.core.types import Params, UserError
from capibara.models.architectures.gemma3n.config import Gemma3nConfig
from capibara.models.parts.kinds import LayerKind

_SHARED = (
    "attention/key",
    "attention/value",
    "attention/key_norm/scale",
)  # of layers with keys and values of their own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submodel:
    """The part of a model that stays.

    Attributes:
      skip_layers: layers that go, by number; of E2B 20 to 24.
      mlp_dims: hidden widths of the layers that stay: of each, or one of all; empty: as they are.
    """

    skip_layers: tuple[int, ...] = ()
    mlp_dims: tuple[int, ...] = ()

    def retained_layers(self, config: Gemma3nConfig) -> list[int]:
        """The layers that stay.

        Raises:
          UserError: a layer is not there, none is left, or others read the keys and values of one that goes.
        """
        for layer in self.skip_layers:
            if not 0 <= layer < config.num_layers:
                raise UserError(
                    f"skip_layers has {layer}, must be from 0 to {config.num_layers - 1}: the model's layers"
                )
        retained = [layer for layer in range(config.num_layers) if layer not in self.skip_layers]
        if not retained:
            raise UserError(f"skip_layers leaves none of {config.num_layers} layers: leave fewer out, e.g. 20-24")
        for kind in set(config.kinds[config.kv_layers :]):
            if (source := config.source(kind)) in self.skip_layers:
                raise UserError(
                    f"skip_layers has {source}, whose keys and values the last {kind} layers read: it must stay"
                )
        return retained

    def config(self, config: Gemma3nConfig) -> Gemma3nConfig:
        """The configuration of what is left.

        Raises:
          UserError: as `retained_layers`, or widths are none that the layers have.
        """
        retained = self.retained_layers(config)
        widths = self._widths(config, retained)
        kinds = [config.kinds[layer] for layer in retained]
        return dataclasses.replace(
            config,
            num_layers=len(retained),
            kv_shared_layers=sum(layer >= config.kv_layers for layer in retained),
            layer_pattern=_pattern(kinds),
            activation_sparsity=tuple(
                config.sparsity(layer) for layer in retained if layer < len(config.activation_sparsity)
            ),
            mlp_dim=max(widths),
            mlp_dims=None if len(set(widths)) == 1 else tuple(widths),
        )

    def params(self, config: Gemma3nConfig, params: Params) -> Params:
        """What is left of the parameters.

        Args:
          config: of the whole model, which has no adapters.
          params: of it, on this host.

        Raises:
          UserError: as `config`.
        """
        left, retained = self.config(config), self.retained_layers(config)
        storing = [layer for layer in retained if layer < config.kv_layers]
        shape = (config.num_layers, config.per_layer_dim)

        def of_layers(value: np.ndarray) -> np.ndarray:
            """[..., L * P] of the layers that stay."""
            return value.reshape(*value.shape[:-1], *shape)[..., retained, :].reshape(*value.shape[:-1], -1)

        cuts: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
            "per_layer_embedding": of_layers,
            "per_layer_projection": of_layers,
            "layers/mlp/gate": lambda value: value[retained, :, : left.mlp_dim],
            "layers/mlp/up": lambda value: value[retained, :, : left.mlp_dim],
            "layers/mlp/down": lambda value: value[retained, : left.mlp_dim],
            **{f"layers/{name}": lambda value: value[storing] for name in _SHARED},
        }

        def cut(name: str, value: jax.Array) -> np.ndarray:
            if name in cuts:
                return cuts[name](np.asarray(value))
            return np.asarray(value)[retained] if name.startswith("layers/") else np.asarray(value)

        return tree.map_with_names(cut, params)

    def _widths(self, config: Gemma3nConfig, retained: Sequence[int]) -> tuple[int, ...]:
        whole = [config.mlp_dim if config.mlp_dims is None else config.mlp_dims[layer] for layer in retained]
        if not self.mlp_dims:
            return tuple(whole)
        widths = self.mlp_dims * len(retained) if len(self.mlp_dims) == 1 else self.mlp_dims
        if len(widths) != len(retained):
            raise UserError(
                f"mlp_dims has {len(widths)} widths, must be one, or one for each of {len(retained)} layers that stay"
            )
        for layer, width, most in zip(retained, widths, whole, strict=True):
            if not 0 < width <= most:
                raise UserError(f"mlp_dims has {width} for layer {layer}, must be from 1 to its {most}")
        return widths


def _pattern(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """The shortest pattern that repeats to these kinds of layers."""
    for size in range(1, len(kinds)):
        if all(kind == kinds[index % size] for index, kind in enumerate(kinds)):
            return tuple(kinds[:size])
    return tuple(kinds)
