"""The table of XLA options: what it gives, and, where libtpu is installed, that the compiler takes all of it."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from capibara.planner.hardware import chips, xla_flags
from capibara.sharding import Plan

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


def test_every_option_has_a_reason_a_source_and_a_chip():
    for chip, table in xla_flags.TABLE.items():
        assert chips.chip(chip).name == chip and chips.chip(chip).is_tpu
        for option in table:
            assert option.name.startswith("xla_") and isinstance(option.value, str)
            assert option.reason and option.source
        assert len({option.name for option in table}) == len(table)


def test_a_chip_goes_by_any_of_its_names():
    assert xla_flags.options("v6e") == xla_flags.options("trillium") == xla_flags.options("TPU v6 lite")
    assert xla_flags.options("v6e", offload=True) == {option.name: option.value for option in xla_flags.TABLE["v6e"]}
    assert xla_flags.options("h100") == xla_flags.options("cpu") == xla_flags.options("v4") == {}
    assert xla_flags.options("NVIDIA of next year") == {}  # whatever a run is on, it is not the table that stops it


def test_with_tensor_parallelism_the_collective_matmul_stays():
    assert not any("collective_matmul" in name for name in xla_flags.options("v6e", tensor=4))
    assert any("collective_matmul" in name for name in xla_flags.options("v6e"))


def test_only_plans_that_offload_have_the_options_for_it():
    plan = Plan(batch_size=8, remat="offload")
    extra = (
        xla_flags.of_plan("v6e", plan).keys() - xla_flags.of_plan("v6e", dataclasses.replace(plan, remat="save")).keys()
    )
    assert extra == {option.name for option in xla_flags.TABLE["v6e"] if option.offload} != set()
    assert xla_flags.of_plan("v6e", plan) == xla_flags.options("v6e", offload=True)


def test_what_the_user_sets_is_left_to_the_user(monkeypatch):
    name, value = next(iter(xla_flags.options("v6e").items()))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--xla_other=1 --{name}=auto")
    assert name not in xla_flags.options("v6e")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{name}_of_another_name={value}")
    assert name in xla_flags.options("v6e")


TINY = """
import json, sys
import jax, jax.numpy as jnp
from capibara import sharding
from capibara.planner.hardware import topology, xla_flags

refused = []
for chip in xla_flags.TABLE:
    # Collectives over chips and a loop: options that the compiler takes may still fail on what they are for.
    mesh = sharding.make_mesh(sharding.Plan(batch_size=4), topology.slice_devices(f"{chip}:2x2"))
    placed = lambda *axes: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    w = jax.ShapeDtypeStruct((4, 512, 512), jnp.bfloat16, sharding=placed(None, "fsdp"))
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=placed("fsdp"))

    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0].astype(jnp.float32))

    lowered = jax.jit(jax.grad(loss), out_shardings=w.sharding).lower(w, x)
    options = xla_flags.options(chip, offload=True)
    for some in [*({name: value} for name, value in options.items()), options]:
        try:
            lowered.compile(compiler_options=some)
        except jax.errors.JaxRuntimeError as error:
            refused.append(f"{chip} {some}: {error}"[:300])
try:
    lowered.compile(compiler_options={"xla_tpu_no_such_option": "true"})
except jax.errors.JaxRuntimeError as error:
    print(json.dumps(refused))
"""


@needs_libtpu
@pytest.mark.heavy
def test_the_compiler_takes_every_option():
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    child = subprocess.run([sys.executable, "-c", TINY], env=environment, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-2000:]
    assert json.loads(child.stdout.splitlines()[-1]) == []


STEP = """
import sys
from capibara import sharding
from capibara.data.pipeline.loader import Dataset
from capibara.models import api
from capibara.optim import Optimizer, Schedule
from capibara.planner.compiler import compile as planner
from capibara.planner.compiler import compile_cache as verdict
from capibara.planner.hardware import topology, xla_flags
from capibara.training import setup as run
from capibara.training.trainer import Trainer

chip, with_table = sys.argv[1], sys.argv[2] == "table"
trainer = Trainer(
    model_dir="unused",
    steps=10,
    model=api.DecoderConfig(vocab_size=32_000, embed_dim=1024, num_layers=4, num_heads=8, mlp_dim=4096),
    plan=sharding.Plan(batch_size=16, remat=sharding.Remat.FULL),
    dataset=Dataset(mixture_or_task_name="unused", length=2048),
    optimizer=Optimizer(schedule=Schedule(learning_rate=1e-3)),
)
mesh = sharding.make_mesh(trainer.plan, topology.slice_devices(f"{chip}:2x2"))
lowered = run.lower_step(trainer, api.build(trainer.model), mesh)
verdict.report(planner.compile_train_step(lowered, xla_flags.options(chip) if with_table else None))
"""


@pytest.mark.heavy
@needs_libtpu
@pytest.mark.parametrize("chip", sorted(xla_flags.TABLE))
def test_the_table_compiles_a_train_step_and_costs_neither_memory_nor_cycles(chip, tmp_path, monkeypatch):
    from capibara.planner.compiler.compile_cache import Outcome, verdict

    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    reports = {}
    for side in ("plain", "table"):
        command = [sys.executable, "-c", STEP, chip, side]
        found = verdict(command, {"chip": chip, "side": side}, deadline_s=900, cache_dir=tmp_path)
        assert found.outcome is Outcome.FITS, found.message
        reports[side] = found.compiled
    plain, table = reports["plain"], reports["table"]
    print(f"{chip}: peak {plain.peak_bytes} -> {table.peak_bytes} bytes, {plain.compiled_s} -> {table.compiled_s} s")
    assert table.peak_bytes <= 1.02 * plain.peak_bytes
    assert table.compiled_s <= 1.02 * plain.compiled_s
