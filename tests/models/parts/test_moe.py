"""Mixtures of experts: against plain loops over tokens, and equal on every mesh."""

import dataclasses
import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from capibara import config, sharding
from capibara.core import tree
from capibara.core.types import UserError
from capibara.interop.hf import tables
from capibara.interop.hf.layout import tensors
from capibara.kernels.grouped_matmul import dispatch as grouped_matmul
from capibara.models import api
from capibara.models.architectures.decoder import DecoderConfig
from capibara.models.parts import dispatch, moe, router
from capibara.models.parts.moe import Hints, Moe, MoeMLP
from capibara.sharding import Plan

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
sys.path.insert(0, str(GOLDEN))

import answers  # noqa: E402
import mixtures  # noqa: E402

CONFIG = DecoderConfig(vocab_size=64, embed_dim=16, num_layers=2, num_heads=2, mlp_dim=32, dtype="float32")
MOE = Moe(num_experts=8, top_k=2, expert_dim=24, balance_loss=0.1, router_z_loss=0.01)
ROWS, LENGTH = 8, 16


def inputs(rows=ROWS, length=LENGTH, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, length, CONFIG.embed_dim)).astype(np.float32)
    segments = np.ones((rows, length), np.int32)
    for row in range(rows):
        segments[row, length - row % 4 :] = 0  # some rows end in padding
    return jnp.asarray(x), jnp.asarray(segments)


def functional(mixture, config=CONFIG, seed=0):
    """(parameters, axes, f(parameters, x, segments, ...) -> (y, stats))."""
    graphdef, state = nnx.split(MoeMLP(config, mixture, nnx.Rngs(seed)))
    axes = {name: variable.axes for name, variable in state.items()}
    params = {name: 2.0 * value for name, value in nnx.to_pure_dict(state).items()}
    params = {name: value + 0.1 * ("bias" in name) for name, value in params.items()}

    def apply(params, *args, **kwargs):
        template = jax.tree.map(lambda v: v, state)
        nnx.replace_by_pure_dict(template, params)
        return nnx.merge(graphdef, template)(*args, **kwargs)

    return params, axes, jax.jit(apply)


def every_expert(params, x, activation):
    """[B, T, E, D]: each token through each expert."""
    h = jnp.einsum("btd,edf->btef", x, params["up"])
    if "up_bias" in params:
        h = h + params["up_bias"]
    h = activation(jnp.einsum("btd,edf->btef", x, params["gate"])) * h if "gate" in params else activation(h)
    y = jnp.einsum("btef,efd->bted", h, params["down"])
    return y + params["down_bias"] if "down_bias" in params else y


def by_loop(params, x, segments, mixture, config=CONFIG):
    """Token choice without a capacity, token by token: the reference."""
    logits = jnp.einsum("btd,de->bte", x, params["router"])
    scores = jax.nn.softmax(logits) if mixture.score == "softmax" else jax.nn.sigmoid(logits)
    gates, experts = jax.lax.top_k(scores, mixture.top_k)
    if mixture.gates == "normalized":
        gates = gates / gates.sum(-1, keepdims=True)
    outputs = every_expert(params, x, config.activation)
    chosen = jnp.take_along_axis(outputs, experts[..., None], 2)
    y = jnp.sum(gates[..., None] * chosen, axis=2)
    return jnp.where(segments[..., None] > 0, y, 0)


def objective(apply, mixture, x, segments):
    """A loss of all outputs and statistics, to differentiate."""
    target = jnp.asarray(np.random.default_rng(9).standard_normal(x.shape), jnp.float32)

    def loss(params, x):
        y, stats = apply(params, x, segments)
        return jnp.sum(y * target) + moe.router_loss(stats, mixture), stats

    return loss


def assert_close(got, want, tolerance=1e-5):
    """Within `tolerance` of the largest magnitude of each array."""
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance * float(np.abs(w).max() + 1e-6)),
        got,
        want,
    )


@pytest.mark.parametrize(
    "score, gates",
    [
        ("softmax", "scores"),
        ("sigmoid", "normalized"),
        pytest.param("softmax", "normalized", marks=pytest.mark.heavy),
        pytest.param("sigmoid", "scores", marks=pytest.mark.heavy),
    ],
)
def test_dropless_is_the_loop_over_tokens(score, gates):
    mixture = dataclasses.replace(MOE, score=score, gates=gates)
    params, _, apply = functional(mixture)
    x, segments = inputs()
    target = inputs(seed=1)[0]
    loop = functools.partial(by_loop, mixture=mixture)
    got = jax.value_and_grad(lambda p, x: jnp.sum(apply(p, x, segments)[0] * target), argnums=(0, 1))(params, x)
    want = jax.value_and_grad(lambda p, x: jnp.sum(loop(p, x, segments) * target), argnums=(0, 1))(params, x)
    assert_close(got, want)
    assert_close(apply(params, x, segments)[0], by_loop(params, x, segments, mixture))


def test_close_gates_are_shares_among_close_logits_that_are_left():
    logits = np.random.default_rng(0).normal(size=(2, 5, 6)).astype(np.float32)
    real = np.ones((2, 5), bool)
    mixture = Moe(num_experts=6, top_k=3, gates="close", closeness=0.8)
    choice, _ = router.choose(jnp.asarray(logits), jnp.asarray(real), mixture)
    for at in np.ndindex(2, 5):
        left, order = logits[at].copy(), np.argsort(-logits[at])[:3]
        np.testing.assert_array_equal(choice.experts[at], order)
        for expert, gate in zip(order, choice.gates[at]):
            far = (left[expert] - logits[at]) / np.maximum(np.abs(logits[at]), left[expert]) > mixture.closeness
            shares = np.where(far, 0.0, np.exp(left))
            np.testing.assert_allclose(gate, shares[expert] / shares.sum(), rtol=1e-5)
            left[expert] = -np.inf
    assert 0.1 < np.mean(np.asarray(choice.gates) == 1) < 0.9  # some have no other nearby


@pytest.mark.parametrize("dispatch_", ["dropless", "capacity"])
def test_plain_activation_with_biases(dispatch_):
    config = dataclasses.replace(CONFIG, activation="gelu", bias="all")
    mixture = dataclasses.replace(MOE, dispatch=dispatch_, capacity_factor=8.0)
    params, _, apply = functional(mixture, config)
    x, segments = inputs()
    target = inputs(seed=1)[0]
    got = jax.value_and_grad(lambda p: jnp.sum(apply(p, x, segments)[0] * target))(params)
    want = jax.value_and_grad(lambda p: jnp.sum(by_loop(p, x, segments, mixture, config) * target))(params)
    assert_close(got, want)


def test_one_expert_is_the_mlp_and_shared_experts_are_added():
    mixture = Moe(num_experts=1, top_k=1, expert_dim=24, shared_experts=2, shared_dim=12)
    params, _, apply = functional(mixture)
    x, segments = inputs()
    segments = jnp.ones_like(segments)
    one = by_loop(params, x, segments, mixture)
    h = jax.nn.silu(x @ params["shared_gate"]) * (x @ params["shared_up"])
    assert params["shared_up"].shape == (16, 24)
    assert_close(apply(params, x, segments)[0], one + h @ params["shared_down"])


def test_experts_and_shared_ones_are_averaged_and_normalised():
    summed = Moe(num_experts=4, top_k=2, expert_dim=24, shared_experts=1)
    params, _, apply = functional(summed)
    x, segments = inputs()
    y = apply(params, x, segments)[0]
    _, _, averaged = functional(dataclasses.replace(summed, combination="average"))
    assert_close(averaged(params, x, segments)[0], y / 2)
    plain = MoeMLP(CONFIG, summed, nnx.Rngs(0))(x, segments)[0]
    normed = MoeMLP(CONFIG, dataclasses.replace(summed, output_norm="layer"), nnx.Rngs(0))
    normed.output_norm.scale[...] = scale = jnp.linspace(0.5, 2.0, x.shape[-1])
    root = jnp.sqrt(jnp.mean(jnp.square(plain), -1, keepdims=True) + CONFIG.norm_eps)
    assert_close(normed(x, segments)[0], plain / root * scale)


def test_unused_experts_and_a_single_busy_one():
    """Empty groups, and one group with all rows, more than a tile."""
    params, _, apply = functional(dataclasses.replace(MOE, top_k=1))
    params["router"] = jnp.zeros((16, 8)).at[:, 5].set(jnp.ones(16))
    x, segments = inputs(rows=4, length=200)
    x = jnp.abs(x)
    y, stats = apply(params, x, segments)
    assert_close(y, by_loop(params, x, segments, dataclasses.replace(MOE, top_k=1)))
    assert float(stats["load"][5]) == float(stats["tokens"]) == int((segments > 0).sum())


def test_a_capacity_that_holds_all_is_dropless():
    x, segments = inputs()
    params, _, plain = functional(MOE)
    mixture = dataclasses.replace(MOE, dispatch="capacity", capacity_factor=4.0)
    assert mixture.capacity(LENGTH) == LENGTH
    *_, limited = functional(mixture)
    grad = functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    got = grad(objective(limited, mixture, x, segments))(params, x)
    want = grad(objective(plain, MOE, x, segments))(params, x)
    assert_close(got, want)
    assert got[0][1]["dropped"] == 0


def test_drops_are_the_latest_choices_and_are_counted():
    mixture = dataclasses.replace(MOE, dispatch="capacity", capacity_factor=0.75)
    params, _, apply = functional(mixture)
    x, segments = inputs()
    capacity = mixture.capacity(LENGTH)
    assert capacity == 3
    gates, experts = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
    gates = np.array(gates / gates.sum(-1, keepdims=True))
    outputs = np.array(every_expert(params, x, CONFIG.activation))
    want, dropped, offered = np.zeros(x.shape, np.float32), 0, np.zeros(8)
    for row in range(ROWS):
        taken = np.zeros(8, int)
        for position in range(LENGTH):
            for rank, expert in enumerate(np.array(experts)[row, position]):
                if segments[row, position] == 0:
                    continue
                offered[expert] += 1
                if taken[expert] < capacity:
                    want[row, position] += gates[row, position, rank] * outputs[row, position, expert]
                else:
                    dropped += 1
                taken[expert] += 1
    y, stats = apply(params, x, segments)
    assert_close(y, want)
    assert dropped > 10 and stats["dropped"] == dropped
    np.testing.assert_array_equal(stats["load"], offered)
    metrics = moe.router_metrics(stats, mixture)
    np.testing.assert_allclose(metrics["dropped_share"], dropped / offered.sum(), rtol=1e-6)


def test_capacity_follows_row_positions():
    mixture = dataclasses.replace(MOE, dispatch="capacity", capacity_factor=0.5)
    params, _, apply = functional(mixture)
    x, segments = inputs()
    row_positions = np.random.default_rng(3).permutation(LENGTH).astype(np.int32)
    y, stats = apply(params, x, segments)
    got, got_stats = apply(
        params, x[:, row_positions], segments[:, row_positions], row_positions_T=jnp.asarray(row_positions)
    )
    assert_close(got, y[:, row_positions])
    assert stats["dropped"] == got_stats["dropped"] > 0


def test_expert_choice_against_numpy():
    mixture = dataclasses.replace(MOE, routing="expert_choice", capacity_factor=0.5)
    params, _, apply = functional(mixture)
    x, segments = inputs()
    capacity = mixture.capacity(LENGTH)
    assert capacity == 2
    scores = np.array(jax.nn.softmax(x @ params["router"]))
    outputs = np.array(every_expert(params, x, CONFIG.activation))
    want, load, reached = np.zeros(x.shape, np.float32), np.zeros(8), np.zeros((ROWS, LENGTH), bool)
    for row in range(ROWS):
        real = np.flatnonzero(np.array(segments[row]) > 0)
        for expert in range(8):
            for position in real[np.argsort(-scores[row, real, expert])][:capacity]:
                want[row, position] += scores[row, position, expert] * outputs[row, position, expert]
                load[expert] += 1
                reached[row, position] = True
    y, stats = apply(params, x, segments)
    assert_close(y, want)
    np.testing.assert_array_equal(stats["load"], load)
    assert float(stats["dropped"]) == (~reached & (np.array(segments) > 0)).sum() > 0


@pytest.mark.parametrize("changes", [{}, {"dispatch": "capacity"}, {"routing": "expert_choice"}], ids=str)
def test_padding_reaches_nothing(changes):
    mixture = dataclasses.replace(MOE, **changes)
    params, _, apply = functional(mixture)
    x, segments = inputs()
    loss = objective(apply, mixture, x, segments)
    garbage = jnp.where(segments[..., None] > 0, x, 1e3)
    got, want = (jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x) for x in (garbage, x))
    assert_close(got, want, 1e-6)
    y, stats = apply(params, garbage, segments)
    assert (np.array(y)[np.array(segments) == 0] == 0).all()
    assert (np.array(got[1][1])[np.array(segments) == 0] == 0).all()
    assert float(stats["tokens"]) == int((segments > 0).sum())


def test_the_sums_are_those_of_their_formulas_and_add_up_over_rows():
    params, _, apply = functional(MOE)
    x, segments = inputs()
    _, stats = apply(params, x, segments)
    logits = np.array(x @ params["router"], np.float64)
    balance = z = entropy = 0.0
    for row in range(ROWS):
        rows = logits[row][np.array(segments[row]) > 0]
        p = np.exp(rows) / np.exp(rows).sum(-1, keepdims=True)
        chosen = np.argsort(-rows, axis=-1)[:, :2]
        f = np.bincount(chosen.ravel(), minlength=8) / chosen.size
        balance += len(rows) * 8 * (f * p.mean(0)).sum()
        z += (np.log(np.exp(rows).sum(-1)) ** 2).sum()
        entropy -= (p * np.log(p)).sum()
    np.testing.assert_allclose([stats[k] for k in ("balance", "z", "entropy")], [balance, z, entropy], rtol=1e-5)
    parts = [apply(params, x[i : i + 2], segments[i : i + 2])[1] for i in range(0, ROWS, 2)]
    assert_close(jax.tree.map(lambda *s: sum(s), *parts), stats)


def test_metrics_of_a_router_without_preference():
    stats = {name: jnp.full(3, 50.0) for name in ("balance", "z", "tokens", "dropped")}
    stats["load"] = jnp.tile(jnp.array([10.0, 40.0, 25.0, 25.0]), (3, 1))
    stats["entropy"] = 50.0 * jnp.log(jnp.full(3, 4.0))
    metrics = moe.router_metrics(stats, Moe(num_experts=4, balance_loss=0.01, router_z_loss=0.001))
    assert float(metrics["router_entropy"]) == pytest.approx(1.0)
    assert float(metrics["balance_loss"]) == pytest.approx(0.03)
    assert float(metrics["router_z_loss"]) == pytest.approx(0.003)
    assert float(metrics["dropped_share"]) == pytest.approx(0.5)
    assert (float(metrics["expert_load_max"]), float(metrics["expert_load_min"])) == pytest.approx((1.6, 0.4))
    assert float(metrics["expert_load/1"]) == pytest.approx(1.6)
    assert float(moe.router_loss(stats, Moe(num_experts=4, balance_loss=0.01))) == pytest.approx(1.5)


MESHES = [
    dict(expert=2),
    dict(expert=4),
    dict(expert=8),
    dict(expert=2, data=2),
    dict(expert=2, fsdp=2),
    dict(expert=4, tensor=2),
    dict(expert=2, context=2),
    dict(expert=2, context=2, tensor=2),
    dict(expert=2, fsdp=2, data=2),
    dict(fsdp=2, context=2, tensor=2),
]
MIXTURES = {
    "dropless": MOE,
    "capacity": dataclasses.replace(MOE, dispatch="capacity", capacity_factor=0.9),
    "expert_choice": dataclasses.replace(MOE, routing="expert_choice", capacity_factor=0.9),
}


def cases():
    """Dropless on all meshes; the others on meshes that exchange tokens, rows or experts."""
    every = [(sizes, "dropless") for sizes in MESHES]
    every += [(sizes, "capacity") for sizes in MESHES if sizes.get("expert") == 2 or len(sizes) == 3]
    every += [(sizes, "expert_choice") for sizes in (dict(expert=8), dict(expert=2, context=2, tensor=2))]
    for sizes, name in every:
        short = name != "dropless" or sizes.get("expert") != 2 or len(sizes) == 3
        short &= name != "capacity" or len(sizes) == 1 or "context" in sizes
        yield pytest.param(sizes, name, marks=() if short else pytest.mark.heavy)


def plan(**sizes):
    return Plan(batch_size=ROWS, **({"fsdp": 1} | sizes))


def on_mesh(mixture, sizes, config=CONFIG, rows=ROWS):
    """Loss, statistics and gradients on a mesh; on one device if the mesh is empty."""
    params, axes, apply = functional(mixture, config)
    x, segments = inputs(rows)
    grad = jax.jit(jax.value_and_grad(objective(apply, mixture, x, segments), argnums=(0, 1), has_aux=True))
    if not sizes:
        return grad(params, x)
    layout = plan(**sizes)
    mesh = sharding.make_mesh(layout, jax.devices()[: int(np.prod(list(sizes.values())))])
    params = jax.device_put(params, sharding.shardings(mesh, layout.rules, axes, params))
    with sharding.activate(mesh, layout.rules):
        return grad(params, x)


@functools.cache
def on_one_device(name):
    return on_mesh(MIXTURES[name], {})


@pytest.mark.parametrize("sizes, name", list(cases()), ids=str)
def test_every_mesh_gives_the_same_numbers(sizes, name):
    assert_close(on_mesh(MIXTURES[name], sizes), on_one_device(name))


def test_rows_that_do_not_divide_over_the_experts_stay_on_all_devices():
    """One row, as in generation of one text: tokens are not exchanged, outputs are summed."""
    for mixture in MIXTURES.values():
        assert_close(on_mesh(mixture, dict(expert=4, tensor=2), rows=1), on_mesh(mixture, {}, rows=1))


def test_biases_on_a_mesh_are_added_once():
    config = dataclasses.replace(CONFIG, activation="gelu", bias="all")
    for mixture in (MIXTURES["dropless"], MIXTURES["capacity"]):
        assert_close(on_mesh(mixture, dict(expert=2, tensor=2), config), on_mesh(mixture, {}, config))


def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What jax.lax.ragged_all_to_all does, for CPU, where XLA has none; one slice a device."""
    me = jax.lax.axis_index(axis_name)
    operands, starts, sizes, offsets = (
        jax.lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets)
    )
    row = jnp.arange(len(output))
    for sender in range(len(operands)):
        start, size, offset = starts[sender, me], sizes[sender, me], offsets[sender, me]
        here = (row >= offset) & (row < offset + size)
        piece = operands[sender].at[row - offset + start].get(mode="fill", fill_value=0)
        output = jnp.where(here[:, None], piece, output)
    return output


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(dict(expert=4), marks=pytest.mark.heavy),
        dict(expert=4, tensor=2),
        pytest.param(dict(expert=8), marks=pytest.mark.heavy),
        pytest.param(dict(expert=4, fsdp=2), marks=pytest.mark.heavy),
    ],
    ids=str,
)
def test_tokens_that_travel_by_ragged_all_to_all(sizes, monkeypatch):
    """The path of TPUs, with a replacement for the collective that XLA's CPU back end does not have."""
    calls = []

    def exchange(*args, **kwargs):
        calls.append(len(args[0]))
        return ragged_all_to_all(*args, **kwargs)

    monkeypatch.setattr(dispatch.jax.lax, "ragged_all_to_all", exchange)
    as_on_tpu(monkeypatch)
    got = on_mesh(MOE, sizes)
    assert len(calls) == 3  # rows and their gates there, results back
    monkeypatch.undo()
    assert_close(got, on_one_device("dropless"))


def as_on_tpu(monkeypatch):
    """The path of TPUs with the products of CPUs."""
    monkeypatch.setattr(grouped_matmul.sharding, "platform", lambda: "tpu")
    product = grouped_matmul._product
    monkeypatch.setattr(grouped_matmul, "_product", lambda *args: product(*args[:-1], "cpu"))


def test_layers_keep_the_experts_weights_sharded():
    params, axes, _ = functional(MOE)
    layout = plan(expert=2, fsdp=2, tensor=2)
    mesh = sharding.make_mesh(layout)
    placed = jax.device_put(params, sharding.shardings(mesh, layout.rules, axes, params))
    for name in ("up", "gate", "down"):
        assert placed[name].addressable_shards[0].data.size * 8 == placed[name].size
    assert placed["router"].is_fully_replicated


HINTS = Hints(domains=("python", "sql"), hold_steps=10, decay_steps=20)


def test_hint_weight_falls_from_start_to_zero():
    weights = [float(HINTS.weight(jnp.int32(step))) for step in (0, 10, 20, 30, 1000)]
    np.testing.assert_allclose(weights, [1.0, 1.0, 0.5, 0.0, 0.0])
    assert HINTS.assignment(8) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert Hints(domains=("a", "b", "c"), decay_steps=1).assignment(2) == ((0,), (1,), (0,))


def test_hints_decide_at_weight_one_and_are_nothing_at_zero():
    mixture = dataclasses.replace(MOE, hints=HINTS)
    params, _, apply = functional(mixture)
    params["router"] = 100.0 * params["router"]  # a very confident router
    x, segments = inputs()
    domains = jnp.tile(jnp.arange(LENGTH, dtype=jnp.int32) % 3, (ROWS, 1))
    logits, real = x @ params["router"], segments > 0
    choice, _ = router.choose(logits, real, mixture, router.hint_of(mixture, domains, jnp.int32(0)))
    alone, _ = router.choose(logits, real, mixture)
    real = np.array(real)
    for domain, experts in enumerate(HINTS.assignment(8), start=1):
        of_domain = real & (np.array(domains) == domain)
        assert np.isin(np.array(choice.experts)[of_domain], experts).all()
        assert not np.isin(np.array(alone.experts)[of_domain], experts).all()
    unhinted = real & (np.array(domains) == 0)
    np.testing.assert_array_equal(np.array(choice.experts)[unhinted], np.array(alone.experts)[unhinted])
    assert np.isfinite(np.array(choice.gates)).all()
    want, _ = apply(params, x, segments)
    assert_close(apply(params, x, segments, domains, jnp.int32(30))[0], want)
    np.testing.assert_array_equal(apply(params, x, segments, domains, None)[0], want)


def test_the_router_learns_from_the_hint_that_overrules_it():
    mixture = dataclasses.replace(MOE, balance_loss=0.0, router_z_loss=0.0, hints=HINTS)
    params, _, apply = functional(mixture)
    x, segments = inputs()
    domains = jnp.ones((ROWS, LENGTH), jnp.int32)

    def loss(params):
        stats = apply(params, x, segments, domains, jnp.int32(0))[1]
        return moe.router_loss(stats, mixture), stats

    def plain(params):
        p = jax.nn.softmax(x @ params["router"])
        return -0.01 * jnp.sum(jnp.log(jnp.sum(p[..., :4], -1)) * (segments > 0).astype(jnp.float32))

    (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params)
    want, want_grads = jax.value_and_grad(plain)(params)
    assert_close((value, grads["router"]), (want, want_grads["router"]))
    metrics = moe.router_metrics(stats, mixture)
    p = np.array(jax.nn.softmax(x @ params["router"]))[np.array(segments) > 0]
    np.testing.assert_allclose(metrics["hint_accuracy"], (p.argmax(-1) < 4).mean(), rtol=1e-6)
    assert metrics["hint_weight"] == 1.0


@pytest.mark.parametrize("step", [None, jnp.int32(0), jnp.int32(99)], ids=["evaluation", "hinted", "decayed"])
def test_accuracy_by_domain_is_that_of_the_router_without_its_hint(step):
    mixture = dataclasses.replace(MOE, hints=dataclasses.replace(HINTS, domains=("python", "sql", "other")))
    params, _, apply = functional(mixture)
    x, segments = inputs()
    domains = jnp.tile(jnp.arange(LENGTH, dtype=jnp.int32) % 3, (ROWS, 1))  # 0: unknown, python, sql
    stats = apply(params, x, segments, domains, step)[1]
    metrics = moe.router_metrics(jax.tree.map(lambda of_layer: jnp.stack([of_layer, of_layer]), stats), mixture)
    real, best = np.array(segments) > 0, np.argmax(np.array(x @ params["router"]), axis=-1)
    right, known = 0, 0
    for number, (name, experts) in enumerate(zip(mixture.hints.domains, mixture.hints.assignment(8)), 1):
        of_domain = best[real & (np.array(domains) == number)]
        hits = np.isin(of_domain, experts)
        right, known = right + hits.sum(), known + len(hits)
        np.testing.assert_allclose(metrics[f"hint_accuracy/{name}"], hits.mean() if len(hits) else np.nan, rtol=1e-6)
    np.testing.assert_allclose(metrics["hint_accuracy"], right / known, rtol=1e-6)
    np.testing.assert_array_equal(
        stats["domain_load"].sum(-1), [(real & (np.array(domains) == d)).sum() for d in range(4)]
    )


def test_domains_can_be_measured_without_a_hint():
    only_measured = dataclasses.replace(MOE, hints=dataclasses.replace(HINTS, start=0.0))
    params, _, apply = functional(MOE)
    x, segments = inputs()
    domains = jnp.tile(jnp.arange(LENGTH, dtype=jnp.int32) % 3, (ROWS, 1))

    def loss(mixture, params, *more):
        y, stats = functional(mixture)[2](params, x, segments, *more)
        return jnp.sum(jnp.square(y)) + moe.router_loss(stats, mixture)

    plain = jax.value_and_grad(lambda p: loss(MOE, p))(params)
    measured = jax.value_and_grad(lambda p: loss(only_measured, p, domains, jnp.int32(0)))(params)
    assert_close(measured, plain)


def domain_share(hints):
    """Trains a layer on two domains with different maps; returns the share of tokens on their experts without hints."""
    mixture = Moe(num_experts=4, top_k=1, expert_dim=32, balance_loss=0.01, gates="scores", hints=hints)
    params, _, apply = functional(mixture)
    rng = np.random.default_rng(0)
    mark, *maps = (jnp.asarray(rng.standard_normal(s) / 4, jnp.float32) for s in ((16,), (16, 16), (16, 16)))

    def batch(key):
        domain, noise = jax.random.split(key)
        domains = jax.random.randint(domain, (8, 16), 1, 3)
        signs = jnp.where(domains == 1, 1.0, -1.0)[..., None]
        x = jax.random.normal(noise, (8, 16, 16)) + signs * mark * 4
        return x, jnp.where(signs > 0, x @ maps[0], x @ maps[1]), domains

    def loss(params, key, step):
        x, wanted, domains = batch(key)
        y, stats = apply(params, x, jnp.ones_like(domains), domains, step)
        return (jnp.sum(jnp.square(y - wanted)) / 16 + moe.router_loss(stats, mixture)) / domains.size

    def update(params, step):
        grads = jax.grad(loss)(params, jax.random.fold_in(jax.random.key(1), step), step)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), None

    params, _ = jax.jit(lambda p: jax.lax.scan(update, p, jnp.arange(300, dtype=jnp.int32)))(params)
    x, _, domains = batch(jax.random.key(2))
    choice, _ = router.choose(x @ params["router"], jnp.ones(domains.shape, bool), mixture)
    return float(np.mean(np.array(choice.experts)[..., 0] // 2 + 1 == np.array(domains)))


@pytest.mark.heavy
def test_domain_experts_form_under_hints_and_then_route_themselves():
    hints = Hints(domains=("python", "sql"), hold_steps=100, decay_steps=100, loss=0.1)
    assert domain_share(hints) > 0.9
    assert domain_share(None) < 0.9


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(top_k=9), "Moe.top_k (9) must be at most num_experts (8)"),
        (dict(num_experts=0), "Moe.num_experts is 0, must be at least 1"),
        (dict(capacity_factor=0.0), "Moe.capacity_factor is 0.0"),
        (dict(balance_loss=-1.0), "Moe.balance_loss is -1.0"),
        (dict(combination="average"), "Moe.combination is for shared experts, shared_experts is 0: leave it out"),
        (dict(closeness=0.5), "Moe.closeness (0.5) is for gates 'close', not for 'normalized'"),
        (dict(gates="close", closeness=-0.5), "Moe.closeness is -0.5, must be finite and at least 0"),
        (
            dict(gates="close", score="sigmoid"),
            "Moe.gates ('close') compare the logits of tokens that choose by softmax",
        ),
        (dict(hints=Hints(domains=("sql",), experts=((9,),), decay_steps=1)), "0 to 7"),
    ],
)
def test_mistakes_are_named(changes, message):
    with pytest.raises(UserError) as error:
        dataclasses.replace(MOE, **changes)
    assert message in str(error.value) and "\n" not in str(error.value)


# Each is also what transformers counts for the same sizes.
PUBLISHED = {
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v3": 671_026_404_352 + 58 * 256,  # transformers counts no corrections: they are its buffers
    "glm4.5_air": 106_852_245_504 + 45 * 128,
    "minimax_m2": 228_689_748_992 + 62 * 256,
    "olmoe_7b": 6_919_161_856,
}
ACTIVE = {"mixtral_8x7b": 12.9e9, "mixtral_8x22b": 39.2e9, "qwen3_30b_a3b": 3.3e9, "qwen3_235b_a22b": 22.2e9}
ACTIVE |= {"deepseek_v3": 37e9, "olmoe_7b": 1.3e9}
ACTIVE_WITHOUT_EMBEDDING = {
    "gpt_oss_20b": 3.61e9,
    "gpt_oss_120b": 5.13e9,
}  # as OpenAI counts (arXiv:2508.10925, table 1)


def built(name):
    config.parse([f"models/{name}.gin"])
    model = api.build(config.build(DecoderConfig))
    assert config.unused() == []
    return model


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_mixture_has_its_published_size(name):
    model = built(name)
    assert model.param_count == PUBLISHED[name]
    if name in ACTIVE:
        embedding = model.config.vocab_size * model.config.embed_dim
        assert model.flops_per_token(1) / 6 + embedding == pytest.approx(ACTIVE[name], rel=0.02)
    elif name in ACTIVE_WITHOUT_EMBEDDING:
        assert model.flops_per_token(1) / 6 == pytest.approx(ACTIVE_WITHOUT_EMBEDDING[name], rel=0.005)


def test_the_tiny_mixture_is_as_large_as_it_says_and_costs_what_the_tiny_model_does():
    model = built("moe_tiny")
    assert model.param_count == 3_694_208
    config.reset()
    assert model.flops_per_token(256) == pytest.approx(built("tiny").flops_per_token(256), rel=0.01)


REFERENCE = json.loads((GOLDEN / "moe.json").read_text())


@pytest.mark.parametrize("name", mixtures.CONFIGS)
def test_logits_equal_the_reference(name):
    """The weights are drawn by their names in memory, as for golden/moe.json."""
    model = api.build(mixtures.CONFIGS[name])
    leaves = jax.tree.leaves(model.abstract_params)
    shapes = dict(zip(tree.path_names(model.abstract_params), [leaf.shape for leaf in leaves], strict=True))
    values = tensors.read(tables.of(name, shapes, {}, fused_experts=True), shapes, answers.draw)
    assert values.keys() == shapes.keys()
    params = tree.map_with_names(lambda path, _: values[path], model.abstract_params)
    tokens = np.array(REFERENCE["tokens"], np.int32)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    batch = {"tokens": tokens, "positions": positions, "segment_ids": np.ones_like(tokens)}
    got = np.asarray(jax.jit(model.logits)(params, batch))[-1, 2 : tokens.shape[1] : 3, 5:96:12]
    np.testing.assert_allclose(got, REFERENCE[name], rtol=0, atol=2e-4)
