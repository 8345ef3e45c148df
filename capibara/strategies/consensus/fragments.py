"""Rounds of one fragment of the model after the other (Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512).

A fragment is some of the model's arrays, in their order. Between two rounds of one the others have theirs, so that as many
bytes pass in all, in smaller and more frequent pieces.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from capibara.core.types import Batch, Params, PyTree, UserError
from capibara.strategies.consensus.agreement import along
from capibara.strategies.consensus.rounds import Nodes, meeting
from capibara.strategies.consensus.settings import Settings
from capibara.training.base.strategy import NodesPrograms


def fragments(params: PyTree, count: int) -> list[list[int]]:
    """The indices of the leaves of each of `count` fragments, of sizes that are as alike as their order allows.

    Raises:
      UserError: there are fewer leaves.
    """
    sizes = [math.prod(x.shape) for x in jax.tree.leaves(params)]
    if count > len(sizes):
        fitting = max(n for n in range(1, len(sizes) + 1) if count % n == 0)
        raise UserError(
            f"ConsensusConfig.fragments is {count}, must be at most the {len(sizes)} arrays of the model: try {fitting}"
        )
    result: list[list[int]] = [[] for _ in range(count)]
    done, at = 0, 0
    for index, size in enumerate(sizes):
        left, rest = len(sizes) - index, count - at - 1
        is_full = result[at] and (done + size / 2 > (at + 1) * sum(sizes) / count or left <= rest)
        at += bool(is_full and rest)
        result[at].append(index)
        done += size
    return result


def parts_of(tree: PyTree, where: Sequence[Sequence[int]]) -> list[Params]:
    """The leaves of each fragment of a tree like the parameters: a list, which rounds take as they take other trees."""
    leaves = jax.tree.leaves(tree)
    return [cast(Params, [leaves[index] for index in indices]) for indices in where]


def sent_bytes(params: Params, count: int, rounds: jax.Array) -> jax.Array:
    """What a node with a part in each of so many rounds of `count` fragments has sent in them, as float32 arrays, float32."""
    sizes = [4 * sum(x.size for x in jax.tree.leaves(part)) for part in parts_of(params, fragments(params, count))]
    so_far = jnp.array(np.cumsum([0, *sizes])[:-1], jnp.float32)
    return (rounds // count).astype(jnp.float32) * float(sum(sizes)) + so_far[rounds % count]


def meeting_in_turn(
    config: Settings, nodes: NodesPrograms, mesh: Mesh, params: PyTree
) -> Callable[[Params, Params | None, Nodes, jax.Array, Batch], tuple[Params, Params | None, Nodes]]:
    """As `rounds.meeting`, of the fragment whose turn it is."""

    def meet(
        agreed: Params, soup: Params | None, state: Nodes, number: jax.Array, batch: Batch
    ) -> tuple[Params, Params | None, Nodes]:
        where = fragments(agreed, config.fragments)

        def of(turn: int) -> tuple[Params, Nodes]:
            part_nodes = dataclasses.replace(
                state,
                params=parts_of(state.params, where)[turn],
                outer=state.outer[turn],
                lost=None if state.lost is None else parts_of(state.lost, where)[turn],
            )
            meet_one = meeting(config, nodes, mesh, parts_of(params, where)[turn])
            part, _, new = meet_one(parts_of(agreed, where)[turn], None, part_nodes, number, batch)
            good = new.verdict.accepted if new.verdict.drawn is None else new.verdict.accepted | ~new.verdict.drawn
            # A node that is masked continues from the agreed model, all of it: one bad fragment spoils the others in a step.
            retained = jax.tree.map(lambda x, start: jnp.where(along(good, x), x, start), state.params, agreed)
            together = dataclasses.replace(
                new,
                params=_with(retained, where[turn], new.params),
                outer=tuple(new.outer if at == turn else outer for at, outer in enumerate(state.outer)),
                lost=None if state.lost is None else _with(state.lost, where[turn], new.lost),
            )
            return _with(agreed, where[turn], part), together

        turn = (number + 1) // config.meets_every % config.fragments
        # The last fragment's round is in the last step of `every`, which is turn 0 of the next.
        branches = [lambda turn=turn: of(turn) for turn in (config.fragments - 1, *range(config.fragments - 1))]
        new, nodes_after = jax.lax.switch(turn, branches)
        return new, soup, nodes_after

    return meet


def _with(tree: PyTree, indices: Sequence[int], new: PyTree) -> PyTree:
    """A tree in which some leaves are others."""
    leaves, structure = jax.tree.flatten(tree)
    for index, leaf in zip(indices, jax.tree.leaves(new), strict=True):
        leaves[index] = leaf
    return jax.tree.unflatten(structure, leaves)
