"""Bad numbers in real batches, through the real step: what becomes of the update, of the run, and what is written down."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re

import jax
import numpy as np
import pytest

from capibara.checkpoints.manager import Checkpointing, CheckpointReader
from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.jobs.local import free_address
from capibara.sharding import Plan
from capibara.training import loop
from capibara.training.feed import BatchFeed
from capibara.training.stability.anomalies import Anomalies, OnSpike

ROLL_BACK = Anomalies(on_spike=OnSpike.ROLL_BACK, window=6, roll_back_steps=3, skip_batches=6)


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def parts(state):
    return {name: getattr(state, name) for name in ("params", "opt_state", "ema", "losses")}


def lines(trainer, name="bad_batches.jsonl"):
    path = pathlib.Path(trainer.model_dir) / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def names(trainer):
    return {
        path.name for path in (pathlib.Path(trainer.model_dir) / "checkpoints").iterdir() if "json" not in path.name
    }


def changed(key, value, rows=slice(None)):
    """(batch) -> the batch with `value` in all places of some rows of the array `key`."""

    def change(batch):
        host = np.array(jax.device_get(batch[key]))
        host[rows] = value
        return {**batch, key: jax.device_put(host, batch[key].sharding)}

    return change


NAN = changed("weights", np.nan, rows=3)
SPIKE = changed("targets", 383)  # an id that no text has: its loss is far above all others


class Watched:
    """The batches of runs as they came from the data, by their number; the states after each step."""

    def __init__(self):
        self.batches, self.states, self.changes, self.without = {}, {}, {}, ()

    def feed(self, changes=None, without=()):
        """From now on: what becomes of some batches, by their number; those that are left out."""
        self.changes, self.without = changes or {}, without

    def texts(self, number):
        """Of each row of a batch the texts that it has parts of, in their order."""
        batch, vocabulary = self.batches[number], ByteVocabulary()
        for ids, segments in zip(batch["targets"], batch["segment_ids"], strict=True):
            yield [vocabulary.decode(ids[segments == n]) for n in range(1, segments.max(initial=0) + 1)]


@pytest.fixture
def watched(monkeypatch):
    set_up, this = loop.set_up, Watched()

    def watching(*args, **options):
        run, initial = set_up(*args, **options)

        def stepping(state, batch):
            state, metrics = run.train_step(state, batch)
            this.states[int(state.step)] = jax.device_get(state)
            return state, metrics

        return dataclasses.replace(run, train_step=stepping), initial

    class Changing(BatchFeed):
        def __init__(self, batches, *args):
            super().__init__(batches, *args)
            self.loader = batches

        def next_batch(self, *state):
            batch = super().next_batch(*state)
            while self.loader.batches in this.without:
                batch = super().next_batch(*state)
            number = self.loader.batches
            this.batches[number] = jax.device_get(batch)
            return this.changes[number](batch) if number in this.changes else batch

    monkeypatch.setattr(loop, "BatchFeed", Changing)
    monkeypatch.setattr(loop, "set_up", watching)
    return this


@pytest.mark.fault(38)
def test_a_nan_leaves_out_its_update_as_if_it_had_never_been(make_trainer, train, watched, tmp_path):
    trainer = make_trainer(steps=7, ema_decay=0.9, checkpointing=Checkpointing(every=2))
    watched.feed({4: NAN})
    whole = train(trainer)
    states = dict(watched.states)
    assert_equal(parts(states[4]), parts(states[3]))
    assert int(states[4].step) == 4 and not np.array_equal(*(s.params["embedding"] for s in (states[4], states[5])))
    assert [whole.metrics[step]["skipped"] for step in range(1, 8)] == [0, 0, 0, 1, 0, 0, 0]
    assert [step for step, loss in whole.losses.items() if not np.isfinite(loss)] == [4]
    assert whole.checkpoints == [2, 4, 6, 7]  # the state of step 4 is good
    # Stopped right after it and resumed: as without the stop.
    stopped = make_trainer(**{**vars(trainer), "model_dir": str(tmp_path / "stopped"), "steps": 4})
    train(stopped)
    resumed = train(dataclasses.replace(stopped, steps=7))
    assert resumed.start_step == 4
    assert_equal(dataclasses.asdict(resumed.state), dataclasses.asdict(whole.state))
    # A run without that batch has the same parameters and moments, a step sooner.
    watched.feed(without=(4,))
    without = train(dataclasses.replace(trainer, model_dir=str(tmp_path / "without"), steps=6))
    assert_equal((whole.state.params, whole.state.opt_state), (without.state.params, without.state.opt_state))
    assert [whole.losses[step] for step in (1, 2, 3, 5, 6, 7)] == list(without.losses.values())


@pytest.mark.fault(38)
def test_the_documents_of_a_bad_batch_are_written_down(make_trainer, train, watched):
    """With logs two steps apart; read from the corpus, they are what the rows were made of."""
    trainer = make_trainer(steps=6, log_every=4)
    watched.feed({1: NAN, 4: NAN})
    seen = train(trainer)
    assert seen.metrics[4]["skipped"] == 2 and np.isfinite(seen.losses[4])  # the mean of the others
    documents = trainer.dataset.source.open("train")
    for line, step in zip(lines(trainer), (1, 4), strict=True):
        rows = line.pop("rows")
        assert line == {"step": step, "why": "loss is nan", "loss": None, "grad_norm": None, "first_row": 0}
        for texts, named in zip(watched.texts(step), rows, strict=True):
            assert len(texts) == len(named) > 0
            for text, name in zip(texts, named, strict=True):
                assert name["epoch"] >= 0 and text in documents.example(name["document"]).text


@pytest.mark.heavy
@pytest.mark.fault(38)
def test_they_are_the_same_with_workers_after_a_stop(make_trainer, train, watched, tmp_path):
    trainer = make_trainer(steps=9)
    dataset = dataclasses.replace(trainer.dataset, workers=2)
    watched.feed({8: NAN})
    train(trainer)
    other = dataclasses.replace(trainer, dataset=dataset, model_dir=str(tmp_path / "workers"))
    train(dataclasses.replace(other, steps=7))
    train(other)
    assert lines(other) == lines(trainer) and len(lines(trainer)) == 1


@pytest.mark.fault(38)
def test_too_many_in_a_row_end_the_run(make_trainer, train, watched):
    trainer = make_trainer(
        checkpointing=Checkpointing(every=2, keep=9), anomalies=Anomalies(most_in_a_row=3), log_every=5
    )
    watched.feed(dict.fromkeys((2, 3, 5, 6, 8, 9, 10), NAN))
    message = "^3 updates in a row were skipped, the last at step 10: loss is nan: earlier checkpoints are kept; lower "
    with pytest.raises(UserError, match=message):
        train(trainer)
    assert {"2", "4", "6", "8"} <= names(trainer) and "10" not in names(trainer)
    assert [line["step"] for line in lines(trainer)] == [2, 3, 5, 6, 8, 9, 10]


@pytest.mark.fault(39)
def test_an_infinity_on_one_replica_is_decided_alike_on_all(make_trainer, train, watched, monkeypatch):
    set_up, copies = loop.set_up, {}

    def held(state):
        leaves = jax.tree.leaves((state.params, state.opt_state))
        return [[np.asarray(shard.data).copy() for shard in leaf.addressable_shards] for leaf in leaves]

    def holding(*args, **options):
        run, initial = set_up(*args, **options)

        def stepping(state, batch):
            before = held(state)
            state, metrics = run.train_step(state, batch)
            decisions = [float(shard.data) for shard in metrics["skipped"].addressable_shards]
            copies[int(state.step)] = (before, held(state), decisions)
            return state, metrics

        return dataclasses.replace(run, train_step=stepping), initial

    monkeypatch.setattr(loop, "set_up", holding)
    watched.feed({3: changed("weights", np.inf, rows=5)})  # on the sixth of eight devices
    train(make_trainer(steps=4, plan=Plan(batch_size=8, data=8, fsdp=1)))
    assert sorted(copies) == [1, 2, 3, 4]
    for number, (before, after, decisions) in copies.items():
        assert all(len(leaf) == 8 and all(np.array_equal(leaf[0], copy) for copy in leaf) for leaf in after)
        assert decisions == [float(number == 3)] * 8
        same = all(np.array_equal(b[0], a[0]) for b, a in zip(before, after, strict=True))
        assert same == (number == 3)


@pytest.mark.fault(41)
def test_a_loss_spike_is_left_out(make_trainer, train, watched, tmp_path):
    anomalies = Anomalies(on_spike=OnSpike.SKIP, window=6)
    trainer = make_trainer(steps=15, anomalies=anomalies)
    watched.feed({13: SPIKE})
    whole = train(trainer)
    states = dict(watched.states)
    assert [step for step, metrics in whole.metrics.items() if metrics["loss_spikes"]] == [13]
    assert [step for step, metrics in whole.metrics.items() if metrics["skipped"]] == [13]
    assert_equal(parts(states[13]), parts(states[12]))
    (line,) = lines(trainer)
    losses = [whole.losses[step] for step in range(7, 13)]
    sigmas = (whole.losses[13] - np.mean(losses)) / np.std(losses)
    assert line["step"] == 13 and line["loss"] == pytest.approx(whole.losses[13])
    assert (
        line["why"] == f"loss {line['loss']:.4g} is {sigmas:.1f} sigma above the mean {np.mean(losses):.4g} of 6 steps"
    )
    # The window comes back with the state: stopped before the spike, it is seen all the same.
    stopped = dataclasses.replace(trainer, model_dir=str(tmp_path / "stopped"), steps=12)
    train(stopped)
    resumed = train(dataclasses.replace(stopped, steps=15))
    assert_equal(dataclasses.asdict(resumed.state), dataclasses.asdict(whole.state))


@pytest.mark.fault(41)
def test_a_run_goes_back_from_a_spike_and_leaves_its_batches_out(make_trainer, train, watched, tmp_path, caplog):
    saving = Checkpointing(every=2, keep=9)
    trainer = make_trainer(steps=15, log_every=2, anomalies=ROLL_BACK, checkpointing=saving)
    watched.feed({11: SPIKE})
    seen = train(trainer)
    assert "loss spike at step 11: rolled back to step 8, skipping the 6 batches after it" in caplog.text
    assert seen.metrics[12]["roll_backs"] == 1 and seen.metrics[14]["roll_backs"] == 1
    assert seen.checkpoints == [2, 4, 6, 8, 10, 10, 12, 14, 15]
    assert names(trainer) == {"2", "4", "6", "8", "10", "10.rolled_back", "12", "14", "15"}
    assert sorted(watched.batches) == [*range(1, 13), *range(15, 22)]
    assert [line["step"] for line in lines(trainer)] == [11]
    # As a run that never saw these batches; and it resumes where it ended.
    watched.feed(without=range(9, 15))
    without = train(dataclasses.replace(trainer, model_dir=str(tmp_path / "without"), steps=17))
    assert_equal(dataclasses.asdict(seen.state), dataclasses.asdict(watched.states[15]))
    watched.feed()
    resumed = train(dataclasses.replace(trainer, steps=17))
    assert_equal(dataclasses.asdict(resumed.state), dataclasses.asdict(without.state))


@pytest.mark.fault(41)
@pytest.mark.parametrize("every, message", [
    (2, "^loss spike at step 11, after 2 roll-backs to step 10: earlier checkpoints are kept; "),
    (50, r"^loss spike at step 11, and no checkpoint before it to roll back to: set Checkpointing.every \(50\)"),
])  # fmt: skip
def test_it_does_not_go_back_for_ever_nor_to_nowhere(make_trainer, train, watched, every, message):
    anomalies = dataclasses.replace(ROLL_BACK, roll_back_steps=1, skip_batches=1, most_roll_backs=2)
    trainer = make_trainer(log_every=2, anomalies=anomalies, checkpointing=Checkpointing(every=every, keep=9))
    watched.feed(dict.fromkeys(range(11, 40), SPIKE))
    with pytest.raises(UserError, match=message):
        train(trainer)
    assert names(trainer) == ({"2", "4", "6", "8", "10"} if every == 2 else set())


@pytest.mark.heavy
@pytest.mark.fault(41)
def test_two_processes_go_back_alike(shell):
    """So little above the mean is a spike here that one comes soon by itself."""
    anomalies = {"on_spike": "'roll_back'", "window": 8, "sigmas": 0.1, "roll_back_steps": 4, "skip_batches": 6}
    flags = [f"--gin.Anomalies.{name}={value}" for name, value in anomalies.items()]
    flags += ["--gin.Checkpointing.every=2", "--gin.TRAIN_STEPS=24", "--gin.LEARNING_RATE=3e-2"]
    address = free_address()
    processes = [
        shell.start(
            *("train", "--gin_file=tiny.gin", "--emulate=2", "--gin.MODEL_DIR=spikes", *flags),
            **{"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(index)},
        )
        for index in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    [warning] = [line for line in errors[0].splitlines() if "loss spike at step" in line]
    spike, step = map(
        int, re.search(r"at step (\d+): rolled back to step (\d+), skipping the 6 batches", warning).groups()
    )
    assert step <= spike - 4
    written = [
        [json.loads(line) for line in (shell.folder / "spikes" / name).read_text().splitlines()]
        for name in ("bad_batches.jsonl", "bad_batches.1.jsonl")
    ]
    for one, other in zip(*written, strict=True):
        assert one["step"] == other["step"] == spike
        assert (one["first_row"], other["first_row"]) == (0, 4) and one["rows"] != other["rows"]
        assert len(one["rows"]) == len(other["rows"]) == 4
    with CheckpointReader(str(shell.folder / "spikes"), Checkpointing()) as reader:
        assert reader.verified_step() == 24
