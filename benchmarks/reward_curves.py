"""Rewards by step of GRPO, DAPO, GSPO and PPO from one start, and a reward model on held-out pairs.

    python benchmarks/reward_curves.py [--folder=runs/reward_curves] [--steps=120] [--seeds=0,1,2] [--json=OUT] [--picture=OUT]

A decoder of 0.1 M parameters learns sums of two digits from answers of which 35% are right, on this machine's CPU.
Each method then trains it on its own answers, 256 a step, with `@numeric_answer` as the reward: all from the same weights, with
the same number of answers a step. Rewards are means over the last ten steps and over seeds; the start is the mean over the
first two steps of all runs. The reward model learns from pairs of a right and a wrong sum, and is evaluated on questions that
no pair of training has. Exit code 1 where PPO or GRPO ends below twice the reward of the start, or the reward model tells
70% of held-out pairs or fewer apart.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the checkout's package, installed or not

import capibara as cb  # noqa: E402
from capibara.monitoring.metrics_file.loggers import read_metrics  # noqa: E402

BELOW, RIGHT, HELD_OUT = 10, 0.35, 0.15
ANSWERS, GROUP, NEW = 256, 8, 4
GOAL_REWARD, GOAL_ACCURACY = 2.0, 0.7
METHODS = ("grpo", "dapo", "gspo", "ppo")


def write_tokenizer(folder: pathlib.Path) -> str:
    """A tokenizer of bytes with a short chat template."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|turn|>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|turn|>{{ m['role'][0] }}:{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>a:{% endif %}"
    )
    return str(folder)


def write_data(folder: pathlib.Path) -> None:
    """chats, prompts and pairs, each as NAME.jsonl and NAME_held_out.jsonl, on different questions."""
    rng = np.random.default_rng(0)
    questions = [(a, b) for a in range(BELOW) for b in range(BELOW)]
    rng.shuffle(questions)
    count = int(HELD_OUT * len(questions))
    for suffix, part in (("", questions[count:]), ("_held_out", questions[:count])):
        chats, prompts, pairs = [], [], []
        for a, b in part:
            question, wrong = f"{a}+{b}", lambda: int(rng.choice([n for n in range(2 * BELOW - 1) if n != a + b]))
            prompts.append({"question": question, "answer": str(a + b)})
            for _ in range(8):
                pairs.append({"prompt": question, "chosen": str(a + b), "rejected": str(wrong())})
            for _ in range(40):
                answer = a + b if rng.random() < RIGHT else wrong()
                chats.append({"prompt": question, "completion": str(answer)})
        for name, lines in (("chats", chats), ("prompts", prompts), ("pairs", pairs)):
            rng.shuffle(lines)
            (folder / f"{name}{suffix}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def files(folder: pathlib.Path, name: str, tokenizer: str) -> dict[str, Any]:
    template = cb.ChatTemplate(tokenizer=tokenizer)
    held_out = (str(folder / f"{name}_held_out.jsonl"),)
    return {"files": (str(folder / f"{name}.jsonl"),), "validation_files": held_out, "template": template}


def start(folder: pathlib.Path, tokenizer: str) -> cb.Trainer:
    """The run that all others begin from."""
    return cb.Trainer(
        model_dir=str(folder / "start"),
        steps=600,
        model=cb.DecoderConfig(
            vocab_size=384, embed_dim=64, num_layers=2, num_heads=4, mlp_dim=192, dtype="float32", max_length=64
        ),
        plan=cb.Plan(batch_size=32),
        dataset=cb.Dataset(
            source=cb.ChatJsonlSource(**files(folder, "chats", tokenizer)),
            vocabulary=cb.TokenizerJsonVocabulary(path=tokenizer),
            length=64,
        ),
        optimizer=cb.Optimizer(schedule=cb.Schedule(learning_rate=3e-3, warmup_steps=20), weight_decay=0.0),
        evaluation=cb.Evaluation(every=600),
        checkpointing=cb.Checkpointing(every=600),
        log_every=100,
    )


def rewarded(base: cb.Trainer, folder: pathlib.Path, method: str, seed: int, steps: int, tokenizer: str) -> cb.Trainer:
    """A run of a method, with the fields of its Gin file in gin/runs."""
    options: dict[str, Any] = dict(
        rewards=(cb.numeric_answer,),
        sampling=cb.Sampling(max_new_tokens=NEW, temperature=1.0),
        engine=cb.EngineConfig(slots=64, prefix_cache_mib=0),
    )
    model = base.model
    if method == "ppo":
        loss: Any = cb.Ppo(**options, group=1, kl=0.01, updates=2, mini_batches=1, value_weight=0.5)
        model = dataclasses.replace(model, value_head=True)
    elif method == "dapo":
        loss = cb.Grpo(
            **options, group=GROUP, surrogate=cb.Clipped(high=0.28), token_weights="batch", resample=1, updates=2
        )
    elif method == "gspo":
        loss = cb.Grpo(**options, group=GROUP, surrogate=cb.Clipped(low=3e-4, high=4e-4), level="sequence", updates=2)
    else:
        loss = cb.Grpo(**options, group=GROUP, updates=2)
    dataset = dataclasses.replace(
        base.dataset,
        source=cb.PromptJsonlSource(**files(folder, "prompts", tokenizer)),
        packing="none",
        length=24,
        seed=seed,
    )
    return dataclasses.replace(
        base,
        model_dir=str(folder / f"{method}_{seed}"),
        init_from=base.model_dir,
        seed=seed,
        steps=steps,
        model=model,
        plan=cb.Plan(batch_size=ANSWERS),
        dataset=dataset,
        loss=loss,
        optimizer=cb.Optimizer(
            schedule=cb.Schedule(kind="constant", learning_rate=7e-4, warmup_steps=4, warmup_fraction=0.0),
            weight_decay=0.0,
        ),
        evaluation=cb.Evaluation(every=steps),
        checkpointing=cb.Checkpointing(every=steps),
        log_every=2,
    )


def reward_model(base: cb.Trainer, folder: pathlib.Path, tokenizer: str) -> cb.Trainer:
    source = cb.PreferenceJsonlSource(**files(folder, "pairs", tokenizer), scored=True)
    return dataclasses.replace(
        base,
        model_dir=str(folder / "reward_model"),
        init_from=base.model_dir,
        steps=200,
        model=dataclasses.replace(base.model, head="score"),
        dataset=dataclasses.replace(base.dataset, source=source),
        loss=cb.Reward(centering=0.01),
        evaluation=cb.Evaluation(every=200),
        checkpointing=cb.Checkpointing(every=200),
    )


def draw(curves: dict[str, dict[str, Any]], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for method, curve in curves.items():
        rows = np.array(curve["rewards"])
        steps, mean = np.array(curve["steps"]), rows.mean(0)
        (line,) = axes.plot(steps, mean, label=method)
        axes.fill_between(steps, rows.min(0), rows.max(0), color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel="step of 256 answers", ylabel="mean reward", ylim=(0, 1))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def trained(run: cb.Trainer) -> None:
    """Trains a run, or resumes it; one that has ended is left as it is."""
    done = [row["step"] for row in read_metrics(run.model_dir)] if pathlib.Path(run.model_dir).exists() else []
    if max(done, default=0) < run.steps:
        cb.train(run)


def curve_of(folder: str) -> tuple[list[int], list[float]]:
    rows = [row for row in read_metrics(folder) if row["kind"] == "train" and "reward" in row]
    return [row["step"] for row in rows], [row["reward"] for row in rows]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/reward_curves"))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--picture", type=pathlib.Path)
    args = parser.parse_args(argv)
    folder, seeds = args.folder.resolve(), [int(seed) for seed in args.seeds.split(",")]
    tokenizer = write_tokenizer(folder / "tokenizer")
    write_data(folder)
    base = start(folder, tokenizer)
    trained(base)
    trained(scores := reward_model(base, folder, tokenizer))
    accuracy = [row["reward_accuracy"] for row in read_metrics(scores.model_dir) if row["kind"] == "eval"][-1]
    curves: dict[str, dict[str, Any]] = {}
    for method in args.methods.split(","):
        curve: dict[str, Any] = {"rewards": [], "held_out": [], "seconds": []}
        for seed in seeds:
            begin_s = time.perf_counter()
            trained(run := rewarded(base, folder, method, seed, args.steps, tokenizer))
            curve["seconds"].append(round(time.perf_counter() - begin_s, 1))
            curve["steps"], rewards = curve_of(run.model_dir)
            curve["rewards"].append(rewards)
            curve["held_out"].append([row["reward"] for row in read_metrics(run.model_dir) if row["kind"] == "eval"])
        curves[method] = curve
    begin = float(np.mean([rewards[0] for curve in curves.values() for rewards in curve["rewards"]]))
    ends = {method: float(np.mean([rewards[-5:] for rewards in curve["rewards"]])) for method, curve in curves.items()}
    print(f"\nreward of the start {begin:.3f}; reward model: {accuracy:.1%} of held-out pairs")
    for method, end in ends.items():
        seconds = np.median(curves[method]["seconds"])
        print(f"{method:6} {end:.3f}, {end / begin:.2f} x the start, median {seconds:.0f} s a run")
    if args.json:
        result = {"start": begin, "ends": ends, "reward_model_accuracy": accuracy, "curves": curves}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.picture:
        draw(curves, args.picture)
    met = all(ends.get(method, 1.0) >= GOAL_REWARD * begin for method in ("grpo", "ppo")) and accuracy > GOAL_ACCURACY
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
