"""Speed of servers under the same load, on the same cores and of the same weights: ours beside llama.cpp, vLLM and transformers.

    python benchmarks/serve.py --model=MODEL.gguf [--llama] [--vllm_python=PATH/bin/python]
        [--transformers_python=PATH/bin/python] [--clients=1,8,32] [--requests=48] [--warm=30] [--long=4000] [--cores=0,1]
        [--rounds=1] [--json=OUT]

The model is written once as a Hugging Face folder and as a GGUF file, both in `--dtype`. Requests have lengths like
ShareGPT's, scaled to a CPU (logarithms are normal: prompts with a median of 64 tokens, texts with one of 32), and the same
random words on all sides. Each client sends its next request when the last one has ended, and begins after a pause that is
exponential (arrivals are Poisson's). Texts have exactly their length on all sides (ignore_eos), except transformers', whose
server knows no such parameter.

  tokens/s  of all texts, from the first request to the end of the last
  first     seconds from a request to its first token
  between   seconds between two events of a stream, divided by the tokens that came with the second
  stall     the longest gap between two events of 7 streams while a prompt of `--long` tokens comes in, over their median gap

A server runs alone; they take turns, `--rounds` times. Each is measured after `--warm` seconds of such a load, and ours not before it
has compiled its programs (capibara_compiling of /metrics); `--warm=0` measures a start. A ratio is ours over theirs for tokens/s,
theirs over ours for times.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

HERE = pathlib.Path(__file__).resolve().parent
READY_S = 1800.0
COMPILING = "capibara_compiling "
LONGEST = 512  # tokens of prompt and text together
WORDS = "the cat sat on a mat and looked at rain over hills while trains went by slowly to some other town".split()


@dataclasses.dataclass(frozen=True)
class Load:
    """A request: a prompt's words, and the tokens of its text."""

    words: int
    tokens: int


@dataclasses.dataclass
class Served:
    """What a client saw of one text: when it was asked for, and when tokens came (time, how many), by time.monotonic."""

    asked_s: float
    came: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    tokens: int = 0


def loads(count: int) -> list[Load]:
    """Lengths whose logarithms are normal, as those of ShareGPT are."""
    random = np.random.default_rng(1)
    prompts = np.clip(random.lognormal(np.log(64), 0.8, count), 4, LONGEST // 2).astype(int)
    texts = np.clip(random.lognormal(np.log(32), 0.7, count), 4, LONGEST // 4).astype(int)
    return [Load(int(words), int(tokens)) for words, tokens in zip(prompts, texts)]


def prompt_of(number: int, words: int) -> str:
    """Words that differ from request to request, so that no prefix is shared."""
    random = np.random.default_rng(number)  # of another load, too: a cached prefix would be measured instead
    return " ".join(WORDS[i] for i in random.integers(0, len(WORDS), words))


async def ask(address: str, path: str, body: dict[str, Any]) -> Served:
    """Sends one request for a stream, and reads it."""
    host, port = address.removeprefix("http://").split(":")
    payload = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    seen = Served(time.monotonic())
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**20)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + payload)
    await writer.drain()
    first = await reader.readline()
    if b" 200 " not in first:
        raise RuntimeError(f"{address} answered {first!r}: {(await reader.read(2000)).decode(errors='replace')}")
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if usage := event.get("usage"):
            seen.tokens = usage["completion_tokens"]
        choice = (event.get("choices") or [{}])[0]
        if choice.get("text") or (choice.get("delta") or {}).get("content"):
            seen.came.append((time.monotonic(), 1))
    writer.close()
    return seen


async def run(server: Server, requests: Sequence[Load], clients: int) -> dict[str, float]:
    """Figures of one load."""
    waiting, seen = list(enumerate(requests)), list[Served]()
    random = np.random.default_rng(2)

    async def client(pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        while waiting:
            number, load = waiting.pop(0)
            prompt = prompt_of(1000 * clients + number, load.words)
            seen.append(await ask(server.address, server.path, server.body(prompt, load.tokens)))

    pauses = np.cumsum(random.exponential(0.2, clients)) - 0.0
    began_s = time.monotonic()
    await asyncio.gather(*(client(float(pause)) for pause in pauses))
    took_s = time.monotonic() - began_s
    return figures(seen, took_s)


async def warm(server: Server, seconds: float, counts: Sequence[int]) -> None:
    """Loads of other prompts by these numbers of clients, until the seconds are over and the server compiles no more."""
    began_s, number = time.monotonic(), 10**6
    while time.monotonic() - began_s < seconds or server.compiling():
        for clients in counts:
            texts = loads(clients)
            bodies = [server.body(prompt_of(number + i, load.words), load.tokens) for i, load in enumerate(texts)]
            await asyncio.gather(*(ask(server.address, server.path, body) for body in bodies))
            number += clients


def figures(seen: Sequence[Served], took_s: float) -> dict[str, float]:
    """tokens/s, and percentiles of the times."""
    first = [one.came[0][0] - one.asked_s for one in seen if one.came]
    between: list[float] = []
    for one in seen:
        gaps = np.diff([at_s for at_s, _ in one.came])
        # Several tokens may come in one event: the gap is shared among them.
        each = max(1.0, (one.tokens - 1) / max(1, len(gaps)))
        between += list(gaps / each)
    tokens = sum(one.tokens for one in seen)
    result = {"tokens_per_s": tokens / took_s, "tokens": float(tokens)}
    for name, values in (("first", first), ("between", between)):
        result |= {f"{name}_p{p}": float(np.percentile(values, p)) for p in (50, 99)}
    return result


async def stall(server: Server, long: int) -> dict[str, float]:
    """Gaps of seven streams while a long prompt comes in."""
    streams = [
        asyncio.create_task(ask(server.address, server.path, server.body(prompt_of(i, 16), 96))) for i in range(7)
    ]
    await asyncio.sleep(3.0)
    began_s = time.monotonic()
    late = await ask(server.address, server.path, server.body(prompt_of(99, long), 4))
    ended_s = late.came[0][0]
    gaps, inside = list[float](), list[float]()
    for seen in await asyncio.gather(*streams):
        for (before_s, _), (after_s, _) in zip(seen.came, seen.came[1:]):
            gaps.append(after_s - before_s)
            if after_s >= began_s and before_s <= ended_s:
                inside.append(after_s - before_s)
    p99 = float(np.percentile(inside or gaps, 99))
    return {"stall_p99": p99, "stall_p50": statistics.median(gaps), "stall": p99 / statistics.median(gaps)}


class Server:
    """A server in a process of its own, pinned to the cores.

    Args:
      name: of the server.
      command: starts it; `{port}` is where it listens.
      ready: the path that answers when it is ready.
      extra: parameters of its requests.
    """

    path = "/v1/completions"

    def __init__(self, name: str, command: Sequence[str], ready: str, extra: dict[str, Any], model: str = "bench"):
        self.name, self._command, self._ready, self._extra, self._model = name, command, ready, extra, model
        with contextlib.closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self._port}"

    def body(self, prompt: str, tokens: int) -> dict[str, Any]:
        """The parameters of a request."""
        return {"model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0} | self._extra

    @contextlib.contextmanager
    def running(self, cores: Sequence[int], log: str) -> Iterator[None]:
        """Starts it, waits until it is ready, and ends it."""
        command = [part.replace("{port}", str(self._port)) for part in self._command]
        threads = str(len(cores))
        environment = os.environ | {"OMP_NUM_THREADS": threads, "VLLM_CPU_KVCACHE_SPACE": "4", "JAX_PLATFORMS": "cpu"}
        with open(log, "w") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )
        try:
            began_s = time.monotonic()
            while not self._answers():
                if process.poll() is not None or time.monotonic() - began_s > READY_S:
                    raise RuntimeError(f"{self.name} did not start: {pathlib.Path(log).read_text()[-1500:]}")
                time.sleep(0.5)
            self.ready_at_s = time.monotonic()
            self.ready_s = self.ready_at_s - began_s
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)

    def compiling(self) -> bool:
        """Whether it says that it compiles programs; peers do not say."""
        with contextlib.suppress(OSError), urllib.request.urlopen(self.address + "/metrics", timeout=5) as reply:
            return any(
                float(line.split()[1]) for line in reply.read().decode().splitlines() if line.startswith(COMPILING)
            )
        return False

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.address + self._ready, timeout=5) as reply:
                return reply.status == 200
        except OSError:
            return False


class ChatServer(Server):
    """One that has only chats."""

    path = "/v1/chat/completions"

    def body(self, prompt: str, tokens: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        return {"model": self._model, "messages": messages, "max_tokens": tokens, "temperature": 0} | self._extra


def written(path: str, folder: str, dtype: str) -> tuple[str, str]:
    """The model as a Hugging Face folder and as a GGUF file, in the dtype."""
    hf, gguf = os.path.join(folder, "bench"), os.path.join(folder, "bench.gguf")
    base = [sys.executable, "-m", "capibara.convert", f"--from={path}"]
    kinds = {"float32": "f32", "bfloat16": "bf16"}
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([*base, f"--to={hf}"], check=True, env=environment, stdout=sys.stderr)
    gguf_of = [sys.executable, "-m", "capibara.convert", f"--from={hf}", f"--to={gguf}", f"--dtype={kinds[dtype]}"]
    subprocess.run(gguf_of, check=True, env=environment, stdout=sys.stderr)
    return hf, gguf


def servers(args: argparse.Namespace, hf: str, gguf: str) -> list[Server]:
    """Ours and the peers."""
    slots, threads = str(args.slots), str(len(args.cores.split(",")))
    # A word may take two tokens.
    length = str(max(2 * LONGEST, 2 * args.long + 64))
    ours = [
        *(sys.executable, "-m", "capibara.serve", f"--model={hf}", "--name=bench", "--port={port}"),
        *(f"--gin.EngineConfig.slots={slots}", f"--gin.Dataset.length={length}", *args.ours),
    ]
    found: list[Server] = [Server("capibara", ours, "/ready", {"ignore_eos": True})]
    if args.llama:
        command = [sys.executable, str(HERE / "peers" / "llama_server.py"), gguf, "{port}", slots, threads, length]
        found.append(Server("llama.cpp", command, "/health", {"ignore_eos": True, "cache_prompt": False}))
    if args.vllm_python:
        command = [
            *(
                args.vllm_python,
                "-m",
                "vllm.entrypoints.openai.api_server",
                f"--model={hf}",
                "--served-model-name=bench",
            ),
            *("--port={port}", f"--max-num-seqs={slots}", f"--dtype={args.dtype}", f"--max-model-len={length}"),
        ]
        found.append(Server("vLLM", command, "/health", {"ignore_eos": True}))
    if args.transformers_python:
        command = [
            *(args.transformers_python, "-m", "transformers.cli.transformers", "serve", hf),
            *("--port", "{port}", "--host", "127.0.0.1", "--continuous-batching"),
        ]
        found.append(ChatServer("transformers", command, "/health", {}, hf))
    return found


def main() -> int:
    """Measures, prints a table, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--llama", action="store_true")
    parser.add_argument("--vllm_python")
    parser.add_argument("--transformers_python")
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--warm", type=float, default=30.0, help="seconds of load before each server is measured; 0: none"
    )
    parser.add_argument("--long", type=int, default=0, help="words of the long prompt; 0: no stall is measured")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ours", action="append", default=[], help="a flag more of capibara.serve")
    parser.add_argument("--json")
    args = parser.parse_args()
    cores = [int(core) for core in args.cores.split(",")]
    each: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        hf, gguf = written(args.model, folder, args.dtype)
        for _ in range(args.rounds):
            for server in servers(args, hf, gguf):
                of_server = each.setdefault(server.name, {})
                with server.running(cores, os.path.join(folder, f"{server.name}.log")):
                    asyncio.run(run(server, loads(4), 2))
                    if args.warm:
                        asyncio.run(warm(server, args.warm, sorted({1, 8, *map(int, args.clients.split(","))})))
                    warm_s = time.monotonic() - server.ready_at_s
                    of_server.setdefault("ready", []).append({"ready_s": server.ready_s, "warm_s": warm_s})
                    for clients in map(int, args.clients.split(",")):
                        requests = loads(max(args.requests, clients) if clients > 1 else args.requests // 4)
                        of_server.setdefault(str(clients), []).append(asyncio.run(run(server, requests, clients)))
                    if args.long:
                        of_server.setdefault("stall", []).append(asyncio.run(stall(server, args.long)))
    medians = {
        name: {
            key: {what: statistics.median(one[what] for one in runs) for what in runs[0]}
            for key, runs in of_server.items()
        }
        for name, of_server in each.items()
    }
    table = Table(title=f"{args.model}, {args.dtype}, cores {args.cores}")
    names = ("clients", "server", "tokens/s", "ours over it", "first p50", "p99", "between p50", "p99")
    for name in names:
        table.add_column(name)
    for clients in args.clients.split(","):
        for name, of_server in medians.items():
            row = of_server[clients]
            ratio = medians["capibara"][clients]["tokens_per_s"] / row["tokens_per_s"]
            times = (f"{row[key]:.3f}" for key in ("first_p50", "first_p99", "between_p50", "between_p99"))
            table.add_row(clients, name, f"{row['tokens_per_s']:.1f}", f"{ratio:.2f}", *times)
    console = Console(width=120)
    console.print(table)
    for name, of_server in medians.items():
        console.print(name, {**of_server["ready"], **of_server.get("stall", {})})
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(medians, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
