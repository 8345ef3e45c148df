"""What running texts notice while adapters are loaded and unloaded: gaps between tokens, with loads and without, in turns.

    python benchmarks/adapter_loading.py --model=MODEL --adapter=PEFT_FOLDER [--clients=4] [--seconds=20] [--rounds=3] [--json=OUT]

A server of the model has `--clients` streams of the base, which end and begin again. In every other turn a thread loads the adapter,
asks it for a token and unloads it, as often as it can. Prints the median and the longest gap of each kind of turn, and how long a
load takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request

import openai

_TOKENS = 200


def gaps(client: openai.OpenAI, until_s: float, result: list[float]) -> None:
    """Adds the seconds between the tokens of texts until a time, as time.monotonic."""
    while time.monotonic() < until_s:
        stream = client.completions.create(
            model="base", prompt="Once upon a time", max_tokens=_TOKENS, temperature=1, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        before = None
        for _ in stream:
            now = time.monotonic()
            if before is not None:
                result.append(now - before)
            before = now


def loads(client: openai.OpenAI, until_s: float, result: list[float]) -> None:
    """Loads, uses and unloads the adapter until a time; adds the seconds of each load."""
    while time.monotonic() < until_s:
        began_s = time.monotonic()
        client.post("/load_lora_adapter", cast_to=str, body={"lora_name": "a", "lora_path": "."})
        result.append(time.monotonic() - began_s)
        client.completions.create(model="a", prompt="Once", max_tokens=1)
        client.post("/unload_lora_adapter", cast_to=str, body={"lora_name": "a"})


def turn(client: openai.OpenAI, clients: int, seconds: float, load_s: list[float] | None) -> list[float]:
    """The gaps of one turn; `load_s`: gets the times of loads, None: there are none."""
    until_s, result = time.monotonic() + seconds, list[float]()
    threads = [threading.Thread(target=gaps, args=(client, until_s, result)) for _ in range(clients)]
    if load_s is not None:
        threads.append(threading.Thread(target=loads, args=(client, until_s, load_s)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--adapter", required=True)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    args = parser.parse_args()
    flags = [f"--model={args.model}", f"--adapter_folder={args.adapter}", "--name=base", "--port=0"]
    flags.append("--gin.EngineConfig.slots=8")
    command = [sys.executable, "-m", "capibara.serve", *flags]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        client = openai.OpenAI(base_url=url, api_key="none", timeout=600)
        metrics = url.removesuffix("/v1") + "/metrics"
        while b"capibara_compiling 0.0" not in urllib.request.urlopen(metrics).read():
            time.sleep(1)
        turn(client, args.clients, 5.0, [])  # compiles what is left, also of the adapter's short prompt
        found: dict[str, list[float]] = {"without": [], "with loads": []}
        load_s: list[float] = []
        for _ in range(args.rounds):
            found["without"] += turn(client, args.clients, args.seconds, None)
            found["with loads"] += turn(client, args.clients, args.seconds, load_s)
    finally:
        server.terminate()
        server.wait()
    results = {
        name: {"gaps": len(each), "p50_ms": 1e3 * statistics.median(each), "p99_ms": 1e3 * sorted(each)[-len(each) // 100],
               "longest_ms": 1e3 * max(each)}
        for name, each in found.items()
    }  # fmt: skip
    results["loads"] = {
        "count": len(load_s),
        "median_ms": 1e3 * statistics.median(load_s),
        "longest_ms": 1e3 * max(load_s),
    }
    for name, row in results.items():
        print(f"{name:12}" + ", ".join(f"{key} {value:.1f}" for key, value in row.items()))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(results | vars(args), file, indent=1)


if __name__ == "__main__":
    main()
