"""Speed of generation on a CPU: ours against transformers' `generate`, and continuous against static batching.

    python benchmarks/generate.py [--model=llama_28m|smollm2_135m] [--torch_python=PATH/bin/python] [--cores=0]
        [--rounds=5] [--json=OUT]

Both sides have the same random weights in float32 and answer the same prompts greedily, pinned to the same cores, in
turns; their texts must agree. The peer runs in a virtual environment of its own (torch, transformers); without it only
ours is measured.

  decode  `new` tokens after prompts of `prompt` tokens, one row and eight. Each turn is a whole call and one for a single
          token, which is the time of reading the prompt; what the whole call takes longer is decoding. Goal 1.5 for
          decoding; the ratio of whole calls stands beside it.
  mixed   requests whose prompts and texts differ in length (texts as an exponential distribution: many short, some
          long), eight slots. Static batching takes eight requests and ends with the longest of them; continuous batching
          gives a free slot to the next request. Times are those of whole calls. Goal 2.

A ratio is the other's median time over ours. On a machine that does other work too, CPU seconds say more than wall
seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
OURS, PEER = "capibara", "transformers"
COMMON = {"length": 256, "prompt": 32, "rope_theta": 10000.0, "norm_eps": 1e-6}
MODELS = {
    "llama_28m": COMMON
    | {"vocab_size": 8192, "embed_dim": 512, "num_layers": 8, "num_heads": 8, "num_kv_heads": 4, "mlp_dim": 1408},
    "smollm2_135m": COMMON
    | {"vocab_size": 49152, "embed_dim": 576, "num_layers": 30, "num_heads": 9, "num_kv_heads": 3, "mlp_dim": 1536}
    | {"rope_theta": 100000.0, "norm_eps": 1e-5},
}
NEW = {"llama_28m": 48, "smollm2_135m": 32}
BATCHES = (1, 8)
GOALS = {"decode": 1.5, "mixed": 2.0}


class Worker:
    """A process that generates when asked; see peers/capibara_generate.py for what is said."""

    def __init__(self, name: str, command: Sequence[str], cores: Sequence[int]):
        self.name = name
        threads = str(len(cores))
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        self.version = self._read()["ready"]["version"]

    def ask(self, **request) -> dict:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict:
        for line in self._process.stdout:
            with contextlib.suppress(json.JSONDecodeError):
                return json.loads(line)
        raise RuntimeError(f"{self.name} ended with exit code {self._process.wait()} without an answer")


def mixed_requests(count: int, shape: dict, mean: int) -> list[list[int]]:
    """Prompt and text lengths of so many requests."""
    random = np.random.default_rng(1)
    prompts = random.integers(8, 64, count)
    texts = np.clip(random.exponential(mean, count), 1, shape["length"] - 64).astype(int)
    return [[int(prompt), int(text)] for prompt, text in zip(prompts, texts)]


def compare(contenders: dict[str, tuple[Worker, dict]], rounds: int) -> dict[str, dict]:
    """Lets everyone answer in turn, once to warm up and `rounds` times; medians of seconds by name.

    Args:
      contenders: name -> who is asked what.
      rounds: timed answers of each.

    Raises:
      RuntimeError: their texts differ.
    """
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        texts = {}
        for name, (worker, request) in contenders.items():
            answer = worker.ask(**request)
            texts[name] = answer["tokens"]
            if turn:
                seconds[name].append((answer["wall_s"], answer["cpu_s"]))
        first = next(iter(texts.values()))
        if any(text != first for text in texts.values()):
            raise RuntimeError(f"the texts of {', '.join(texts)} differ")
    count = sum(map(len, first))
    return {
        name: {
            "tokens": count,
            "wall_median_s": statistics.median(wall for wall, _ in pairs),
            "wall_min_s": min(wall for wall, _ in pairs),
            "cpu_median_s": statistics.median(cpu for _, cpu in pairs),
        }
        for name, pairs in seconds.items()
    }


def decoding(workers: dict[str, Worker], batch: int, new: int, prompt: int, rounds: int) -> dict[str, dict]:
    """As `compare`, of the tokens after the first; `prompt_s` and `call_s` are medians of reading prompts and of whole calls."""
    request = {"op": "decode", "batch": batch, "new": new, "positions": prompt + new}
    seconds: dict[str, list[dict[str, tuple[float, float]]]] = {name: [] for name in workers}
    for turn in range(rounds + 1):
        texts = []
        for name, worker in workers.items():
            call, first = worker.ask(**request), worker.ask(**request | {"new": 1})
            texts.append(call["tokens"])
            if turn:
                took = {key: (answer["wall_s"], answer["cpu_s"]) for key, answer in (("call", call), ("prompt", first))}
                took["decode"] = tuple(whole - begin for whole, begin in zip(took["call"], took["prompt"]))
                seconds[name].append(took)
        if any(text != texts[0] for text in texts):
            raise RuntimeError(f"the texts of {', '.join(workers)} differ")
    return {
        name: {
            "tokens": batch * (new - 1),
            "wall_median_s": statistics.median(took["decode"][0] for took in turns),
            "wall_min_s": min(took["decode"][0] for took in turns),
            "cpu_median_s": statistics.median(took["decode"][1] for took in turns),
            "prompt_s": statistics.median(took["prompt"][0] for took in turns),
            "call_s": statistics.median(took["call"][0] for took in turns),
        }
        for name, turns in seconds.items()
    }


def show(title: str, results: dict[str, dict], goal: float) -> None:
    """Prints one comparison; the first contender is ours."""
    ours = next(iter(results.values()))
    parts = {"prompt_s": "prompt s", "call_s": "call s"} if "call_s" in ours else {}
    print(f"\n{title} (goal {goal})")
    head = f"{'':28}{'tokens/s':>10}{'wall s':>9}{'min':>8}{'CPU s':>8}{'wall/ours':>11}{'CPU/ours':>10}"
    print(head + "".join(f"{label:>10}{'/ours':>7}" for label in parts.values()))
    for name, result in results.items():
        ratios = (result[f] / ours[f] for f in ("wall_median_s", "cpu_median_s"))
        print(
            f"{name:28}{result['tokens'] / result['wall_median_s']:10.1f}{result['wall_median_s']:9.3f}"
            f"{result['wall_min_s']:8.3f}{result['cpu_median_s']:8.3f}"
            + "{:11.2f}{:10.2f}".format(*ratios)
            + "".join(f"{result[part]:10.3f}{result[part] / ours[part]:7.2f}" for part in parts)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), default="llama_28m")
    parser.add_argument("--torch_python", help="python of an environment with torch and transformers")
    parser.add_argument("--cores", default="0", help="comma-separated numbers of the cores that everyone is pinned to")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64, help="of the mixed comparison; 0: leave it out")
    parser.add_argument("--json", help="file to write the figures to")
    args = parser.parse_args()
    cores, shape, new = [int(core) for core in args.cores.split(",")], MODELS[args.model], NEW[args.model]
    summary, workers = {"model": args.model, "shape": shape, "cores": cores}, {}
    with tempfile.TemporaryDirectory() as folder:
        given = [f"--shape={json.dumps(shape)}", f"--weights={os.path.join(folder, 'weights.npz')}"]
        try:
            workers[OURS] = Worker(OURS, [sys.executable, f"{HERE}/peers/capibara_generate.py", *given], cores)
            if args.torch_python:
                peer = [args.torch_python, f"{HERE}/peers/torch_generate.py", *given, f"--threads={len(cores)}"]
                workers[PEER] = Worker(PEER, peer, cores)
            summary["versions"] = {name: worker.version for name, worker in workers.items()}
            print(f"{args.model}, cores {cores}, {summary['versions']}")
            for batch in BATCHES:
                found = decoding(workers, batch, new, shape["prompt"], args.rounds)
                summary[f"decode_{batch}"] = found
                show(f"decode: {batch} x {new} tokens after {shape['prompt']}", found, GOALS["decode"])
            if args.requests:
                requests = mixed_requests(args.requests, shape, new)
                request = {"op": "mixed", "requests": requests, "batch": 8}
                contenders = {f"{OURS}, continuous": (workers[OURS], request | {"continuous": True})}
                contenders |= {f"{name}, static": (w, request | {"continuous": False}) for name, w in workers.items()}
                # All of them once to warm up: which prompts are read together decides what is compiled.
                summary["mixed"] = compare(contenders, max(1, args.rounds // 3))
                show(f"mixed: {args.requests} requests", summary["mixed"], GOALS["mixed"])
        finally:
            for worker in workers.values():
                worker.close()
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(summary, file, indent=2)


if __name__ == "__main__":
    main()
