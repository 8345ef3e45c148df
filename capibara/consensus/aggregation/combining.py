"""The steps of an aggregation, whichever the rule and wherever the nodes are: mask, measure, mix, combine.

Shape letters as in points.py; Q rows of a mixing matrix: the candidates and, as the last one, the reference.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from capibara.consensus.aggregation import blocks
from capibara.consensus.aggregation.blocks import Axes, Block, Layout
from capibara.consensus.aggregation.coordinates import median
from capibara.consensus.aggregation.mixing import PreAggregation
from capibara.consensus.aggregation.points import Points, matmul
from capibara.consensus.aggregation.report import Report
from capibara.consensus.aggregation.rules import CoordinateRule, DistanceRule, Rule

# A node that is further from the coordinate median is masked: in float32 squares of such distances are not finite.
_FURTHEST = 1e15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Values:
    """The values of all nodes, wherever they are.

    Attributes:
      layout: how a device reads them.
      leaves: as the layout has them.
      references: for each leaf the reference [S]; empty: zero.
      axes: for each leaf the mesh axes over which it is sharded.
    """

    layout: Layout
    leaves: Sequence[jax.Array]
    references: Sequence[jax.Array]
    axes: Sequence[Axes]

    def read(self, leaf: int, block: Block, is_alive_N: jax.Array) -> jax.Array:
        """A block [P, C] of a leaf, the reference's row last; 0 for masked nodes."""
        values_NC = self.layout.read(self.leaves[leaf], block)
        if self.references:
            last_C = self.layout.read_reference(self.references[leaf], block)
        else:
            last_C = jnp.zeros_like(values_NC[0])
        return jnp.concatenate([jnp.where(is_alive_N[:, None], values_NC, 0.0), last_C[None]])


def combine(
    values: Values, rule: Rule, before: Sequence[PreAggregation], faults: int, key: jax.Array | None
) -> tuple[list[jax.Array], Report]:
    """Aggregates all leaves; gives them [S] each, in their own dtypes, and the report."""
    layout = values.layout
    bad = layout.total([(layout.has_bad(leaf), axes) for leaf, axes in zip(values.leaves, values.axes)])
    is_alive_N = bad == 0
    gram_PP = jnp.zeros((layout.nodes + 1, layout.nodes + 1), jnp.float32)
    if rule.uses_distances or any(mix.uses_distances for mix in before):
        gram_PP = _gram(values, is_alive_N)
        is_alive_N &= jnp.diag(gram_PP)[:-1] < _FURTHEST**2
        is_kept_P = jnp.append(is_alive_N, True)
        gram_PP = jnp.where(is_kept_P[:, None] & is_kept_P[None, :], gram_PP, 0.0)
    spare = faults - jnp.sum(~is_alive_N, dtype=jnp.int32)
    points = Points(gram_PP=gram_PP, is_alive_R=is_alive_N, faults=jnp.maximum(spare, 0), assumed_faults=faults)
    points, mixing_QP = _mixed(points, before, key)
    weights_P = None
    if isinstance(rule, DistanceRule):
        weights_Q = rule.weights(points)
        weights_P = weights_Q if mixing_QP is None else matmul(weights_Q, mixing_QP)
        fuse = functools.partial(_weighted, weights_P)
    else:
        assert isinstance(rule, CoordinateRule)
        fuse = functools.partial(_by_coordinate, rule, mixing_QP, rule.chosen(points), points.faults)
    combined, squared_N = _write(values, fuse, is_alive_N)
    report = Report(
        is_masked=~is_alive_N,
        spare_faults=spare,
        distances=jnp.where(is_alive_N, jnp.sqrt(squared_N), jnp.inf),
        weights=None if weights_P is None else weights_P[:-1],
    )
    return combined, report


def _weighted(weights_P: jax.Array, block_PC: jax.Array) -> jax.Array:
    return jnp.sum(weights_P[:, None] * block_PC, axis=0)


def _by_coordinate(
    rule: CoordinateRule, mixing_QP: jax.Array | None, chosen_R: jax.Array, faults: jax.Array, block_PC: jax.Array
) -> jax.Array:
    values_RC = block_PC[:-1] if mixing_QP is None else matmul(mixing_QP[:-1], block_PC)
    return rule.combine(values_RC, chosen_R, faults)


def _mixed(points: Points, before: Sequence[PreAggregation], key: jax.Array | None) -> tuple[Points, jax.Array | None]:
    """The candidates after all pre-aggregations, and their rows [Q, P]; None: they are the points as they were."""
    mixing_QP = None
    for number, each in enumerate(before):
        own_key = jax.random.fold_in(key, number) if each.uses_key and key is not None else None
        rows_RP, is_alive_R = each.mixing(points, own_key)
        step_QP = jnp.pad(rows_RP, ((0, 1), (0, 0))).at[-1, -1].set(1.0)
        points = points.mixed(step_QP, is_alive_R)
        mixing_QP = step_QP if mixing_QP is None else matmul(step_QP, mixing_QP)
    return points, mixing_QP


def _gram(values: Values, is_alive_N: jax.Array) -> jax.Array:
    """Inner products [P, P] of the points about the coordinate median of the nodes.

    About a mean they would be of no use where one node is far off: the differences between the others would be rounded away.
    """
    nodes = values.layout.nodes

    def add(leaf: int, gram_PP: jax.Array, block: Block) -> jax.Array:
        values_PC = values.read(leaf, block, is_alive_N)
        centre_C = median(values_PC[:-1], is_alive_N)
        is_kept_P1 = jnp.append(is_alive_N, True)[:, None]
        centred_PC = jnp.where(is_kept_P1 & values.layout.is_new(block), values_PC - centre_C, 0.0)
        return gram_PP + matmul(centred_PC, centred_PC.T)

    parts = []
    for index, leaf in enumerate(values.leaves):
        zero_PP = jnp.zeros((nodes + 1, nodes + 1), jnp.float32)
        size = values.layout.size(leaf)
        parts.append((blocks.sweep(values.layout, size, functools.partial(add, index), zero_PP), values.axes[index]))
    return values.layout.total(parts)


def _write(
    values: Values, fuse: Callable[[jax.Array], jax.Array], is_alive_N: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
    """The combined leaves [S], and the squared distances [N] of the nodes from them."""

    def add(leaf: int, carry: tuple[jax.Array, jax.Array], block: Block) -> tuple[jax.Array, jax.Array]:
        combined_S, squared_N = carry
        values_PC = values.read(leaf, block, is_alive_N)
        combined_C = fuse(values_PC)
        gap_NC = jnp.where(values.layout.is_new(block), values_PC[:-1] - combined_C, 0.0)
        elements = values.layout.gather(combined_C.astype(combined_S.dtype))[: block.count]
        combined_S = jax.lax.dynamic_update_slice_in_dim(combined_S, elements, block.start, axis=0)
        return combined_S, squared_N + jnp.sum(jnp.square(gap_NC), axis=1)

    combined, parts = [], []
    for index, leaf in enumerate(values.leaves):
        size = values.layout.size(leaf)
        zeros = jnp.zeros(size, leaf.dtype), jnp.zeros(values.layout.nodes, jnp.float32)
        combined_S, squared_N = blocks.sweep(values.layout, size, functools.partial(add, index), zeros)
        combined.append(combined_S)
        parts.append((squared_N, values.axes[index]))
    return combined, values.layout.total(parts)
