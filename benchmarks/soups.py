"""Soups and merges of five fine-tunes of a small language model: against their mean member and the best one.

    python benchmarks/soups.py [--base_steps=1000] [--steps=300] [--json=OUT]

The base is trained on the standard library's bytes, and fine-tuned five times, in other orders of the data and with other
learning rates. Soups choose by one half of the validation text, and everything is compared on the other half, which no choice
has seen. The memory of a soup is the peak of what is allocated while it takes models of a larger size one by one, over the size
of one model.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
import sys
import tracemalloc

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import consensus  # sets the emulated devices before JAX starts
import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from capibara import sharding
from capibara.consensus import soups
from capibara.consensus.merging import METHODS
from capibara.consensus.merging.method import BaseUse, draw_of
from capibara.core import tree
from capibara.models import api
from capibara.sharding import Plan
from capibara.training.evaluation import evaluate, make_eval_step

RATES = (5e-4, 7e-4, 1e-3, 1.4e-3, 2e-3)
MERGES = ("linear", "multislerp", "karcher", "ties", "dare_ties", "breadcrumbs_ties", "model_stock", "sce")
LARGE = 64 << 20  # bytes of a model whose soup's memory is measured


def make_loss(text):
    """(parameters) -> their loss on a text, in nats a byte."""
    plan = Plan(batch_size=consensus.NODES * consensus.ROWS, data=consensus.NODES, fsdp=1)
    mesh = sharding.make_mesh(plan)
    model = api.build(consensus.MODEL)
    step = make_eval_step(model, plan, mesh, np.ones(consensus.MODEL.vocab_size, np.int32))
    rng = np.random.default_rng(2**31)
    batches = [consensus.batch_of_rows(consensus.rows_of(text, plan.batch_size, rng)) for _ in range(12)]
    placed = sharding.batch_sharding(mesh, plan.rules)
    return lambda params: evaluate(step, params, batches, placed)["loss"]


def merged(name, models, base):
    """A merge of models by one of `capibara merge`'s methods, with its default settings."""
    method = METHODS[name]()
    has_base = method.base is not BaseUse.UNUSED
    method.check(len(models), has_base=has_base)
    leaves = zip(tree.path_names(base), jax.tree.leaves(base), *map(jax.tree.leaves, models), strict=True)
    made = [
        method.merge(
            [np.asarray(x, np.float32) for x in own],
            np.asarray(start, np.float32) if has_base else None,
            draw_of(0, path),
        )
        for path, start, *own in leaves
    ]
    return jax.tree.unflatten(jax.tree.structure(base), made)


def memory_in_models(count=5):
    """Peak memory while an incremental soup takes so many models, over the size of one."""

    def made():
        for seed in range(count):
            yield {f"{at}": np.full(LARGE // 64, seed, np.float32) for at in range(16)}

    tracemalloc.start()
    soup = soups.incremental(made(), lambda params: 0.0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(soup.members) == count
    return peak / LARGE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base_steps", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=300, help="of each fine-tune")
    parser.add_argument("--json", help="write the results there")
    args = parser.parse_args()
    texts = consensus.Texts()
    half = len(texts.validation) // 2
    chosen_by, measured = make_loss(texts.validation[:half]), make_loss(texts.validation[half:])
    base = consensus.train(texts, args.base_steps, learning_rate=3e-3)[0]
    models = []
    for seed, rate in enumerate(RATES):
        begun = functools.partial(consensus.train, texts, args.steps, base=base, learning_rate=rate)
        models.append(begun(first_row=10**6 * (seed + 1))[0])
        print(f"fine-tune {seed}, learning rate {rate:g}: {measured(models[-1]):.4f} nats a byte", flush=True)
    loads = [lambda model=model: model for model in models]
    greedy = soups.greedy(loads, chosen_by, maximize=False)
    incremental = soups.incremental(iter(models), chosen_by, maximize=False)
    alone = [measured(model) for model in models]
    found = {"mean member": statistics.mean(alone), "best member": min(alone)}
    found["uniform soup"] = measured(soups.uniform(iter(models)))
    found[f"greedy soup of {len(greedy.members)}"] = measured(greedy.params)
    found[f"incremental soup of {len(incremental.members)}"] = measured(incremental.params)
    found |= {name: measured(merged(name, models, base)) for name in MERGES}
    table = Table(title="loss on text that no choice has seen, nats a byte")
    for heading in ("model", "loss", "over the mean member's"):
        table.add_column(heading)
    for name, loss in found.items():
        table.add_row(name, f"{loss:.4f}", f"{loss / found['mean member']:.4f}")
    Console(width=100).print(table)
    best = min(greedy.scores)
    print(f"greedy soup, on the text by which it chooses: {greedy.score:.4f}, its best member {best:.4f}")
    memory = memory_in_models()
    print(f"an incremental soup of five models holds {memory:.2f} models at most")
    if args.json:
        about = {"loss": found, "members": alone, "greedy": greedy.score, "best": best, "memory_in_models": memory}
        pathlib.Path(args.json).write_text(json.dumps(vars(args) | about, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
