"""What running texts notice while adapters are loaded and unloaded: gaps between tokens, with loads and without, in turns.

    python benchmarks/adapter_loading.py --model=MODEL --adapter=PEFT_FOLDER [--slots=4] [--tokens=100] [--rounds=3] [--json=OUT]

An engine with its own thread continues `--slots` prompts by `--tokens` tokens each. In every other turn a thread loads the adapter,
asks it for a token and unloads it, as often as it can. Prints the gaps between tokens of each kind of turn, how long a load takes,
and the CPU time of a turn, since machines are shared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time

import capibara as cb
from capibara.api.language_model import LanguageModel
from capibara.inference.engine.engine import EngineConfig


def turn(model: LanguageModel, slots: int, tokens: int, load_s: list[float] | None) -> tuple[list[float], float]:
    """The gaps between tokens of one turn, and its CPU seconds; `load_s`: gets the seconds of loads, None: there are none."""
    done = threading.Event()

    def loads(seconds: list[float]) -> None:
        while not done.is_set():
            began_s = time.monotonic()
            model.load_adapter("a", ".")
            seconds.append(time.monotonic() - began_s)
            model.engine.submit("Once", cb.Sampling(max_new_tokens=1), adapter="a").result()
            model.unload_adapter("a")

    began_s = time.process_time()
    sampling = cb.Sampling(temperature=1.0, max_new_tokens=tokens, min_new_tokens=tokens)
    streams = [model.engine.submit(f"Row {row} upon a time", sampling) for row in range(slots)]
    loading = threading.Thread(target=loads, args=(load_s,)) if load_s is not None else None
    if loading is not None:
        loading.start()
    completions = [stream.result() for stream in streams]
    done.set()
    if loading is not None:
        loading.join()
    arrivals = [[piece.at_s for piece in completion.pieces] for completion in completions]
    return [after - at for each in arrivals for at, after in zip(each, each[1:])], time.process_time() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "adapter"):
        parser.add_argument(f"--{name}", required=True)
    for name, value in (("slots", 4), ("tokens", 100), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json")
    args = parser.parse_args()
    model = cb.load(args.model, adapters=cb.Adapters(folders=(args.adapter,)), bindings=["Dataset.length = 256"])
    model._batching = EngineConfig(slots=args.slots + 1, decode_steps=1)
    gaps: dict[str, list[float]] = {"without": [], "with loads": []}
    cpu_s: dict[str, list[float]] = {"without": [], "with loads": []}
    load_s: list[float] = []
    with model.engine.start():
        turn(model, args.slots, 8, [])  # compiles
        for _ in range(args.rounds):
            for name, times in (("without", None), ("with loads", load_s)):
                each, took_s = turn(model, args.slots, args.tokens, times)
                gaps[name] += each
                cpu_s[name].append(took_s)
    results = {
        name: {
            "p50_ms": 1e3 * statistics.median(each),
            "p99_ms": 1e3 * sorted(each)[-1 - len(each) // 100],
            "longest_ms": 1e3 * max(each),
            "cpu_s": statistics.median(cpu_s[name]),
        }
        for name, each in gaps.items()
    }
    results["loads"] = {
        "count": len(load_s),
        "p50_ms": 1e3 * statistics.median(load_s),
        "longest_ms": 1e3 * max(load_s),
    }
    for name, row in results.items():
        print(f"{name:12}" + ", ".join(f"{key} {value:.1f}" for key, value in row.items()))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"results": results} | vars(args), file, indent=1)


if __name__ == "__main__":
    main()
