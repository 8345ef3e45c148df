"""What the dashboard costs: large runs that are opened, 200 viewers beside a training loop, an hour of updates.

    python benchmarks/dashboard.py [--parts=open,viewers,memory] [--steps=1000000] [--log_every=1] [--viewers=200] [--json=OUT]
    python benchmarks/dashboard.py --parts=browser [--modules=FOLDER] [--chromium=PATH]
    python benchmarks/dashboard.py --parts=peer --peers_python=PATH/bin/python

The server runs in a process of its own, as `capibara dashboard` does.

  open      one run of --steps steps, and ten, from a cold page cache: seconds from the start of the process, and from the
            moment it listens, until a chart of the loss from the first step to the last is served for all runs, and until all
            points of all metrics are
  browser   the same in headless Chromium, which is open before: until the charts that are seen of the run's page, and of the
            comparison of ten, are drawn; the median of three. FOLDER/node_modules has puppeteer-core
  peer      the run as event files in TensorBoard with its fast data server, and ours, in turns: from the start of the process
            until the loss is served from the first step to the last, the median of three. TensorBoard draws 1000 points of a
            run, taken at random; ours the lowest and highest of each stretch
  viewers   a training loop (JAX on all cores, a line of metrics each step) alternates between windows in which the server and
            its viewers are stopped and windows in which they run. A tenth of the viewers read slowly, a tenth not at all, the
            rest all events and now and then a chart. They have idle priority, since viewers are other machines. `slower`
            and the control are those of windows.py; the latency is from the line to the event
  memory    ten runs receive an hour's lines (one a second each) within a minute: the server's memory after a tenth of them
            and at the end

Goals: 2 s and 5 s, slowed by less than 2%, events within 2 s, memory flat within 16 MiB beside the lines themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import os
import pathlib
import random
import re
import resource
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from windows import compared, family

GOALS = {"one_s": 2.0, "ten_s": 5.0, "slower": 1.02, "latency_s": 2.0, "memory_mib": 16.0}
GOALS |= {"browser_one_s": 2.0, "browser_ten_s": 5.0}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts; returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="open,viewers,memory", help="which, comma-separated")
    parser.add_argument("--steps", type=int, default=1_000_000, help="of a large run")
    parser.add_argument(
        "--log_every", type=int, default=1, help="steps between its lines; runs log every 10 by default"
    )
    parser.add_argument("--viewers", type=int, default=200)
    parser.add_argument("--windows", type=int, default=60, help="in which the viewers run (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--modules", default="build/browser", help="folder of node_modules with puppeteer-core")
    parser.add_argument("--peers_python", help="a python with tensorboard")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="its program (default: %(default)s)")
    parser.add_argument("--child", choices=["train", "view"], help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child == "train":
        return train(pathlib.Path(args.target))
    if args.child == "view":
        return view(int(args.target), args.viewers)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in args.parts.split(","):
            inner = pathlib.Path(folder, "large" if part in ("open", "browser", "peer") else part)
            inner.mkdir(exist_ok=True)
            run = {"open": lambda: opening(inner, args.steps, args.log_every), "memory": lambda: memory(inner)}
            run["viewers"] = lambda: viewing(inner, args.viewers, args.windows)
            run["browser"], run["peer"] = lambda: browsing(inner, args), lambda: beside_peer(inner, args)
            found |= run[part]()
    missed = [name for name, goal in GOALS.items() if found.get(name, 0.0) > goal]
    for name, value in found.items():
        goal = f" (goal {GOALS[name]:g}: {'missed' if name in missed else 'met'})" if name in GOALS else ""
        print(f"{name:24}{value:10.3f}{goal}")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(found, indent=1))
    return int(bool(missed))


# --- open ---


def large_run(folder: pathlib.Path, steps: int, log_every: int) -> None:
    """Writes a metrics.jsonl as a run does; numbers have all their digits."""
    noise = random.Random(0)
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        start = {"total_steps": steps, "param_count": 10**9, "tokens_per_step": 2**19, "device_kind": "TPU v5 lite"}
        file.write(json.dumps({"kind": "event", "step": 0, "time": 1.7e9, "event": "start", **start}) + "\n")
        for step in range(log_every, steps + 1, log_every):
            step_s = 1.2 + noise.random() * 0.01
            line = {"kind": "train", "step": step, "time": round(1.7e9 + 1.2 * step, 3)}
            line |= {"loss": 2 + 8 / math.sqrt(step) + noise.gauss(0, 0.05), "grad_norm": abs(noise.gauss(1, 0.2))}
            line |= {"learning_rate": 3e-4 * (1 - step / steps), "tokens": 524288.0, "token_accuracy": noise.random()}
            line |= {"step_s": step_s, "tokens_per_s": 524288 / step_s, "data_wait_s": noise.random() * 1e-3}
            file.write(json.dumps(line | {"mfu": 0.5 + noise.random() * 0.01}) + "\n")
            if step % 1000 == 0:
                file.write(json.dumps({"kind": "eval", "step": step, "time": 1.7e9, "loss": 2.0}) + "\n")


def large_runs(folder: pathlib.Path, steps: int, log_every: int) -> pathlib.Path:
    """Writes a run to one/run and links it ten times below ten/; returns its file."""
    first = folder / "one" / "run" / "metrics.jsonl"
    if not first.exists():
        first.parent.mkdir(parents=True)
        large_run(first.parent, steps, log_every)
        for number in range(10):
            (folder / "ten" / f"run {number}").mkdir(parents=True)
            os.link(first, folder / "ten" / f"run {number}" / "metrics.jsonl")
    return first


def evict(path: pathlib.Path) -> None:
    """Removes a file from the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def opening(folder: pathlib.Path, steps: int, log_every: int) -> dict[str, float]:
    """Seconds until one run, and ten, are served."""
    first = large_runs(folder, steps, log_every)
    found = {"file_mib": first.stat().st_size / 2**20}
    for name, runs in (("one", 1), ("ten", 10)):
        evict(first)
        begin_s = time.monotonic()
        with server(folder / name) as (port, process):
            listens_s, used_s = time.monotonic(), cpu(process.pid)
            wait(lambda: opened(port, runs, [log_every, steps]))
            found[f"{name}_s"] = time.monotonic() - listens_s
            found[f"{name}_from_start_s"] = time.monotonic() - begin_s
            wait(lambda: not any(run["loading"] for run in ask(port, "/api/runs")["runs"]))
            found[f"{name}_all_points_s"] = time.monotonic() - listens_s
            found[f"{name}_all_points_cpu_s"] = cpu(process.pid) - used_s
            for metric in ("train/loss", "train/mfu"):
                assert [line["count"] for line in charts(port, metric)] == [steps // log_every] * runs
    return found


def browsing(folder: pathlib.Path, args: argparse.Namespace) -> dict[str, float]:
    """Seconds until Chromium has drawn the page of one run, and the comparison of ten."""
    first = large_runs(folder, args.steps, args.log_every)
    found: dict[str, list[float]] = {}
    settings = json.dumps({"modules": str(pathlib.Path(args.modules).resolve()), "chromium": args.chromium})
    command = ["node", str(pathlib.Path(__file__).with_name("dashboard_open.mjs")), settings]
    with child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as browser:
        assert browser.stdout.readline() == b"ready\n", "Chromium has not started"
        for name, runs in (("one", 1), ("ten", 10)) * 3:
            evict(first)
            with server(folder / name) as (port, _):
                listens_s = time.monotonic()
                wait(lambda: len(ask(port, "/api/runs")["runs"]) == runs)
                ids = [run["id"] for run in ask(port, "/api/runs")["runs"]]
                page = f"run/{ids[0]}" if runs == 1 else "compare?" + "&".join(f"run={one}" for one in ids)
                browser.stdin.write(f"http://127.0.0.1:{port}/#/{page}\n".encode())
                browser.stdin.flush()
                assert float(browser.stdout.readline()) > 0, f"the charts of {name} were not drawn"
                found.setdefault(f"browser_{name}_s", []).append(time.monotonic() - listens_s)
    return {name: statistics.median(values) for name, values in found.items()}


def beside_peer(folder: pathlib.Path, args: argparse.Namespace) -> dict[str, float]:
    """Seconds until the loss of a run is served by TensorBoard, and by ours."""
    first = large_runs(folder, args.steps, args.log_every)
    events = event_file(first, folder / "events")
    ends, seconds = [args.log_every, args.steps], {"tensorboard_s": [], "ours_s": []}
    for _ in range(3):
        evict(first)
        begin_s = time.monotonic()
        with server(folder / "one") as (port, _):
            wait(lambda: opened(port, 1, ends))
            seconds["ours_s"].append(time.monotonic() - begin_s)
        evict(events)
        begin_s = time.monotonic()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [args.peers_python, "-m", "tensorboard.main", f"--logdir={events.parent}", f"--port={port}"]
        with child([*command, "--reload_interval=1"], stderr=subprocess.DEVNULL):
            wait(lambda: _of_tensorboard(port) == args.steps, 600)
            seconds["tensorboard_s"].append(time.monotonic() - begin_s)
    found = {f"peer_{name}": statistics.median(values) for name, values in seconds.items()}
    return {"events_mib": events.stat().st_size / 2**20, **found}


def event_file(metrics: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Writes the lines of a metrics.jsonl as TensorBoard's events."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter

    folder.mkdir(exist_ok=True)
    path = folder / "events.out.tfevents.1700000000.host"
    writer = RecordWriter(str(path))
    writer.write(Event(wall_time=1.7e9, file_version="brain.Event:2").SerializeToString())
    with open(metrics, encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            kind, step, wall_time = (record.pop(name) for name in ("kind", "step", "time"))
            if kind != "event":
                event = Event(wall_time=wall_time, step=step)
                for name, value in record.items():
                    event.summary.value.add(tag=f"{kind}/{name}", simple_value=value)
                writer.write(event.SerializeToString())
    writer.flush()
    writer.close()
    return path


def _of_tensorboard(port: int) -> int | None:
    """The last step of the loss that it serves."""
    try:
        points = ask(port, "/data/plugin/scalars/scalars?run=.&tag=train/loss")
    except (OSError, AssertionError, http.client.HTTPException):
        return None  # it has not started, or does not know the run yet
    return points[-1][1] if points else None


def charts(port: int, metric: str) -> list[dict]:
    """The lines of all runs in a chart."""
    ids = [run["id"] for run in ask(port, "/api/runs")["runs"]]
    return ask(port, "/api/series?" + "&".join([f"metric={metric}", *(f"run={one}" for one in ids)]))["series"]


def opened(port: int, runs: int, ends: list[int]) -> bool:
    """Whether a chart of the loss of all runs is served, from the first step to the last."""
    lines = charts(port, "train/loss")
    return len(lines) == runs and all(line["range"] == ends and len(line["x"]) >= 500 for line in lines)


# --- viewers ---


def viewing(folder: pathlib.Path, viewers: int, windows: int) -> dict[str, float]:
    """How much slower a training loop is beside a dashboard with many viewers, and how late events are."""
    run = folder / "run"
    run.mkdir()
    code = [sys.executable, __file__]
    with contextlib.ExitStack() as stack:
        trainer = stack.enter_context(child([*code, "--child=train", f"--target={run}"]))
        wait(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 20_000, 60)
        port, process = stack.enter_context(server(folder))
        crowd = stack.enter_context(child([*code, "--child=view", f"--target={port}", f"--viewers={viewers}"], nice=19))
        wait(lambda: viewers_of(port) >= 0.9 * viewers, 60)
        processes = {"server": process.pid, "viewers": crowd.pid}
        found = {"viewers": viewers, **compared(processes, windows, lambda: times_of(run / "metrics.jsonl"))}
        found |= {"viewers_at_the_end": viewers_of(port), "latency_s": max(latency(port, run))}
        trainer.terminate()
    return found


def times_of(path: pathlib.Path) -> list[float]:
    """When each training line of a run was written."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:-1]]
    return [line["time"] for line in lines if line["kind"] == "train"]


def train(folder: pathlib.Path) -> int:
    """Trains a small model on all cores, and logs each step."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp

    @jax.jit
    def step(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) @ w.T - x) ** 2))(weights)
        return weights - 0.1 * gradient, loss

    weights, x = jnp.eye(1024), jax.random.normal(jax.random.key(0), (256, 1024))
    with open(folder / "metrics.jsonl", "w") as file:
        file.write(json.dumps({"kind": "event", "step": 0, "time": time.time(), "event": "start"}) + "\n")
        for number in range(1, 10_000_000):
            begin_s = time.perf_counter()
            weights, loss = step(weights, x)
            line = {"kind": "train", "step": number, "time": time.time(), "loss": float(loss)}
            line |= {"step_s": time.perf_counter() - begin_s, "learning_rate": 0.1, "tokens_per_s": 1.0}
            file.write(json.dumps(line) + "\n")
            file.flush()
    return 0


def view(port: int, viewers: int) -> int:
    """Opens the events of many viewers and reads them: most at once, some slowly, some not at all.

    Those that the server closes, since they read too little, are opened again, as browsers do.
    """
    run_id = ask(port, "/api/runs")["runs"][0]["id"]
    request = f"GET /api/events?run={run_id} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
    all_of: dict[int, tuple[int, socket.socket]] = {}
    ready = select.epoll()

    def open_one(number: int) -> None:
        connection = socket.create_connection(("127.0.0.1", port))
        if number % 10 < 2:  # dead, and slow ones
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(request)
        connection.setblocking(False)
        all_of[connection.fileno()] = number, connection
        ready.register(connection, select.EPOLLIN if number % 10 > 1 else select.EPOLLRDHUP)

    for number in range(viewers):
        open_one(number)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # viewers are other machines: here they get what is idle
    for turn in range(1_000_000):
        for descriptor, event in ready.poll(0):
            number, connection = all_of[descriptor]
            if event & ~select.EPOLLIN or not connection.recv(65_536):
                del all_of[descriptor]
                connection.close()
                open_one(number)
        for number, connection in list(all_of.values()) if turn % 4 == 0 else []:
            if number % 10 == 1:
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    connection.recv(200)
        with contextlib.suppress(OSError, AssertionError):  # a chart for one of them: each has one in 100 s
            ask(port, f"/api/series?run={run_id}&metric=train/loss&points={600 + turn % 7}")
        time.sleep(0.5)
    return 0


def latency(port: int, run: pathlib.Path, count: int = 8) -> list[float]:
    """Seconds from lines to their events."""
    found: list[float] = []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", "/api/events")
        answer = connection.getresponse()
        while len(found) < count:
            line = answer.readline()
            for row in json.loads(line[6:]).get("runs", []) if line.startswith(b"data: ") else []:
                for times in [new["times"] for new in (row.get("new") or {}).values() if new] or [[row["updated"]]]:
                    found.append(time.time() - min(times))
    return found


# --- memory ---


def memory(folder: pathlib.Path, runs: int = 10, lines: int = 3600, seconds: float = 60.0) -> dict[str, float]:
    """The server's memory while runs receive an hour's lines within a minute, and viewers watch."""
    files = []
    for number in range(runs):
        (folder / str(number)).mkdir()
        files.append(open(folder / str(number) / "metrics.jsonl", "w"))
        files[-1].write(json.dumps({"kind": "event", "step": 0, "time": time.time(), "event": "start"}) + "\n")
    sizes = []
    with (
        server(folder) as (port, process),
        child([sys.executable, __file__, "--child=view", f"--target={port}", "--viewers=40"], nice=19),
    ):
        begin_s = time.monotonic()
        for step in range(1, lines + 1):
            for file in files:
                line = {"kind": "train", "step": step, "time": time.time(), "loss": 2.0 + step % 7, "step_s": 1.0}
                file.write(
                    json.dumps(line | {"grad_norm": 1.0, "learning_rate": 1e-4, "tokens_per_s": 1e5, "mfu": 0.5}) + "\n"
                )
                file.flush()
            if step % 36 == 0:
                sizes.append(resident_mib(process.pid))
                ask(
                    port,
                    f"/api/series?run={ask(port, '/api/runs')['runs'][0]['id']}&metric=train/loss&points={500 + step % 50}",
                )
            time.sleep(max(0.0, begin_s + seconds * step / lines - time.monotonic()))
    for file in files:
        file.close()
    return {
        "memory_begin_mib": max(sizes[5:15]),
        "memory_end_mib": max(sizes[-10:]),
        "memory_mib": max(sizes[-10:]) - max(sizes[5:15]),
    }


# --- processes ---


@contextlib.contextmanager
def server(folder: pathlib.Path) -> Iterator[tuple[int, subprocess.Popen]]:
    """A dashboard's port and process."""
    command = [
        sys.executable,
        "-m",
        "capibara.dashboard",
        str(folder),
        "--port=0",
        "--gin.DashboardConfig.memory_mib=8192",
    ]
    with child(command, stdout=subprocess.PIPE) as process:
        found = re.search(rb":(\d+)/", process.stdout.readline())
        assert found, "the server has not started"
        yield int(found[1]), process


@contextlib.contextmanager
def child(command: list[str], *, nice: int = 0, **options: int) -> Iterator[subprocess.Popen]:
    """A process that ends with the block."""
    process = subprocess.Popen(["nice", f"-n{nice}", *command] if nice else command, **options)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def ask(port: int, path: str) -> dict:
    """The JSON of an address."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 200, path
        return json.loads(answer.read())


def viewers_of(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        found = re.search(rb"^capibara_dashboard_viewers (\d+)", connection.getresponse().read(), re.MULTILINE)
        return int(found[1]) if found else 0


def wait(is_done, within_s: float = 120.0) -> None:
    """Waits until a condition holds."""
    limit_s = time.monotonic() + within_s
    while not is_done():
        assert time.monotonic() < limit_s, "it takes too long"
        time.sleep(0.1)


def cpu(pid: int) -> float:
    """Seconds of processor time of a process and those that it has started."""
    total = 0
    for one in family(pid):
        with contextlib.suppress(OSError), open(f"/proc/{one}/stat", encoding="ascii") as file:
            total += sum(map(int, file.read().rpartition(")")[2].split()[11:13]))
    return total / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    """Resident memory of a process and those that it has started."""
    total = 0
    for one in family(pid):
        with contextlib.suppress(OSError), open(f"/proc/{one}/statm", encoding="ascii") as file:
            total += int(file.read().split()[1]) * resource.getpagesize()
    return total / 2**20


if __name__ == "__main__":
    sys.exit(main())
