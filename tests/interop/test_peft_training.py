"""Adapters train here as in PEFT: five steps of AdamW in training.json, recorded by training_peer.py.

python tests/interop/training_peer.py record tests/interop/training.json    (peft 0.21.2 made the committed file)
Every family and kind of training is compared with it in test_transformers_training.py.
"""

import dataclasses
import json
import pathlib
import sys

import jax
import numpy as np
import pytest

from capibara import sharding
from capibara.core import tree
from capibara.interop.peft import folder as peft
from capibara.models import api
from capibara.optim import Optimizer, Schedule
from capibara.sharding import Plan
from capibara.training.base import state as states
from capibara.training.step import make_train_step

safetensors = pytest.importorskip("safetensors.numpy")
HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "models" / "golden")]

import answers  # noqa: E402
import test_peft  # noqa: E402

RECORDED = json.loads((HERE / "training.json").read_text())

pytestmark = pytest.mark.standard_promotion


def written(folder, case):
    """The adapter as PEFT stores it before the steps."""
    drawn = {name: answers.draw(name, tuple(shape)) for name, shape in case["tensors"].items()}
    safetensors.save_file(drawn, folder / peft.WEIGHTS)
    (folder / peft.CONFIG).write_text(json.dumps(case["config"]))
    return drawn


def learned(model, params, steps):
    """Losses, the norm of the first gradient, and the parameters after the steps."""
    tokens = np.random.default_rng(0).integers(0, answers.VOCAB, (answers.ROWS, answers.LENGTH)).clip(1)
    targets = tokens[:, 1:].astype(np.int32)
    batch = {"tokens": tokens[:, :-1].astype(np.int32), "targets": targets, "segment_ids": np.ones_like(targets)}
    batch["positions"] = np.tile(np.arange(targets.shape[1], dtype=np.int32), (len(targets), 1))
    batch["weights"] = np.ones(targets.shape, np.float32)
    plan = Plan(batch_size=len(targets))
    mesh = sharding.make_mesh(plan, jax.devices()[:1])
    optimizer = Optimizer(schedule=Schedule(kind="constant", learning_rate=1e-4), b2=0.95, eps=1e-6)
    tx = optimizer.build(100, model.trained(model.axes))
    shardings = states.state_shardings(model, tx, mesh, plan.rules, ema=False)
    state = states.init_state(model, tx, jax.random.key(0), ema=False)
    state = jax.device_put(dataclasses.replace(state, params=params), shardings)
    step = make_train_step(model, tx, optimizer.schedule.build(100), plan, mesh)
    step = jax.jit(step, out_shardings=(shardings, None))
    batch, found = sharding.global_batch(sharding.batch_sharding(mesh, plan.rules), batch), []
    for _ in range(steps):
        state, metrics = step(state, batch)
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    losses, norms = np.array(found).T
    return losses, norms[0], state.params


@pytest.mark.parametrize(
    "name", ["fused", "layers", "tokens", "tokens_untied", pytest.param("fused_biases", marks=pytest.mark.heavy)]
)
def test_five_steps_are_those_of_peft(name, tmp_path):
    case = RECORDED[name]
    before = written(tmp_path, case)
    plain, base = test_peft.base_of(case["name"])
    lora, adapters = peft.read_peft(str(tmp_path), plain, case["name"])
    model = api.build(dataclasses.replace(plain.config, lora=lora))
    params = tree.joined(adapters, jax.jit(model.adapt)(base, jax.random.key(0)))
    losses, norm, params = learned(model, params, len(case["losses"]))
    np.testing.assert_allclose(norm, case["grad_norm"], rtol=1e-5)
    np.testing.assert_allclose(losses, case["losses"], rtol=0, atol=5e-6)
    peft.write_peft(str(tmp_path / "after"), params, model, case["name"])
    after = safetensors.load_file(tmp_path / "after" / peft.WEIGHTS)
    assert after.keys() == before.keys()
    moved = {key: float(np.linalg.norm(after[key] - value)) for key, value in before.items()}
    assert moved == pytest.approx(case["moved"], rel=2e-3)
