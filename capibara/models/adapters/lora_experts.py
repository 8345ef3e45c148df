"""Frozen weights of experts, in their storage format, and the adapters beside them.

This code runs on a device's own experts, inside shard_map if there is a mesh. Shape letters as in
models/parts/dispatch.py: M rows, G experts of the device, K inputs and N outputs of a weight, R rank.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from capibara.kernels.grouped_matmul.kernel import Transposed
from capibara.models.layers.quantized_weights import Blocks, Whole

Names = tuple[str, ...]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["a", "b", "share", "seeds", "step"],
    meta_fields=["scale", "dropout"],
)
@dataclasses.dataclass(frozen=True)
class Factors:
    """The adapters of one weight of all experts: y = x W + scale (x a) b.

    Attributes:
      a: [G, K, R], in the compute dtype.
      b: [G, R, N].
      share: [G, N], DoRA's factor for the columns: their trained norm divided by their current one.
      seeds: [G] uint32, seeds of dropout; None: no dropout.
      step: the train step, for dropout.
      scale: factor of the product.
      dropout: share of the inputs to drop.
    """

    a: jax.Array
    b: jax.Array
    share: jax.Array | None
    seeds: jax.Array | None
    step: jax.Array | None
    scale: float
    dropout: float

    def __call__(self, x: jax.Array, y: jax.Array, rows: Rows, start: jax.Array | int) -> jax.Array:
        """The output of the weight with its adapter for x.

        Args:
          x: rows of the experts.
          y: their products with the weight.
          rows: how to multiply rows.
          start: index of x's first column among all inputs.
        """
        h = rows.product(self._dropped(x, rows, start), self.a)
        y = y + self.scale * rows.product(h, self.b)
        if self.share is None:
            return y
        # Rows without an expert are undefined, and 0 times infinity is not 0.
        return jnp.where(rows.real, y, 0) * rows.of_experts(self.share.astype(y.dtype))

    def _dropped(self, x: jax.Array, rows: Rows, start: jax.Array | int) -> jax.Array:
        if self.seeds is None:
            return x
        assert rows.tokens is not None and self.step is not None, "dropout depends on both"
        seeds, tokens = jnp.broadcast_arrays(rows.of_experts(self.seeds[:, None]), rows.tokens)
        features = start + jnp.arange(x.shape[-1], dtype=jnp.int32)
        retained = _mask(seeds.reshape(-1), self.step, tokens.reshape(-1), features, self.dropout).reshape(x.shape)
        return jnp.where(retained, x / (1 - self.dropout), jnp.zeros((), x.dtype))

    def specs(self, experts: Names | None, hidden: Names | None, *, hidden_inputs: bool) -> Factors:
        """The partition specs in place of the arrays; `experts` and `hidden` are the mesh axes of experts and hidden width."""
        inputs, outputs = (hidden, None) if hidden_inputs else (None, hidden)
        of: dict[str, Any] = {"a": P(experts, inputs), "b": P(experts, None, outputs), "share": P(experts, outputs)}
        of |= {"seeds": P(experts), "step": P()}
        return dataclasses.replace(self, **{name: of[name] for name in of if getattr(self, name) is not None})


@dataclasses.dataclass(frozen=True)
class Rows:
    """How to multiply the rows of experts.

    Attributes:
      product: (rows, weight [G, K, N]) -> rows.
      of_experts: [G, N] values of experts -> values of the rows, or an array that broadcasts to them.
      real: bool, broadcasts to rows: whether a row belongs to an expert.
      tokens: int32, the number of each row's token among those of all devices; set if dropout needs it.
    """

    product: Callable[[jax.Array, Weight | Transposed], jax.Array]
    of_experts: Callable[[jax.Array], jax.Array]
    real: jax.Array | bool
    tokens: jax.Array | None


def _mask(seeds_M: jax.Array, step: jax.Array, tokens_M: jax.Array, features_K: jax.Array, dropout: float) -> jax.Array:
    """[M, K] bool: which inputs dropout keeps. Depends on the token and the feature, not on their location."""

    def of_row(seed: jax.Array, token: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step), token)
        return jax.vmap(lambda feature: jax.random.key_data(jax.random.fold_in(key, feature))[0])(features_K)

    return jax.vmap(of_row)(seeds_M, tokens_M) >= jnp.uint32(math.ceil(dropout * 2**32))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["whole"], meta_fields=["axes"])
@dataclasses.dataclass(frozen=True)
class Part:
    """A device's inputs of a weight that every device stores whole, since its blocks do not divide over the devices.

    Attributes:
      whole: [G, K, N] with the inputs of all devices.
      axes: manual mesh axes over which the inputs are divided.
    """

    whole: Blocks
    axes: Names

    def astype(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        weight = self.whole.astype(dtype)
        size = weight.shape[1] // jax.lax.axis_size(self.axes)
        return jax.lax.dynamic_slice_in_dim(weight, jax.lax.axis_index(self.axes) * size, size, axis=1)


Weight = jax.Array | Whole | Blocks | Part


def in_compute_dtype(weight: Weight, dtype: jax.typing.DTypeLike) -> Weight:
    """An array cast to the compute dtype; quantized weights stay as they are."""
    match weight:
        case Whole():
            return Whole(weight.astype(dtype))
        case Blocks():
            return weight
    return weight.astype(dtype)


def placed(weight: Weight, spec: P, hidden: Names, shards: int, *, hidden_inputs: bool) -> tuple[Weight, Any]:
    """A weight [E, K, N] for shard_map, and the partition specs of its arrays.

    Args:
      weight: of all experts.
      spec: the spec if the weight were one array.
      hidden: mesh axes of the experts' hidden width.
      shards: number of devices along `hidden`.
      hidden_inputs: whether the hidden width is K; else it is N.
    """
    if not isinstance(weight, Blocks):
        return weight, spec
    experts = spec[0]
    if hidden_inputs and weight.scales.shape[1] % shards:
        weight, spec = Part(weight, hidden), P(experts)
    blocks = weight.whole if isinstance(weight, Part) else weight
    across = P(experts) if hidden_inputs else P(experts, spec[-1])
    of_scales = None if blocks.means is None else across
    of_arrays: dict[str, Any] = {"codes": spec, "scales": spec, "means": of_scales, "steps": of_scales}
    specs = dataclasses.replace(blocks, **of_arrays)
    return weight, dataclasses.replace(weight, whole=specs) if isinstance(weight, Part) else specs


@jax.custom_vjp
def batched_matmul(x_GMK: jax.Array, weight_GKN: Whole | Blocks | Part) -> jax.Array:
    """Multiplies the experts' rows, the same number each, by a frozen weight, in x's dtype.

    The backward pass saves only the weight, in its storage format.
    """
    return jnp.einsum("GMK,GKN->GMN", x_GMK, weight_GKN.astype(x_GMK.dtype))


def _backward(weight_GKN: Whole | Blocks | Part, dy_GMN: jax.Array) -> tuple[jax.Array, None]:
    return jnp.einsum("GMN,GKN->GMK", dy_GMN, weight_GKN.astype(dy_GMN.dtype)), None


batched_matmul.defvjp(lambda x, weight: (batched_matmul(x, weight), weight), _backward)
