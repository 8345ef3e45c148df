"""How soon a run is back at work after one of its two processes was stopped, and whether it computes the same after it.

    python benchmarks/stops.py [--stops=10] [--crashes=3] [--seed=0] [--folder=DIR] [--json=stops.json]

`launch local --processes=2` trains a small decoder. At random moments a random one of the two is stopped (SIGSTOP); with
--crashes, that many times more, the other is killed by SIGABRT while the first stands still, so that both are started
again. Back at work is the run once it has logged three steps more. In the end its losses are compared, bit for bit,
with those of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

from rich.console import Console
from rich.table import Table

from capibara.jobs import guard

LIMIT_S = 30.0
_GIVE_UP_S = 120.0
_MORE_STEPS = 3
RUN = """
include "runs/pretrain.gin"
include "tasks/jsonl.gin"
FILES = ("corpus.jsonl",)
TRAIN_STEPS = 1000000
BATCH_SIZE = 8
LENGTH = 64
LEARNING_RATE = 1e-3
DecoderConfig.vocab_size = 384
DecoderConfig.embed_dim = 64
DecoderConfig.num_layers = 2
DecoderConfig.num_heads = 2
DecoderConfig.mlp_dim = 128
DecoderConfig.dtype = "float32"
Schedule.kind = "rsqrt"
Schedule.warmup_fraction = 0.0
Evaluation.every = 0
Checkpointing.every = 25
Trainer.log_every = 1
"""


class Run:
    """A supervised run of two processes in a folder of its own."""

    def __init__(self, folder: pathlib.Path, name: str, restarts: int):
        self._metrics = folder / name / "metrics.jsonl"
        self._log = open(folder / f"{name}.log", "w")
        command = [sys.executable, "-m", "capibara.launch", "local", "--processes=2", f"--restarts={restarts}", "--"]
        command += ["train", "--gin_file=run.gin", "--emulate=2", f"--gin.MODEL_DIR={name}"]
        self.process = subprocess.Popen(command, cwd=folder, stdout=self._log, stderr=subprocess.STDOUT)

    def records(self) -> list[tuple[int, float]]:
        """(step, loss) of all whole lines, in the order in which they were logged."""
        if not self._metrics.exists():
            return []
        lines = self._metrics.read_text().splitlines(keepends=True)
        records = [json.loads(line) for line in lines if line.endswith("\n") and line.strip()]
        return [(record["step"], record["loss"]) for record in records if record["kind"] == "train"]

    def wait_for(self, count: int) -> float:
        """Seconds until so many lines more are there."""
        begin_s, wanted = time.monotonic(), len(self.records()) + count
        while len(self.records()) < wanted:
            if time.monotonic() - begin_s > _GIVE_UP_S or self.process.poll() is not None:
                raise SystemExit(
                    f"error: not back at work after {time.monotonic() - begin_s:.0f} s: see {self._log.name}"
                )
            time.sleep(0.02)
        return time.monotonic() - begin_s

    def workers(self) -> list[int]:
        """The process ids of the two, in the order of their start; [] while there are not two."""
        found = [
            int(pid)
            for pid in pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]
        return sorted(found, key=lambda pid: guard.stat_of(pid).start) if len(found) == 2 else []

    def stop(self) -> None:
        """Ends it as a user does, with a checkpoint."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(_GIVE_UP_S)
        self._log.close()


def disturb(run: Run, chance: random.Random, crashes: bool) -> tuple[str, float]:
    """Stops one of the two at a random moment; what was done, and the seconds until the run was back at work."""
    time.sleep(chance.uniform(0.0, 5.0))
    workers, index = run.workers(), chance.randrange(2)
    step = run.records()[-1][0]
    os.kill(workers[index], signal.SIGSTOP)
    begin_s = time.monotonic()
    what = f"process {index} stopped at step {step}"
    if crashes:
        time.sleep(chance.uniform(0.0, 2.0))
        os.kill(workers[1 - index], signal.SIGABRT)
        what += f", process {1 - index} aborted"
    waited_s = begin_s - time.monotonic()
    return what, run.wait_for(_MORE_STEPS) - waited_s


def measure(
    folder: pathlib.Path, stops: int, crashes: int, seed: int
) -> tuple[list[tuple[str, float]], dict[str, int]]:
    """What was done with the seconds until the run was back, and how many losses there are and differ."""
    write_input(folder)
    chance, run = random.Random(seed), Run(folder, "disturbed", restarts=crashes)
    run.wait_for(1)
    found = []
    for number in range(stops + crashes):
        found.append(disturb(run, chance, crashes=number >= stops))
        print(f"{found[-1][0]}: back at work after {found[-1][1]:.1f} s", flush=True)
    run.stop()
    disturbed = run.records()
    reference = Run(folder, "undisturbed", restarts=0)
    last = max(step for step, _ in disturbed)
    while not (records := reference.records()) or records[-1][0] < last:
        reference.wait_for(1)
    reference.stop()
    expected = dict(reference.records())
    differ = sum(expected[step] != loss for step, loss in disturbed)  # steps that were made twice, too
    return found, {"steps": last, "losses": len(disturbed), "differ": differ}


def write_input(folder: pathlib.Path) -> None:
    """The run file and the texts."""
    chance = random.Random(0)
    words = ["river", "grass", "swims", "eats", "sleeps", "mud"]
    texts = [" ".join(chance.choices(words, k=chance.randint(3, 40))) for _ in range(400)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "run.gin").write_text(RUN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--crashes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", metavar="DIR", help="where the two runs and their logs stay")
    parser.add_argument("--json", metavar="PATH")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(args.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found, losses = measure(folder, args.stops, args.crashes, args.seed)
    table = Table("what was done", "back at work after", f"at most {LIMIT_S:.0f} s")
    for what, seconds in found:
        table.add_row(what, f"{seconds:.1f} s", "yes" if seconds <= LIMIT_S else "NO")
    console = Console()
    console.print(table)
    console.print(
        f"{losses['losses']} losses up to step {losses['steps']}: {losses['differ']} differ from the undisturbed run"
    )
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"recoveries": found, **losses}, indent=2) + "\n")
    if losses["differ"] or any(seconds > LIMIT_S for _, seconds in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
