"""Accuracy against tokens of thinking strategies: a vote, the best by a reward model, and more rounds.

    python benchmarks/thinking.py [--folder=runs/reward_curves] [--samples=1,2,4,8,16,32] [--seeds=0,1,2] [--json=OUT] [--picture=OUT]

The model and its reward model are those of `benchmarks/reward_curves.py`, trained here if the folder has none: a decoder of 0.1 M
parameters that learned sums of two digits from answers of which 35% are right, and a reward model that learned from pairs of a right
and a wrong sum of the same questions. Asked are those 85 questions, at temperature 1, once with each seed. Exit code 1 where no strategy has
a higher accuracy than one text.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # reward_curves
sys.path.insert(0, str(HERE.parent))  # the checkout's package, installed or not

import reward_curves  # noqa: E402

import capibara as cb  # noqa: E402
from capibara.inference.thinking.strategy import Strategy  # noqa: E402

ROUNDS, AGAIN = (1, 2, 3), "{prompt} not {answer}?"  # short: a row has 64 tokens
_SEEDS_APART = 1000  # more than a strategy has samples


def strategies(reward: str, samples: Sequence[int]) -> dict[str, list[Strategy]]:
    """The strategies by name, each from few to many tokens."""
    return {
        "vote": [cb.SelfConsistency(samples=count) for count in samples],
        "best by reward": [cb.BestOfN(reward=reward, samples=count) for count in samples],
        "rounds": [cb.Rounds(rounds=count, again=AGAIN) for count in ROUNDS],
    }


def task_name(strategy: str, number: int, seed: int) -> str:
    return f"{strategy.replace(' ', '_')}_{number}_{seed}"


def measured(model: str, questions: str, each: Mapping[str, Sequence[Strategy]], seeds: Sequence[int]) -> list[dict]:
    """Accuracy and tokens of every strategy: means over seeds, and the standard deviation over them."""
    tasks = {
        task_name(name, i, seed): cb.EvalTask(
            files=(questions,),
            prompt="{question}",
            target="answer",
            metrics=(cb.exact_match,),
            format="chat",
            sampling=cb.Sampling(temperature=1.0, max_new_tokens=reward_curves.NEW, seed=_SEEDS_APART * seed),
            thinking=strategy,
        )
        for name, row in each.items()
        for i, strategy in enumerate(row)
        for seed in seeds
    }
    results = cb.evaluate(model, tasks)["tasks"]
    points = []
    for name, row in each.items():
        for i, strategy in enumerate(row):
            runs = [results[task_name(name, i, seed)] for seed in seeds]
            accuracy = [run["metrics"]["exact_match"]["value"] for run in runs]
            point: dict[str, Any] = {"strategy": name, "options": strategy.described()}
            point |= {
                key: float(np.mean([run["thinking"][f"mean_{key}"] for run in runs])) for key in ("texts", "tokens")
            }
            point |= {"accuracy": float(np.mean(accuracy)), "deviation": float(np.std(accuracy))}
            if "ties" in runs[0]["thinking"]:
                point["ties"] = float(np.mean([run["thinking"]["ties"] / run["examples"] for run in runs]))
            points.append(point)
    return points


def draw(points: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in dict.fromkeys(point["strategy"] for point in points):
        row = [point for point in points if point["strategy"] == name]
        tokens, accuracy, deviation = (
            np.array([point[key] for point in row]) for key in ("tokens", "accuracy", "deviation")
        )
        axes.errorbar(tokens, accuracy, yerr=deviation, marker="o", capsize=3, label=name)
    axes.set(xlabel="generated tokens a question", ylabel="accuracy", xscale="log", ylim=(0, 1.02))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/reward_curves"))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--samples", default="1,2,4,8,16,32")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--picture", type=pathlib.Path)
    args = parser.parse_args(argv)
    folder, seeds = args.folder.resolve(), [int(seed) for seed in args.seeds.split(",")]
    tokenizer = reward_curves.write_tokenizer(folder / "tokenizer")
    reward_curves.write_data(folder)
    base = reward_curves.start(folder, tokenizer)
    reward_curves.trained(base)
    reward_curves.trained(scores := reward_curves.reward_model(base, folder, tokenizer))
    each = strategies(scores.model_dir, [int(count) for count in args.samples.split(",")])
    questions = str(folder / "prompts.jsonl")
    print("| strategy | texts | tokens a question | accuracy | ties |\n|---|---|---|---|---|")
    points = []
    for name, row in each.items():
        points += (new := measured(base.model_dir, questions, {name: row}, seeds))
        for point in new:
            ties = f"{point['ties']:.0%}" if "ties" in point else ""
            print(
                f"| {name} | {point['texts']:.0f} | {point['tokens']:.1f} | {point['accuracy']:.1%} ± "
                f"{point['deviation']:.1%} | {ties} |",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(points, indent=1) + "\n")
    if args.picture:
        draw(points, args.picture)
    one = max(point["accuracy"] for point in points if point["texts"] == 1)
    return 0 if max(point["accuracy"] for point in points) > one else 1


if __name__ == "__main__":
    sys.exit(main())
