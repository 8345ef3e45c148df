"""What a tracker costs the training whose server is a black hole: it accepts connections, and never answers.

    PATH/bin/python benchmarks/trackers.py [--trackers=wandb,mlflow,comet] [--windows=40] [--json=OUT]

PATH is an environment with capibara and the clients of the services. For each of them `capibara.train` trains a small model and
logs every step, in windows in which the process that feeds the tracker is stopped, in turns with windows in which it runs;
`slower` and the control are those of windows.py. Goal: slowed by less than 1%.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence

from dashboard import child, times_of, wait
from windows import compared, family

GOAL = 1.01
TRACKERS = {
    "wandb": ("WandbTracker", "base_url"),
    "mlflow": ("MlflowTracker", "uri"),
    "comet": ("CometTracker", "server"),
}
RUN = (
    *("--gin_file=quickstart.gin", "--gin.TRAIN_STEPS=1000000", "--gin.BATCH_SIZE=4", "--gin.LENGTH=128"),
    *("--gin.DecoderConfig.embed_dim=64", "--gin.DecoderConfig.mlp_dim=128", "--gin.DecoderConfig.num_layers=2"),
    *(
        "--gin.Trainer.log_every=1",
        "--gin.Checkpointing.every=0",
        "--gin.Evaluation.every=0",
        "--gin.Tracking.finish_s=0",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures the trackers; returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trackers", default=",".join(TRACKERS), help="which, comma-separated")
    parser.add_argument("--windows", type=int, default=40, help="in which it runs (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args(argv)
    found = {}
    for name in args.trackers.split(","):
        with tempfile.TemporaryDirectory() as folder, black_hole() as (port, connections):
            found[name] = measured(name, pathlib.Path(folder, "run"), port, args.windows) | {
                "connections": len(connections)
            }
        figures = ", ".join(f"{key} {value:.4g}" for key, value in found[name].items())
        print(f"{name:8}{figures} ({'met' if found[name]['slower'] < GOAL else 'missed'})", flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(found, indent=1))
    return int(any(one["slower"] >= GOAL for one in found.values()))


@contextlib.contextmanager
def black_hole() -> Iterator[tuple[int, list[socket.socket]]]:
    """A server that never answers: its port, and its connections."""
    connections: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connections.append(server.accept()[0])

    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1], connections
        server.shutdown(socket.SHUT_RDWR)
    for one in connections:
        one.close()


def measured(name: str, folder: pathlib.Path, port: int, windows: int) -> dict[str, float]:
    """How much slower steps are while a tracker is fed."""
    tracker, field = TRACKERS[name]
    os.environ |= {"WANDB_API_KEY": "a" * 40, "COMET_API_KEY": "a" * 25, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "capibara.train", *RUN, f"--gin.MODEL_DIR={folder}"]
    command += [f"--gin.Monitoring.trackers=(@{tracker}(),)", f"--gin.{tracker}.{field}=http://127.0.0.1:{port}"]
    metrics = folder / "metrics.jsonl"
    with tempfile.TemporaryFile() as output, child(command, stdout=output.fileno()) as trainer:
        wait(lambda: metrics.exists() and len(times_of(metrics)) > 200, 300)
        feeding = next(
            pid for pid in family(trainer.pid) if b"capibara.monitoring import tracker_process" in line_of(pid)
        )
        return compared({"tracker": feeding}, windows, lambda: times_of(metrics))


def line_of(pid: int) -> bytes:
    """The command line of a process."""
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


if __name__ == "__main__":
    sys.exit(main())
