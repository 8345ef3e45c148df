"""How long until something happens: --help, import, and the first train step with a warm compilation cache.

    python benchmarks/startup.py [--rounds=3] [--json=startup.json]

The first step is that of the quickstart's model on 8 emulated devices, from process start until its metrics are
printed, on the direct text feed and on the SeqIO feed, alternating. One start before the rounds fills that cache
and Python's own of compiled modules, which an image of a container may have switched off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from rich.console import Console
from rich.table import Table

TARGETS_S = {"import capibara": 0.3, "train --help": 1.0, "first step, text feed": 10.0, "first step, SeqIO feed": 20.0}
# As on a machine that starts a program a second time.
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def seconds_to_end(*arguments: str) -> float:
    """Wall seconds of a Python process."""
    begin_s = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=_ENVIRONMENT)
    return time.perf_counter() - begin_s


def seconds_to_first_step(gin_file: str) -> float:
    """Wall seconds from process start until the metrics of step 1 are printed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "capibara.train", f"--gin_file={gin_file}", "--emulate=8"]
        command += [f"--gin.MODEL_DIR={folder}/run", "--gin.TRAIN_STEPS=1", "--gin.Trainer.log_every=1"]
        command += ["--gin.Evaluation.every=0", "--gin.Schedule.warmup_fraction=0.0"]
        begin_s = time.perf_counter()
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=_ENVIRONMENT, **pipes) as process:
            first_s = None
            for line in process.stdout:
                if first_s is None and "step 1/1" in line:
                    first_s = time.perf_counter() - begin_s
            errors = process.stderr.read()
        if process.returncode or first_s is None:
            raise SystemExit(f"error: {' '.join(command)} failed: {errors[-2000:]}")
        return first_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="PATH")
    args = parser.parse_args()
    probes = {
        "import capibara": lambda: seconds_to_end("-c", "import capibara"),
        "train --help": lambda: seconds_to_end("-m", "capibara.train", "--help"),
        "first step, text feed": lambda: seconds_to_first_step("quickstart.gin"),
        "first step, SeqIO feed": lambda: seconds_to_first_step("quickstart_seqio.gin"),
    }
    for probe in probes.values():
        probe()
    times = {name: [] for name in probes}
    for _ in range(args.rounds):
        for name, probe in probes.items():
            times[name].append(probe())
    table = Table(title=f"seconds from process start, median of {args.rounds} (warm compilation cache)")
    for heading in ("what", "median", "fastest", "at most"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for name, values in times.items():
        table.add_row(name, f"{statistics.median(values):.2f}", f"{min(values):.2f}", f"{TARGETS_S[name]:g}")
    Console().print(table)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"seconds": times, "at_most": TARGETS_S, "python": sys.version.split()[0]}, file, indent=1)


if __name__ == "__main__":
    main()
