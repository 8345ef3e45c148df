"""The hybrid expert router against learned routing alone, on six domains of recorded executions.

    python benchmarks/record_executions.py --out=logs ...                  # see there
    python benchmarks/routing.py --logs=logs --folder=runs/routing [--steps=1000] [--seeds=0] [--json=OUT] [--picture=PNG]

`capibara prepare executions` and `capibara prepare routing` make a training set of the logs. On it two decoders with a mixture
of experts are trained by `capibara.train`, with the same settings, seed and steps: one with domain hints, whose weight
falls to 0 by --hinted of the steps, and one without. Then both read texts of the validation and test splits, of sources that
neither has seen, without hints. Of each token and layer the router's most probable expert counts. Choose settings by the
validation split alone; the test split is for the result.

Routing accuracy is the share of a domain's tokens whose expert belongs to that domain, and of its texts whose most experts do.
The hybrid router's experts belong to the domains of their hints. Experts of learned routing have none; they get, in each layer,
those that suit them best on texts of the train split: as many for each domain (the best assignment), or each expert the domain
that sends it the largest share of its tokens (majority). The better one counts on each split, and both routers are measured by
all of them. The mean is that over domains and seeds. Information is that of the expert about the domain, in bits, which needs no
assignment.

Exit code 1 where the hybrid router's mean accuracy is not above that of learned routing alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the checkout's package, installed or not

import jax
import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import linear_sum_assignment

import capibara as cb
from capibara import sharding
from capibara.builders.routing.balance import Balance
from capibara.builders.routing.labelling.domains import BUILT_IN
from capibara.builders.routing.settings import RoutingSet
from capibara.builders.routing.splits import Splits
from capibara.config import written
from capibara.data.packing.packing import Packing
from capibara.data.pipeline.loader import make_loader
from capibara.models import api
from capibara.models.parts.router import Hints
from capibara.training.evaluation import evaluate, make_eval_step

DOMAINS = tuple(BUILT_IN)
# Parts of the standard library whose sessions are recorded as well.
API_IMPORTS = tuple("wsgiref xmlrpc json email html xml".split())
ROUTERS = ("hybrid", "learned alone")
ROWS = 32  # rows that are read at a time in evaluation


class Counts(NamedTuple):
    """What the router did with texts.

    Attributes:
      domains: [N] the number of each text's domain, from 0.
      top: [N, L, E] tokens whose most probable expert is this one.
      load: [N, L, E] choices of each expert, top_k for each token.
    """

    domains: np.ndarray
    top: np.ndarray
    load: np.ndarray

    def by_domain(self, counts: np.ndarray) -> np.ndarray:
        """[L, D, E]: of each domain's tokens the shares of the experts."""
        sums = np.stack([counts[self.domains == number].sum(0) for number in range(len(DOMAINS))], axis=1)
        return sums / np.maximum(sums.sum(-1, keepdims=True), 1)


def run(*command: str) -> None:
    """Prints a command and runs it; its output goes to the terminal."""
    print(f"\n$ python {' '.join(command)}", flush=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, *command], check=True, env=environment)


def prepared(logs: str, folder: pathlib.Path, per_domain: int) -> pathlib.Path:
    """The routing set of the logs."""
    executions, found = folder / "executions", folder / "set"
    api_domain = BUILT_IN["api"]
    api_domain = dataclasses.replace(api_domain, imports=(*api_domain.imports, *API_IMPORTS))
    settings = RoutingSet(
        domains=tuple(api_domain if name == "api" else name for name in DOMAINS),
        splits=Splits(train=0.75, validation=0.05, test=0.2),
        balance=Balance(method="oversample", per_domain=per_domain),
    )
    folder.mkdir(parents=True, exist_ok=True)
    gin = folder / "routing.gin"
    gin.write_text(written.text_of(settings), encoding="utf-8")
    run("-m", "capibara.prepare", "executions", logs, f"--out={executions}", "--num_workers=2")
    made_of = [str(executions / name) for name in ("executions", "fixes")]
    run("-m", "capibara.prepare", "routing", *made_of, f"--out={found}", f"--gin_file={gin}")
    return found


def trainer_of(args: argparse.Namespace, texts: pathlib.Path, router: str, seed: int) -> cb.Trainer:
    """A run with a router; the runs of a seed differ in nothing else."""
    decay_steps = max(1, round(args.steps * args.hinted) - args.steps // 6)
    hints = cb.Hints(domains=DOMAINS, hold_steps=args.steps // 6, decay_steps=decay_steps, loss=args.hint_loss)
    model = cb.DecoderConfig(
        vocab_size=384,
        embed_dim=args.embed_dim,
        num_layers=args.layers,
        num_heads=2,
        mlp_dim=args.embed_dim,
        dtype="float32",
        moe=cb.Moe(
            num_experts=args.experts, balance_loss=args.balance_loss, hints=hints if router == "hybrid" else None
        ),
    )
    return cb.Trainer(
        model_dir=str(args.folder / f"{router.replace(' ', '_')}_{seed}"),
        steps=args.steps,
        model=model,
        plan=cb.Plan(batch_size=args.rows),
        dataset=dataset_of(args, texts, "validation", Packing.BEST_FIT, seed),
        optimizer=cb.Optimizer(schedule=cb.Schedule(learning_rate=args.learning_rate, warmup_steps=args.steps // 20)),
        evaluation=cb.Evaluation(every=0),
        checkpointing=cb.Checkpointing(every=0),
        seed=seed,
        log_every=max(1, args.steps // 30),
    )


def dataset_of(
    args: argparse.Namespace, texts: pathlib.Path, held_out: str, packing: Packing, seed: int = 0
) -> cb.Dataset:
    source = cb.JsonlSource(files=(str(texts / "train.jsonl"),), validation_files=(str(texts / f"{held_out}.jsonl"),))
    vocabulary, workers = cb.ByteVocabulary(), 0
    return cb.Dataset(
        source=source, vocabulary=vocabulary, length=args.length, packing=packing, domains=DOMAINS, seed=seed, workers=workers
    )  # fmt: skip


def sampled(texts: pathlib.Path, folder: pathlib.Path, most: int) -> pathlib.Path:
    """At most so many different texts of each domain of the train split, evenly spaced, in a file of their own."""
    of_domain: dict[str, list[str]] = {name: [] for name in DOMAINS}
    with open(texts / "train.jsonl", encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            if not record["repeat"]:
                of_domain[record["domain"]].append(line)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "sample.jsonl", "w", encoding="utf-8") as file:
        for lines in of_domain.values():
            count = min(most, len(lines))
            file.writelines(lines[number * len(lines) // count] for number in range(count))
    return folder / "sample.jsonl"


def counter(loaded: Any) -> Callable[[cb.Dataset], Counts]:
    """A function that counts what the router does with the first tokens of each text of a validation split."""
    config = loaded.model.config
    measured_only = Hints(domains=DOMAINS, start=0.0, decay_steps=1)
    model = api.build(dataclasses.replace(config, moe=dataclasses.replace(config.moe, hints=measured_only)))

    @jax.jit
    def of_rows(params, batch):
        def of_row(row):
            _, stats = model.hidden(params, {name: value[None] for name, value in row.items()})
            return stats["domain_load"].sum(1), stats["load"]

        return jax.lax.map(of_row, batch)

    def count(dataset: cb.Dataset) -> Counts:
        domains, top, load = [], [], []
        for batch in make_loader(dataset, split="validation", batch_size=ROWS, epochs=1):
            real = batch["segment_ids"][:, 0] > 0
            found = jax.device_get(of_rows(loaded.params, batch))
            domains.append(batch["domains"][real, 0] - 1)
            for rows, values in zip((top, load), found):
                rows.append(values[real])
        return Counts(*map(np.concatenate, (domains, top, load)))

    return count


def losses(args: argparse.Namespace, loaded: Any, texts: pathlib.Path) -> dict[str, float]:
    """The loss on each held-out split, in nats a byte."""
    plan = cb.Plan(batch_size=ROWS, fsdp=1)
    mesh = sharding.make_mesh(plan, jax.devices()[:1])
    step = make_eval_step(loaded.model, plan, mesh, cb.ByteVocabulary().token_bytes())
    placed = sharding.batch_sharding(mesh, plan.rules)
    found = {}
    for split in ("validation", "test"):
        dataset = dataset_of(args, texts, split, Packing.BEST_FIT)
        batches = make_loader(dataset, split="validation", batch_size=ROWS, epochs=1)
        found[split] = evaluate(step, loaded.params, batches, placed)["loss"]
    return found


def hinted(experts: int, layers: int) -> np.ndarray:
    """[L, E]: the domain of each expert by the hints."""
    found = np.zeros(experts, int)
    for number, own in enumerate(Hints(domains=DOMAINS, decay_steps=1).assignment(experts)):
        found[list(own)] = number
    return np.tile(found, (layers, 1))


def best(shares: np.ndarray) -> np.ndarray:
    """[L, E]: the domains of experts that give the largest sum of shares [L, D, E], as many experts for each domain."""
    found = []
    for shares_DE in shares:
        slots = np.repeat(np.arange(len(shares_DE)), -(-shares_DE.shape[1] // len(shares_DE)))
        rows, columns = linear_sum_assignment(-shares_DE[slots])
        of_expert = shares_DE.argmax(0)
        of_expert[columns] = slots[rows]
        found.append(of_expert)
    return np.stack(found)


def accuracies(counts: Counts, of_experts: np.ndarray) -> dict[str, list[float]]:
    """Of each domain: the share of tokens, over all layers, and of texts, that go to experts of the domain."""
    belongs = of_experts[..., None] == np.arange(len(DOMAINS))  # [L, E, D]
    votes = np.einsum("nle,led->nd", counts.top, belongs)
    own = np.arange(len(votes)), counts.domains
    tokens, right = votes.sum(-1), votes.argmax(-1) == counts.domains
    of_domain = [counts.domains == number for number in range(len(DOMAINS))]
    return {
        "tokens": [float(votes[own][at].sum() / max(1.0, tokens[at].sum())) for at in of_domain],
        "texts": [float(right[at].mean()) if at.any() else 0.0 for at in of_domain],
    }


def entropy(p: np.ndarray) -> np.ndarray:
    """Of distributions in the last axis, in bits."""
    return -np.sum(p * np.log2(np.where(p > 0, p, 1)), axis=-1)


def utilisation(counts: Counts) -> dict[str, Any]:
    """How the experts are used if all domains are equally frequent; means over layers."""
    load = counts.by_domain(counts.load)  # [L, D, E]
    top = counts.by_domain(counts.top)
    of_expert, experts = load.mean(1), load.shape[-1]
    return {
        "load": (of_expert * experts).mean(0).tolist(),
        "load_max": float((of_expert * experts).max()),
        "load_min": float((of_expert * experts).min()),
        "entropy": float(entropy(of_expert).mean() / np.log2(experts)),
        "entropy_within_domain": float(entropy(load).mean() / np.log2(experts)),
        "information_bits": float((entropy(top.mean(1)) - entropy(top).mean(1)).mean()),
    }


def result(counts: Counts, assignments: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The accuracies on a split by each assignment, the one that counts, and the texts of each domain."""
    found = {name: accuracies(counts, of_experts) for name, of_experts in assignments.items()}
    counts_by = "hints" if "hints" in found else max(found, key=lambda name: np.mean(found[name]["tokens"]))
    texts = np.bincount(counts.domains, minlength=len(DOMAINS)).tolist()
    return {"accuracy": found, "counts_by": counts_by, "texts": texts}


def measured(args: argparse.Namespace, texts: pathlib.Path, router: str, seed: int) -> dict[str, Any]:
    """Trains a router and measures it."""
    trainer, begin_s = trainer_of(args, texts, router, seed), time.perf_counter()
    cb.train(trainer)
    train_s = time.perf_counter() - begin_s
    loaded = cb.load(trainer.model_dir)
    sample = sampled(texts, args.folder / "sample", args.sample)
    count = counter(loaded)
    seen = count(dataset_of(args, sample.parent, sample.stem, Packing.NONE))
    validation, test = (count(dataset_of(args, texts, split, Packing.NONE)) for split in ("validation", "test"))
    shares = seen.by_domain(seen.top)
    assignments = {"best assignment": best(shares), "majority": shares.argmax(1)}
    if router == "hybrid":
        assignments = {"hints": hinted(args.experts, args.layers)} | assignments
    found = result(test, assignments)
    of_experts = assignments[found["counts_by"]]
    order = np.argsort(of_experts, axis=-1, kind="stable")  # experts of a domain stand side by side
    shown = np.take_along_axis(test.by_domain(test.top), order[:, None], axis=-1).mean(0)
    return {
        "loss": losses(args, loaded, texts),
        "train_s": round(train_s, 1),
        **found,
        "validation": result(validation, assignments),
        "utilisation": utilisation(test),
        "share_by_domain": shown.tolist(),
    }


def mean_of(found: Sequence[Mapping[str, Any]], unit: str) -> np.ndarray:
    """[D] accuracy, mean over seeds, by the assignment that counts."""
    return np.mean([one["accuracy"][one["counts_by"]][unit] for one in found], axis=0)


def overall(one: Mapping[str, Any], unit: str = "tokens", counts_by: str | None = None) -> float:
    """The mean accuracy of a run on a split, over the domains that have texts in it."""
    of_domains = np.array(one["accuracy"][counts_by or one["counts_by"]][unit])
    return float(of_domains[np.array(one["texts"]) > 0].mean())


def spread(values: Sequence[float]) -> str:
    """The mean over seeds and, of several, the least and the largest."""
    return f"{np.mean(values):.1%}" + f" ({min(values):.1%}..{max(values):.1%})" * (len(values) > 1)


def show(found: Mapping[str, list[dict[str, Any]]], console: Console) -> bool:
    """Prints the tables; returns whether the hybrid router is better."""
    table = Table(title="routing accuracy on the test split, without hints: tokens / texts")
    for heading in ("domain", "texts", *ROUTERS):
        table.add_column(heading, justify="left" if heading == "domain" else "right")
    means = {router: [mean_of(found[router], unit) for unit in ("tokens", "texts")] for router in ROUTERS}
    for number, domain in enumerate(DOMAINS):
        row = (f"{means[router][0][number]:.1%} / {means[router][1][number]:.1%}" for router in ROUTERS)
        table.add_row(domain, str(found["hybrid"][0]["texts"][number]), *row)
    by_seed = {unit: {r: [overall(one, unit) for one in found[r]] for r in ROUTERS} for unit in ("tokens", "texts")}
    row = (" / ".join(f"{np.mean(of_unit[router]):.1%}" for of_unit in by_seed.values()) for router in ROUTERS)
    table.add_row("mean", str(sum(found["hybrid"][0]["texts"])), *row)
    console.print(table)
    table = Table("", *ROUTERS, title="experts and losses, mean over seeds")
    values = {
        "validation loss, nats a byte": lambda one: one["loss"]["validation"],
        "test loss, nats a byte": lambda one: one["loss"]["test"],
        "busiest expert's load, of the mean": lambda one: one["utilisation"]["load_max"],
        "idlest expert's load, of the mean": lambda one: one["utilisation"]["load_min"],
        "entropy of the load, of a uniform one's": lambda one: one["utilisation"]["entropy"],
        "the same within a domain": lambda one: one["utilisation"]["entropy_within_domain"],
        "information about the domain, bits": lambda one: one["utilisation"]["information_bits"],
        "accuracy of tokens, validation": lambda one: overall(one["validation"]),
        "accuracy of texts, validation": lambda one: overall(one["validation"], "texts"),
        "accuracy of tokens, test": overall,
        "the same by the best assignment": lambda one: overall(one, counts_by="best assignment"),
        "the same by majority": lambda one: overall(one, counts_by="majority"),
        "training, s": lambda one: one["train_s"],
    }  # fmt: skip
    for name, value in values.items():
        table.add_row(name, *(f"{np.mean([value(one) for one in found[router]]):.3f}" for router in ROUTERS))
    console.print(table)
    for router in ROUTERS:
        shares = np.mean([one["share_by_domain"] for one in found[router]], axis=0)
        table = Table("domain", *map(str, range(shares.shape[1])), title=f"{router}: tokens of a domain by expert, %")
        for domain, row in zip(DOMAINS, shares):
            table.add_row(domain, *(f"{100 * share:.0f}" for share in row))
        console.print(table)
    better = sum(one > other for one, other in zip(*(means[router][0] for router in ROUTERS)))
    hybrid, learned = (by_seed["tokens"][router] for router in ROUTERS)
    passed = bool(np.mean(hybrid) > np.mean(learned))
    console.print(
        f"hybrid {spread(hybrid)}, learned alone {spread(learned)}, chance {1 / len(DOMAINS):.1%}; better in {better} of "
        f"{len(DOMAINS)} domains: {'passed' if passed else 'FAILED'}",
        soft_wrap=True,
    )
    return passed


def draw(found: Mapping[str, list[dict[str, Any]]], path: pathlib.Path) -> None:
    """A picture of both routers: which experts the tokens of each domain go to."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shares = {router: np.mean([one["share_by_domain"] for one in found[router]], axis=0) for router in ROUTERS}
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained", sharey=True)
    most = max(float(share.max()) for share in shares.values())
    for axis, router in zip(axes, ROUTERS):
        image = axis.imshow(shares[router], cmap="viridis", vmin=0, vmax=most, aspect="auto")
        accuracy = np.mean([overall(one) for one in found[router]])
        axis.set_title(f"{router}: {accuracy:.0%} of tokens in their domain")
        axis.set_xlabel("expert (ordered by its domain in each layer)")
        axis.set_xticks(range(shares[router].shape[1]))
        axis.set_yticks(range(len(DOMAINS)), DOMAINS)
    figure.colorbar(image, ax=axes, label="share of the domain's tokens")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", required=True, help="folder of execution logs")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/routing"), help="of what is made")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--hinted", type=float, default=0.4, help="share of the steps after which hints have no weight")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--experts", type=int, default=12)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--embed_dim", type=int, default=96)
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=16, help="of a batch")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--balance_loss", type=float, default=0.01)
    parser.add_argument("--hint_loss", type=float, default=0.1)
    parser.add_argument("--per_domain", type=int, default=1500, help="training texts of a domain")
    parser.add_argument(
        "--sample", type=int, default=60, help="training texts of a domain that experts are assigned by"
    )
    parser.add_argument("--json", type=pathlib.Path, help="write the results there")
    parser.add_argument("--picture", type=pathlib.Path, help="write a picture there (PNG)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parsed(argv)
    texts = prepared(args.logs, args.folder, args.per_domain)
    found = {router: [measured(args, texts, router, seed) for seed in args.seeds] for router in ROUTERS}
    passed = show(found, Console(width=110))
    if args.json:
        settings = {
            name: str(value) if isinstance(value, pathlib.Path) else value for name, value in vars(args).items()
        }
        args.json.write_text(json.dumps({"settings": settings, "passed": passed, **found}, indent=1), encoding="utf-8")
    if args.picture:
        draw(found, args.picture)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
