"""Consensus training: nodes that agree after each step train as one model, and others in rounds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from capibara import sharding
from capibara.consensus.aggregation import Aggregation, Bucketing, CenteredClipping, CoordinateMedian
from capibara.consensus.compression import Compression
from capibara.consensus.outer import OuterSgd
from capibara.models import api
from capibara.models.api import DecoderConfig
from capibara.sharding import Plan
from capibara.strategies.consensus import ConsensusConfig
from capibara.training import state as states
from capibara.training.state import Apart
from capibara.training.step import make_nodes_step, make_train_step
from capibara.training.strategy import of_all

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
    apart = None if strategy is None else Apart(strategy, plan.node)
    shardings = states.state_shardings(model, tx, mesh, plan.rules, ema=False, apart=apart)
    step = make_train_step(model, tx, lambda _: RATE, plan, mesh)
    if strategy is not None:
        strategy.check(plan)
        step = make_nodes_step(step, model, strategy, shardings)
    step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    init = functools.partial(states.init_state, model, tx, ema=False, apart=apart)
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


def verdict_of(strategy, own, losses, agreed=None, failures=0, moment=0.0):
    """The next model, and the nodes, after a round of four nodes with given parameters and losses.

    `failures`: rounds that failed before. `moment`: the moments of all nodes.
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
    )
    shardings = strategy.shardings(state, params, jax.tree.map(lambda _: params["w"], optax.adam(RATE).init(agreed)))
    meet = jax.jit(strategy._round(mesh, params))
    placed = dataclasses.replace(
        state,
        **{
            name: jax.device_put(getattr(state, name), getattr(shardings, name)) for name in ("params", "outer", "lost")
        },
    )
    return jax.device_get(meet(jax.device_put(agreed, params), placed, np.int32(1)))


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


def round_of(strategy, skipped, number=0):
    """(agreed model, nodes) after a step of eight nodes, node n at n."""
    mesh = sharding.make_mesh(Plan(batch_size=8, node=8, fsdp=1))
    params = {"w": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())}
    agreed = {"w": jnp.zeros(4)}
    metrics = dict(loss=jnp.ones(8), grad_norm=jnp.ones(8), tokens=jnp.full(8, 4.0), skipped=jnp.asarray(skipped))
    own = {"w": jnp.broadcast_to(jnp.arange(8.0)[:, None] ** 2, (8, 4))}
    step = strategy.step(lambda _, opt_state, *more: (own, opt_state, metrics), mesh, params)
    return jax.device_get(jax.jit(step)(jnp.int32(number), agreed, strategy.init(optax.sgd(0.1), agreed, 8), {}))


def test_a_node_whose_updates_were_skipped_has_no_part():
    """Its loss is finite: a spike, or gradients that were not finite."""
    _, nodes, _ = round_of(ConsensusConfig(every=1), [0.0, 0, 1, 0, 0, 0, 0, 0])
    assert nodes.verdict.quality[2] == -1 and nodes.verdict.accepted.tolist() == [n != 2 for n in range(8)]


def test_each_round_draws_its_own_key():
    strategy = ConsensusConfig(every=1, aggregation=Aggregation(rule=CoordinateMedian(), before=(Bucketing(),)))
    found = [round_of(strategy, [0.0] * 8, number).params["w"][0] for number in range(6)]
    assert len({float(x) for x in found}) > 1
