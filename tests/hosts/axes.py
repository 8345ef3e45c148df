"""Trains tiny runs on four devices, in this process or as one of several: python axes.py FOLDER PART ...

Each part is a mesh whose axes span the processes, or something that all processes must decide alike. What it has come to is
written to FOLDER/PART.PROCESS.json. A test does the same alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import signal
import sys

import jax
import numpy as np

from capibara.checkpoints import lease
from capibara.checkpoints.manager import Checkpointing, Checkpoints
from capibara.consensus.aggregation import Aggregation, CoordinateMedian
from capibara.core.types import UserError
from capibara.data.dataset import Dataset
from capibara.data.sources.sources import JsonlSource
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.models.api import DecoderConfig
from capibara.multihost import exits, joining
from capibara.optim import Optimizer, Schedule
from capibara.sharding import Plan
from capibara.strategies.consensus import ConsensusConfig
from capibara.training import loop
from capibara.training.base.callbacks import Callback
from capibara.training.base.options import Evaluation
from capibara.training.stability.watchdog import Watch
from capibara.training.trainer import Trainer

DEVICES = 4
# The first axis that has more than one device spans two processes of two, and four of one.
MESHES = {
    "data": {"data": 4, "fsdp": 1},
    "fsdp": {"fsdp": 4},
    "tensor": {"fsdp": 1, "tensor": 4},
    "stage": {"stage": 2, "fsdp": 2},
    "context": {"fsdp": 1, "context": 4},
    "data_fsdp": {"data": 2, "fsdp": 2},
    "data_tensor": {"data": 2, "fsdp": 1, "tensor": 2},
    "nodes": {"node": 2, "fsdp": 2},
}
STEPS = 4
STOPPED_AT = 2  # the step during which process 1 is signalled, of `STEPS`


class Seen(Callback):
    """The metrics of steps and evaluations; on process 0."""

    def __init__(self):
        self.steps, self.evaluations = {}, {}

    def on_step(self, step, metrics):
        self.steps[step] = {name: float(metrics[name]) for name in ("loss", "grad_norm")}

    def on_evaluate(self, step, metrics):
        self.evaluations[step] = metrics["loss"]


def write_corpus(folder: pathlib.Path) -> None:
    """Rows of a language that can be learned."""
    rng, words = np.random.default_rng(0), ["capybara", "river", "grass", "swims"]
    texts = [" ".join(rng.choice(words, int(rng.integers(3, 40)))) for _ in range(99)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def run_of(folder: pathlib.Path, name: str, steps: int = STEPS, **changes) -> Trainer:
    """A run of four devices: a mesh by its name, else fsdp=4."""
    plan = Plan(batch_size=8, **MESHES.get(name, {"fsdp": 4}))
    nodes = ConsensusConfig(every=STEPS // 2, aggregation=Aggregation(rule=CoordinateMedian()))  # two rounds
    base = Trainer(
        model_dir=str(folder / name),
        steps=steps,
        model=DecoderConfig(vocab_size=384, embed_dim=32, num_layers=2, num_heads=4, mlp_dim=64, dtype="float32"),
        plan=plan,
        strategy=nodes if plan.node > 1 else None,
        dataset=Dataset(
            source=JsonlSource(files=(str(folder / "corpus.jsonl"),), validation_fraction=0.2),
            vocabulary=ByteVocabulary(),
            length=64,
        ),
        optimizer=Optimizer(schedule=Schedule(kind="rsqrt", learning_rate=1e-2, warmup_steps=2)),
        evaluation=Evaluation(every=4, max_batches=2),
        checkpointing=Checkpointing(every=2),
        ema_decay=0.5 if plan.node == 1 else None,
        log_every=1,
        replica_check_every=2,
        watch=Watch(at_least_s=100.0, start_s=200.0),  # what hangs ends
    )
    return dataclasses.replace(base, **changes)


def trained(trainer: Trainer, after_step=None, devices=None) -> dict:
    """Trains; what there is to tell of it."""
    seen, set_up = Seen(), loop.set_up

    def hooked(trainer, **options):
        run, initial = set_up(trainer, devices, **options)
        steps = itertools.count(initial.step + 1)

        def stepped(state, batch):
            done = run.train_step(state, batch)
            if after_step is not None:
                after_step(next(steps))
            return done

        return dataclasses.replace(run, train_step=stepped), initial

    loop.set_up = hooked
    try:
        outcome = loop.train(trainer, seen)
    finally:
        loop.set_up = set_up
    return {"outcome": dataclasses.astuple(outcome), **vars(seen)}


def stopping(folder: pathlib.Path) -> Trainer:
    plan = Plan(batch_size=8, **MESHES["data_fsdp"])
    return run_of(folder, "signalled", plan=plan, checkpointing=Checkpointing(every=0))


def signalled(folder: pathlib.Path) -> dict:
    """One process is told to stop: all stop after the same step, with its checkpoint."""

    def signal_one(step):
        if step == STOPPED_AT and jax.process_index() == jax.process_count() - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    return trained(stopping(folder), signal_one)


def resumed(folder: pathlib.Path) -> dict:
    """And go on."""
    return trained(stopping(folder))


def differing(folder: pathlib.Path) -> dict:
    """One process saves a step earlier than the others."""
    every = 3 - (jax.process_index() == 1)
    return trained(run_of(folder, "differing", checkpointing=Checkpointing(every=every), replica_check_every=0))


def not_shared(folder: pathlib.Path) -> dict:
    """Each process has a folder of its own by the same name, as on the disks of hosts."""
    lease.SEEN_S = 1.0
    try:
        Checkpoints(str(folder / f"own.{jax.process_index()}"), Checkpointing()).close()
    except UserError as error:
        return {"said": str(error)}
    return {"said": None}


PARTS = {"signalled": signalled, "resumed": resumed, "differing": differing, "not_shared": not_shared}


def main(argv: list[str] | None = None) -> int:
    folder, *parts = sys.argv[1:] if argv is None else argv
    where = joining.Joining()
    jax.config.update("jax_num_cpu_devices", DEVICES // int(os.environ["JAX_NUM_PROCESSES"]))
    joining.join(where, {}, emulated=True)
    for part in parts:
        at = pathlib.Path(folder)
        found = PARTS[part](at) if part in PARTS else trained(run_of(at, part))
        (at / f"{part}.{jax.process_index()}.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(exits.run_process(main))
