"""The MaxText side of benchmarks/step_time.py: MaxText's own train step on one CPU device.

Runs in a virtual environment of its own (Python 3.12: pip install 'maxtext[tpu]==0.2.5') and imports nothing of
capibara. The configuration goes through MaxText's own initialisation, and state and step are made by the functions that
its train loop calls; only the batch is ours. Speaks as benchmarks/peers/torch_step.py does: one JSON line when ready,
then one JSON line for each line of input.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata

os.environ["JAX_PLATFORMS"] = "cpu"

_QUIET = {  # nothing is written, fetched or reported
    "enable_checkpointing": False,
    "enable_tensorboard": False,
    "enable_goodput_recording": False,
    "monitor_goodput": False,
    "gcs_metrics": False,
    "save_config_to_gcs": False,
    "skip_jax_distributed_system": True,
    "dataset_type": "synthetic",
    "hardware": "cpu",
}


def settings_of(spec: dict) -> dict[str, object]:
    """The spec in MaxText's keys."""
    shape, optimizer = spec["shape"], spec["optimizer"]
    settings = _QUIET | {
        "dtype": "float32",
        "weight_dtype": "float32",
        "decoder_block": "llama2",
        "vocab_size": shape["vocab_size"],
        "base_emb_dim": shape["embed_dim"],
        "base_num_decoder_layers": shape["num_layers"],
        "base_num_query_heads": shape["num_heads"],
        "base_num_kv_heads": shape["num_heads"],
        "head_dim": shape["embed_dim"] // shape["num_heads"],
        "base_mlp_dim": shape["mlp_dim"],
        "logits_via_embedding": shape["head"] == "tied",
        "normalization_layer_epsilon": 1e-6,
        "max_target_length": shape["length"],
        "per_device_batch_size": shape["batch"],
        "learning_rate": optimizer["learning_rate"],
        "learning_rate_final_fraction": 1.0,  # constant
        "warmup_steps_fraction": 0.0,
        "adam_b1": optimizer["b1"],
        "adam_b2": optimizer["b2"],
        "adam_eps": optimizer["eps"],
        "adam_weight_decay": optimizer["weight_decay"],
        "adamw_mask": "['.*norm.*']",  # as ours: norm scales do not decay
        "gradient_clipping_threshold": optimizer["clip_norm"],
    }
    if experts := shape.get("num_experts"):
        settings |= {
            "decoder_block": "mixtral",
            "num_experts": experts,
            "num_experts_per_tok": shape["top_k"],
            "base_moe_mlp_dim": shape["mlp_dim"],
            "load_balance_loss_weight": shape["load_balance"],
        }
    return settings


def make_step(spec: dict, overrides: list[str]) -> tuple[Callable[[], float], int]:
    """One update on the spec's batch, as MaxText's train loop makes it, returning the loss; and the parameter count."""
    import jax
    from flax import nnx
    from flax.core.spmd import logical_axis_rules
    from maxtext.trainers.pre_train import train
    from maxtext.utils import sharding, train_utils

    settings = settings_of(spec) | {"run_name": "step_time", "base_output_directory": tempfile.mkdtemp()}
    config, recorder = train.initialize(["", *(f"{key}={value}" for key, value in settings.items()), *overrides])
    _, _, state_shardings, _, mesh, *_, state = train_utils.setup_train_loop(config, recorder)
    graph, state = nnx.split(state)
    param_shardings, state_shardings = sharding.maybe_update_params_sharding_with_opt(config, state_shardings)
    jitted, _ = train_utils.jit_train_and_eval_step(
        config, graph, mesh, state, state_shardings, train.train_step, params_shardings=param_shardings
    )
    batch = jax.device_put(host_batch(spec), sharding.get_input_data_sharding(config, mesh))
    parameters = jax.tree.leaves(nnx.state(nnx.merge(graph, state).model, nnx.Param))

    def update() -> float:
        nonlocal state
        with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
            state, metrics = jitted(state, batch)
        return float(metrics["scalar"]["learning/lm_loss"])

    return update, sum(leaf.size for leaf in parameters)


def host_batch(spec: dict) -> dict:
    """The ids that everyone trains on, one document a row."""
    import numpy as np

    shape = spec["shape"]
    rows, length = shape["batch"], shape["length"]
    ids = np.random.default_rng(spec["seed"]).integers(0, shape["vocab_size"], (rows, length + 1)).astype(np.int32)
    ones = np.ones((rows, length), np.int32)
    positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    batch = {"inputs": ids[:, :-1], "inputs_position": positions, "inputs_segmentation": ones}
    return batch | {"targets": ids[:, 1:], "targets_position": positions, "targets_segmentation": ones}


def sgemm_flops_per_s(size: int = 1024, repeats: int = 8) -> float:
    """The best rate of a square float32 matrix product."""
    import jax

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
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one of MaxText's settings")
    parser.add_argument("--keep_freed_memory", action="store_true", help="glibc's malloc set as capibara sets it")
    args = parser.parse_args()
    if args.keep_freed_memory:
        sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
        from capibara.core import allocator  # the standard library is all that it imports

        allocator.keep_freed_memory()
    spec = json.loads(args.spec)
    with contextlib.redirect_stdout(sys.stderr):  # MaxText prints, and standard output is for the answers
        step, param_count = make_step(spec, args.set)
        first_losses = [step() for _ in range(3)]
    import jax

    version = f"maxtext {metadata.version('maxtext')}\njax {jax.__version__}"
    ready = {"param_count": param_count, "first_losses": first_losses, "version": version}
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
