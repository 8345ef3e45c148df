"""A private run: it ends with its budget, refuses what breaks its promise, and reads each document once in a pass."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from capibara import sharding
from capibara.checkpoints.manager import Checkpointing
from capibara.consensus.privacy import Privacy
from capibara.core.types import UserError
from capibara.data.packing.packing import Packing
from capibara.data.shards.source import ShardedSource
from capibara.data.sources.sources import CombinedSource, JsonlSource
from capibara.models import api
from capibara.models.api import Lora
from capibara.planner.compiler import proof
from capibara.planner.hardware import slices
from capibara.sharding import Plan
from capibara.strategies.consensus import ConsensusConfig
from capibara.training.base.options import Evaluation, InitWith
from capibara.training.methods.private import Private
from capibara.training.privacy.ledger import Ledger
from capibara.training.stability.anomalies import Anomalies


@pytest.fixture
def make_private(make_trainer):
    """A run on documents of which five batches of 32 hold a pass."""
    base = make_trainer()
    source = dataclasses.replace(base.dataset.source, validation_fraction=0.25)
    dataset = dataclasses.replace(base.dataset, source=source, packing=Packing.NONE)
    assert 128 < len(dataset.documents("train")) <= 160
    own = {"plan": Plan(batch_size=32, fsdp=4, tensor=2), "dataset": dataset, "steps": 12}
    return lambda privacy, **changes: make_trainer(**{"privacy": privacy} | own | changes)


SIGMA = dict(clip_norm=0.5, noise_multiplier=2.0)


def test_a_run_ends_where_its_budget_does_and_a_larger_one_resumes_it(make_private, train):
    two = Privacy(**SIGMA, budget=Privacy(**SIGMA).epsilon(2) + 1e-6)
    seen = train(make_private(two, evaluation=Evaluation(every=6, max_batches=1)))
    assert [*seen.evaluations] == [6, 10]  # the model that comes out, too
    assert (seen.outcome.step, seen.outcome.reason) == (10, "privacy_budget") and seen.checkpoints == [10]
    assert "allows 10 of Trainer.steps (12)" in "; ".join(seen.statuses)
    assert f"epsilon {two.budget:.3g} at delta 1e-05 after step 10, in pass 2 over the data" in seen.statuses[-1]
    for step, metrics in seen.metrics.items():
        assert metrics["epsilon"] == pytest.approx(two.epsilon(1 if step <= 5 else 2))
    with pytest.raises(UserError, match=r"the privacy budget is spent at step 10: raise Privacy.budget to continue"):
        train(make_private(two))
    with pytest.raises(
        UserError, match=r"Privacy.budget is 2.5, and this run has spent epsilon 2.94 by step 10: raise"
    ):
        train(make_private(dataclasses.replace(two, budget=2.5)))
    more = train(make_private(dataclasses.replace(two, budget=100.0)))
    assert (more.start_step, more.outcome.step, more.outcome.reason) == (10, 12, "finished")
    assert more.metrics[11]["epsilon"] == pytest.approx(two.epsilon(3))


@pytest.mark.parametrize(
    ("passes", "end", "told"),
    [(2, (10, "privacy_budget"), "allows 10 of Trainer.steps (12)"), (3, (12, "finished"), "")],
)
def test_the_budget_says_where_a_run_ends(make_private, passes, end, told):
    privacy = Privacy(**SIGMA, budget=Privacy(**SIGMA).epsilon(passes) + 1e-6)
    lines = []
    hooks = Private(privacy).hooks(make_private(privacy), {"w": np.zeros(10**6)}, lines.append)
    assert (hooks.last_step, hooks.reason) == end and hooks.metrics(6) == {"epsilon": privacy.epsilon(2)}
    assert "it drowns" in lines[0] and told in "".join(lines[1:]) and len(lines) == (2 if told else 1)
    assert "after step 10, in pass 2 over the data" in hooks.closing(10)
    ended = "the privacy budget is spent at step 10" if told else "the run is at step 10 of 12 already"
    assert hooks.ended(10).startswith(ended)


@pytest.mark.parametrize("steps", [2, pytest.param(20, marks=pytest.mark.heavy)])
def test_a_run_learns_and_its_noise_is_secret(make_private, train, tmp_path, steps):
    little = Privacy(clip_norm=1.0, noise_multiplier=0.05, accounting="rdp")
    runs = [train(make_private(little, steps=steps, model_dir=str(tmp_path / name))) for name in ("one", "two")]
    for seen in runs:
        assert seen.losses[steps] < seen.losses[1] - (0.5 if steps == 20 else 0.0)
        # The secret is no part of what is saved.
        assert {leaf.dtype.name for leaf in jax.tree.leaves(seen.state)} <= {"float32", "int32"}
    assert runs[0].losses[1] == runs[1].losses[1] and runs[0].losses[2] != runs[1].losses[2]


def test_the_promise_of_a_run_that_resumes_is_the_same(make_private, train):
    train(make_private(Privacy(**SIGMA), steps=5))
    for privacy, words in (
        (Privacy(clip_norm=0.6, noise_multiplier=2.0), r"Trainer.privacy.clip_norm was 0.5, is 0.6"),
        (Privacy(clip_norm=0.5, noise_multiplier=1.0), r"Trainer.privacy.noise_multiplier was 2.0, is 1.0"),
        (None, r"Trainer.privacy was {.*}, is None"),
    ):
        with pytest.raises(UserError, match=words):
            train(make_private(privacy))


def test_adapters_train_with_little_noise(make_private, make_trainer, train, tmp_path):
    train(make_trainer(steps=4, model_dir=str(tmp_path / "base"), checkpointing=Checkpointing(every=4)))
    model = dataclasses.replace(make_trainer().model, lora=Lora(rank=2))
    seen = train(make_private(Privacy(**SIGMA), model=model, init_from=str(tmp_path / "base"), steps=3))
    (warning,) = [line for line in seen.statuses if line.startswith("warning")]
    count = sum(x.size for x in jax.tree.leaves(api.build(model).trained(seen.state.params)))
    assert count < 10_000
    assert f"largest document's (0.5): with 32 documents in a batch and {count:,} parameters it drowns" in warning
    assert seen.outcome.step == 3


def test_what_breaks_the_promise_is_refused(make_private, corpus, tmp_path):
    privacy = Privacy(**SIGMA)
    base = make_private(None)
    changes = {
        "Dataset.packing is 'best_fit', must be 'none'": {
            "dataset": dataclasses.replace(base.dataset, packing=Packing.BEST_FIT)
        },
        "Plan.accumulation is not supported with Trainer.privacy": {
            "plan": Plan(batch_size=32, fsdp=4, tensor=2, accumulation=2)
        },
        "Plan.stage is not supported with": {"plan": Plan(batch_size=32, fsdp=4, stage=2)},
        "Anomalies.on_spike is not supported with": {"anomalies": Anomalies(on_spike="skip")},
        "Trainer.strategy is not supported with": {
            "strategy": ConsensusConfig(every=4),
            "plan": Plan(batch_size=32, node=4, fsdp=2),
        },
        "DecoderConfig.dtype = 'float16' is not": {"model": dataclasses.replace(base.model, dtype="float16")},
        "Evaluation.unigram_batches is not supported": {"evaluation": Evaluation(unigram_batches=2)},
        "Trainer.loss_normalization is not supported": {"loss_normalization": "documents"},
        "Trainer.init_with = 'state' is not supported": {"init_with": InitWith.STATE, "init_from": "x"},
    }
    for words, change in changes.items():
        with pytest.raises(UserError, match=words):
            make_private(privacy, **change)


def test_a_budget_that_the_first_pass_exceeds_ends_before_anything_is_compiled(make_private, train, monkeypatch):
    monkeypatch.setattr("capibara.training.setup.compile_step", lambda *given: pytest.fail("compiled"))
    with pytest.raises(UserError, match=r"Privacy.budget is 0.1, and the first pass over the data costs epsilon"):
        train(make_private(Privacy(**SIGMA, budget=0.1)))


def test_each_document_is_in_one_step_of_a_pass(make_private, train, tmp_path, monkeypatch):
    """Also if their number is no multiple of the rows, and some are empty."""
    texts = [f"{number}:" + "x" * (number % 50) for number in range(70)]
    texts[3] = texts[40] = ""
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    base = make_private(None).dataset
    dataset = dataclasses.replace(base, source=JsonlSource(files=(str(path),), validation_files=(str(path),)))
    read = []
    monkeypatch.setattr(
        "capibara.training.feed.sharding.global_batch",
        lambda placed, batch, make=sharding.global_batch: (read.append(batch["targets"].copy()), make(placed, batch))[
            1
        ],
    )
    trainer = make_private(Privacy(**SIGMA), dataset=dataset, steps=7)
    train(dataclasses.replace(trainer, steps=4))  # it resumes within the second pass
    train(trainer)
    assert len(read) == 7
    for first in (0, 3):
        found = [bytes(row[row > 2].astype(np.uint8) - 3) for batch in read[first : first + 3] for row in batch]
        numbers = [int(text.split(b":")[0]) for text in found if b":" in text]
        assert sorted(numbers) == [number for number in range(70) if number not in (3, 40)]


def lines(path, count):
    path.write_text("".join(json.dumps({"text": f"{number}:x"}) + "\n" for number in range(count)))
    return (str(path),)


def test_documents_that_do_not_suit_the_promise_are_told_before_anything_is_compiled(
    make_private, train, tmp_path, monkeypatch
):
    monkeypatch.setattr("capibara.training.setup.compile_step", lambda *given: pytest.fail("compiled"))
    base = make_private(None).dataset
    few = JsonlSource(files=lines(tmp_path / "few.jsonl", 20), validation_files=lines(tmp_path / "valid.jsonl", 2))
    with pytest.raises(UserError, match=r"has 20 documents, must have at least one for each of the 32 rows of a batch"):
        train(make_private(Privacy(**SIGMA), dataset=dataclasses.replace(base, source=few)))
    shards = ShardedSource(files=few.files, validation_files=few.validation_files)
    with pytest.raises(UserError, match="Trainer.privacy needs documents with random access"):
        train(make_private(Privacy(**SIGMA), dataset=dataclasses.replace(base, source=shards)))


def test_every_row_is_read_without_shuffling_too(make_private, train, tmp_path):
    """The last batch of a pass is padded."""
    source = JsonlSource(files=lines(tmp_path / "some.jsonl", 40), validation_files=lines(tmp_path / "valid.jsonl", 2))
    dataset = dataclasses.replace(make_private(None).dataset, source=source, shuffle=False)
    assert train(make_private(Privacy(**SIGMA), dataset=dataset, steps=5)).outcome.step == 5


def test_a_delta_that_promises_nothing_is_warned_of(corpus, make_private):
    dataset = make_private(None).dataset
    (line,) = Ledger.of(Privacy(**SIGMA, delta=0.1), dataset, 32).remarks(5, 1)
    assert "Privacy.delta is 0.1, and one over the number of documents (" in line and "try 7e-04" in line
    assert not list(Ledger.of(Privacy(**SIGMA), dataset, 32).remarks(5, 1))


def test_sources_with_rows_of_their_own_are_refused(make_private, train, tmp_path):
    """Their loader would not read each document once in a pass."""
    base = make_private(None).dataset
    parts = tuple(JsonlSource(files=lines(tmp_path / f"{name}.jsonl", 80)) for name in "ab")
    dataset = dataclasses.replace(base, source=CombinedSource(sources=parts, rows="apart"))
    with pytest.raises(UserError, match="CombinedSource.rows = 'apart' is not supported with Trainer.privacy"):
        train(make_private(Privacy(**SIGMA), dataset=dataset))


def test_a_kept_compile_result_is_of_one_privacy(make_private):
    slice_, two = slices.parse("v5e-8"), Privacy(**SIGMA)
    runs = [make_private(privacy) for privacy in (None, two, dataclasses.replace(two, clip_norm=1.0))]
    plain, private, other = (proof.key(run, slice_) for run in runs)
    assert plain != private != other and private == {**plain, "privacy": repr(two)}
