"""Time of a train step on a CPU: ours against what a user would pick instead.

    python benchmarks/step_time.py [--model=dense|moe|encdec] [--torch_python=PATH/bin/python]
        [--maxtext_python=PATH/bin/python] [--cores=0] [--rounds=9] [--json=OUT]

Everyone trains the same model in float32 on the same 8 x 256 tokens, pinned to the same cores, in turns: a few steps
each, then the next.

  dense   a Llama-like decoder, AdamW and a global-norm clip, against PyTorch + transformers (eager and compiled) and
          MaxText. Without MaxText: SwiGLU of 672, tied vocabulary; as soon as MaxText is there, its shape for
          everyone: gated MLP of 1024, input and output embeddings apart.
  moe     MaxText's shape with 8 experts of 1024 in each layer, 2 a token, against MaxText. Ours drops no token; MaxText
          is fastest where it drops what is beyond 1.25 times the mean load, so that is who we compare with.
  encdec  T5 1.1 of 4 + 4 layers with Adafactor, against T5X's recorded CPU seconds (T5X is not on PyPI).

The peers run in virtual environments of their own: torch and transformers in one, maxtext[tpu]==0.2.5 (Python 3.12) in
the other; the peers whose python is not given are left out. MaxText runs as it comes, and with the settings that were
the fastest of those tried (MAXTEXT). "kept memory" is a peer with the C allocator set as we set ours
(allocator.keep_freed_memory): no peer does that by itself, so these lines have a ratio of their own.

A ratio is the best peer's time over ours. On a machine that does other work too, CPU seconds say more than wall
seconds. The sgemm rate is the best that any of the frameworks reached in the run, the share is the model's FLOPs
(causal attention counted by half) over time over that rate.
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
KEPT_MEMORY = ", kept memory"  # ends the name of a peer whose allocator is set as ours
GOALS = {"dense": 1.2, "moe": 1.5, "encdec": 1.5}  # the best peer's time over ours, at least
COMMON = {"vocab_size": 8192, "embed_dim": 256, "num_layers": 4, "num_heads": 4, "length": 256, "batch": 8}
DENSE = COMMON | {"mlp_dim": 672, "head": "tied"}
DENSE_OF_MAXTEXT = COMMON | {"mlp_dim": 1024, "head": "separate"}
MOE = DENSE_OF_MAXTEXT | {"num_experts": 8, "top_k": 2, "load_balance": 0.01, "dispatch": "dropless"}
CAPACITY_FACTOR = 1.25  # of Mixtral in MaxText's own recipes
ENCDEC = DENSE_OF_MAXTEXT | {"target_length": 128}
ADAMW = {
    "name": "adamw",
    "learning_rate": 1e-3,
    "b1": 0.9,
    "b2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "clip_norm": 1.0,
}
# T5X's: relative to the weights, no momentum, no weight decay, no clip of the global norm.
ADAFACTOR = {"name": "adafactor", "learning_rate": 1e-2, "weight_decay": 0.0, "clip_norm": None}
# CPU seconds of one step of T5X for ENCDEC in float32 with Adafactor, as recorded once on a CPU machine; T5X is no
# longer maintained and not on PyPI, so it cannot run beside us.
T5X_RECORDED_CPU_S = 3.41
# Name of a contender -> MaxText's settings on top of those that say what is trained, the fastest last. Tried, in CPU
# seconds a step on one core of a busy machine: dense: as it comes (scan, remat full) 2.09, unrolled 1.85, unrolled with
# remat minimal 1.80, none 1.85; unrolled, minimal, fused_mlp 1.70; with num_vocab_tiling 4 too 1.41 (8: 1.43,
# 16: 1.48, scanned 1.50). Mixture, unrolled, minimal and tiled: all experts for all tokens 6.5, ragged_dot
# (sparse_matmul without megablox) 9.8, capacity 1.25 2.63 (scanned 2.88, remat none 2.93). Its default there, the
# megablox kernel, is for TPUs: a CPU interprets it. use_iota_embed is slower, fused_qkv trains with other numbers.
_TUNED = ("scan_layers=false", "remat_policy=minimal", "num_vocab_tiling=4")
MAXTEXT = {
    "dense": {"MaxText": (), "MaxText, fastest": (*_TUNED, "fused_mlp=true")},
    "moe": {
        "MaxText, dropless": (*_TUNED, "sparse_matmul=false"),
        "MaxText, capacity": (*_TUNED, "sparse_matmul=false", f"capacity_factor={CAPACITY_FACTOR}"),
    },
}


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


def our_commands(args: argparse.Namespace, spec: dict) -> dict[str, list[str]]:
    """Our contenders -> command line; the first one is compared with the peers."""
    shape = spec["shape"]
    found = {OURS: shape}
    if args.model == "moe":
        found[OURS + ", capacity"] = shape | {"dispatch": "capacity", "capacity_factor": CAPACITY_FACTOR}
    script = [sys.executable, os.path.join(HERE, "peers", "capibara_step.py"), f"--layer_loop={args.layer_loop}"]
    return {name: [*script, f"--spec={json.dumps(spec | {'shape': shape})}"] for name, shape in found.items()}


def peer_commands(args: argparse.Namespace, threads: int, spec: dict) -> dict[str, list[str]]:
    """Peer -> command line, of the peers that can run this model and whose python is given."""
    found = {}
    text = json.dumps(spec)
    if args.torch_python and args.model == "dense":
        script = os.path.join(HERE, "peers", "torch_step.py")
        peer = [args.torch_python, script, f"--spec={text}", f"--threads={threads}"]
        found["torch eager"] = [*peer, "--mode=eager"]
        found["torch compile"] = [*peer, "--mode=compile"]
        found["torch compile" + KEPT_MEMORY] = [*peer, "--mode=compile", "--keep_freed_memory"]
    if args.maxtext_python and args.model != "encdec":
        peer = [args.maxtext_python, os.path.join(HERE, "peers", "maxtext_step.py"), f"--spec={text}"]
        for name, settings in MAXTEXT[args.model].items():
            found[name] = [*peer, *(f"--set={setting}" for setting in settings)]
        found[name + KEPT_MEMORY] = [*found[name], "--keep_freed_memory"]
    return found


def shape_of(args: argparse.Namespace) -> dict[str, object]:
    """What everyone trains."""
    dense = DENSE_OF_MAXTEXT if args.maxtext_python else DENSE
    return {"model": args.model} | {"dense": dense, "moe": MOE, "encdec": ENCDEC}[args.model]


def measure(workers: Sequence[Worker], rounds: int, steps: int) -> None:
    """Lets everyone make `steps` steps in turn, `rounds` times, each round beginning with another."""
    for index in range(rounds):
        turn = index % len(workers)
        for worker in [*workers[turn:], *workers[:turn]]:
            worker.step(steps)
            worker.multiply()


def check_alike(workers: Sequence[Worker], vocab_size: int) -> None:
    """Raises RuntimeError unless all have as many parameters and learn, from about the loss of a uniform guess.

    An output projection of its own begins with logits of variance 1, which adds a half to that loss.
    """
    counts = {worker.name: worker.ready["param_count"] for worker in workers}
    if len(set(counts.values())) > 1:
        raise RuntimeError(f"the models differ in size: {counts}")
    uniform = math.log(vocab_size)
    for worker in workers:
        first, *_, last = worker.ready["first_losses"]
        if not (-0.2 < first - uniform < 0.7 and last < first):
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


def summarize(workers: Sequence[Worker], cores: Sequence[int], spec: dict) -> dict:
    """Everything that is printed and written."""
    results = [result_of(worker) for worker in workers]
    ours, peers = results[0], [r for r in results if not r.name.startswith(OURS)]
    flops = workers[0].ready["flops_per_step"]
    sgemm = max(statistics.median(worker.sgemm) for worker in workers)
    fields = ("wall_median_s", "wall_min_s", "cpu_median_s", "cpu_min_s")
    stock = [peer for peer in peers if not peer.name.endswith(KEPT_MEMORY)]

    def over_ours(contenders: Sequence[Result]) -> dict[str, float] | None:
        return {f: min(getattr(c, f) for c in contenders) / getattr(ours, f) for f in fields} if contenders else None

    recorded = None
    if spec["shape"]["model"] == "encdec":
        recorded = {f: T5X_RECORDED_CPU_S / getattr(ours, f) for f in ("cpu_median_s", "cpu_min_s")}
    return spec | {
        "cores": list(cores),
        "param_count": workers[0].ready["param_count"],
        "flops_per_step": flops,
        "sgemm_flops_per_s": sgemm,
        "results": [dataclasses.asdict(r) | {"sgemm_share": flops / r.wall_median_s / sgemm} for r in results],
        "goal": GOALS[spec["shape"]["model"]],
        "best_peer_over_ours": over_ours(stock),
        "best_peer_with_kept_memory_over_ours": over_ours(peers),
        "recorded_t5x_over_ours": recorded,
    }


def show(summary: dict) -> None:
    """Prints the table."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120)
    results = summary["results"]
    ours = results[0]
    title = f"One train step, {summary['shape']['model']}, {ours['steps']} steps each, cores {summary['cores']}"
    table = Table(title=title)
    for column in ("", "version", "wall s", "min", "CPU s", "min", "GFLOP/s", "of sgemm", "wall/ours", "CPU/ours"):
        table.add_column(column, justify="left" if column in ("", "version") else "right")
    for result in results:
        seconds = [result[f] for f in ("wall_median_s", "wall_min_s", "cpu_median_s", "cpu_min_s")]
        table.add_row(
            result["name"],
            result["version"],
            *(f"{value:.3f}" for value in seconds),
            f"{summary['flops_per_step'] / result['wall_median_s'] / 1e9:.1f}",
            f"{result['sgemm_share']:.0%}",
            *(f"{result[f] / ours[f]:.2f}" for f in ("wall_median_s", "cpu_median_s")),
        )
    console.print(table)
    console.print(", ".join(f"{name} {value}" for name, value in summary["shape"].items()))
    console.print(
        f"{summary['param_count']:,} parameters, {summary['flops_per_step'] / 1e9:.1f} GFLOP a step, "
        f"sgemm {summary['sgemm_flops_per_s'] / 1e9:.1f} GFLOP/s"
    )
    if ratios := summary["recorded_t5x_over_ours"]:
        console.print(
            f"T5X's recorded {T5X_RECORDED_CPU_S} CPU s / ours: {ratios['cpu_median_s']:.2f} "
            f"(minimum {ratios['cpu_min_s']:.2f}), goal {summary['goal']}"
        )
    for label, key in (
        ("best peer / ours", "best_peer_over_ours"),
        ("the same, peers with kept memory too", "best_peer_with_kept_memory_over_ours"),
    ):
        if ratios := summary[key]:
            console.print(
                f"{label}: wall {ratios['wall_median_s']:.2f} (minimum {ratios['wall_min_s']:.2f}), "
                f"CPU {ratios['cpu_median_s']:.2f} (minimum {ratios['cpu_min_s']:.2f}), goal {summary['goal']}"
            )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(GOALS), default="dense")
    parser.add_argument("--torch_python", help="python of an environment with torch and transformers")
    parser.add_argument("--maxtext_python", help="python of an environment with maxtext[tpu]==0.2.5")
    parser.add_argument("--cores", default="0", help="comma-separated numbers of the cores that everyone is pinned to")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--layer_loop", choices=("scan", "unroll"), default="unroll", help="how our layers run")
    parser.add_argument("--json", help="file to write the figures to")
    args = parser.parse_args()
    if args.torch_python and args.model != "dense":
        parser.error(f"--torch_python has a peer for --model=dense only, not for {args.model}")
    if args.maxtext_python and args.model == "encdec":
        parser.error("--maxtext_python has no peer for --model=encdec: MaxText has no encoder-decoder")
    return args


def main() -> None:
    args = parse_args()
    cores = [int(core) for core in args.cores.split(",")]
    spec = {"shape": shape_of(args), "optimizer": ADAFACTOR if args.model == "encdec" else ADAMW, "seed": 0}
    contenders = our_commands(args, spec) | peer_commands(args, len(cores), spec)
    workers: list[Worker] = []
    try:
        for name, command in contenders.items():
            workers.append(Worker(name, command, cores))
        check_alike(workers, spec["shape"]["vocab_size"])
        measure(workers, args.rounds, args.steps)
    finally:
        for worker in workers:
            worker.close()
    summary = summarize(workers, cores, spec)
    show(summary)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(summary, file, indent=2)


if __name__ == "__main__":
    main()
