"""What a flood costs a server: half-open connections and prompts of 1 MB, while others ask for its health.

    python benchmarks/server_flood.py [--connections=1000] [--prompts=40] [--hold_s=15] [--rounds=1] [--json=OUT]

`capibara serve` runs in a process of its own with a tiny model, on this machine's loopback address, where all of the load
goes. Another process asks /health over and over, each time over a new connection, and takes the times. Between the
phases, which are

  quiet        nobody else is there
  half-open    a third of the connections sends nothing, a third half a header, a third half a body; they are held
  prompts      of 1 MB, all at once: text, messages, token ids, nested lists
  both         the prompts while half-open connections are held

the server has time to rest. Goals: /health under 100 ms throughout, each prompt refused with 400, and afterwards the
connections closed and the memory (of the server and the process of its chat template) back within 16 MiB of where it
was after the first round of prompts of each kind, in which what is loaded late is loaded.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.table import Table

HEALTH_GOAL_MS, MEMORY_GOAL_MIB = 100.0, 16.0
LENGTH = 2048
MB = 10**6
HEADER = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n"
)
HALVES = (b"", b"GET /health HTTP/1.1\r\nHost: local", HEADER + b"\r\n{")
PROMPTS: tuple[tuple[str, dict], ...] = (
    ("completions", {"prompt": "A river. " * (MB // 9)}),
    ("chat/completions", {"messages": [{"role": "user", "content": "x" * MB}]}),
    ("completions", {"prompt": [5] * (MB // 3)}),
    ("completions", {"prompt": [[]] * (MB // 4)}),
    ("chat/completions", {"messages": [{"role": "user", "content": "x"}] * (MB // 34)}),
)
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
Address = tuple[str, int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the flood; returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--hold_s", type=float, default=15.0, help="how long half-open connections are held")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--probe", metavar="HOST:PORT", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.probe:
        host, _, port = args.probe.rpartition(":")
        return probe((host, int(port)))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, args.connections + 1024), most))
    with tempfile.TemporaryDirectory() as folder, running(make_model(folder)) as (address, pid):
        summary = measure(address, pid, args)
    report(summary)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(summary, file, indent=2)
    print(json.dumps(summary))
    return int(not all(summary["goals"].values()))


def measure(address: Address, pid: int, args: argparse.Namespace) -> dict:
    """All phases; times in ms, memory in MiB."""
    warm_up(address)
    time.sleep(2)
    before_mib, before_files = memory_mib(pid), open_files(pid)
    phases = []
    for _ in range(args.rounds):
        phases += [
            phase("quiet", address, pid, lambda: time.sleep(3)),
            phase("half-open", address, pid, lambda: hold(address, args.connections, args.hold_s)),
            phase("prompts", address, pid, lambda: send_prompts(address, args.prompts)),
            phase("both", address, pid, lambda: both(address, args)),
        ]
    time.sleep(3)
    after_mib, after_files = memory_mib(pid), open_files(pid)
    statuses = collections.Counter(status for one in phases for status in one["statuses"].elements())
    return {
        "connections": args.connections,
        "prompts": args.prompts,
        "phases": [one | {"statuses": dict(one["statuses"])} for one in phases],
        "memory_before_mib": before_mib,
        "memory_after_mib": after_mib,
        "files_before": before_files,
        "files_after": after_files,
        "goals": {
            f"/health under {HEALTH_GOAL_MS:.0f} ms": max(one["health_max_ms"] for one in phases) < HEALTH_GOAL_MS,
            "every prompt refused with 400": set(statuses) == {400},
            f"memory within {MEMORY_GOAL_MIB:.0f} MiB": after_mib - before_mib < MEMORY_GOAL_MIB,
            "connections closed": after_files <= before_files + 2,
        },
    }


def phase(name: str, address: Address, pid: int, act) -> dict:
    """What /health and the memory were while something was done."""
    command = [sys.executable, os.path.abspath(__file__), "--probe={}:{}".format(*address)]
    prober = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    prober.stdout.readline()  # it has begun
    peak, done = [memory_mib(pid)], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            peak.append(memory_mib(pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    began_s = time.monotonic()
    statuses = collections.Counter(act() or ())
    took_s = time.monotonic() - began_s
    time.sleep(1)
    done.set()
    watcher.join()
    times_ms = sorted(json.loads(prober.communicate("end\n", timeout=60)[0]))
    return {
        "phase": name,
        "seconds": round(took_s, 2),
        "health_count": len(times_ms),
        "health_median_ms": round(times_ms[len(times_ms) // 2], 2),
        "health_p99_ms": round(times_ms[int(len(times_ms) * 0.99)], 2),
        "health_max_ms": round(times_ms[-1], 2),
        "memory_peak_mib": round(max(peak), 1),
        "statuses": statuses,
    }


def probe(address: Address) -> int:
    """Asks for the health until a line comes; prints the times in ms."""
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), ended.set()), daemon=True).start()
    print("begun", flush=True)
    times_ms = []
    while not ended.wait(0.01):
        began_s = time.perf_counter()
        status = ask(address, "GET", "/health")
        times_ms.append(1e3 * (time.perf_counter() - began_s) if status == 200 else 1e6)
    print(json.dumps(times_ms))
    return 0


def hold(address: Address, count: int, seconds: float) -> None:
    """Holds half-open connections."""
    with contextlib.ExitStack() as held:
        for k in range(count):
            client = held.enter_context(socket.create_connection(address, timeout=10))
            with contextlib.suppress(OSError):  # it had to make room already
                client.sendall(HALVES[k % len(HALVES)])
        time.sleep(seconds)


def send_prompts(address: Address, count: int) -> list[int]:
    """Sends prompts at once; returns their statuses."""
    bodies = [(path, json.dumps({"model": "tiny", **given}).encode()) for path, given in PROMPTS]
    with ThreadPoolExecutor(count) as pool:
        asked = [bodies[k % len(bodies)] for k in range(count)]
        return list(pool.map(lambda one: ask(address, "POST", f"/v1/{one[0]}", one[1]), asked))


def both(address: Address, args: argparse.Namespace) -> list[int]:
    """Prompts while half-open connections are held, which leave the room that there is for connections."""
    holder = threading.Thread(target=hold, args=(address, args.connections, args.hold_s / 2))
    holder.start()
    time.sleep(2)
    statuses = send_prompts(address, args.prompts)
    holder.join()
    return statuses


def warm_up(address: Address) -> None:
    """Each kind of prompt once, and one that is answered."""
    send_prompts(address, 2 * len(PROMPTS))
    body = json.dumps({"model": "tiny", "prompt": "The river", "max_tokens": 4}).encode()
    if (status := ask(address, "POST", "/v1/completions", body)) != 200:
        raise SystemExit(f"a completion was answered with {status}")
    talk = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}).encode()
    if (status := ask(address, "POST", "/v1/chat/completions", talk)) != 200:
        raise SystemExit(f"a conversation was answered with {status}")


def ask(address: Address, method: str, path: str, body: bytes | None = None) -> int:
    """The status of a response; 0: the connection was closed."""
    connection = http.client.HTTPConnection(*address, timeout=60)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


# The server.


@contextlib.contextmanager
def running(model: str) -> Iterator[tuple[Address, int]]:
    """The server's address and process id."""
    command = [sys.executable, "-m", "capibara.serve", f"--model={model}", "--name=tiny", "--port=0"]
    command += ["--gin.ServerConfig.warm_up=False", "--gin.EngineConfig.slots=2", f"--gin.Dataset.length={LENGTH}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"CAPIBARA_API_KEY": ""})
    try:
        said = process.stdout.readline()
        if not said:
            raise SystemExit("the server has not started")
        host, port = said.split("http://")[1].split("/")[0].split(":")
        yield (host, int(port)), process.pid
    finally:
        process.terminate()
        process.wait(60)


def make_model(folder: str) -> str:
    """A tiny model with a tokenizer and a chat template, as a Hugging Face folder."""
    import jax
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    from capibara.interop import open_model
    from capibara.interop.hf import config as hf_config
    from capibara.interop.hf import folder as hf_folder
    from capibara.models import api

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=letters | {"th": 256}, merges=[("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken("<|endoftext|>", special=True)])
    about = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    files = {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(about)}
    sizes = dict(vocab_size=260, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64, dtype="float32")
    model = api.build(api.DecoderConfig(**sizes))
    params = jax.jit(model.init)(jax.random.key(1))
    values = hf_config.to_hf(model.config, {"max_position_embeddings": LENGTH})
    kind, path = values["model_type"], os.path.join(folder, "tiny")
    tensors = open_model.hf_shapes(model, kind), open_model.hf_tensors(params, model, kind)
    written = {name: text.encode() for name, text in files.items()}
    hf_folder.save_hf(path, values, *tensors, written, dtype="float32")
    return path


def memory_mib(pid: int) -> float:
    """Resident memory of a process and its children."""
    total = 0
    for one in [pid, *children(pid)]:
        with contextlib.suppress(OSError), open(f"/proc/{one}/statm", encoding="ascii") as file:
            total += int(file.read().split()[1]) * resource.getpagesize()
    return total / 2**20


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
            found += map(int, file.read().split())
    return found


def open_files(pid: int) -> int:
    """What a process has open, connections among it."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def report(summary: dict) -> None:
    """Prints the table."""
    table = Table(title=f"{summary['connections']} half-open connections, {summary['prompts']} prompts of 1 MB")
    for name in ("phase", "s", "/health asked", "median ms", "p99 ms", "max ms", "peak MiB", "statuses"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for one in summary["phases"]:
        said = ", ".join(f"{count} x {status}" for status, count in one["statuses"].items()) or "-"
        times = [f"{one[f'health_{name}_ms']:.1f}" for name in ("median", "p99", "max")]
        counts = [f"{one['seconds']:.1f}", str(one["health_count"])]
        table.add_row(one["phase"], *counts, *times, f"{one['memory_peak_mib']:.0f}", said)
    console = Console()
    console.print(table)
    before, after = summary["memory_before_mib"], summary["memory_after_mib"]
    console.print(f"memory {before:.1f} MiB before, {after:.1f} after; open files {summary['files_before']}, ", end="")
    console.print(f"{summary['files_after']} after")
    for goal, is_met in summary["goals"].items():
        console.print(f"{'met   ' if is_met else 'MISSED'}  {goal}")


if __name__ == "__main__":
    sys.exit(main())
