"""How much of a training run is spent waiting for data: the quickstart, on its SeqIO feed and on the direct one.

    python benchmarks/data_wait.py [--steps=60] [--json=data_wait.json]

The wait is the time from asking for a batch until it is on its devices, summed over the steps after the first log and
divided by their wall time. The host runs ahead of the devices, so this is an upper bound of the devices' idle share.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile

from rich.console import Console
from rich.table import Table

from capibara.monitoring.metrics_file.loggers import read_metrics

TARGET_BUSY = 0.97
FEEDS = {"SeqIO task": "quickstart_seqio.gin", "direct": "quickstart.gin"}


def wait_share(steps: int, gin_file: str) -> float:
    """Share of a run's step time that was spent waiting for data."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "capibara.train", f"--gin_file={gin_file}", "--emulate=8"]
        command += [f"--gin.MODEL_DIR={folder}", f"--gin.TRAIN_STEPS={steps}", "--gin.Evaluation.every=0"]
        subprocess.run(command, check=True, capture_output=True)
        logs = [record for record in read_metrics(folder) if record["kind"] == "train"][1:]
    return sum(log["data_wait_s"] for log in logs) / sum(log["step_s"] for log in logs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", metavar="PATH")
    args = parser.parse_args()
    shares = {name: wait_share(args.steps, gin_file) for name, gin_file in FEEDS.items()}
    table = Table(title=f"quickstart, {args.steps} steps on 8 emulated devices")
    for heading in ("feed", "wait for data", "devices busy, at least", "wanted"):
        table.add_column(heading, justify="left" if heading == "feed" else "right")
    for name, share in shares.items():
        table.add_row(name, f"{share:.2%}", f"{1 - share:.2%}", f"{TARGET_BUSY:.0%}")
    Console().print(table)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"steps": args.steps, "wait_share": shares}, file, indent=1)


if __name__ == "__main__":
    main()
