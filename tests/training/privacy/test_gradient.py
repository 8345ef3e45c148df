"""DP-SGD: the gradient is the mean of clipped ones with the noise that is counted."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from capibara import sharding
from capibara.consensus.privacy import Privacy
from capibara.models import api
from capibara.models.api import DecoderConfig, Moe
from capibara.objectives.base import of_cross_entropy
from capibara.sharding import Plan
from capibara.training.base.state import TrainState
from capibara.training.methods.method import StepParts
from capibara.training.methods.private import Private
from capibara.training.privacy.gradient import NOISE_KEY, key_sharding, make_private_gradient
from capibara.training.stability.anomalies import Anomalies
from capibara.training.step import make_train_step

CONFIG = DecoderConfig(
    vocab_size=128, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=64, dtype="float32"
)
EXPERTS = dataclasses.replace(CONFIG, moe=Moe(num_experts=4, top_k=2))
ROWS, LENGTH = 8, 16
ALMOST_NONE = 1e-9  # a noise multiplier
MESHES = {
    "1": (CONFIG, {"fsdp": 1}),
    "data8": (CONFIG, {"data": 8, "fsdp": 1}),
    "data2-fsdp2-tensor2": (CONFIG, {"data": 2, "fsdp": 2, "tensor": 2}),
    "data2-context2": (CONFIG, {"data": 2, "fsdp": 1, "context": 2}),
    "experts-1": (EXPERTS, {"fsdp": 1}),
    "experts-fsdp2-expert2": (EXPERTS, {"fsdp": 2, "expert": 2}),
}


def batch_of(seed=0):
    """Rows of different lengths; the last one is padding."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 128, (ROWS, LENGTH)).astype(np.int32)
    real = np.arange(LENGTH) < np.array([*rng.integers(1, LENGTH, ROWS - 1), 0])[:, None]
    return {
        "tokens": tokens,
        "targets": (tokens * 3 + 1) % 128,
        "weights": real.astype(np.float32),
        "segment_ids": real.astype(np.int32),
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
    }


def key_of(*words):
    return np.array(words, np.uint32)


@functools.cache
def weights(config):
    return jax.jit(api.build(config).init)(jax.random.key(0))


@functools.cache
def of_documents(config):
    """The gradient and the loss of each row by itself, on one device."""
    model = api.build(config)
    objective = of_cross_entropy(model, 0.0)

    @jax.jit
    def gradient(params, row):
        def loss(params):
            loss, sums, _ = objective.checked_sums(params, row, Plan(batch_size=1).remat_policy, 0)
            return loss / jnp.maximum(sums.weight, 1.0)

        return jax.grad(loss)(params)

    rows = [{name: value[b : b + 1] for name, value in batch_of().items()} for b in range(ROWS)]
    return [jax.device_get(gradient(weights(config), row)) for row in rows]


@functools.cache
def program(config, sizes, privacy):
    """The gradient of (parameters, batch, step), compiled once; the parameters; the mesh and the rules of both."""
    plan = Plan(batch_size=ROWS, **dict(sizes))
    mesh = sharding.make_mesh(plan, jax.devices()[: int(np.prod([size for _, size in sizes]))])
    model = api.build(config)
    gradient = make_private_gradient(of_cross_entropy(model, 0.0), plan, mesh, privacy)
    placed = jax.device_put(weights(config), sharding.shardings(mesh, plan.rules, model.axes, model.abstract_params))
    return jax.jit(lambda params, batch, step: gradient(params, {}, batch, step, None)), placed, mesh, plan.rules


def private_gradient(config, sizes, privacy, batch, key=(1, 2), step=0):
    call, placed, mesh, rules = program(config, tuple(sizes.items()), privacy)
    batch = sharding.global_batch(sharding.batch_sharding(mesh, rules), batch)
    batch[NOISE_KEY] = jax.device_put(key_of(*key), key_sharding(mesh))
    grads, sums, _, metrics = call(placed, batch, jnp.int32(step))
    return jax.device_get((grads, sums, metrics))


@pytest.mark.parametrize("mesh", MESHES)
def test_the_gradient_is_the_mean_of_the_documents_clipped_gradients(mesh):
    config, sizes = MESHES[mesh]
    norms = [float(optax.tree.norm(grads)) for grads in of_documents(config)]
    clip = float(np.median(norms))
    want = jax.tree.map(np.zeros_like, of_documents(config)[0])
    for grads, norm in zip(of_documents(config), norms, strict=True):
        want = jax.tree.map(lambda total, g: total + g * min(1.0, clip / max(norm, 1e-30)) / ROWS, want, grads)
    privacy = Privacy(clip_norm=clip, noise_multiplier=ALMOST_NONE)
    found, sums, metrics = private_gradient(config, sizes, privacy, batch_of())
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-6, rtol=1e-4), found, want)
    assert metrics["clipped_share"] == sum(norm > clip for norm in norms) / ROWS
    assert metrics["broken_rows"] == 0 and sums.weight == batch_of()["weights"].sum()


def test_the_noise_is_what_the_ledger_counts_and_new_in_each_step_and_start():
    privacy = Privacy(clip_norm=0.5, noise_multiplier=3.0)
    calm = private_gradient(
        CONFIG, {"fsdp": 1}, dataclasses.replace(privacy, noise_multiplier=ALMOST_NONE), batch_of()
    )[0]

    def noise(sizes=None, **options):
        found = private_gradient(CONFIG, sizes or {"fsdp": 1}, privacy, batch_of(), **options)[0]
        leaves = zip(jax.tree.leaves(found), jax.tree.leaves(calm), strict=True)
        return np.concatenate([np.ravel(x - y) for x, y in leaves])

    one = noise()
    deviation = 3.0 * 0.5 / ROWS
    assert np.std(one) == pytest.approx(deviation, rel=0.02) and abs(np.mean(one)) < 4 * deviation / np.sqrt(one.size)
    np.testing.assert_allclose(noise({"data": 2, "fsdp": 2, "tensor": 2}), one, atol=1e-5)
    for other in (noise(step=1), noise(key=(1, 3)), noise(key=(2, 2))):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.03
    sizes = np.cumsum([x.size for x in jax.tree.leaves(calm)])[:-1]
    large = [part[:1000] for part in np.split(one, sizes) if part.size >= 1000]
    assert len(large) > 3 and np.abs(np.corrcoef(large) - np.eye(len(large))).max() < 0.15


def test_a_document_moves_the_sum_by_the_clip_norm_at_most_and_a_broken_one_not_at_all():
    privacy = Privacy(clip_norm=0.01, noise_multiplier=ALMOST_NONE)
    sizes = {"data": 4, "fsdp": 1}
    whole, sums, _ = private_gradient(CONFIG, sizes, privacy, batch_of())
    without = batch_of()
    without["weights"][2] = 0
    found, of_others, _ = private_gradient(CONFIG, sizes, privacy, without)
    moved = optax.tree.norm(jax.tree.map(lambda x, y: (x - y) * ROWS, whole, found))
    assert 0.0099 < moved < 0.0101
    broken = batch_of()
    broken["weights"][2, 0] = np.nan
    same, of_good, metrics = private_gradient(CONFIG, sizes, privacy, broken)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-7), same, found)
    assert metrics["broken_rows"] == 1 and np.isfinite(of_good.nll) and of_good.weight == of_others.weight


def step_of(privacy, **options):
    """The jitted step of a run on a device, and its first state."""
    plan, model = Plan(batch_size=ROWS, fsdp=1), api.build(CONFIG)
    mesh = sharding.make_mesh(plan, jax.devices()[:1])
    method, parts = Private(privacy), StepParts(model, plan, mesh, of_cross_entropy(model, 0.0), None)
    gradient, tx = method.gradient(parts), optax.sgd(0.1)
    step = make_train_step(model, tx, lambda _: 0.1, plan, mesh, gradient=gradient, anomalies=Anomalies())
    return jax.jit(method.step(parts, step)), TrainState(jnp.int32(0), weights(CONFIG), tx.init(weights(CONFIG)), None)


def test_a_step_is_not_skipped_because_of_one_document():
    """A batch whose one document is broken changes the model as one in which it counts as zero."""
    step, state = step_of(Privacy(clip_norm=0.5, noise_multiplier=2.0))
    none = batch_of() | {"weights": np.zeros((ROWS, LENGTH), np.float32), NOISE_KEY: key_of(1, 2)}
    broken = none | {"weights": none["weights"].copy()}
    broken["weights"][3, 0] = np.nan
    (without, _), (after, metrics) = step(state, none), step(state, broken)
    jax.tree.map(np.testing.assert_array_equal, after.params, without.params)
    assert metrics["skipped"] == 0 and np.isnan(metrics["loss"]) and metrics["broken_rows"] == 1
    assert any(np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (after.params, state.params)), strict=True))


def test_a_model_that_has_diverged_does_not_look_perfect():
    """Its rows are all left out."""
    step, state = step_of(Privacy(clip_norm=0.5, noise_multiplier=2.0))
    state = dataclasses.replace(state, params=jax.tree.map(lambda x: x * np.nan, state.params))
    _, metrics = step(state, batch_of() | {NOISE_KEY: key_of(1, 2)})
    assert np.isnan(metrics["loss"]) and metrics["broken_rows"] == ROWS
