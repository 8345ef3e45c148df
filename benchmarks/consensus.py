"""Consensus training of a small language model: against data-parallel training, and with nodes that lie.

    python benchmarks/consensus.py [--base_steps=4000] [--base=FILE.npz] [--steps=2000] [--learning_rates=1e-3,2e-3]
      [--every=50] [--attacked_steps=300] [--attacked_learning_rate=1e-3] [--attacked_momentum=0] [--attacks=alie,nan]
      [--rules=mean,krum] [--variants=vote] [--json=OUT]

Eight nodes train a decoder on the standard library's bytes, each on files of its own (non-iid): the files are sorted by path
and every node has a run of them. The validation text is of files that no node sees. All runs begin with the same model,
which has been trained data-parallel for some steps (as in Douillard et al. 2023, arXiv:2311.08105), have the same batches
and schedule, and see the same number of tokens. First data-parallel training and rounds (DiLoCo) without attackers, each with
several learning rates, of which its best counts; the outer optimizer is DiLoCo's, Nesterov with learning rate 0.7 and momentum
0.9. Then, with fewer steps and the rounds' learning rate, rounds with a vote, a convex merge and each strategy, and every
attack by two nodes with every rule, compared with rounds of as many steps without them. There the outer optimizer is plain
averaging: a momentum of 0.9 moves the model by ten times what each round is off, and a robust rule is always a little off
where the nodes' data differ. --attacked_momentum=0.9 measures that. Everything is measured on emulated devices.

Attacks, by the last two nodes, which know what the others send: sign: minus four times their own update; alie: the mean
less as many standard deviations as hide among the honest (Baruch et al. 2019, arXiv:1902.06156); ipm: minus ten times the
mean update (Xie et al. 2020, arXiv:1903.03936); gaussian: noise of standard deviation 1; mimic: what node 0 sends (Karimireddy
et al. 2022, arXiv:2006.09365); nan.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import sys
import sysconfig

NODES, LIARS = 8, 2
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={NODES}"
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from capibara import sharding
from capibara.consensus.aggregation import (
    Aggregation,
    Caf,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    Mean,
    MultiKrum,
    Nnm,
    TrimmedMean,
)
from capibara.consensus.outer import OuterSgd
from capibara.models import api
from capibara.models.api import DecoderConfig
from capibara.optim import Optimizer, Schedule
from capibara.sharding import Plan
from capibara.strategies.consensus import ConsensusConfig
from capibara.training.base import state as states
from capibara.training.evaluation import evaluate, make_eval_step
from capibara.training.methods.nodes import Nodes, make_node_loss, make_nodes_step
from capibara.training.step import make_train_step

ROWS, LENGTH = 8, 128  # of a node and step
MODEL = DecoderConfig(vocab_size=256, embed_dim=64, num_layers=2, num_heads=2, mlp_dim=176, dtype="float32")
DILOCO = OuterSgd(learning_rate=0.7, momentum=0.9)
BEFORE = {"before": (Nnm(),), "faults": LIARS}
AGGREGATIONS = {
    "mean": Aggregation(rule=Mean()),
    "median": Aggregation(rule=CoordinateMedian(), faults=LIARS),
    "trimmed mean": Aggregation(rule=TrimmedMean(), faults=LIARS),
    "geometric median": Aggregation(rule=GeometricMedian(), faults=LIARS),
    "krum": Aggregation(rule=Krum(), faults=LIARS),
    "CAF": Aggregation(rule=Caf(), faults=LIARS),
    "NNM, trimmed mean": Aggregation(rule=TrimmedMean(), **BEFORE),
    "NNM, multi-krum": Aggregation(rule=MultiKrum(), **BEFORE),
}
RULES = {name: {"aggregation": aggregation} for name, aggregation in AGGREGATIONS.items()}
RULES["convex merge"] = {"merge_strategy": "convex"}
# Rounds without attackers, each with one more thing.
VARIANTS = {
    "vote": {"voting_strategy": "byzantine", "quality_threshold": 0.85},
    "convex merge": {"merge_strategy": "convex"},
    **{name: {"strategies": (name,)} for name in ("hierarchical", "convexity", "incremental_soup")},
}
VARIANTS["all of these"] = {
    "voting_strategy": "byzantine",
    "merge_strategy": "convex",
    "quality_threshold": 0.85,
    "consensus_threshold": 0.75,
    "strategies": ("hierarchical", "convexity", "incremental_soup"),
}
ATTACKS = ("sign", "alie", "ipm", "gaussian", "mimic", "nan")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attacked(ConsensusConfig):
    """Consensus training in which the last LIARS nodes send something else; "": they do not."""

    attack: str = ""

    def sent(self, agreed, own, number):
        if not self.attack:
            return own
        keys = jax.random.split(jax.random.fold_in(jax.random.key(1), number), len(jax.tree.leaves(own)))
        keys = jax.tree.unflatten(jax.tree.structure(own), list(keys))
        return jax.tree.map(functools.partial(self._lied, self.attack), agreed, own, keys)

    @staticmethod
    def _lied(attack, start, own, key):
        honest, liars = own[: NODES - LIARS] - start, own[NODES - LIARS :] - start
        mean = jnp.mean(honest, axis=0)
        # As many honest nodes as make a majority with the liars are further from the mean than that.
        share = (NODES - LIARS - (NODES // 2 + 1 - LIARS)) / (NODES - LIARS)
        lie = {
            "sign": -4.0 * liars,
            "alie": mean - statistics.NormalDist().inv_cdf(share) * jnp.std(honest, axis=0),
            "ipm": -10.0 * mean,
            "gaussian": jax.random.normal(key, liars.shape),
            "mimic": honest[0],
            "nan": jnp.full_like(liars, jnp.nan),
        }[attack]
        return own.at[NODES - LIARS :].set(start + lie)


class Texts:
    """The bytes of the standard library, by node, and those for validation."""

    def __init__(self):
        root = sysconfig.get_path("stdlib")
        paths = sorted(
            os.path.join(folder, name)
            for folder, _, names in os.walk(root)
            if not {"site-packages", "__pycache__"} & set(folder.split(os.sep))
            for name in names
            if name.endswith(".py")
        )
        held, kept = paths[::20], [path for index, path in enumerate(paths) if index % 20]
        self.validation = self._bytes(held)
        self.nodes = [self._bytes(part) for part in np.array_split(np.array(kept), NODES)]

    @staticmethod
    def _bytes(paths):
        parts = []
        for path in paths:
            with open(path, "rb") as file:
                parts.append(file.read())
        return np.frombuffer(b"\n".join(parts), np.uint8)

    def batch(self, step):
        """Rows of a step: ROWS of node 0's text, of node 1's, and so on."""
        rng = np.random.default_rng(step)
        return batch_of_rows(np.concatenate([rows_of(text, ROWS, rng) for text in self.nodes]))

    def validation_batches(self, count=16):
        rng = np.random.default_rng(2**31)
        return [batch_of_rows(rows_of(self.validation, NODES * ROWS, rng)) for _ in range(count)]


def rows_of(text, count, rng):
    starts = rng.integers(0, len(text) - LENGTH - 1, count)
    return np.stack([text[start : start + LENGTH + 1] for start in starts]).astype(np.int32)


def batch_of_rows(rows):
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (len(rows), LENGTH))
    ones = np.ones((len(rows), LENGTH))
    return {
        "tokens": rows[:, :-1],
        "targets": rows[:, 1:],
        "weights": ones.astype(np.float32),
        "segment_ids": ones.astype(np.int32),
        "positions": positions,
    }


def train(texts, steps, strategy=None, base=None, learning_rate=1e-3, first_row=10**6):
    """The parameters after so many steps, and their validation loss in nats a byte.

    `strategy`: None: one model, data-parallel. `base`: the parameters to begin with; None: random ones. `first_row`: seeds of
    the rows of a run with a base, other ones than those of the base.
    """
    model, optimizer = api.build(MODEL), Optimizer(schedule=Schedule(learning_rate=learning_rate, warmup_steps=20))
    plan = Plan(batch_size=NODES * ROWS, **({"data": NODES} if strategy is None else {"node": NODES}), fsdp=1)
    mesh, tx = sharding.make_mesh(plan), optimizer.transformation(steps, model.trained(model.axes))
    opt_part, ema = (None, False) if strategy is None else (Nodes(strategy).opt_part(plan), strategy.averages)
    shardings = states.state_shardings(model, tx, mesh, plan.rules, ema=ema, opt_part=opt_part)
    step = make_train_step(model, tx, optimizer.schedule.learning_rates(steps), plan, mesh)
    if strategy is not None:
        strategy.check(plan)
        step = make_nodes_step(step, make_node_loss(model, plan, mesh), model, strategy, shardings)
    step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    init = functools.partial(states.init_state, model, tx, ema=ema, opt_part=opt_part)
    state = jax.device_put(jax.jit(init)(jax.random.key(0), pretrained=base), shardings)
    placed = sharding.batch_sharding(mesh, plan.rules)
    for index in range(steps):
        seed = index if base is None else first_row + index
        state, metrics = step(state, sharding.global_batch(placed, texts.batch(seed)))
        if index % 10 == 0:  # as far ahead as memory holds
            jax.block_until_ready(metrics)
    eval_step = make_eval_step(model, plan, mesh, np.ones(MODEL.vocab_size, np.int32))
    loss = evaluate(eval_step, state.eval_params, texts.validation_batches(), placed)["loss"]
    return jax.device_get(state.eval_params), loss


def base_of(texts, path, steps):
    """The parameters that all runs begin with: those in `path`, if it is there; else trained, and written there."""
    if path and os.path.exists(path):
        model = api.build(MODEL)
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        with np.load(path, allow_pickle=False) as arrays:
            return jax.tree.map_with_path(lambda key, _: arrays[jax.tree_util.keystr(key)], shapes)
    base, loss = train(texts, steps, learning_rate=3e-3)
    print(f"the base, after {steps * NODES * ROWS * LENGTH / 1e6:.1f} M tokens: {loss:.4f} nats a byte", flush=True)
    if path:
        np.savez(path, **{jax.tree_util.keystr(key): value for key, value in jax.tree.leaves_with_path(base)})
    return base


def compare(texts, base, args, found):
    """Data-parallel training and rounds, each at several learning rates -> the best one of the rounds."""
    parameters, best = api.build(MODEL).param_count, {}
    found["tokens"] = args.steps * NODES * ROWS * LENGTH
    found["bytes"] = {
        "data-parallel": 4 * parameters * args.steps,
        "rounds": 4 * parameters * (args.steps // args.every),
    }
    for name, strategy in {"data-parallel": None, "rounds": Attacked(every=args.every, outer=DILOCO)}.items():
        losses = found.setdefault("by_learning_rate", {})[name] = {}
        for rate in args.learning_rates:
            losses[rate] = train(texts, args.steps, strategy, base, rate)[1]
            print(f"{name}, learning rate {rate:g}: {losses[rate]:.4f} nats a byte", flush=True)
            _write(args.json, found)
        best[name] = min(losses, key=losses.get)
        found["loss"][name] = losses[best[name]]
        sent = found["bytes"][name] / 1e6
        print(f"{name}: {found['loss'][name]:.4f} nats a byte, {sent:.1f} MB sent by each node", flush=True)
    ratio = found["loss"]["rounds"] / found["loss"]["data-parallel"]
    fewer = args.steps / (args.steps // args.every)
    print(f"rounds / data-parallel: loss {ratio:.4f}, bytes 1 / {fewer:.0f}", flush=True)
    return best["rounds"]


def attack(texts, base, rate, args, found):
    """Rounds with each variant, then every attack with every rule; prints the table."""
    outer = dataclasses.replace(DILOCO, momentum=args.attacked_momentum) if args.attacked_momentum else OuterSgd()
    make = functools.partial(Attacked, every=args.every, outer=outer)

    def measured(strategy):
        return train(texts, args.attacked_steps, strategy, base, rate)[1]

    apart = found["loss"]["rounds, fewer steps"] = measured(make())
    print(f"rounds, {args.attacked_steps} steps: {apart:.4f}", flush=True)
    for name in args.variants:
        found["loss"][name] = measured(make(**VARIANTS[name]))
        print(f"rounds with {name}: {found['loss'][name]:.4f}, {found['loss'][name] / apart:.3f} of rounds", flush=True)
        _write(args.json, found)
    table = Table(title=f"validation loss over that without attackers, {LIARS} of {NODES} nodes lie")
    for heading in ("rule", "no attack", *args.attacks):
        table.add_column(heading)
    for rule in args.rules:
        row = found["loss"].setdefault("attacked", {}).setdefault(rule, {})
        for name in ("", *args.attacks):
            row[name or "none"] = measured(make(**RULES[rule], attack=name))
            print(f"{rule}, {name or 'no attack'}: {row[name or 'none'] / apart:.4f}", flush=True)
            _write(args.json, found)
        table.add_row(rule, *(f"{loss / apart:.3f}" for loss in row.values()))
    Console(width=140).print(table)


def names(known):
    """The type of an argument: names of `known` with commas between them, and a + for ', ' within one."""

    def parse(text):
        found = [name.replace("+", ", ") for name in text.split(",") if name]
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not known, must be one of {', '.join(known)}")
        return found

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base_steps", type=int, default=4000, help="of the model that all runs begin with")
    parser.add_argument("--base", help="read that model there, if the file exists; else write it there")
    parser.add_argument(
        "--steps", type=int, default=2000, help="of data-parallel training and of rounds, without attackers"
    )
    parser.add_argument(
        "--learning_rates",
        type=lambda text: [float(rate) for rate in text.split(",") if rate],
        default="1e-3,2e-3,4e-3",
        help="comma-separated; the best one counts; empty: that comparison is left out",
    )
    parser.add_argument("--attacked_steps", type=int, default=300, help="of each other run")
    parser.add_argument("--attacked_learning_rate", type=float, help="of each other run (the best one of the rounds)")
    parser.add_argument(
        "--attacked_momentum",
        type=float,
        default=0.0,
        help="of each other run's outer optimizer, with learning rate 0.7; 0: plain averaging",
    )
    parser.add_argument("--every", type=int, default=50, help="steps between two rounds")
    parser.add_argument(
        "--attacks", type=names(ATTACKS), default=",".join(ATTACKS), help="comma-separated; empty: none"
    )
    parser.add_argument(
        "--rules", type=names(RULES), default=",".join(RULES).replace(", ", "+"), help="comma-separated; a + for ', '"
    )
    parser.add_argument(
        "--variants", type=names(VARIANTS), default=",".join(VARIANTS), help="comma-separated; empty: none"
    )
    parser.add_argument("--json", help="write the results there")
    args = parser.parse_args()
    if not args.learning_rates and args.attacked_learning_rate is None:
        parser.error("with no --learning_rates, --attacked_learning_rate must be set")
    texts = Texts()
    base = base_of(texts, args.base, args.base_steps)
    found = {**vars(args), "loss": {}}
    rate = args.attacked_learning_rate
    if args.learning_rates:
        best = compare(texts, base, args, found)
        rate = best if rate is None else rate
    if args.variants or args.rules:
        attack(texts, base, rate, args, found)


def _write(path, found):
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
