"""The loss of multi-token prediction on meshes, in a step, and in what a fine-tuning chooses."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
import pytest

from capibara import sharding
from capibara.cli.composition import finetuning
from capibara.cli.composition.finetuning import Method
from capibara.cli.composition.pretrained import Pretrained
from capibara.core import tree
from capibara.core.types import UserError
from capibara.models import api
from capibara.models.api import DecoderConfig, Lora, Moe, Mtp
from capibara.objectives.base import of_cross_entropy
from capibara.optim import Optimizer
from capibara.planner.model import workload
from capibara.sharding import Plan
from capibara.training.metrics import Meter

ROWS, LENGTH, V = 8, 16, 64
CONFIG = DecoderConfig(
    vocab_size=V, embed_dim=32, num_layers=2, num_heads=4, mlp_dim=64, dtype="float32", mtp=Mtp(layers=2, loss_weight=0.5),
    moe=Moe(num_experts=4, expert_dim=32, balance_loss=0.1),
)  # fmt: skip


def batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, V, (ROWS, LENGTH + 1)).astype(np.int32)
    segments = np.tile(np.repeat([1, 2, 0], [7, 6, 3]), (ROWS, 1)).astype(np.int32)
    positions = np.tile([*range(7), *range(6), 0, 0, 0], (ROWS, 1)).astype(np.int32)
    rows = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": segments, "positions": positions}
    return rows | {"weights": (segments > 0).astype(np.float32)}


def loss_and_gradients(devices, **sizes):
    model, plan = api.build(CONFIG), Plan(batch_size=ROWS, remat="full", **sizes)
    mesh = sharding.make_mesh(plan, devices)
    shardings = sharding.shardings(mesh, plan.rules, model.axes, model.abstract_params)
    objective = of_cross_entropy(model, 0.0)

    def loss(params, batch):
        with sharding.activate(mesh, plan.rules, plan.pipeline(mesh)):
            return objective.sums(params, batch, plan.remat_policy, None)[0] / (ROWS * LENGTH)

    params = jax.device_put(model.init(jax.random.key(0)), shardings)
    rows = sharding.global_batch(sharding.batch_sharding(mesh, plan.rules), batch())
    return jax.device_get(jax.jit(jax.value_and_grad(loss))(params, rows))


@pytest.mark.parametrize("sizes", [dict(fsdp=1, context=2), dict(fsdp=2, context=2, expert=2)], ids=str)
def test_a_mesh_has_the_loss_and_the_gradients_of_one_device(sizes):
    want = loss_and_gradients(jax.devices()[:1])
    found = loss_and_gradients(jax.devices()[: math.prod(sizes.values())], **sizes)
    np.testing.assert_allclose(found[0], want[0], rtol=1e-5)
    for path, a, b in zip(tree.path_names(want[1]), jax.tree.leaves(found[1]), jax.tree.leaves(want[1]), strict=True):
        assert np.abs(b).max() > 1e-7, path
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6, err_msg=path)


def test_stages_are_refused():
    with pytest.raises(UserError, match="Plan.stage is above 1, and pipelines have no multi-token prediction"):
        loss_and_gradients(jax.devices()[:2], stage=2, fsdp=1, pipeline_microbatches=2)


def test_a_log_averages_its_metrics_over_the_steps():
    meter = Meter(1)
    for loss in (1.0, 3.0):
        meter.add({"loss": loss, "tokens": 1.0, "grad_norm": 0.0, "mtp_loss": loss, "mtp_acceptance": loss / 10})
    read = meter.read()
    assert (read["mtp_loss"], read["mtp_acceptance"]) == (2.0, pytest.approx(0.2))


def test_adapters_leave_the_modules_as_they_are_unless_they_are_saved():
    for saved, trained in (((), False), (("mtp/*",), True)):
        model = api.build(dataclasses.replace(CONFIG, lora=Lora(rank=2, modules_to_save=saved)))
        assert ("mtp" in model.trained(model.abstract_params)) is trained


def test_the_planner_counts_the_modules():
    with_modules, without = (
        workload.describe(api.build(dataclasses.replace(CONFIG, mtp=mtp)), Optimizer(), length=LENGTH)
        for mtp in (CONFIG.mtp, None)
    )
    assert [stack.name for stack in with_modules.stacks] == ["decoder", "mtp"]
    assert with_modules.stacks[1].layers == 2 and len(without.stacks) == 1
    assert with_modules.params.total() > without.params.total()
    assert with_modules.model_flops_per_token > 1.5 * without.model_flops_per_token


@pytest.mark.parametrize(
    "method, binding",
    [
        (Method.LORA, None),
        (Method.FULL, None),
        (Method.DPO, "Mtp.loss_weight = 0.0"),
        (Method.GRPO, "Mtp.loss_weight = 0.0"),
        (Method.REWARD, "DecoderConfig.mtp = None"),
    ],
)
def test_a_fine_tuning_by_another_loss_freezes_them(method, binding):
    model = Pretrained("model", CONFIG, None, False)
    assert list(finetuning._without_mtp_loss(method, model)) == ([] if binding is None else [binding])
