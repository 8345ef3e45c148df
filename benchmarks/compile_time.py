"""Does compile time grow with depth? The train step of a 32-layer decoder against its 2-layer version, under scan.

    python benchmarks/compile_time.py [--rounds=3] [--tpu] [--json=OUT]

Each compilation is a process of its own, in turns, without a compilation cache: seconds of lowering and compiling on
this machine, wall clock and CPU. With --tpu the real TPU compiler compiles for a v5e-4 slice too (libtpu, no TPU
needed). The goal is at most 1.3 times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
DEPTHS = (2, 32)
GOAL = 1.3


def compile_once(layers: int, target: str) -> dict[str, float]:
    """Lowers and compiles; runs in a child process."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from capibara import sharding
    from capibara.data.pipeline.loader import Dataset
    from capibara.models import api
    from capibara.optim import Optimizer, Schedule
    from capibara.training import setup
    from capibara.training.trainer import Trainer

    devices = jax.devices()
    if target == "tpu":
        from capibara.planner.hardware import topology

        devices = topology.slice_devices("v5e-4")
    sizes = {"vocab_size": 8192, "embed_dim": 256, "num_heads": 4, "mlp_dim": 1024}
    trainer = Trainer(
        model_dir="unused",
        steps=100,
        model=api.DecoderConfig(num_layers=layers, **sizes),
        plan=sharding.Plan(batch_size=8, remat=sharding.Remat.FULL),
        dataset=Dataset(mixture_or_task_name="unused", length=512),
        optimizer=Optimizer(schedule=Schedule(learning_rate=1e-3)),
    )
    model = api.build(trainer.model)
    mesh = sharding.make_mesh(trainer.plan, devices)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    setup.lower_step(trainer, model, mesh).compile()
    return {"wall_s": time.perf_counter() - begin_s, "cpu_s": time.process_time() - begin_cpu_s}


def measure(target: str, rounds: int) -> dict[str, object]:
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(HERE) + os.pathsep + os.environ.get("PYTHONPATH", "")}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    times: dict[int, list[dict[str, float]]] = {layers: [] for layers in DEPTHS}
    for _ in range(rounds):
        for layers in DEPTHS:
            command = [sys.executable, __file__, f"--child={layers}", f"--target={target}"]
            child = subprocess.run(command, env=environment, capture_output=True, text=True)
            if child.returncode:
                raise SystemExit(child.stderr[-2000:])
            times[layers].append(json.loads(child.stdout.splitlines()[-1]))
    result: dict[str, object] = {"target": target, "rounds": rounds}
    for key in ("wall_s", "cpu_s"):
        shallow, deep = (statistics.median(t[key] for t in times[layers]) for layers in DEPTHS)
        result[key] = {str(DEPTHS[0]): shallow, str(DEPTHS[1]): deep, "ratio": deep / shallow}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="compilations of each depth (default: %(default)s)")
    parser.add_argument("--tpu", action="store_true", help="compile for a TPU slice too")
    parser.add_argument("--json", help="write the results there")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(compile_once(options.child, options.target)), flush=True)
        return
    results = [measure(target, options.rounds) for target in (["cpu", "tpu"] if options.tpu else ["cpu"])]
    print(f"{'compiled for':14}{'clock':8}{'2 layers, s':>14}{'32 layers, s':>14}{'ratio':>8}   goal {GOAL}")
    for result in results:
        for key, name in (("wall_s", "wall"), ("cpu_s", "CPU")):
            row = result[key]
            print(f"{result['target']:14}{name:8}{row['2']:14.2f}{row['32']:14.2f}{row['ratio']:8.2f}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
