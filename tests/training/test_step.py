"""The step: the same numbers on every mesh, tokens weighted alike, and what each option adds."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from capibara import sharding
from capibara.models import api
from capibara.models.api import DecoderConfig
from capibara.objectives.base import of_cross_entropy
from capibara.optim import Optimizer, Schedule
from capibara.sharding import Plan
from capibara.training.base import state as states
from capibara.training.methods.nodes import make_node_loss
from capibara.training.step import make_train_step

CONFIG = DecoderConfig(
    vocab_size=128, embed_dim=64, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=128, dtype="float32"
)
OPTIMIZER = Optimizer(schedule=Schedule(learning_rate=1e-2, warmup_steps=2))


def batch_of(step, rows=16, length=32):
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, 128, (rows, length)).astype(np.int32)
    return {
        "tokens": tokens,
        "targets": (tokens * 3 + 1) % 128,
        "weights": (rng.random((rows, length)) > np.linspace(0, 0.9, rows)[:, None]).astype(np.float32),
        "segment_ids": np.tile(np.repeat([1, 2], length // 2).astype(np.int32), (rows, 1)),
        "positions": np.tile(np.arange(length, dtype=np.int32) % (length // 2), (rows, 1)),
    }


@functools.cache
def new_state(ema):
    """Made on one device: the tests of a run's start are elsewhere, and every mesh would compile it anew."""
    model = api.build(CONFIG)
    tx = OPTIMIZER.build(100, model.axes)
    return jax.device_get(jax.jit(functools.partial(states.init_state, model, tx, ema=ema))(jax.random.key(0)))


def run(plan, steps, devices=None, **options):
    """Losses of the first steps, and the last state."""
    model = api.build(CONFIG)
    mesh = sharding.make_mesh(plan, devices)
    tx = OPTIMIZER.build(100, model.axes)
    ema = options.get("ema_decay") is not None
    shardings = states.state_shardings(model, tx, mesh, plan.rules, ema=ema)
    step = make_train_step(model, tx, OPTIMIZER.schedule.build(100), plan, mesh, **options)
    step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    state, losses = jax.device_put(new_state(ema), shardings), []
    rows = sharding.batch_sharding(mesh, plan.rules)
    for index in range(steps):
        state, metrics = step(state, sharding.global_batch(rows, batch_of(index)))
        losses.append(float(metrics["loss"]))
    return np.array(losses), state, metrics


@functools.cache
def one_device():
    return run(Plan(batch_size=16), 20, jax.devices()[:1])


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(dict(data=8, fsdp=1), marks=pytest.mark.heavy),
        pytest.param(dict(fsdp=8), marks=pytest.mark.heavy),
        dict(tensor=2, fsdp=4),
    ],
    ids=str,
)
def test_every_mesh_learns_alike(sizes):
    losses, state, _ = run(Plan(batch_size=16, **sizes), 20)
    want, want_state, _ = one_device()
    assert want[-1] < 0.9 * want[0]
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert int(state.step) == int(want_state.step) == 20


def test_a_tensor_axis_alone_learns_alike():
    losses, *_ = run(Plan(batch_size=16, tensor=2, fsdp=1), 2, jax.devices()[:2])
    np.testing.assert_allclose(losses, one_device()[0][:2], rtol=1e-5)


def test_parameters_and_moments_are_sharded():
    _, state, _ = run(Plan(batch_size=16, tensor=2, fsdp=4), 1)
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == (2, 64, 128)]
    assert len(moments) == 4  # first and second moments of the two projections into the MLP
    for leaf in [state.params["layers"]["mlp"]["up"], *moments]:
        assert leaf.addressable_shards[0].data.size * 8 == leaf.size


def test_an_optimizer_may_keep_no_state():
    """The empty tuple, which optimizers outside of optax have for no state, is no tuple of axis names."""
    model, plan = api.build(CONFIG), Plan(batch_size=16, fsdp=8)
    stateless = optax.GradientTransformation(lambda params: (), lambda updates, state, params=None: (updates, state))
    tx = optax.chain(stateless, optax.trace(0.9))
    found = states.state_shardings(model, tx, sharding.make_mesh(plan), plan.rules, ema=False).opt_state
    assert found[0] == () and jax.tree.structure(found[1].trace) == jax.tree.structure(model.abstract_params)


@pytest.mark.parametrize("remat", [pytest.param("dots", marks=pytest.mark.heavy), "full"])
def test_accumulation_and_remat_change_nothing(remat):
    losses, state, metrics = run(Plan(batch_size=16, accumulation=2, remat=remat), 3)
    want, want_state, want_metrics = run(Plan(batch_size=16), 3)
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], want_metrics["grad_norm"], rtol=1e-5)
    assert metrics["tokens"] == want_metrics["tokens"] == batch_of(2)["weights"].sum()


def test_micro_batches_of_unequal_weight_count_by_their_tokens():
    """Every row has another share of real tokens, so a mean of micro-batch means would differ."""
    batch = batch_of(0)
    per_row = batch["weights"].sum(-1)
    assert per_row[0::2].sum() != per_row[1::2].sum()
    losses, *_ = run(Plan(batch_size=16, accumulation=2), 1)
    whole, *_ = run(Plan(batch_size=16), 1)
    np.testing.assert_allclose(losses, whole, rtol=1e-6)


def test_the_loss_of_a_node_is_that_of_the_step_without_dropout():
    """Summed over its micro-batches, and its gradient too."""
    params, losses = new_state(False).params, {}
    for accumulation in (1, 2):
        plan = Plan(batch_size=16, accumulation=accumulation)
        model = api.build(dataclasses.replace(CONFIG, dropout_rate=0.5 if accumulation == 2 else 0.0))
        of_node = make_node_loss(model, plan, sharding.make_mesh(plan))
        grads, sums = jax.jit(of_node.gradient)(params, model.frozen(params), batch_of(0))
        np.testing.assert_allclose(jax.jit(of_node.sums)(params, model.frozen(params), batch_of(0)), sums, rtol=1e-6)
        losses[accumulation] = jax.device_get((sums, grads))
    whole, *_ = run(Plan(batch_size=16), 1)
    np.testing.assert_allclose(
        losses[1][0], [whole[0] * batch_of(0)["weights"].sum(), batch_of(0)["weights"].sum()], rtol=1e-5
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), losses[1], losses[2])


def test_ema_follows_its_formula_and_is_what_evaluation_sees():
    _, first, _ = run(Plan(batch_size=16), 1)
    _, state, _ = run(Plan(batch_size=16), 1, ema_decay=0.9)
    start = api.build(CONFIG).init(jax.random.key(0))
    want = jax.tree.map(lambda a, b: 0.1 * a + 0.9 * b, start, first.params)  # min(0.9, 1 / 10) at the first step
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state.ema, want)
    assert state.eval_params is state.ema and first.eval_params is first.params


def test_z_loss_is_the_mean_squared_log_normaliser_and_reaches_the_gradient():
    """Against the whole logits; that the gradient is the right one is shown in test_losses.py."""
    model, batch = api.build(CONFIG), batch_of(0)
    params = model.init(jax.random.key(0))
    log_z = jax.nn.logsumexp(model.logits(params, batch), axis=-1)
    want = 0.1 * np.average(np.square(log_z), weights=batch["weights"])
    losses, state, metrics = run(Plan(batch_size=16), 1, objective=of_cross_entropy(api.build(CONFIG), 0.1))
    plain_losses, plain_state, plain_metrics = run(Plan(batch_size=16), 1)
    np.testing.assert_allclose(metrics["z_loss"], want, rtol=1e-5)
    np.testing.assert_array_equal(losses, plain_losses)  # the loss reported is without it
    assert plain_metrics["z_loss"] == 0.0
    assert abs(metrics["grad_norm"] / plain_metrics["grad_norm"] - 1) > 1e-3
    assert not np.allclose(state.params["embedding"], plain_state.params["embedding"], atol=1e-5)


def test_learning_rate_in_the_metrics_is_the_one_of_the_step():
    *_, metrics = run(Plan(batch_size=16), 2)
    assert float(metrics["learning_rate"]) == pytest.approx(float(OPTIMIZER.schedule.build(100)(1)))
