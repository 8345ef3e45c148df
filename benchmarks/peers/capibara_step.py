"""Our side of benchmarks/step_time.py: the package's own train step on one CPU device.

Speaks as benchmarks/peers/torch_step.py does: one JSON line when ready, then one JSON line for each line of input.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))

import jax
import numpy as np

from capibara import sharding
from capibara.core import allocator
from capibara.models import api
from capibara.models.api import DecoderConfig, EncoderDecoderConfig
from capibara.models.parts.moe import Moe
from capibara.optim import Optimizer, Schedule
from capibara.sharding import Plan
from capibara.training.base import state as states
from capibara.training.step import make_train_step

_SCHEDULE_STEPS = 1000  # of a constant learning rate


def dense(shape: dict[str, Any], layer_loop: str) -> DecoderConfig:
    """A Llama-like decoder."""
    sizes = {name: shape[name] for name in ("vocab_size", "embed_dim", "num_layers", "num_heads", "mlp_dim", "head")}
    return DecoderConfig(**sizes, dtype="float32", layer_loop=layer_loop)


def moe(shape: dict[str, Any], layer_loop: str) -> DecoderConfig:
    """The same with Mixtral's experts: gates sum to 1; the balance is the mean over layers, as MaxText's."""
    experts = Moe(
        num_experts=shape["num_experts"],
        top_k=shape["top_k"],
        gates="normalized",
        balance_loss=shape["load_balance"] / shape["num_layers"],
        dispatch=shape["dispatch"],
        capacity_factor=shape.get("capacity_factor", 1.0),
    )
    return dataclasses.replace(dense(shape, layer_loop), moe=experts)


def encdec(shape: dict[str, Any], layer_loop: str) -> EncoderDecoderConfig:
    """T5 1.1 with as many layers in the encoder as in the decoder."""
    sizes = {name: shape[name] for name in ("vocab_size", "embed_dim", "num_layers", "num_heads", "mlp_dim", "head")}
    return EncoderDecoderConfig(**sizes, dtype="float32", layer_loop=layer_loop)


CONFIGS = {"dense": dense, "moe": moe, "encdec": encdec}


def make_step(model: api.Model, spec: dict) -> Callable[[], float]:
    """One update on the spec's batch, jitted and donated as in a run; returns the loss."""
    shape, options = spec["shape"], dict(spec["optimizer"])
    schedule = Schedule(kind="constant", learning_rate=options.pop("learning_rate"))
    optimizer = Optimizer(schedule=schedule, **options)
    plan = Plan(batch_size=shape["batch"])
    mesh = sharding.make_mesh(plan)
    tx = optimizer.build(_SCHEDULE_STEPS, model.axes)
    shardings = states.state_shardings(model, tx, mesh, plan.rules, ema=False)
    step = make_train_step(model, tx, schedule.build(_SCHEDULE_STEPS), plan, mesh)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    init = jax.jit(functools.partial(states.init_state, model, tx, ema=False), out_shardings=shardings)
    batch = sharding.global_batch(sharding.batch_sharding(mesh, plan.rules), host_batch(spec))
    state = init(jax.random.key(spec["seed"]))

    def update() -> float:
        nonlocal state
        state, metrics = jitted(state, batch)
        return float(metrics["loss"])

    return update


def host_batch(spec: dict) -> dict[str, np.ndarray]:
    """The ids that the peers train on, one document a row; of an encoder-decoder `length` are the encoder's."""
    shape = spec["shape"]
    rows, length = shape["batch"], shape["length"]
    random = np.random.default_rng(spec["seed"])
    encoder = {}
    if target_length := shape.get("target_length"):
        inputs = random.integers(0, shape["vocab_size"], (rows, length)).astype(np.int32)
        encoder = {"tokens": inputs, **_one_document(rows, length)}
        length = target_length
    ids = random.integers(0, shape["vocab_size"], (rows, length + 1)).astype(np.int32)
    return {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "weights": np.ones((rows, length), np.float32),
        **_one_document(rows, length),
        **{f"encoder_{name}": array for name, array in encoder.items()},
    }


def _one_document(rows: int, length: int) -> dict[str, np.ndarray]:
    positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    return {"segment_ids": np.ones((rows, length), np.int32), "positions": positions}


def sgemm_flops_per_s(size: int = 1024, repeats: int = 8) -> float:
    """The best rate of a square float32 matrix product."""
    multiply = jax.jit(lambda a: a @ a)
    a = jax.random.normal(jax.random.key(0), (size, size))
    multiply(a).block_until_ready()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        multiply(a).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", required=True, help="JSON: shape, optimizer, seed")
    parser.add_argument("--layer_loop", choices=("scan", "unroll"), required=True)
    parser.add_argument("--default_memory", action="store_true", help="leave glibc's malloc as it is")
    args = parser.parse_args()
    if not args.default_memory:
        allocator.keep_freed_memory()
    spec = json.loads(args.spec)
    model = api.build(CONFIGS[spec["shape"]["model"]](spec["shape"], args.layer_loop))
    step = make_step(model, spec)
    shape = spec["shape"]
    length, target_length = shape["length"], shape.get("target_length")
    if target_length:
        flops = model.flops_per_token(target_length, length) * shape["batch"] * target_length
    else:
        flops = model.flops_per_token(length) * shape["batch"] * length
    ready = {
        "param_count": model.param_count,
        "flops_per_step": flops,
        "first_losses": [step() for _ in range(3)],
        "version": f"jax {jax.__version__}",
    }
    print(json.dumps({"ready": ready}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "sgemm":
            print(json.dumps({"flops_per_s": sgemm_flops_per_s()}), flush=True)
            continue
        wall_s, cpu_s, loss = [], [], 0.0
        for _ in range(request["count"]):
            wall, cpu = time.perf_counter(), time.process_time()
            loss = step()
            wall_s.append(time.perf_counter() - wall)
            cpu_s.append(time.process_time() - cpu)
        print(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s, "loss": loss}), flush=True)


if __name__ == "__main__":
    main()
