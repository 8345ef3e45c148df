"""Time of a step with rollouts in turn with training, and beside it on half of the devices.

    python benchmarks/async_rollouts.py [--train_s=0.4] [--decode_s=0.05] [--steps=12] [--rounds=3] [--json=OUT]
    python benchmarks/async_rollouts.py --rewards=120 [--seeds=0,1,2] [--folder=runs/async_rollouts] [--json=OUT]

GRPO of a decoder of 0.1 M parameters on eight emulated devices, which share this machine's cores: 64 answers of 16 tokens a step,
from random weights. Emulated devices do not work beside each other as chips do. So each train step also waits `--train_s` seconds
on four devices, and half of that on eight; each step of an engine waits `--decode_s` on any number of devices, since a decode step
reads all weights however few rows it has. These waits stand for chips: they are assumed, and so are the ratios between rows.
`--train_s=0 --decode_s=0` times the program alone.

Rows are alternated, `--rounds` times; a time is the median over rounds of the mean over the steps after the fourth.

`--rewards=STEPS` trains GRPO of benchmarks/reward_curves.py, with one update of 256 answers a step, and prints the mean reward of the
last ten steps by the bound of staleness. With `--train_s` drawing is faster than training, so that answers become as old as the bound.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import jax

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the checkout's package, installed or not

import capibara as cb  # noqa: E402
from benchmarks import reward_curves  # noqa: E402
from capibara.core import devices  # noqa: E402
from capibara.inference.engine.engine import Engine  # noqa: E402
from capibara.monitoring.metrics_file.loggers import read_metrics  # noqa: E402
from capibara.training import loop  # noqa: E402
from capibara.training.base.callbacks import Callback  # noqa: E402
from capibara.training.setup import Setup  # noqa: E402

DEVICES, WARM, NEW = 8, 4, 16
ROWS = {
    "in turn, 8 devices": {},
    "4 + 4 devices, staleness 0": {"rollout_devices": 4, "max_staleness": 0},
    "4 + 4 devices, staleness 1": {"rollout_devices": 4, "max_staleness": 1},
    "4 + 4 devices, staleness 2": {"rollout_devices": 4, "max_staleness": 2},
}


class Times(Callback):
    """The time at which each step ended, and its metrics."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.metrics: list[Mapping[str, Any]] = []

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.ends_s.append(time.perf_counter())
        self.metrics.append(dict(metrics))


def run_of(folder: pathlib.Path, options: Mapping[str, int], steps: int) -> cb.Trainer:
    tokenizer = reward_curves.write_tokenizer(folder / "tokenizer")
    reward_curves.write_data(folder)
    base = reward_curves.start(folder, tokenizer)
    run = reward_curves.rewarded(base, folder, "grpo", 0, steps, tokenizer)
    sampling = cb.Sampling(max_new_tokens=NEW, temperature=1.0)
    return dataclasses.replace(
        run,
        init_from=None,
        plan=cb.Plan(batch_size=64),
        dataset=dataclasses.replace(run.dataset, length=32),
        loss=dataclasses.replace(run.loss, updates=1, sampling=sampling, **options),
        evaluation=cb.Evaluation(every=0),
        checkpointing=cb.Checkpointing(every=0),
        log_every=1,
    )


def waiting_step(wait_s: float) -> Callable[..., Any]:
    """A step of training that waits for the devices, and for so many seconds more."""
    step = Setup.step

    def waiting(self: Setup, *args: Any) -> Any:
        result = jax.block_until_ready(step(self, *args))
        time.sleep(wait_s)
        return result

    return waiting


def timed(options: Mapping[str, int], steps: int, train_s: float, decode_s: float) -> dict[str, float]:
    """Seconds of a step, and means of metrics, of one run."""
    step, engine_step, times = waiting_step(train_s if options else train_s / 2), Engine.step, Times()

    def waiting_decode(self: Engine) -> bool:
        if worked := engine_step(self):
            time.sleep(decode_s)
        return worked

    with tempfile.TemporaryDirectory() as name:
        run = run_of(pathlib.Path(name), options, steps)
        with mock.patch.object(Setup, "step", step), mock.patch.object(Engine, "step", waiting_decode):
            loop.train(run, times)
    result = {"step_s": (times.ends_s[-1] - times.ends_s[WARM - 1]) / (steps - WARM)}
    for metric in ("staleness", "training_idle", "rollout_idle", "drawn_ratio"):
        values = [float(row[metric]) for row in times.metrics[WARM:] if metric in row]
        result[metric] = statistics.fmean(values) if values else 0.0
    return result


def rewards(folder: pathlib.Path, steps: int, seeds: Sequence[int], train_s: float) -> dict[str, dict[str, Any]]:
    """Mean rewards of the last ten steps, of each seed, by bound of staleness."""
    tokenizer = reward_curves.write_tokenizer(folder / "tokenizer")
    reward_curves.write_data(folder)
    base = reward_curves.start(folder, tokenizer)
    reward_curves.trained(base)
    result = {}
    for bound in (None, 1, 4, 16):
        options = {} if bound is None else {"rollout_devices": 4, "max_staleness": bound}
        name = "in turn" if bound is None else f"staleness up to {bound}"
        row: dict[str, Any] = {"rewards": [], "staleness": []}
        for seed in seeds:
            run = reward_curves.rewarded(base, folder, "grpo", seed, steps, tokenizer)
            loss = dataclasses.replace(run.loss, updates=1, **options)
            run = dataclasses.replace(run, model_dir=f"{run.model_dir}_{bound}", loss=loss)
            with mock.patch.object(Setup, "step", waiting_step(0.0 if bound is None else train_s)):
                reward_curves.trained(run)
            logged = [item for item in read_metrics(run.model_dir) if item["kind"] == "train" and "reward" in item]
            row["rewards"].append(statistics.fmean(item["reward"] for item in logged[-5:]))  # a log of two steps each
            row["staleness"].append(statistics.fmean(item.get("staleness", 0.0) for item in logged))
        result[name] = row
        print(f"{name:20} {statistics.fmean(row['rewards']):.3f} (staleness {statistics.fmean(row['staleness']):.2f})")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_s", type=float, default=0.4)
    parser.add_argument("--decode_s", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rewards", type=int, metavar="STEPS")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/async_rollouts"))
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args(argv)
    if args.steps <= WARM:
        parser.error(f"--steps is {args.steps}, must be above {WARM}: try 12")
    devices.start(DEVICES)
    if args.rewards:
        by_bound = rewards(
            args.folder.resolve(), args.rewards, [int(seed) for seed in args.seeds.split(",")], args.train_s
        )
        if args.json:
            args.json.write_text(json.dumps(by_bound, indent=1) + "\n")
        return 0
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in ROWS}
    for _ in range(args.rounds):
        for name, options in ROWS.items():
            measured[name].append(timed(options, args.steps, args.train_s, args.decode_s))
    result = {
        name: {metric: statistics.median(row[metric] for row in rows) for metric in rows[0]}
        for name, rows in measured.items()
    }
    first = result[next(iter(ROWS))]["step_s"]
    print(f"{'':28} {'s a step':>9} {'ratio':>6} {'staleness':>10} {'training idle':>14} {'rollouts idle':>14}")
    for name, row in result.items():
        print(
            f"{name:28} {row['step_s']:9.3f} {row['step_s'] / first:6.2f} {row['staleness']:10.2f} "
            f"{row['training_idle']:14.0%} {row['rollout_idle']:14.0%}"
        )
    if args.json:
        options = {"train_s": args.train_s, "decode_s": args.decode_s, "steps": args.steps, "rounds": args.rounds}
        args.json.write_text(json.dumps({"options": options, "rows": result}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
