"""Time of a train step on a CPU: ours against PyTorch + transformers, eager and compiled.

    python benchmarks/step_time.py --torch_python=PATH/bin/python [--cores=0] [--rounds=9] [--json=OUT]

Everyone trains the same Llama-like decoder (256 wide, 4 layers, 4 heads, SwiGLU of 672, tied vocabulary of 8192) in
float32 with AdamW and a global-norm clip on the same 8 x 256 tokens, pinned to the same cores, in turns: a few steps
each, then the next. The peers run in a virtual environment of their own with torch and transformers; without
--torch_python only ours runs. "kept memory" is PyTorch with the C allocator set as we set ours
(sharding.keep_freed_memory): PyTorch does not do that by itself, so it has a line and a ratio of its own.

A ratio is the best peer's time over ours. On a machine that does other work too, CPU seconds say more than wall
seconds. The sgemm rate is the best that any of the frameworks reached in
the run, the share is the model's FLOPs (causal attention counted by half) over time over that rate.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence

HERE = os.path.dirname(os.path.abspath(__file__))
OURS = "capibara"
KEPT_MEMORY = "torch compile, kept memory"
SHAPE = {
    "vocab_size": 8192,
    "embed_dim": 256,
    "num_layers": 4,
    "num_heads": 4,
    "mlp_dim": 672,
    "length": 256,
    "batch": 8,
}
OPTIMIZER = {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0}


class Worker:
    """A process that makes steps when asked; see torch_step.py for what is said."""

    def __init__(self, name: str, command: Sequence[str], cores: Sequence[int]):
        self.name = name
        threads = str(len(cores))
        environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        self.ready = self._read()["ready"]
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self.sgemm: list[float] = []

    def step(self, count: int) -> None:
        answer = self._ask({"op": "step", "count": count})
        self.wall_s += answer["wall_s"]
        self.cpu_s += answer["cpu_s"]

    def multiply(self) -> None:
        self.sgemm.append(self._ask({"op": "sgemm"})["flops_per_s"])

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, request: dict) -> dict:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict:
        for line in self._process.stdout:
            with contextlib.suppress(json.JSONDecodeError):
                return json.loads(line)
        raise RuntimeError(f"{self.name} ended with exit code {self._process.wait()} without an answer")


@dataclasses.dataclass(frozen=True)
class Result:
    """One contender's steps, in seconds."""

    name: str
    version: str
    wall_median_s: float
    wall_min_s: float
    cpu_median_s: float
    cpu_min_s: float
    steps: int
    first_losses: list[float]


def commands(python: str | None, threads: int, spec: str, our_spec: str) -> dict[str, list[str]]:
    """Contender -> command line, ours first."""
    found = {OURS: [sys.executable, os.path.join(HERE, "peers", "capibara_step.py"), f"--spec={our_spec}"]}
    if python:
        peer = [python, os.path.join(HERE, "peers", "torch_step.py"), f"--spec={spec}", f"--threads={threads}"]
        found["torch eager"] = [*peer, "--mode=eager"]
        found["torch compile"] = [*peer, "--mode=compile"]
        found[KEPT_MEMORY] = [*peer, "--mode=compile", "--keep_freed_memory"]
    return found


def measure(workers: Sequence[Worker], rounds: int, steps: int) -> None:
    """Lets everyone make `steps` steps in turn, `rounds` times, each round beginning with another."""
    for index in range(rounds):
        turn = index % len(workers)
        for worker in [*workers[turn:], *workers[:turn]]:
            worker.step(steps)
            worker.multiply()


def check_alike(workers: Sequence[Worker]) -> None:
    """Raises RuntimeError unless all have as many parameters and start near the loss of a uniform guess."""
    counts = {worker.name: worker.ready["param_count"] for worker in workers}
    if len(set(counts.values())) > 1:
        raise RuntimeError(f"the models differ in size: {counts}")
    uniform = math.log(SHAPE["vocab_size"])
    for worker in workers:
        first, *_, last = worker.ready["first_losses"]
        if abs(first - uniform) > 0.2 or not last < first:
            raise RuntimeError(f"{worker.name}: losses {first:.3f} ... {last:.3f} should fall from near {uniform:.3f}")


def result_of(worker: Worker) -> Result:
    return Result(
        name=worker.name,
        version=worker.ready["version"],
        wall_median_s=statistics.median(worker.wall_s),
        wall_min_s=min(worker.wall_s),
        cpu_median_s=statistics.median(worker.cpu_s),
        cpu_min_s=min(worker.cpu_s),
        steps=len(worker.wall_s),
        first_losses=worker.ready["first_losses"],
    )


def summarize(workers: Sequence[Worker], cores: Sequence[int]) -> dict:
    """Everything that is printed and written."""
    ours, *peers = [result_of(worker) for worker in workers]
    flops = workers[0].ready["flops_per_step"]
    sgemm = max(statistics.median(worker.sgemm) for worker in workers)
    fields = ("wall_median_s", "wall_min_s", "cpu_median_s", "cpu_min_s")
    stock = [peer for peer in peers if peer.name != KEPT_MEMORY]

    def over_ours(contenders: Sequence[Result]) -> dict[str, float] | None:
        return {f: min(getattr(c, f) for c in contenders) / getattr(ours, f) for f in fields} if contenders else None

    return {
        "shape": SHAPE,
        "optimizer": OPTIMIZER,
        "cores": list(cores),
        "param_count": workers[0].ready["param_count"],
        "flops_per_step": flops,
        "sgemm_flops_per_s": sgemm,
        "results": [
            dataclasses.asdict(r) | {"sgemm_share": flops / r.wall_median_s / sgemm} for r in (ours, *peers)
        ],
        "best_torch_over_ours": over_ours(stock),
        "best_torch_with_kept_memory_over_ours": over_ours(peers),
    }


def show(summary: dict) -> None:
    """Prints the table."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120)
    results = summary["results"]
    table = Table(title=f"One train step, {results[0]['steps']} steps each, cores {summary['cores']}")
    for column in ("", "version", "wall s", "min", "CPU s", "min", "GFLOP/s", "of sgemm", "times ours"):
        table.add_column(column, justify="left" if column in ("", "version") else "right")
    for result in results:
        seconds = [result[f] for f in ("wall_median_s", "wall_min_s", "cpu_median_s", "cpu_min_s")]
        table.add_row(
            result["name"],
            result["version"],
            *(f"{value:.3f}" for value in seconds),
            f"{summary['flops_per_step'] / result['wall_median_s'] / 1e9:.1f}",
            f"{result['sgemm_share']:.0%}",
            f"{result['wall_median_s'] / results[0]['wall_median_s']:.2f}",
        )
    console.print(table)
    console.print(
        f"{summary['param_count']:,} parameters, {summary['flops_per_step'] / 1e9:.1f} GFLOP a step, "
        f"sgemm {summary['sgemm_flops_per_s'] / 1e9:.1f} GFLOP/s"
    )
    for label, key in (
        ("best PyTorch / ours", "best_torch_over_ours"),
        ("the same, PyTorch with kept memory too", "best_torch_with_kept_memory_over_ours"),
    ):
        if ratios := summary[key]:
            console.print(
                f"{label}: wall {ratios['wall_median_s']:.2f} (minimum {ratios['wall_min_s']:.2f}), "
                f"CPU {ratios['cpu_median_s']:.2f} (minimum {ratios['cpu_min_s']:.2f})"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch_python", help="python of an environment with torch and transformers")
    parser.add_argument("--cores", default="0", help="comma-separated numbers of the cores that everyone is pinned to")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--layer_loop", choices=("scan", "unroll"), default="unroll", help="how our layers run")
    parser.add_argument("--json", help="file to write the figures to")
    args = parser.parse_args()
    cores = [int(core) for core in args.cores.split(",")]
    spec = {"shape": SHAPE, "optimizer": OPTIMIZER, "seed": 0}
    ours = spec | {"shape": SHAPE | {"layer_loop": args.layer_loop}}
    workers: list[Worker] = []
    try:
        for name, command in commands(args.torch_python, len(cores), json.dumps(spec), json.dumps(ours)).items():
            workers.append(Worker(name, command, cores))
        check_alike(workers)
        measure(workers, args.rounds, args.steps)
    finally:
        for worker in workers:
            worker.close()
    summary = summarize(workers, cores)
    show(summary)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(summary, file, indent=2)


if __name__ == "__main__":
    main()
