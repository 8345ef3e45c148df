"""What stands before a head: BERT's transform of the final hidden states."""

from __future__ import annotations

import enum

import jax
from flax import nnx

from capibara.core.types import UserError
from capibara.models.layers import layers
from capibara.models.layers.layers import Activation, Norm

_PARAMETERS = (Activation.XIELU,)  # activations with parameters


class Transform(enum.StrEnum):
    """What stands before the head: a projection, an activation and a norm (BERT), or nothing (EuroBERT)."""

    DENSE = "dense"
    NONE = "none"


class TransformBias(enum.StrEnum):
    """Whether the projection of the transform before the head has a bias (BERT)."""

    EMBED = "embed"
    NONE = "none"


class Transformed:
    """What a configuration says of the transform before its head."""

    activation: Activation
    transform: Transform
    transform_activation: Activation | None
    transform_bias: TransformBias

    @property
    def before_head(self) -> Activation:
        """The transform's activation: it has no second projection for a gated one."""
        if self.transform_activation is not None:
            return self.transform_activation
        return Activation.GELU if self.activation.gated else self.activation


def check(config: Transformed) -> None:
    """Checks the transform's variants.

    Raises:
      UserError: its activation has a gate or parameters, or one of them is set where there is no transform.
    """
    name = type(config).__name__
    if config.transform_activation in (*_PARAMETERS, *(item for item in Activation if item.gated)):
        raise UserError(
            f"{name}.transform_activation is {str(config.transform_activation)!r}, the transform has one projection "
            "and no parameters for it: try 'gelu'"
        )
    if config.transform is Transform.DENSE:
        return
    for field, usual in (("transform_activation", None), ("transform_bias", TransformBias.EMBED)):
        if getattr(config, field) != usual:
            raise UserError(
                f"{name}.{field} ({getattr(config, field)!s}) is of the transform before the head, and transform is "
                "'none': leave it out, or write 'dense'"
            )


class Transforming:
    """A module with a transform before its head."""

    transform: nnx.Param[jax.Array]
    transform_bias: nnx.Param[jax.Array]
    transform_norm: Norm

    def make_transform(self, config: Transformed, sizes: tuple[int, int], norm: Norm, rngs: nnx.Rngs) -> None:
        """Makes the transform's parameters; `sizes` are the widths that it reads and gives."""
        self.transform = layers.param(rngs, sizes, ("embed", "norm"), layers.fan_in(0))
        if config.transform_bias is TransformBias.EMBED:
            self.transform_bias = layers.param(rngs, sizes[1:], ("norm",), layers.zeros)
        self.transform_norm = norm

    def transformed(self, config: Transformed, x: jax.Array) -> jax.Array:
        """The final hidden states as the head reads them."""
        x = layers.dense(x, self.transform[...])
        if config.transform_bias is TransformBias.EMBED:
            x = x + self.transform_bias[...].astype(x.dtype)
        return self.transform_norm(config.before_head(x))
