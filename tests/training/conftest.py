"""A tiny run, and eyes on everything that its loop does."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal

import jax
import numpy as np
import pytest

from capibara.checkpoints.manager import Checkpointing
from capibara.data.dataset import Dataset
from capibara.data.sources.sources import JsonlSource
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.models.api import DecoderConfig
from capibara.optim import Optimizer, Schedule
from capibara.sharding import Plan
from capibara.training import loop
from capibara.training.base.callbacks import Callback
from capibara.training.base.options import Evaluation
from capibara.training.evaluation import Evaluator
from capibara.training.trainer import Trainer


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """JSON lines of a language that can be learned."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    words = ["capybara", "river", "grass", "swims", "sleeps", "eats"]
    texts = [" ".join(rng.choice(words, int(rng.integers(3, 40)))) for _ in range(200)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def make_trainer(corpus, tmp_path):
    """(changes of Trainer's fields) -> a run of 20 steps on fsdp=4 x tensor=2."""
    base = Trainer(
        model_dir=str(tmp_path / "run"),
        steps=20,
        model=DecoderConfig(vocab_size=384, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64, dtype="float32"),
        plan=Plan(batch_size=8, fsdp=4, tensor=2),
        dataset=Dataset(
            source=JsonlSource(files=(str(corpus),), validation_fraction=0.2), vocabulary=ByteVocabulary(), length=64
        ),
        # The schedule's length is fixed, so that a run that is stopped at a smaller `steps` follows the same one.
        optimizer=Optimizer(schedule=Schedule(kind="rsqrt", learning_rate=1e-2, warmup_steps=2)),
        evaluation=Evaluation(every=0),
        checkpointing=Checkpointing(every=0),
        log_every=1,
    )
    return lambda **changes: dataclasses.replace(base, **changes)


class Seen(Callback):
    """What a run did: losses and batch hashes by step, evaluations, checkpoints, and the last state on the host."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.metrics: dict[int, dict[str, float]] = {}
        self.evaluations: dict[int, dict[str, float]] = {}
        self.batches: list[str] = []
        self.checkpoints: list[int] = []
        self.statuses: list[str] = []
        self.progress: list[str] = []
        self.signal_at: str | None = None
        self.start_step = self.outcome = self.started = self.state = self.recovery = None

    @property
    def early(self):
        return self.recovery.early

    def on_progress(self, text):
        self.progress.append(text)
        if text == self.signal_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_sample(self, step, prompt, text):
        self.on_progress(f"sample {prompt}")

    def on_status(self, text):
        self.statuses.append(text)

    def on_train_begin(self, run):
        self.start_step = run.start_step

    def on_step(self, step, metrics):
        self.losses[step] = metrics["loss"]
        self.metrics[step] = dict(metrics)

    def on_evaluate(self, step, metrics):
        self.evaluations[step] = dict(metrics)

    def on_checkpoint(self, step):
        self.checkpoints.append(step)


@pytest.fixture
def train(monkeypatch):
    """(trainer, devices, evaluate, after_step, signal_at) -> Seen.

    `evaluate(n)` may give the loss of the n-th evaluation; told of `signal_at`, the run gets a signal.
    """

    metrics = Evaluator.metrics

    def run_it(trainer, devices=None, evaluate=None, after_step=None, signal_at=None):
        seen, set_up = Seen(), loop.set_up  # which a test may have changed
        seen.signal_at = signal_at

        def watched(trainer, **options):
            run, initial = set_up(trainer, devices, **options)
            step, begin, seen.recovery = run.train_step, run.recovery.begin, run.recovery

            def begun(*given):
                start = begin(*given)
                seen.started = seen.state = jax.device_get(start.state)
                return start

            def train_step(state, batch):
                host = jax.device_get(batch)
                seen.batches.append(hashlib.sha256(b"".join(host[k].tobytes() for k in sorted(host))).hexdigest())
                state, metrics = step(state, batch)
                seen.state = jax.device_get(state)
                if after_step is not None:
                    after_step(int(seen.state.step))
                return state, metrics

            run.recovery.begin = begun
            return dataclasses.replace(run, train_step=train_step), initial

        def evaluated(evaluator, params):
            return metrics(evaluator, params) if evaluate is None else {"loss": evaluate(len(seen.evaluations))}

        with monkeypatch.context() as patch:
            patch.setattr(loop, "set_up", watched)
            patch.setattr(Evaluator, "metrics", evaluated)
            seen.outcome = loop.train(trainer, seen)
        return seen

    return run_it
