"""Disentangled attention (DeBERTa, He et al. 2020, arXiv:2006.03654): scores of contents with distances, too."""

from __future__ import annotations

import dataclasses
import enum

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from capibara.config import configurable
from capibara.core import projections
from capibara.core.projections import Projection
from capibara.core.types import UserError
from capibara.kernels.attention.spec import AttentionSpec
from capibara.models.layers import layers
from capibara.models.parts.attention import Attention
from capibara.models.parts.config import TransformerConfig
from capibara.models.parts.kinds import LayerKind
from capibara.models.parts.transformer import Block, Rows, Shared
from capibara.sharding import constrain


class Terms(enum.StrEnum):
    """Which scores a distance has: of the queries with its key, of the keys with its query, or both."""

    QUERIES = "queries"
    KEYS = "keys"
    BOTH = "both"

    @property
    def number(self) -> int:
        return 2 if self is Terms.BOTH else 1


class Distances(enum.StrEnum):
    """What makes keys and queries of distances: the layer's own projections of them, or those of the tokens."""

    OWN = "own"
    SHARED = "shared"


class TableNorm(enum.StrEnum):
    """Whether the embeddings of distances are normalised, as the layers are."""

    NONE = "none"
    LAYER = "layer"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Disentangled:
    """Distances of disentangled attention: a table of embeddings that all layers share.

    Attributes:
      span: distances from this one on, in either direction, are alike.
      buckets: number of embeddings in each direction, of which half are of one distance each and the others of ranges that
        grow geometrically up to `span`; 0: an embedding for each distance below `span`.
      terms: the scores that are added to those of the contents; the scale of all is that of as many terms.
      projections: what makes keys and queries of the embeddings.
      norm: whether the embeddings are normalised.
    """

    span: int = 512
    buckets: int = 0
    terms: Terms = Terms.BOTH
    projections: Distances = Distances.SHARED
    norm: TableNorm = TableNorm.NONE

    def __post_init__(self) -> None:
        if not 1 <= self.span < 2**20:
            raise UserError(f"Disentangled.span is {self.span}, must be from 1 to below 2**20: try 512")
        if self.buckets < 0 or self.buckets == 1 or (self.buckets and self.span - 1 <= self.buckets // 2):
            raise UserError(
                f"Disentangled.buckets is {self.buckets}, must be 0, or at least 2 and less than twice span - 1 "
                f"({self.span - 1}): try {max(2, self.span // 2)}"
            )

    @property
    def rows(self) -> int:
        """Embeddings of both directions."""
        return 2 * (self.buckets or self.span)

    def row_of(self, back: np.ndarray) -> np.ndarray:
        """The embedding's row of each distance: position of the query minus position of the key."""
        if self.buckets:
            middle, magnitude = self.buckets // 2, np.maximum(np.abs(back), 1)
            # float32 as in DeBERTa's own code: its rounding decides where a range begins.
            widest = np.log(np.float32((self.span - 1) / middle))
            share = np.log(magnitude.astype(np.float32) / np.float32(middle)) / widest
            ranges = np.ceil(share * np.float32(middle - 1)).astype(np.int64) + middle
            back = np.where(np.abs(back) <= middle, back, np.sign(back) * ranges)
        return np.clip(back + self.rows // 2, 0, self.rows - 1)


class DisentangledAttention(Attention):
    """Self-attention whose scores have terms of contents with distances."""

    def __init__(self, config: TransformerConfig, sizes: Disentangled, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.sizes = sizes
        if sizes.projections is Distances.OWN:
            for declared in self._declared():
                shape = (config.embed_dim, config.num_heads, config.head_size)
                setattr(self, declared.name, layers.projection(rngs, declared, shape))
                if config.bias.of_heads:
                    bias = layers.param(rngs, shape[1:], declared.out_axes, layers.zeros)
                    setattr(self, f"{declared.name}_bias", bias)

    def scored(
        self, x_BTD: jax.Array, distances_RD: jax.Array, scale: float, row_positions_T: jax.Array | None
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
        """Queries, keys and values of x, and the terms of its contents with distances, float32 [B, N, T, T]."""
        q_BTNH, k_BTNH, v_BTNH = self._heads(x_BTD, x_BTD, None)
        length = x_BTD.shape[1]
        columns_T = np.arange(length) if row_positions_T is None else row_positions_T
        rows = jnp.asarray(self.sizes.row_of(np.arange(1 - length, length)))
        rows_TT = rows[columns_T[:, None] - columns_T[None, :] + length - 1]
        total = jnp.zeros((), jnp.float32)
        for declared in self._declared():
            of_keys = declared in (projections.POSITION_QUERY, projections.QUERY)
            contents, index_TT = (k_BTNH, rows_TT.T) if of_keys else (q_BTNH, rows_TT)
            distances_RNH = self._projected(declared, distances_RD.astype(x_BTD.dtype))
            scores_BNTR = jnp.einsum(
                "BTNH,RNH->BNTR", contents * scale, distances_RNH, preferred_element_type=jnp.float32
            )
            scores_BNTT = jnp.take_along_axis(scores_BNTR, index_TT[None, None], axis=-1)
            total = total + (jnp.swapaxes(scores_BNTT, 2, 3) if of_keys else scores_BNTT)
        return (q_BTNH, k_BTNH, v_BTNH), constrain(total, ("batch", "act_heads", "act_time", None))

    def _declared(self) -> list[Projection]:
        """What makes a distance's key, and its query, for the terms that there are."""
        has_projections = self.sizes.projections is Distances.OWN
        key, query = (
            (projections.POSITION_KEY, projections.POSITION_QUERY)
            if has_projections
            else (projections.KEY, projections.QUERY)
        )
        return {Terms.QUERIES: [key], Terms.KEYS: [query], Terms.BOTH: [key, query]}[self.sizes.terms]

    def _projected(self, by: Projection, distances_RD: jax.Array) -> jax.Array:
        """[R, N, H]."""
        y_RNH = self._dense(by, distances_RD[None])[0]
        return y_RNH + getattr(self, f"{by.name}_bias")[...].astype(y_RNH.dtype) if self.config.bias.of_heads else y_RNH


class DisentangledBlock(Block):
    """A layer with disentangled attention."""

    def __init__(self, config: TransformerConfig, sizes: Disentangled, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.attention = DisentangledAttention(config, sizes, rngs)

    def attended(
        self, x_BTD: jax.Array, rows: Rows, shared: Shared, kind: AttentionSpec, layer_kind: LayerKind
    ) -> jax.Array:
        assert isinstance(self.attention, DisentangledAttention) and shared.distances_RD is not None, "the encoder's"
        heads, row_bias_BNTS = self.attention.scored(x_BTD, shared.distances_RD, kind.scale, shared.row_positions)
        return self.attention(
            x_BTD,
            kind=kind,
            segment_ids_BT=rows.segment_ids,
            row_positions_T=shared.row_positions,
            row_bias_BNTS=row_bias_BNTS,
            drop=shared.drop,
            heads=heads,
        )
