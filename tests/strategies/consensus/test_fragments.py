"""Rounds of fragments: each is a round of its arrays alone, at its steps, and no other changes."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import jax
import numpy as np
import pytest

from capibara.consensus.aggregation import Aggregation, CoordinateMedian
from capibara.consensus.compression import Compression
from capibara.consensus.outer import FedAdam, OuterSgd
from capibara.core.types import UserError
from capibara.sharding import Plan
from capibara.strategies.consensus import ConsensusConfig
from capibara.strategies.consensus.fragments import fragments

sys.path.append(str(pathlib.Path(__file__).resolve().parent))
from test_rounds import broken, run  # noqa: E402

PLAN = Plan(batch_size=16, node=4, fsdp=2)
OUTER = OuterSgd(learning_rate=0.7, momentum=0.9)


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def changed(before, after):
    return {i for i, (x, y) in enumerate(zip(leaves(before), leaves(after), strict=True)) if not np.array_equal(x, y)}


def test_each_fragment_has_its_round_in_its_turn_and_the_last_one_in_the_last_step():
    strategy = ConsensusConfig(every=6, fragments=3, outer=OUTER)
    states = [run(PLAN, step, strategy)[1] for step in range(7)]
    where = [set(part) for part in fragments(states[0].params, 3)]
    turns = [changed(one.params, other.params) for one, other in zip(states, states[1:])]
    assert turns == [set(), where[0], set(), where[1], set(), where[2]]
    sizes = [4 * sum(leaves(states[0].params)[index].size for index in part) for part in where]
    told = [run(PLAN, step, strategy)[2]["bytes_sent"] for step in (1, 2, 3, 4, 6, 8)]
    np.testing.assert_allclose(told, np.cumsum([0, *sizes, sizes[0]])[[0, 1, 1, 2, 3, 4]])
    assert set.union(*where) == set(range(len(leaves(states[0].params))))
    for turn, step in enumerate((2, 4, 6)):
        for index, (own, agreed) in enumerate(
            zip(leaves(states[step].opt_state.params), leaves(states[step].params), strict=True)
        ):
            assert np.array_equal(own, np.broadcast_to(agreed, own.shape)) == (index in where[turn])


@pytest.mark.parametrize("outer", [OUTER, FedAdam()], ids=["momentum", "adam"])
def test_a_round_of_a_fragment_is_an_outer_step_with_the_mean_of_its_arrays(outer):
    """Of the nodes' own models of the step before, trained one step further by a run without rounds."""
    strategy = ConsensusConfig(every=4, fragments=2, outer=outer)
    begun, one = (run(PLAN, steps, strategy)[1] for steps in (0, 2))
    _, apart, _ = run(PLAN, 2, ConsensusConfig(every=100))
    first, second = fragments(begun.params, 2)
    start, ends = leaves(begun.params), leaves(apart.opt_state.params)
    want, _ = jax.device_get(
        outer.step(
            [start[i] for i in first], [ends[i].mean(axis=0) for i in first], outer.init([start[i] for i in first])
        )
    )
    for index, expected in zip(first, want, strict=True):
        np.testing.assert_allclose(leaves(one.params)[index], expected, atol=1e-6)
    for index in second:
        np.testing.assert_array_equal(leaves(one.params)[index], start[index])
        np.testing.assert_allclose(leaves(one.opt_state.params)[index], ends[index], atol=1e-6)


def test_a_broken_node_is_left_out_of_each_fragment_and_is_readmitted():
    rule = Aggregation(rule=CoordinateMedian(), faults=1)
    strategy = ConsensusConfig(every=6, fragments=2, aggregation=rule, compression=Compression(bits=8))
    _, _, metrics = run(PLAN, 3, strategy, broken)
    read = {name: float(value) for name, value in metrics.items()}
    assert [read[f"node_{n}/accepted"] for n in range(4)] == [1, 1, 0, 1]
    (line,) = strategy.remarks(3, read)
    assert line.startswith("step 3: node_2 has no part in the round")
    _, state, metrics = run(PLAN, 12, strategy, broken)
    assert all(np.isfinite(x).all() for x in leaves(state.params)) and metrics["consensus_score"] == 1


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_fragments_are_alike_in_size_and_in_order(count):
    rng = np.random.default_rng(count)
    params = [np.zeros(int(size), np.int8) for size in rng.integers(1, 50, 60)]
    found = fragments(params, count)
    assert [index for part in found for index in part] == list(range(60)) and len(found) == count
    sizes = [sum(params[index].size for index in part) for part in found]
    assert max(sizes) - min(sizes) <= 2 * 50


def test_no_fragment_is_empty_whatever_the_sizes():
    for sizes in ([1000, 1, 1, 1], [1, 1, 1, 1000], [1, 1000, 1, 1], [1, 1, 1, 1]):
        assert all(fragments([np.zeros(size) for size in sizes], 4))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"fragments": 0}, "fragments is 0, must be at least 1 and divide ConsensusConfig.every .50.: try 1"),
        ({"fragments": 7}, "fragments is 7, must .* divide ConsensusConfig.every .50.: try 5"),
        ({"fragments": 5, "merge_strategy": "convex"}, "and merge_strategy = 'convex' needs rounds of the whole model"),
        (
            {"fragments": 5, "strategies": ("convexity", "incremental_soup")},
            "and the strategy 'incremental_soup' needs",
        ),
        ({"fragments": 5, "strategies": ("hierarchical",)}, "and the strategy 'hierarchical' needs rounds"),
        (
            {"fragments": 5, "voting_strategy": "byzantine", "quality_threshold": 0.5},
            "and voting_strategy = 'byzantine' needs rounds",
        ),
    ],
)
def test_what_cannot_be_is_one_line(fields, words):
    with pytest.raises(UserError, match=words):
        ConsensusConfig(**fields)


def test_more_fragments_than_arrays_are_refused():
    strategy = ConsensusConfig(every=100, fragments=100)
    with pytest.raises(UserError, match=r"fragments is 100, must be at most the \d+ arrays of the model: try 10"):
        run(PLAN, 0, dataclasses.replace(strategy))


def test_each_fragment_has_an_outer_momentum_of_its_own():
    strategy = ConsensusConfig(every=4, fragments=2, outer=OUTER)
    states = [run(PLAN, steps, strategy)[1] for steps in (0, 2, 4, 6)]
    moments = [[leaves(outer) for outer in one.opt_state.outer] for one in states]
    for turn, (before, after) in enumerate(zip(moments, moments[1:])):
        own, other = turn % 2, 1 - turn % 2
        assert all(np.any(x != y) for x, y in zip(before[own], after[own], strict=True))
        assert all(np.array_equal(x, y) for x, y in zip(before[other], after[other], strict=True))


def test_a_node_that_is_not_drawn_keeps_what_it_has_of_the_other_fragments():
    strategy = ConsensusConfig(every=4, fragments=2, nodes_per_round=2)
    _, state, _ = run(PLAN, 2, strategy)
    _, apart, _ = run(PLAN, 2, ConsensusConfig(every=100))
    drawn = np.asarray(state.opt_state.verdict.drawn)
    assert drawn.sum() == 2
    for index in fragments(state.params, 2)[1]:
        own, alone = (leaves(one.opt_state.params)[index] for one in (state, apart))
        np.testing.assert_allclose(own, alone, atol=1e-6)
