"""What rewiring a mixture's experts costs, by domain, before and after some training.

    python benchmarks/domain_texts.py --out=texts ...                 # texts of six domains, see there
    capibara prepare routing texts/documents --out=set ...            # see docs/experts.md, "Measured"
    python benchmarks/experts.py --texts=set --folder=runs/experts [--steps=400] [--healing=60] [--json=OUT] [--picture=PNG]

Trains a small mixture of experts on a routing set by `cb.train`, measures its experts on the validation split by
`cb.expert_statistics`, and rewires it by `cb.rewire`: half of the experts pruned by each criterion and at random, or merged; all split; the
busiest doubled. The loss of each domain's test texts is that right after the operation, and after --healing further steps, which the
mixture as it was gets as well.

Then a dense model is trained for half of the steps and goes on for the other half: as it is, and upcycled in several ways. Beside
them stands a mixture of the same size that begins anew and is trained for that half, and one that is trained for all steps.

Last, the mixture answers which of four pieces goes on with the beginning of a test text, plain and with its experts re-mixed by those of
questions on the validation split (`cb.RemixExperts`).

Exit code 1 where pruning by activation is not better than the mean of random pruning before healing, or where an upcycled
model is not better than the one that begins anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the checkout's package, installed or not

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import capibara as cb
from capibara import config, sharding
from capibara.data.pipeline.loader import make_loader
from capibara.training.evaluation import evaluate, make_eval_step

DOMAINS = ("python", "sql", "javascript", "debug", "ml", "api")
ROWS = 16  # rows that are read at a time in evaluation
RANDOM_SEEDS = (0, 1, 2)


def operations(experts: int) -> dict[str, Any]:
    """What is done to the mixture; a rewired model is healed unless it is one of several random ones."""
    half, more = experts // 2, experts + experts // 3
    found = {f"prune by {by}": cb.PruneExperts(experts=half, by=by) for by in ("activation", "use", "gate")}
    found |= {f"prune at random {s}": cb.PruneExperts(experts=half, by="random", seed=s) for s in RANDOM_SEEDS}
    found |= {
        "merge": cb.MergeExperts(experts=half),
        "merge, unaligned": cb.MergeExperts(experts=half, alignment="none"),
        "merge by router": cb.MergeExperts(experts=half, similarity="router"),
        "split in 2": cb.SplitExperts(),
        "duplicate": cb.DuplicateExperts(experts=more, noise=0.01),
    }
    return found


UPCYCLED = {
    "upcycled": cb.UpcycleExperts(experts=8),
    "upcycled, granularity 2": cb.UpcycleExperts(experts=16, top_k=4, granularity=2),
    "upcycled, drop ratio 0.5": cb.UpcycleExperts(experts=8, drop_ratio=0.5),
}


def trained(
    args: argparse.Namespace, name: str, steps: int, model: Any, init_from: pathlib.Path | None = None
) -> pathlib.Path:
    """Trains a model for so many steps; returns its run folder."""
    folder = args.folder / name.replace(" ", "_").replace(",", "")
    shutil.rmtree(folder, ignore_errors=True)
    texts = args.texts
    source = cb.JsonlSource(files=(str(texts / "train.jsonl"),), validation_files=(str(texts / "validation.jsonl"),))
    rate = args.learning_rate * (0.3 if init_from else 1.0)
    config.reset()
    cb.train(
        cb.Trainer(
            model_dir=str(folder),
            steps=steps,
            model=dataclasses.replace(model, dtype="float32"),
            init_from=None if init_from is None else str(init_from),
            plan=cb.Plan(batch_size=args.rows),
            dataset=cb.Dataset(source=source, vocabulary=cb.ByteVocabulary(), length=args.length, workers=0),
            optimizer=cb.Optimizer(schedule=cb.Schedule(learning_rate=rate, warmup_steps=max(1, steps // 20))),
            evaluation=cb.Evaluation(every=0),
            checkpointing=cb.Checkpointing(every=0),
            log_every=max(1, steps // 4),
        )
    )
    return folder


def by_domain(args: argparse.Namespace, folder: pathlib.Path) -> dict[str, float]:
    """The loss of each domain's test texts in nats a byte, and their mean."""
    config.reset()
    loaded = cb.load(str(folder)).loaded
    plan = cb.Plan(batch_size=ROWS, fsdp=1)
    mesh = sharding.make_mesh(plan, jax.devices()[:1])
    step = make_eval_step(loaded.model, plan, mesh, cb.ByteVocabulary().token_bytes())
    placed, found = sharding.batch_sharding(mesh, plan.rules), {}
    for name in DOMAINS:
        file = str(args.folder / "test" / f"{name}.jsonl")
        source = cb.JsonlSource(files=(), validation_files=(file,))
        dataset = cb.Dataset(source=source, vocabulary=cb.ByteVocabulary(), length=args.length, workers=0)
        batches = make_loader(dataset, split="validation", batch_size=ROWS, epochs=1)
        found[name] = evaluate(step, loaded.params, batches, placed)["loss"]
    return found | {"mean": float(np.mean([*found.values()]))}


def divided(args: argparse.Namespace) -> None:
    """Writes the test texts of each domain to a file, at most --most of each."""
    (args.folder / "test").mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[str]] = {name: [] for name in DOMAINS}
    for line in (args.texts / "test.jsonl").read_text(encoding="utf-8").splitlines():
        lines[json.loads(line)["domain"]].append(line)
    for name, of_domain in lines.items():
        if not of_domain:
            raise SystemExit(
                f"{args.texts}/test.jsonl has no text of {name}: prepare a set with all of {', '.join(DOMAINS)}"
            )
        text = "".join(line + "\n" for line in of_domain[: args.most])
        (args.folder / "test" / f"{name}.jsonl").write_text(text, encoding="utf-8")


def rewired(source: pathlib.Path, target: pathlib.Path, operation: Any, statistics: pathlib.Path | None) -> Any:
    """Rewires a run to a run; returns the new configuration of its model."""
    shutil.rmtree(target, ignore_errors=True)
    config.reset()
    needed = str(statistics) if operation.needs_statistics else None
    cb.rewire(str(source), str(target), operation, statistics=needed, format="capibara")
    config.reset()
    return cb.load(str(target)).loaded.model.config


def mixtures(args: argparse.Namespace, model: Any) -> dict[str, dict[str, Any]]:
    """The mixture rewired in all ways: losses before and after healing."""
    moe = dataclasses.replace(model, moe=cb.Moe(num_experts=args.experts))
    whole = trained(args, "mixture", args.steps, moe)
    config.reset()
    statistics = args.folder / "use.json"
    cb.expert_statistics(str(whole), [str(args.texts / "validation.jsonl")], domains=DOMAINS).write(str(statistics))
    healed = by_domain(args, trained(args, "mixture healed", args.healing, moe, whole))
    found = {"as it was": {"experts": args.experts, "before": by_domain(args, whole), "after": healed}}
    for name, operation in operations(args.experts).items():
        target = args.folder / f"rewired_{name.replace(' ', '_').replace(',', '')}"
        changed = rewired(whole, target, operation, statistics)
        found[name] = {"experts": changed.moe.num_experts, "before": by_domain(args, target), "after": None}
        if name != f"prune at random {RANDOM_SEEDS[-1]}" and name not in [
            f"prune at random {s}" for s in RANDOM_SEEDS[1:]
        ]:
            found[name]["after"] = by_domain(args, trained(args, f"{name} healed", args.healing, changed, target))
        print(name, found[name]["before"]["mean"], (found[name]["after"] or {}).get("mean"), flush=True)
    return found


def upcycled(args: argparse.Namespace, model: Any) -> dict[str, dict[str, Any]]:
    """A dense model that goes on as it is or upcycled, and mixtures that begin anew."""
    half = args.steps // 2
    dense = trained(args, "dense", half, model)
    found = {
        "dense": {
            "before": by_domain(args, dense),
            "after": by_domain(args, trained(args, "dense on", half, model, dense)),
        }
    }
    for name, operation in UPCYCLED.items():
        target = args.folder / name.replace(" ", "_").replace(",", "")
        changed = rewired(dense, target, operation, None)
        after = by_domain(args, trained(args, f"{name} on", half, changed, target))
        found[name] = {"before": by_domain(args, target), "after": after}
        print(name, found[name]["before"]["mean"], after["mean"], flush=True)
    fresh = dataclasses.replace(model, moe=cb.Moe(num_experts=8))
    for name, steps in (
        ("mixture from scratch, half of the steps", half),
        ("mixture from scratch, all steps", args.steps),
    ):
        found[name] = {"before": None, "after": by_domain(args, trained(args, name, steps, fresh))}
    return found


def asked(texts: pathlib.Path, file: pathlib.Path, most: int) -> str:
    """Writes questions: which of four pieces of texts of a domain goes on with the beginning of one."""
    draw, lines = np.random.default_rng(0), list[str]()
    of_domain: dict[str, list[str]] = {name: [] for name in DOMAINS}
    for line in texts.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if len(record["text"]) > 200:
            of_domain[record["domain"]].append(record["text"])
    for found in of_domain.values():
        for number, text in enumerate(found[:most]):
            others = [found[i] for i in range(len(found)) if i != number]
            pieces = [other[160:190] for other in draw.choice(np.array(others, object), 3, replace=False)]
            right = int(draw.integers(4))
            pieces.insert(right, text[160:190])
            lines.append(json.dumps({"prompt": text[:160], "choices": pieces, "target": right}) + "\n")
    file.write_text("".join(lines), encoding="utf-8")
    return str(file)


def remixed(args: argparse.Namespace) -> dict[str, float]:
    """The mixture's share of right answers, plain and with re-mixed experts of other questions."""
    questions = asked(args.texts / "test.jsonl", args.folder / "questions.jsonl", args.most)
    references = asked(args.texts / "validation.jsonl", args.folder / "references.jsonl", args.most)
    ways = {"plain": None} | {
        f"{count} neighbours, strength {strength}": cb.RemixExperts(
            references=(references,), neighbours=count, strength=strength
        )
        for count in (3, 8)
        for strength in (0.25, 0.5, 1.0)
    }
    ways |= {
        f"gradient steps, 3 neighbours, learning rate {rate}": cb.RemixExperts(
            references=(references,), strength=1.0, method="neighborhood_gradient", learning_rate=rate
        )
        for rate in (0.1, 1.0, 10.0)
    }
    tasks = {
        f"way_{number}": cb.EvalTask(files=(questions,), choices="choices", before_choice="", remix=remix)
        for number, remix in enumerate(ways.values())
    }
    config.reset()
    found = cb.evaluate(str(args.folder / "mixture"), tasks)["tasks"]
    return {way: found[f"way_{number}"]["metrics"]["accuracy"]["value"] for number, way in enumerate(ways)}


def table(title: str, found: Mapping[str, Mapping[str, Any]]) -> Table:
    result = Table(title=title)
    for heading in ("", "before", "after", *DOMAINS):
        result.add_column(heading, justify="right" if heading else "left")
    shown = lambda losses, name: "" if losses is None else f"{losses[name]:.3f}"  # noqa: E731
    for name, row in found.items():
        last = row["after"] or row["before"]
        result.add_row(
            name, shown(row["before"], "mean"), shown(row["after"], "mean"), *(shown(last, d) for d in DOMAINS)
        )
    return result


def draw(found: Mapping[str, Mapping[str, Mapping[str, Any]]], path: pathlib.Path) -> None:
    """A bar for each model before and after training, in two panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    for axes, (title, rows) in zip(figure.subplots(1, 2), found.items()):
        places = np.arange(len(rows))
        for offset, key, color in ((-0.2, "before", "#c8553d"), (0.2, "after", "#4a6fa5")):
            values = [0.0 if row[key] is None else row[key]["mean"] for row in rows.values()]
            axes.barh(places + offset, values, 0.38, color=color, label=f"{key} training")
        axes.set_yticks(places, [*rows], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("loss on test texts, nats a byte, mean of six domains")
        axes.set_title(title, fontsize=10)
        lowest = min(row[key]["mean"] for row in rows.values() for key in ("before", "after") if row[key] is not None)
        axes.set_xlim(left=0.9 * lowest)
        axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def holds(mixed: Mapping[str, Any], made: Mapping[str, Any]) -> bool:
    """What the exit code says."""
    at_random = np.mean([mixed[f"prune at random {seed}"]["before"]["mean"] for seed in RANDOM_SEEDS])
    scratch = made["mixture from scratch, half of the steps"]["after"]["mean"]
    return mixed["prune by activation"]["before"]["mean"] < at_random and made["upcycled"]["after"]["mean"] < scratch


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=pathlib.Path, required=True, help="what `capibara prepare routing` wrote")
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="for runs and rewired models")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--healing", type=int, default=60, help="steps after an operation")
    parser.add_argument("--experts", type=int, default=12)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--embed_dim", type=int, default=64)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rows", type=int, default=8, help="of a batch")
    parser.add_argument("--most", type=int, default=40, help="test texts of a domain")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--json", type=pathlib.Path, help="write the results there")
    parser.add_argument("--picture", type=pathlib.Path, help="write a picture there (PNG)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args, begin_s = parsed(argv), time.perf_counter()
    divided(args)
    model = cb.DecoderConfig(
        vocab_size=384,
        embed_dim=args.embed_dim,
        num_layers=args.layers,
        num_heads=2,
        mlp_dim=args.embed_dim,
        dtype="float32",
        head="separate",
    )
    found = {"experts rewired": mixtures(args, model), "dense models upcycled": upcycled(args, model)}
    for title, rows in found.items():
        Console(width=140).print(table(title, rows))
    passed, shares = holds(*found.values()), remixed(args)
    print("right answers of re-mixed experts:", {way: f"{share:.1%}" for way, share in shares.items()})
    if args.json:
        settings = {
            name: str(value) if isinstance(value, pathlib.Path) else value for name, value in vars(args).items()
        }
        values = {
            "settings": settings,
            "passed": passed,
            "wall_s": round(time.perf_counter() - begin_s),
            **found,
            "remixed": shares,
        }
        args.json.write_text(json.dumps(values, indent=1), encoding="utf-8")
    if args.picture:
        draw(found, args.picture)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
