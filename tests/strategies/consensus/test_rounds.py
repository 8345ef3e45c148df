"""Consensus training: nodes that agree after each step train as one model, and others in rounds."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from capibara import sharding
from capibara.consensus.aggregation import Aggregation, Bucketing, CenteredClipping, CoordinateMedian
from capibara.consensus.compression import Compression
from capibara.consensus.outer import OuterSgd
from capibara.core import tree
from capibara.core.types import UserError
from capibara.models import api
from capibara.models.api import DecoderConfig
from capibara.sharding import Plan
from capibara.strategies.consensus import ConsensusConfig
from capibara.strategies.consensus.rounds import meeting
from capibara.training.base import state as states
from capibara.training.base.strategy import NodesPrograms, of_all
from capibara.training.methods.nodes import Nodes, make_node_loss, make_nodes_step
from capibara.training.step import make_train_step

CONFIG = DecoderConfig(
    vocab_size=64, embed_dim=32, num_layers=2, num_heads=2, num_kv_heads=2, mlp_dim=64, dtype="float32"
)
RATE = 0.1


def batch_of(step, rows=16, length=16):
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, 64, (rows, length)).astype(np.int32)
    return {
        "tokens": tokens,
        "targets": (tokens * 3 + 1) % 64,
        "weights": np.ones((rows, length), np.float32),
        "segment_ids": np.ones((rows, length), np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
    }


@functools.cache
def program(plan, strategy, devices):
    """(new state, step, sharding of the rows), compiled once."""
    model, tx = api.build(CONFIG), optax.sgd(RATE)
    mesh = sharding.make_mesh(plan, devices)
    opt_part, ema = (None, False) if strategy is None else (Nodes(strategy).opt_part(plan), strategy.averages)
    shardings = states.state_shardings(model, tx, mesh, plan.rules, ema=ema, opt_part=opt_part)
    step = make_train_step(model, tx, lambda _: RATE, plan, mesh)
    if strategy is not None:
        strategy.check(plan)
        step = make_nodes_step(step, make_node_loss(model, plan, mesh), model, strategy, shardings)
    step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    init = functools.partial(states.init_state, model, tx, ema=ema, opt_part=opt_part)
    return jax.jit(init, out_shardings=shardings), step, sharding.batch_sharding(mesh, plan.rules)


def run(plan, steps, strategy=None, change=lambda step, batch: batch, devices=None):
    """Losses, the last state and the last metrics; `change` makes a step's batch from ours."""
    init, step, rows = program(plan, strategy, devices)
    state, losses, metrics = init(jax.random.key(0)), [], {}
    for index in range(steps):
        state, metrics = step(state, sharding.global_batch(rows, change(index, batch_of(index))))
        losses.append(float(metrics["loss"]))
    return np.array(losses), jax.device_get(state), jax.device_get(metrics)


@functools.cache
def as_one():
    return run(Plan(batch_size=16), 4)


@pytest.mark.parametrize("sizes", [dict(node=4, fsdp=2), dict(node=8, fsdp=1), dict(node=2, fsdp=2, tensor=2)], ids=str)
def test_a_round_after_each_step_of_sgd_is_data_parallel_training(sizes):
    losses, state, metrics = run(Plan(batch_size=16, **sizes), 4, ConsensusConfig(every=1))
    want, want_state, want_metrics = as_one()
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    for got, expected in zip(jax.tree.leaves(state.params), jax.tree.leaves(want_state.params), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6, rtol=0)
    assert metrics["tokens"] == want_metrics["tokens"] == 256
    assert int(state.step) == 4


H = 3


def broken(step, batch, node=2, rows=4):
    """A node's weights are NaN in the first round, and with them its loss and gradients."""
    weights = batch["weights"].copy()
    weights[node * rows : (node + 1) * rows] = np.nan if step < H else 1.0
    return batch | {"weights": weights}


@functools.cache
def rounds(steps):
    """Of four nodes, in float32 and with momentum outside."""
    strategy = ConsensusConfig(every=H, outer=OuterSgd(learning_rate=0.7, momentum=0.9))
    return run(Plan(batch_size=16, node=4, fsdp=2), steps, strategy)


def test_between_rounds_the_nodes_differ_and_the_agreed_model_stays():
    _, begun, _ = rounds(0)
    _, state, metrics = rounds(H - 1)
    assert_equal(state.params, begun.params)
    own = jax.tree.leaves(state.opt_state.params)
    assert all(x.shape[0] == 4 for x in own) and any(np.ptp(x, axis=0).max() > 1e-4 for x in own)
    assert len({float(metrics[f"node_{n}/loss"]) for n in range(4)}) == 4


def test_a_round_is_an_outer_step_with_the_mean_of_the_nodes():
    """Against the nodes trained one by one on their rows, without a mesh axis of nodes."""
    _, begun, _ = rounds(0)

    def of_node(n):
        rows = lambda _, batch: {name: values[4 * n : 4 * n + 4] for name, values in batch.items()}  # noqa: E731
        return run(Plan(batch_size=4, fsdp=2, data=1), H, change=rows, devices=tuple(jax.devices()[:2]))[1].params

    ends = [of_node(n) for n in range(4)]
    _, state, _ = rounds(H)
    mean = jax.tree.map(lambda *x: np.mean(x, axis=0), *ends)
    # Nesterov's momentum: 0.7 * (1 + 0.9) of the first gradient.
    want = jax.tree.map(lambda start, x: start - 0.7 * 1.9 * (start - x), begun.params, mean)
    for got, expected in zip(jax.tree.leaves(state.params), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6, rtol=0)
    for own, agreed in zip(jax.tree.leaves(state.opt_state.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(own, np.broadcast_to(agreed, own.shape))


def test_a_broken_node_is_left_out_named_and_readmitted():
    strategy = ConsensusConfig(every=H, aggregation=Aggregation(rule=CoordinateMedian(), faults=1))
    plan = Plan(batch_size=16, node=4, fsdp=2)
    _, _, metrics = run(plan, H, strategy, broken)
    read = {name: float(value) for name, value in metrics.items()}
    assert [read[f"node_{n}/accepted"] for n in range(4)] == [1, 1, 0, 1] and read["consensus_score"] == 0.75
    assert np.isfinite(read["loss"]) and np.isnan(read["node_2/loss"])
    assert list(strategy.remarks(H, read)) == [
        "step 3: node_2 has no part in the round, it made no update: its loss or gradients were never finite"
    ]
    assert not list(strategy.remarks(H + 1, read))  # only of the step of a round
    _, state, metrics = run(plan, 2 * H, strategy, broken)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
    assert metrics["consensus_score"] == 1 and np.isfinite(metrics["node_2/loss"])


def _quadratic(params, batch):
    off = params["w"] - batch["target"]
    return {"w": 10 * off}, jnp.stack([20 + 5 * jnp.sum(off**2, axis=1), jnp.full(len(off), 10.0)], axis=1)


# The loss of a node, of ten tokens, is 2, as that of language is never 0, and half its squared distance from its target.
QUADRATIC = NodesPrograms(step=None, loss=lambda *args: _quadratic(*args)[1], gradient=_quadratic)


def verdict_of(strategy, own, losses, agreed=None, failures=0, moment=0.0, target=None, lost=0.0):
    """The next model, and the nodes, after a round of four nodes with given parameters and losses.

    `failures`: rounds that failed before. `moment`: the moments of all nodes. `target`: of QUADRATIC. `lost`: what compression
    has lost before.
    """
    mesh = sharding.make_mesh(Plan(batch_size=8, node=4, fsdp=2))
    params = {"w": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))}
    agreed = {"w": np.zeros(8, np.float32)} if agreed is None else agreed
    state = strategy.init(optax.adam(RATE), agreed, 4)
    state = dataclasses.replace(state, params={"w": np.asarray(own, np.float32)}, losses=np.asarray(losses, np.float32))
    state = dataclasses.replace(
        state,
        opt_state=jax.tree.map(lambda x: x + moment if x.ndim > 1 else x, state.opt_state),
        verdict=dataclasses.replace(state.verdict, failures=np.int32(failures)),
        lost=jax.tree.map(lambda x: x + lost, state.lost),
    )
    shardings = strategy.shardings(state, params, jax.tree.map(lambda _: params["w"], optax.adam(RATE).init(agreed)))
    meet = jax.jit(meeting(strategy, QUADRATIC, mesh, params))
    placed = dataclasses.replace(
        state,
        **{
            name: jax.device_put(getattr(state, name), getattr(shardings, name)) for name in ("params", "outer", "lost")
        },
    )
    batch = {"target": np.zeros((4, 8), np.float32) if target is None else np.asarray(target, np.float32)}
    agreed, _, nodes = jax.device_get(meet(jax.device_put(agreed, params), None, placed, np.int32(1), batch))
    return agreed, nodes


LOSSES = [[10.0, 10.0]] * 4  # sums and tokens


def test_what_few_bits_lose_of_a_node_without_a_part_is_forgotten():
    strategy = ConsensusConfig(quality_threshold=0.5, compression=Compression(bits=4))
    own = np.linspace(0.1, 1, 32).reshape(4, 8)
    own[3] *= 1e4
    _, nodes = verdict_of(strategy, own, [*LOSSES[:3], [90.0, 10.0]])
    assert list(nodes.verdict.accepted) == [True, True, True, False]
    assert np.abs(nodes.lost["w"][:3]).max() > 0 and not nodes.lost["w"][3].any()
    _, nodes = verdict_of(dataclasses.replace(strategy, consensus_threshold=0.8), own, [*LOSSES[:3], [90.0, 10.0]])
    assert not nodes.lost["w"].any() and nodes.verdict.failures == 1  # a round that failed


def test_a_failed_round_changes_neither_the_model_nor_the_outer_momentum():
    strategy = ConsensusConfig(consensus_threshold=0.8, outer=OuterSgd(learning_rate=0.7, momentum=0.9))
    own = np.ones((4, 8))
    agreed, nodes = verdict_of(strategy, own, [*LOSSES[:3], [0.0, 0.0]])
    assert not agreed["w"].any() and not jax.tree.leaves(nodes.outer)[0].any()
    assert nodes.verdict.quality[3] == -1 and not nodes.params["w"].any() and not nodes.losses.any()
    agreed, nodes = verdict_of(strategy, own, LOSSES, failures=2)
    assert agreed["w"].all() and jax.tree.leaves(nodes.outer)[0].all() and nodes.verdict.failures == 0


def test_a_node_that_broke_gets_finite_moments_and_the_agreed_model_is_the_reference():
    """Centred clipping begins at the agreed model: a node that is far from it moves it by the radius."""
    strategy = ConsensusConfig(aggregation=Aggregation(rule=CenteredClipping(radius=1.0, iterations=1)))
    start = np.full(8, 100.0, np.float32)
    own = np.stack([start, start, start, start + 1e3])
    agreed, nodes = verdict_of(strategy, own, LOSSES, agreed={"w": start}, moment=np.nan)
    np.testing.assert_allclose(agreed["w"], start + 0.25 / np.sqrt(8), rtol=1e-6)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(nodes.opt_state))


def test_a_bad_loss_is_no_reason_without_a_threshold_and_distances_are_finite():
    far = np.ones((4, 8))
    far[3] = 1e25
    strategy = ConsensusConfig(aggregation=Aggregation(rule=CoordinateMedian(), faults=1))
    agreed, nodes = verdict_of(strategy, far, [*LOSSES[:3], [1e5, 10.0]])
    assert nodes.verdict.accepted.all() and nodes.verdict.quality[3] == 0
    np.testing.assert_array_equal(agreed["w"], np.ones(8, np.float32))
    assert np.isfinite(nodes.verdict.distances).all() and nodes.verdict.spare_faults == 1


def test_the_metrics_of_a_step_are_weighted_like_its_loss():
    metrics = {"loss": [1.0, 2.0, np.nan], "grad_norm": [1.0, 3.0, 1.0], "tokens": [10.0, 30.0, np.nan]}
    metrics |= {"learning_rate": [0.5] * 3, "skipped": [0.0, 0.0, 1.0]}
    found = of_all({name: np.asarray(values, np.float32) for name, values in metrics.items()})
    assert {name: float(value) for name, value in found.items()} == {
        "loss": 1.75, "grad_norm": 2.5, "tokens": 40.0, "learning_rate": 0.5, "skipped": 0.0
    }  # fmt: skip
    found = of_all({name: np.asarray(values, np.float32)[2:] for name, values in metrics.items()})
    assert np.isnan(found["loss"]) and found["learning_rate"] == 0.5 and found["skipped"] == 1


def test_compressed_rounds_follow_the_others_and_nothing_is_lost():
    plan = Plan(batch_size=16, node=4, fsdp=2)
    _, plain, _ = run(plan, 2 * H, ConsensusConfig(every=H))
    _, state, _ = run(plan, 2 * H, ConsensusConfig(every=H, compression=Compression(bits=8)))
    _, begun, _ = rounds(0)
    for got, want, start in zip(*(jax.tree.leaves(s.params) for s in (state, plain, begun)), strict=True):
        moved = np.abs(want - start).max()
        assert 0 < np.abs(got - want).max() <= 0.02 * moved
    lost = jax.tree.leaves(state.opt_state.lost)
    assert all(x.shape[0] == 4 for x in lost) and any(np.abs(x).max() > 0 for x in lost)


def assert_equal(a, b):
    for got, expected in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(got, expected)


def round_of(strategy, skipped, number=0, losses=np.ones(8)):
    """The round after a step of eight nodes, node n at n."""
    mesh = sharding.make_mesh(Plan(batch_size=8, node=8, fsdp=1))
    params = {"w": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())}
    agreed = {"w": jnp.zeros(4)}
    metrics = dict(
        loss=jnp.asarray(losses), grad_norm=jnp.ones(8), tokens=jnp.full(8, 4.0), skipped=jnp.asarray(skipped)
    )
    own = {"w": jnp.broadcast_to(jnp.arange(8.0)[:, None] ** 2, (8, 4))}
    nodes = QUADRATIC._replace(step=lambda _, opt_state, *more: (own, opt_state, metrics))
    step = strategy.step(nodes, mesh, params)
    return jax.device_get(jax.jit(step)(jnp.int32(number), agreed, None, strategy.init(optax.sgd(0.1), agreed, 8), {}))


def test_a_node_whose_updates_were_skipped_has_no_part():
    """Its loss is finite: a spike, or gradients that were not finite."""
    nodes = round_of(ConsensusConfig(every=1), [0.0, 0, 1, 0, 0, 0, 0, 0]).state
    assert nodes.verdict.quality[2] == -1 and nodes.verdict.accepted.tolist() == [n != 2 for n in range(8)]


def test_each_round_draws_its_own_key():
    strategy = ConsensusConfig(every=1, aggregation=Aggregation(rule=CoordinateMedian(), before=(Bucketing(),)))
    found = [round_of(strategy, [0.0] * 8, number).params["w"][0] for number in range(6)]
    assert len({float(x) for x in found}) > 1


ALL = {
    "voting_strategy": "byzantine",
    "merge_strategy": "convex",
    "quality_threshold": 0.85,
    "consensus_threshold": 0.75,
}


def test_a_vote_and_a_convex_merge_train_end_to_end():
    """Nodes with rows of one kind agree on a model that is better than the first, in every round."""
    strategy = ConsensusConfig(every=H, num_nodes=4, **ALL)
    losses, state, metrics = run(Plan(batch_size=16, node=4, fsdp=2), 3 * H, strategy)
    assert metrics["votes"] == 4 and metrics["consensus_score"] == 1 and metrics["failed_rounds"] == 0
    assert sum(metrics[f"node_{n}/weight"] for n in range(4)) == pytest.approx(1)
    assert losses[2 * H] < losses[H] < losses[0]
    for own, agreed in zip(jax.tree.leaves(state.opt_state.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(own, np.broadcast_to(agreed, own.shape))


STRATEGIES = ("hierarchical", "convexity", "incremental_soup")


def test_each_group_of_nodes_holds_its_frozen_parts():
    """Against rounds in which nothing is frozen: what a group trains is the same until the first round."""
    strategy = ConsensusConfig(every=H, frozen=("embed", "mlp"))
    plan = Plan(batch_size=16, node=4, fsdp=2)
    _, begun, _ = run(plan, 0, strategy)
    _, state, _ = run(plan, 1, strategy)
    _, free, _ = run(plan, 1, ConsensusConfig(every=H))
    names = tree.path_names(begun.params)
    assert any("embed" in name for name in names) and any("mlp" in name for name in names)
    trees = (begun.params, state.opt_state.params, free.opt_state.params)
    for name, start, own, trained in zip(names, *map(jax.tree.leaves, trees), strict=True):
        for node in range(4):
            is_held = ("embed" if node < 2 else "mlp") in name
            np.testing.assert_array_equal(own[node], start if is_held else trained[node])
    everything = ConsensusConfig(every=4, group_every=2, frozen=("embed", ""), strategies=("hierarchical", "convexity"))
    _, state, _ = run(plan, 3, everything)
    of_nodes = jax.tree.leaves(state.opt_state.params)
    for name, start, own in zip(names, jax.tree.leaves(begun.params), of_nodes, strict=True):
        if "embed" in name:
            np.testing.assert_array_equal(own[:2], np.broadcast_to(start, own[:2].shape))
            assert np.any(own[2:] != start)
    with pytest.raises(
        UserError, match="frozen has 'attn.x', which is in no trained parameter's name: take a part of one"
    ):
        run(plan, 0, ConsensusConfig(every=H, frozen=("attn.x", "")))


def test_all_strategies_train_end_to_end():
    strategy = ConsensusConfig(every=4, num_nodes=8, group_every=2, strategies=STRATEGIES, **ALL)
    losses, state, metrics = run(Plan(batch_size=16, node=8, fsdp=1), 12, strategy)
    assert metrics["failed_rounds"] == 0 and metrics["votes"] >= 6 and 1 <= metrics["soup_size"] <= 3
    assert losses[8] < losses[4] < losses[0]
    assert state.ema is not None and int(state.opt_state.soup_size) == metrics["soup_size"]


def test_the_soup_is_the_mean_of_agreed_models_and_what_is_evaluated():
    """With SGD each agreed model is better than the one before: all come in."""
    strategy = ConsensusConfig(every=H, strategies=("incremental_soup",))
    plan = Plan(batch_size=16, node=4, fsdp=2)
    agreed = [run(plan, steps, ConsensusConfig(every=H))[1].params for steps in (H, 2 * H)]
    _, state, metrics = run(plan, 2 * H, strategy)
    assert metrics["soup_size"] == 2
    for found, first, second in zip(*(jax.tree.leaves(x) for x in (state.eval_params, *agreed)), strict=True):
        np.testing.assert_allclose(found, (first + second) / 2, atol=1e-6)
    for found, expected in zip(jax.tree.leaves(state.params), jax.tree.leaves(agreed[1]), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_the_soup_has_its_share_of_an_integrated_model_once_it_has_a_model():
    shares = (("aggregation", 1.0), ("incremental_soup", 1.0))
    strategy = ConsensusConfig(
        every=H, merge_strategy="integrated", merge_shares=shares, strategies=("incremental_soup",)
    )
    plan = Plan(batch_size=16, node=4, fsdp=2)
    first, second = (run(plan, steps, ConsensusConfig(every=H))[1].params for steps in (H, 2 * H))
    _, state, _ = run(plan, H, strategy)
    for found, expected in zip(jax.tree.leaves(state.params), jax.tree.leaves(first), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)
    _, state, _ = run(plan, 2 * H, strategy)
    for found, *halves in zip(*(jax.tree.leaves(x) for x in (state.params, first, second)), strict=True):
        np.testing.assert_allclose(found, sum(halves) / 2, atol=1e-6)


def test_groups_meet_between_rounds():
    strategy = ConsensusConfig(every=4, strategies=("hierarchical",), group_every=2)
    plan = Plan(batch_size=16, node=4, fsdp=2)
    _, begun, _ = run(plan, 0, strategy)
    _, state, _ = run(plan, 2, strategy)
    _, apart, _ = run(plan, 2, ConsensusConfig(every=4))
    for own, free, agreed, start in zip(
        *(jax.tree.leaves(x) for x in (state.opt_state.params, apart.opt_state.params, state.params, begun.params)),
        strict=True,
    ):
        of_groups = free.reshape(2, 2, *free.shape[1:]).mean(axis=1)
        np.testing.assert_allclose(own, of_groups.repeat(2, axis=0), atol=1e-6)
        np.testing.assert_array_equal(agreed, start)
    _, first, _ = run(plan, 1, strategy)
    assert any(np.ptp(x[:2], axis=0).max() > 1e-5 for x in jax.tree.leaves(first.opt_state.params))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lying(ConsensusConfig):
    """The last node sends and votes what it likes."""

    factor: float = 1.0
    votes_for: bool = True

    def sent(self, agreed, own, number):
        return jax.tree.map(lambda start, x: x.at[3].set(start + self.factor * (x[3] - start)), agreed, own)

    def voted(self, approved):
        return approved if self.votes_for else approved.at[3].set(False)


def test_the_honest_vote_down_a_model_that_a_liar_has_spoiled():
    """By the mean, which one node moves anywhere."""
    plan = Plan(batch_size=16, node=4, fsdp=2)
    strategy = Lying(every=H, voting_strategy="byzantine", quality_threshold=0.85, factor=-3e3)
    _, begun, _ = run(plan, 0, strategy)
    _, state, metrics = run(plan, H, strategy)
    assert_equal(state.params, begun.params)
    assert metrics["votes"] == 0 and metrics["consensus_score"] == 1 and metrics["failed_rounds"] == 1
    read = {name: float(value) for name, value in metrics.items()}
    assert list(strategy.remarks(H, read)) == [
        "step 3: no agreement, consensus score 1.00 of 0.5, 0 votes of 3: the nodes go on from the last agreed model"
    ]


def test_a_liar_that_votes_no_stops_nothing():
    strategy = Lying(every=H, voting_strategy="byzantine", quality_threshold=0.85, votes_for=False)
    _, _, metrics = run(Plan(batch_size=16, node=4, fsdp=2), H, strategy)
    assert metrics["votes"] == 3 and metrics["node_3/vote"] == 0 and metrics["failed_rounds"] == 0


def test_a_quorum_is_of_two_thirds():
    """A vote of too few fails the round, whatever the score."""
    strategy = ConsensusConfig(voting_strategy="byzantine", quality_threshold=0.9)
    own, target = np.ones((4, 8)), np.ones((4, 8))
    target[2:] = -1  # to two nodes the model is worse than the agreed one
    agreed, nodes = verdict_of(strategy, own, LOSSES, target=target)
    assert nodes.verdict.approved.tolist() == [True, True, False, False] and nodes.verdict.failures == 1
    assert nodes.verdict.accepted.all() and not agreed["w"].any()
    target[2] = 1
    agreed, nodes = verdict_of(strategy, own, LOSSES, target=target)
    assert nodes.verdict.failures == 0 and agreed["w"].all()


def test_a_model_without_a_finite_loss_is_never_approved():
    strategy = ConsensusConfig(voting_strategy="byzantine", quality_threshold=0.0)
    _, nodes = verdict_of(strategy, np.ones((4, 8)), LOSSES, target=-np.ones((4, 8)))
    assert nodes.verdict.approved.all()
    _, nodes = verdict_of(strategy, np.full((4, 8), 1e25), LOSSES, target=-np.ones((4, 8)))
    assert not nodes.verdict.approved.any() and nodes.verdict.failures == 1


def test_a_round_is_of_the_nodes_that_are_drawn():
    own = np.arange(32.0).reshape(4, 8)
    strategy = ConsensusConfig(nodes_per_round=2, consensus_threshold=1.0)
    agreed, nodes = verdict_of(strategy, own, LOSSES)
    drawn = nodes.verdict.drawn
    assert drawn.sum() == 2 and nodes.verdict.accepted.tolist() == drawn.tolist() and nodes.verdict.failures == 0
    np.testing.assert_allclose(agreed["w"], own[drawn].mean(axis=0))
    np.testing.assert_array_equal(nodes.params["w"], np.tile(agreed["w"], (4, 1)))  # those too that were not drawn
    assert nodes.verdict.spare_faults == 0 and (nodes.verdict.quality == 1).all()
    assert (nodes.verdict.distances >= 0).tolist() == drawn.tolist()


def test_each_round_draws_other_nodes_and_says_nothing_of_the_others():
    strategy = ConsensusConfig(every=1, nodes_per_round=3)
    found = [round_of(strategy, [0.0] * 8, number) for number in range(6)]
    drawn = {tuple(one.state.verdict.drawn.tolist()) for one in found}
    assert len(drawn) > 1 and all(sum(nodes) == 3 for nodes in drawn)
    read = {name: float(value) for name, value in found[0].metrics.items()}
    assert read["consensus_score"] == 1 and sum(read[f"node_{n}/drawn"] for n in range(8)) == 3
    assert not list(strategy.remarks(1, read))
    left_out = found[0].state.verdict.drawn.argmax()
    one = round_of(strategy, [float(n == left_out) for n in range(8)], 0)  # a node that is drawn made no update
    read = {name: float(value) for name, value in one.metrics.items()}
    assert read["consensus_score"] == pytest.approx(2 / 3)
    assert [line.split(" has")[0] for line in strategy.remarks(1, read)] == [f"step 1: node_{left_out}"]


def test_an_integrated_model_is_the_weighted_mean_of_the_merges():
    own = np.random.default_rng(2).standard_normal((4, 8))
    target = np.tile(own[0], (4, 1))
    settings = {"target": target, "losses": LOSSES}
    by_mean, _ = verdict_of(ConsensusConfig(), own, **settings)
    by_weights, alone = verdict_of(ConsensusConfig(merge_strategy="convex"), own, **settings)
    shares = (("aggregation", 1.0), ("convex", 3.0))
    agreed, nodes = verdict_of(ConsensusConfig(merge_strategy="integrated", merge_shares=shares), own, **settings)
    want = 0.25 * by_mean["w"] + 0.75 * by_weights["w"]
    np.testing.assert_allclose(agreed["w"], want, atol=1e-6)
    np.testing.assert_allclose(nodes.verdict.weights, alone.verdict.weights)
    np.testing.assert_allclose(nodes.verdict.distances, np.linalg.norm(own - want, axis=1), rtol=1e-5)
    assert np.abs(by_mean["w"] - by_weights["w"]).max() > 0.1
    own[1] = 1e4  # finite, and far off: the convex merge leaves it out, and so does the mean
    agreed, nodes = verdict_of(ConsensusConfig(merge_strategy="integrated"), own, **settings)
    assert nodes.verdict.accepted.tolist() == [True, False, True, True] and np.abs(agreed["w"]).max() < 10


def test_what_few_bits_lose_of_a_node_that_is_not_drawn_is_kept():
    strategy = ConsensusConfig(nodes_per_round=2, compression=Compression(bits=4))
    own = np.linspace(0.1, 1, 32).reshape(4, 8)
    _, nodes = verdict_of(strategy, own, LOSSES, lost=0.25)
    for drawn, lost in zip(nodes.verdict.drawn, nodes.lost["w"], strict=True):
        assert (lost == 0.25).all() != drawn


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"proximal": 0.5}, "ConsensusConfig.proximal is 0.5, and has no effect without 'convexity' in strategies"),
        ({"group_every": 5}, "group_every is 5, and has no effect without 'hierarchical' in strategies"),
        ({"max_iterations": 3}, "max_iterations is 3, and has no effect without merge_strategy = 'convex', or a share"),
        ({"merge_shares": (("convex", 1.0),)}, "has no effect without merge_strategy = 'integrated'"),
        ({"merge_strategy": "integrated", "merge_shares": (("mean", 1.0),)}, "has 'mean': 1.0, must be each of"),
        ({"merge_strategy": "integrated", "merge_shares": (("convex", -1.0),)}, "with a share of at least 0"),
        (
            {"merge_strategy": "integrated", "merge_shares": (("incremental_soup", 1.0),)},
            "gives nothing to 'aggregation' and 'convex'",
        ),
        (
            {"merge_strategy": "integrated", "merge_shares": (("convex", 1.0), ("incremental_soup", 1.0))},
            "has 'incremental_soup', which is not in ConsensusConfig.strategies",
        ),
        (
            {"nodes_per_round": 2, "aggregation": Aggregation(rule=CoordinateMedian(), faults=1)},
            "must be 0 with ConsensusConfig.nodes_per_round",
        ),
        (
            {"frozen": ("em(bed", "")},
            "ConsensusConfig.frozen has 'em(bed', must be regular expressions (missing ), unt",
        ),
        ({"init_from": ("runs/a", " ")}, "ConsensusConfig.init_from has an empty name"),
        ({"nodes_per_round": 2, "strategies": ("hierarchical",)}, "has no effect with the strategy 'hierarchical'"),
    ],
    ids=str,
)
def test_fields_without_an_effect_or_out_of_their_range_are_refused(settings, said):
    with pytest.raises(UserError, match=re.escape(said)):
        ConsensusConfig(**settings)


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"nodes_per_round": 5}, "nodes_per_round is 5, must be from 1 to Plan.node (4), or None for all: try 2"),
        ({"frozen": ("a", "b", "c")}, "frozen has 3 patterns, whose number must divide Plan.node (4): try 2"),
        ({"init_from": ("a",) * 5}, "init_from has 5 models, must be at most Plan.node (4): set Plan.node = 5"),
    ],
    ids=str,
)
def test_fields_that_do_not_fit_the_nodes_are_refused(settings, said):
    with pytest.raises(UserError, match=re.escape(said)):
        ConsensusConfig(**settings).check(Plan(batch_size=16, node=4, fsdp=2))


def merged(own, target, **settings):
    strategy = ConsensusConfig(merge_strategy="convex", **{"max_iterations": 60, **settings})
    return verdict_of(strategy, own, LOSSES, target=target)


def test_a_convex_merge_finds_the_weights_of_the_least_loss():
    own = np.zeros((4, 8))
    own[:, :4] = 40 * np.eye(4)
    best = np.array([0.5, 0.3, 0.15, 0.05])
    agreed, nodes = merged(own, np.tile(best @ own, (4, 1)))
    np.testing.assert_allclose(nodes.verdict.weights, best, atol=5e-3)
    np.testing.assert_allclose(agreed["w"], nodes.verdict.weights @ own, rtol=1e-5)
    _, nodes = merged(own, np.tile(best @ own, (4, 1)), lambda_reg=1e6)
    np.testing.assert_allclose(nodes.verdict.weights, np.full(4, 0.25), atol=5e-3)


def test_a_convex_merge_is_not_worse_than_the_mean():
    rng = np.random.default_rng(0)
    for _ in range(3):
        own, target = 9 + rng.standard_normal((4, 8)), 9 + rng.standard_normal((4, 8))
        agreed, nodes = merged(own, target, max_iterations=3)
        assert nodes.verdict.failures == 0 and nodes.verdict.weights.sum() == pytest.approx(1)
        assert np.square(agreed["w"] - target).sum() <= np.square(own.mean(axis=0) - target).sum() * (1 + 1e-6)


@pytest.mark.parametrize("lie", [np.nan, np.inf, 1e25, -50.0], ids=str)
def test_a_liar_has_no_weight_and_is_named(lie):
    own = 1 + 0.1 * np.random.default_rng(0).standard_normal((4, 8))
    own[2] = lie
    agreed, nodes = merged(own, np.ones((4, 8)), lambda_reg=1.0)
    assert nodes.verdict.accepted.tolist() == [True, True, False, True] and nodes.verdict.weights[2] < 0.0025
    assert nodes.verdict.failures == 0 and nodes.verdict.spare_faults == -1
    assert np.abs(agreed["w"] - 1).max() < 0.2 and np.isfinite(nodes.verdict.distances).all()


def test_a_liar_without_weight_does_not_end_the_search():
    """Its slope overflows, and 0 times infinity is no number."""
    own = np.full((4, 8), 100.0)
    own[0], own[1], own[2] = 103, 96, 3e38
    _, nodes = merged(own, np.full((4, 8), 101.0))
    assert nodes.verdict.weights[0] > 0.4 and nodes.verdict.weights[2] == 0


def test_a_round_whose_best_model_is_one_nodes_succeeds():
    own = np.repeat([[1.0], [0.6], [0.55], [0.5]], 8, axis=1)
    agreed, nodes = merged(own, np.ones((4, 8)))
    assert nodes.verdict.failures == 0 and nodes.verdict.accepted.all() and nodes.verdict.weights[0] > 0.9
    np.testing.assert_allclose(agreed["w"], 1, atol=0.05)


def test_rows_that_are_broken_say_nothing_of_a_model():
    """One node's rows have no finite loss: the others' models are merged, and come into the soup."""
    plan = Plan(batch_size=16, node=4, fsdp=2)
    always = lambda step, batch: broken(0, batch)  # noqa: E731
    _, begun, _ = run(plan, 0, ConsensusConfig(every=H, merge_strategy="convex"))
    for settings in ({"merge_strategy": "convex"}, {"strategies": ("incremental_soup",)}):
        _, state, metrics = run(plan, H, ConsensusConfig(every=H, **settings), always)
        assert metrics["failed_rounds"] == 0 and metrics["consensus_score"] == 0.75, settings
        assert metrics.get("soup_size", 1) == 1
        assert any((x != y).any() for x, y in zip(jax.tree.leaves(state.eval_params), jax.tree.leaves(begun.params)))


def test_groups_meet_without_nodes_of_low_quality_and_not_in_a_round():
    """Node 7 is at 49 with a bad loss: its group takes the mean of the others, and the round does not see it."""
    config = dict(every=2, quality_threshold=0.85, strategies=("hierarchical",), group_every=1)
    losses = np.ones(8)
    losses[7] = 9
    of_round = round_of(ConsensusConfig(**config), [0.0] * 8, number=1, losses=losses)
    np.testing.assert_allclose(of_round.params["w"], np.mean(np.arange(7.0) ** 2), rtol=1e-6)
    before = round_of(ConsensusConfig(**config), [0.0] * 8, number=0, losses=losses).state.params["w"]
    np.testing.assert_allclose(before[:, 0], [3.5] * 4 + [np.mean([16, 25, 36])] * 4, rtol=1e-6)


def test_where_no_merge_is_finite_the_round_fails():
    agreed, nodes = merged(np.full((4, 8), np.nan), np.ones((4, 8)))
    assert not agreed["w"].any() and nodes.verdict.failures == 1 and not nodes.verdict.accepted.any()


def test_a_proximal_step_pulls_each_node_to_the_agreed_model():
    plan = Plan(batch_size=16, node=4, fsdp=2)
    _, free, _ = run(plan, 1, ConsensusConfig(every=H))
    _, held, _ = run(plan, 1, ConsensusConfig(every=H, strategies=("convexity",), proximal=2.0))
    share = RATE * 2.0
    for x, y, start in zip(*(jax.tree.leaves(t) for t in (free.opt_state.params, held.opt_state.params, free.params))):
        np.testing.assert_allclose(y, (x + share * start) / (1 + share), atol=1e-7)


@pytest.mark.parametrize(
    "settings, line",
    [
        (dict(num_nodes=8), "ConsensusConfig.num_nodes is 8, must be Plan.node (4): set both alike"),
        (dict(proximal=-1.0), "ConsensusConfig.proximal is -1.0, must be above 0 and finite: try 1.0"),
        (
            dict(strategies=("hierarchical",), groups=3),
            "ConsensusConfig.groups is 3, must divide Plan.node (4) into groups of two or more: try 2",
        ),
        (
            dict(strategies=("hierarchical",), groups=1),
            "ConsensusConfig.groups is 1, must be at least 2: try 2",
        ),
        (
            dict(strategies=("hierarchical",), group_every=7),
            "ConsensusConfig.group_every is 7, must divide ConsensusConfig.every (50) and be less: try 25",
        ),
        (
            dict(strategies=("hierarchical",), aggregation=Aggregation(rule=CoordinateMedian(), faults=1)),
            "Aggregation.faults is 1, must be 0 with the strategy 'hierarchical': a node that lies spoils the mean of its group: "
            "leave out one of them",
        ),
        (
            dict(merge_strategy="convex", aggregation=Aggregation(rule=CoordinateMedian())),
            "ConsensusConfig.aggregation has no effect with merge_strategy = 'convex': leave out one of them",
        ),
        (
            dict(
                voting_strategy="byzantine",
                quality_threshold=0.8,
                aggregation=Aggregation(rule=CoordinateMedian(), faults=1),
            ),
            "Plan.node is 3, must be at least 4 for a vote with Aggregation.faults = 1 (n >= 3f + 1, and at least one may lie): "
            "set Plan.node = 4",
        ),
        (
            dict(voting_strategy="byzantine"),
            "ConsensusConfig.quality_threshold is None, and with voting_strategy = 'byzantine' any finite model would be "
            "approved: try 0.85",
        ),
        (
            dict(strategies=("hierarchical",), every=1),
            "ConsensusConfig.every is 1, must be at least 2 for 'hierarchical': try 50",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_line(settings, line):
    nodes = 3 if "Plan.node is 3" in line else 4
    with pytest.raises(UserError) as caught:
        ConsensusConfig(**settings).check(Plan(batch_size=12, node=nodes))
    assert str(caught.value) == line
