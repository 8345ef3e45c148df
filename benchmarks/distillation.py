"""How much of the gap between a student and a teacher distillation closes.

    python benchmarks/distillation.py [--folder=runs/distillation] [--steps=300] [--json=OUT]

The teacher (0.1 M parameters) has learned sums of two digits from right answers, the student (0.08 M) from answers of which 35%
are right. The metric is the negative log-likelihood of right answers, in nats a token. All runs below begin with the student's
weights and train on the student's own data, wrong answers included:

    cross entropy    further on that data: what the steps alone are worth
    given            from the teacher's distributions on the given answers, forward KL
    stored           the same from 8 tokens of the teacher a position, stored before, without the teacher
    on-policy        the same on answers that the student draws

Exit code 1 where given, stored or on-policy recovers less than half of the gap.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]  # the checkout's package, installed or not

import reward_curves  # noqa: E402

import capibara as cb  # noqa: E402
from capibara.cli.composition import training_run  # noqa: E402
from capibara.monitoring.metrics_file.loggers import read_metrics  # noqa: E402
from capibara.strategies.distillation import storing  # noqa: E402

BELOW, RIGHT, TOP_K, GOAL = 10, 0.35, 8, 0.5


def write_data(folder: pathlib.Path) -> None:
    """right.jsonl and mixed.jsonl, and check.jsonl: each question with its right answer."""
    rng = np.random.default_rng(0)
    lines: dict[str, list[dict[str, str]]] = {"right": [], "mixed": [], "check": []}
    for a in range(BELOW):
        for b in range(BELOW):
            right = {"prompt": f"{a}+{b}", "completion": str(a + b)}
            lines["check"].append(right)
            for _ in range(30):
                answer = a + b if rng.random() < RIGHT else int(rng.integers(0, 2 * BELOW - 1))
                lines["right"].append(right)
                lines["mixed"].append(right | {"completion": str(answer)})
    for name, records in lines.items():
        rng.shuffle(records)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def run_of(
    folder: pathlib.Path, name: str, data: str, model: cb.DecoderConfig, steps: int, **fields: Any
) -> cb.Trainer:
    template = cb.ChatTemplate(tokenizer=str(folder / "tokenizer"))
    source = cb.ChatJsonlSource(
        files=(str(folder / f"{data}.jsonl"),), validation_files=(str(folder / "check.jsonl"),), template=template
    )
    dataset = cb.Dataset(
        source=source, vocabulary=cb.TokenizerJsonVocabulary(path=str(folder / "tokenizer")), length=24, packing="none"
    )
    schedule = cb.Schedule(learning_rate=3e-3, warmup_steps=20)
    return cb.Trainer(
        model_dir=str(folder / name),
        steps=steps,
        model=model,
        plan=cb.Plan(batch_size=64),
        dataset=dataset,
        optimizer=cb.Optimizer(schedule=schedule, weight_decay=0.0),
        evaluation=cb.Evaluation(every=steps),
        checkpointing=cb.Checkpointing(every=steps),
        log_every=steps // 5,
        **fields,
    )


def nll(run: cb.Trainer) -> float:
    """Trains a run; returns the negative log-likelihood of right answers at its end."""
    reward_curves.trained(run)
    last = [row for row in read_metrics(run.model_dir) if row["kind"] == "eval"][-1]
    return float(last.get("nll", last["loss"]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/distillation"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args(argv)
    folder = args.folder.resolve()
    reward_curves.write_tokenizer(folder / "tokenizer")
    write_data(folder)
    large = cb.DecoderConfig(vocab_size=384, embed_dim=64, num_layers=2, num_heads=4, mlp_dim=192, dtype="float32")
    small = dataclasses.replace(large, num_layers=1)
    teacher = nll(of_teacher := run_of(folder, "teacher", "right", large, 2 * args.steps))
    student = nll(of_student := run_of(folder, "student", "mixed", small, 2 * args.steps))
    taught_by = cb.Teacher(path=of_teacher.model_dir, model=large)

    def further(name: str, loss: cb.Distillation | None) -> float:
        start = of_student.model_dir
        return nll(run_of(folder, name, "mixed", small, args.steps, init_from=start, loss=loss))

    results = {"cross entropy": further("cross_entropy", None)}
    results["given"] = further("given", cb.Distillation(teacher=taught_by, beta=0.0))
    if not (folder / "stored").exists():
        loss = cb.Distillation(teacher=taught_by, beta=0.0, top_k=TOP_K)
        asked = run_of(folder, "asked", "mixed", small, args.steps, loss=loss)
        load = functools.partial(training_run.loader, dataset=asked.dataset)
        storing.store(asked, loss, taught_by, str(folder / "stored"), load, lambda *_: None)
    results["stored"] = further("of_stored", cb.Distillation(stored=str(folder / "stored"), beta=0.0))
    drawn = cb.Distillation(
        teacher=taught_by,
        beta=0.0,
        on_policy=1.0,
        sampling=cb.Sampling(max_new_tokens=4, temperature=1.0),
        engine=cb.EngineConfig(slots=64, prefix_cache_mib=0),
    )
    results["on-policy"] = further("on_policy", drawn)
    print(f"\nnegative log-likelihood of right answers, nats a token: student {student:.4f}, teacher {teacher:.4f}")
    shares = {name: (student - value) / (student - teacher) for name, value in results.items()}
    for name, share in shares.items():
        print(f"{name:13} {results[name]:.4f}, {share:6.1%} of the gap")
    if args.json:
        args.json.write_text(
            json.dumps({"student": student, "teacher": teacher, "nll": results, "shares": shares}) + "\n"
        )
    return 0 if all(shares[name] >= GOAL for name in ("given", "stored", "on-policy")) else 1


if __name__ == "__main__":
    sys.exit(main())
