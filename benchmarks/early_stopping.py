"""How often a sequential comparison tells two models apart, and how many answers it saves, on simulated answers.

    python benchmarks/early_stopping.py [--runs=500] [--prompts=1000] [--alpha=0.05] [--json=OUT]

Both models answer a prompt right or wrong, and agree more often than by chance: a share of the prompts is told apart. Every 8
prompts there is a look. Beside the confidence sequence: a look at the 95% interval of the normal distribution, which is for one look
alone, and one test after all prompts. Exit code 1 where the sequence finds a difference that does not exist more often than alpha.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the checkout's package, installed or not

from capibara.evaluation.statistics.stopping import SequentialStopping  # noqa: E402

APART = 0.3  # share of prompts that one of the models alone answers
DIFFERENCES = (0.0, 0.02, 0.05, 0.1, 0.2)


def simulated(difference: float, runs: int, prompts: int, stopping: SequentialStopping) -> dict[str, float]:
    """Shares of runs that find a difference, and the median of the prompts that are asked."""
    rng, asked, naive, fixed = np.random.default_rng(0), [], 0, 0
    found = 0
    for _ in range(runs):
        better = (APART + difference) / 2
        values = rng.choice([1.0, -1.0, 0.0], prompts, p=[better, APART - better, 1 - APART])
        sequence, reason, count = stopping.sequence(), None, 0
        while reason is None and count < prompts:
            for value in values[count : count + stopping.every]:
                sequence.add(value)
            count += stopping.every
            reason = stopping.reason(sequence.bound)
        asked.append(min(count, prompts))
        found += reason is not None
        counts = np.arange(1, prompts + 1)
        means, squares = np.cumsum(values) / counts, np.cumsum(values**2) / counts
        far = np.abs(means) > 1.96 * np.sqrt(np.maximum(squares - means**2, 0) / counts)
        naive += bool(far[23 :: stopping.every].any())
        fixed += bool(far[-1])
    return {
        "difference": difference,
        "found": found / runs,
        "median_asked": float(np.median(asked)),
        "saved": 1 - float(np.mean(asked)) / prompts,
        "found_by_repeated_intervals": naive / runs,
        "found_by_one_test": fixed / runs,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--alpha", type=float, default=0.05)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args(argv)
    stopping = SequentialStopping(alpha=args.alpha)
    rows = [simulated(difference, args.runs, args.prompts, stopping) for difference in DIFFERENCES]
    print(
        "| difference | sequence finds it | median of prompts asked | answers saved | repeated intervals find it | one test finds it |"
    )
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['difference']:g} | {row['found']:.1%} | {row['median_asked']:.0f} | {row['saved']:.0%} | "
            f"{row['found_by_repeated_intervals']:.1%} | {row['found_by_one_test']:.1%} |"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if rows[0]["found"] <= args.alpha else 1


if __name__ == "__main__":
    sys.exit(main())
