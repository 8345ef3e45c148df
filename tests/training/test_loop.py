"""The loop: stopping and going on changes nothing, on any mesh and feed; early stopping; what callbacks are told."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal

import jax
import numpy as np
import pytest

from capibara import sharding
from capibara.checkpoints import restoring
from capibara.checkpoints.encryption import Encryption
from capibara.checkpoints.manager import Checkpointing, CheckpointReader
from capibara.core.types import UserError
from capibara.data.dataset import Dataset
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.models import api
from capibara.multihost import hosts
from capibara.optim import Adafactor, FactorSchedule, Optimizer, Schedule
from capibara.sharding import Plan
from capibara.training import loop, setup
from capibara.training.base.callbacks import Callback
from capibara.training.base.options import Evaluation
from capibara.training.evaluation import Evaluator
from capibara.training.recovery import Recovery
from capibara.training.stability.anomalies import Anomalies
from capibara.training.stability.watchdog import Watch, Watchdog


def assert_equal_states(one, other):
    jax.tree.map(np.testing.assert_array_equal, dataclasses.asdict(one), dataclasses.asdict(other))


def assert_resumed(whole, first, second, at=10):
    assert (first.start_step, second.start_step) == (0, at)
    assert first.batches + second.batches == whole.batches
    assert {**first.losses, **second.losses} == whole.losses  # exactly, as floats
    assert_equal_states(second.state, whole.state)


def test_stop_and_resume_equals_the_uninterrupted_run_bit_for_bit(make_trainer, train, tmp_path):
    trainer = make_trainer(ema_decay=0.9, evaluation=Evaluation(every=5, max_batches=2))
    whole = train(dataclasses.replace(trainer, model_dir=str(tmp_path / "whole")))
    first = train(dataclasses.replace(trainer, steps=10))
    second = train(trainer)
    assert_resumed(whole, first, second)
    assert len(set(whole.batches)) == 20 and sorted(whole.losses) == list(range(1, 21))
    assert whole.losses[20] < 0.8 * whole.losses[1]
    assert second.state.ema is not None and int(second.state.step) == 20
    # The evaluation of step 10 is neither repeated nor counted twice.
    assert (list(first.evaluations), list(second.evaluations)) == ([5, 10], [15, 20])
    assert {**first.evaluations, **second.evaluations} == whole.evaluations
    assert second.early.state() == whole.early.state()


@pytest.mark.heavy
def test_it_holds_for_adafactor_and_smoothed_labels(make_trainer, train, tmp_path):
    """On a mesh; and a run of the rule before is told how to go on."""
    adafactor = Adafactor(weight_decay_rate_lr_exponent=2.0)
    optimizer = Optimizer(
        name="adafactor", schedule=FactorSchedule(warmup_steps=10), momentum=0.9, factored_min_size=32,
        weight_decay=0.0, adafactor=adafactor,
    )  # fmt: skip
    trainer = make_trainer(steps=4, optimizer=optimizer, label_smoothing=0.1, loss_normalization="documents")
    whole = train(dataclasses.replace(trainer, model_dir=str(tmp_path / "whole")))
    first = train(dataclasses.replace(trainer, steps=2))
    assert_resumed(whole, first, train(trainer), at=2)
    assert whole.metrics[4]["smoothed_loss"] > 0 and whole.metrics[4]["tokens"] > 100
    old = dataclasses.replace(optimizer, adafactor=dataclasses.replace(adafactor, factoring="dimensions"))
    with pytest.raises(
        UserError, match="another optimizer's state: .*earlier version is Adafactor.factoring = 'dimens"
    ):
        train(dataclasses.replace(trainer, steps=6, optimizer=old))


def test_the_state_of_adafactor_before_it_had_rules_says_how_to_go_on():
    saved = {"params/q": "float32[2,8]", "opt_state/1/v/q": "float32[2,8]"}
    with pytest.raises(UserError, match="which for runs of an earlier version is Adafactor.factoring = 'dimens"):
        restoring.check_shapes("run/10", saved, saved | {"opt_state/1/v/q": "float32[1]"}, cast=False)


@pytest.mark.heavy
def test_it_holds_for_a_seqio_task(make_trainer, train, tmp_path):
    dataset = dataclasses.replace(
        make_trainer().dataset,
        source=None,
        mixture_or_task_name="python_stdlib",
        task_module="capibara.data.builtin_tasks",
    )
    trainer = make_trainer(dataset=dataset)
    whole = train(dataclasses.replace(trainer, model_dir=str(tmp_path / "whole")))
    assert_resumed(whole, train(dataclasses.replace(trainer, steps=10)), train(trainer))


def test_a_run_goes_on_on_other_meshes(make_trainer, train):
    """fsdp=4 x tensor=2, then 2 x 2 x 2, then one device: what is restored is what was saved, and learning goes on."""
    first = train(make_trainer(steps=4))
    second = train(make_trainer(steps=6, plan=Plan(batch_size=8, data=2, fsdp=2, tensor=2)))
    third = train(make_trainer(steps=8, plan=Plan(batch_size=8)), jax.devices()[:1])
    assert_equal_states(second.started, first.state)
    assert_equal_states(third.started, second.state)
    assert (second.start_step, third.start_step) == (4, 6)
    assert len({*first.batches, *second.batches, *third.batches}) == 8
    losses = {**first.losses, **second.losses, **third.losses}
    assert sorted(losses) == list(range(1, 9)) and losses[8] < losses[1]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.heavy)])
def test_a_signal_ends_the_run_after_its_step(make_trainer, train, number):
    stopped = train(make_trainer(), after_step=lambda step: step == 3 and os.kill(os.getpid(), number))
    assert dataclasses.astuple(stopped.outcome) == (3, "interrupted", number)
    assert stopped.checkpoints == [3]
    again = train(make_trainer(steps=5))
    assert again.start_step == 3 and again.outcome.reason == "finished" and sorted(again.losses) == [4, 5]
    assert again.evaluations == {}


def test_an_evaluation_that_a_signal_came_before_is_made_up_for(make_trainer, train):
    trainer = make_trainer(steps=6, evaluation=Evaluation(every=3))
    losses = iter([2.0, 3.0])
    signal_at = lambda step: step == 3 and os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    stopped = train(trainer, after_step=signal_at, evaluate=lambda n: next(losses))
    assert stopped.outcome.step == 3 and stopped.evaluations == {} and stopped.early.state()["best"] is None
    resumed = train(trainer, evaluate=lambda n: next(losses))
    assert list(resumed.evaluations) == [3, 6] and resumed.early.state() == {"best": 2.0, "bad": 1}


@pytest.mark.parametrize("encrypted", [pytest.param(False, marks=pytest.mark.heavy), True])
def test_an_evaluation_that_is_made_up_for_counts_for_the_checkpoints_that_are_kept(
    make_trainer, train, encrypted, monkeypatch
):
    monkeypatch.setenv("CAPIBARA_CHECKPOINT_KEY", "00" * 32)
    checkpointing = Checkpointing(every=2, keep=1, keep_best=1, encryption=Encryption() if encrypted else None)
    trainer = make_trainer(steps=6, evaluation=Evaluation(every=2, patience=9), checkpointing=checkpointing)
    signal_at = lambda step: step == 4 and os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    train(trainer, after_step=signal_at, evaluate=lambda n: 3.0)
    first = train(dataclasses.replace(trainer, steps=4), evaluate=lambda n: 1.0)
    assert first.early.state() == {"best": 1.0, "bad": 0} and first.batches == []
    # The next start has the score from the checkpoint.
    resumed = train(trainer, evaluate=lambda n: 5.0)
    assert list(resumed.evaluations) == [6] and resumed.early.state() == {"best": 1.0, "bad": 1}
    with CheckpointReader(trainer.model_dir, checkpointing) as reader:
        assert reader.steps() == [4, 6] and [reader.restore_progress(step).score for step in (4, 6)] == [1.0, 5.0]


def test_a_signal_in_the_last_sample_comes_when_all_is_done(make_trainer, train, monkeypatch):
    sampler = lambda params: ((one, "") for one in "abc")  # noqa: E731
    monkeypatch.setattr(loop, "train", functools.partial(loop.train, sampler=sampler))
    ended = train(
        make_trainer(steps=2, evaluation=Evaluation(every=2)), evaluate=[2.0].__getitem__, signal_at="sample c"
    )
    assert ended.outcome.reason == "finished"


def test_a_signal_in_an_evaluation_ends_the_run_without_another_step(make_trainer, train):
    trainer = make_trainer(evaluation=Evaluation(every=5))
    stopped = train(trainer, evaluate=lambda number: os.kill(os.getpid(), signal.SIGTERM) or 2.0)
    assert dataclasses.astuple(stopped.outcome) == (5, "interrupted", signal.SIGTERM)
    assert stopped.checkpoints == [5] and sorted(stopped.losses) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("steps", [pytest.param(10, marks=pytest.mark.heavy), 5], ids=["before the end", "at the end"])
def test_a_signal_ends_an_evaluation_in_its_middle(make_trainer, train, steps):
    """What resumes from there makes up for it, and early stopping is as if there had been no signal."""
    trainer = make_trainer(steps=steps, evaluation=Evaluation(every=5, max_batches=4, patience=9))
    whole = train(dataclasses.replace(trainer, model_dir=trainer.model_dir + "_whole"))
    stopped = train(trainer, signal_at="evaluating: 2 of 4 batches")
    assert dataclasses.astuple(stopped.outcome) == (5, "interrupted", signal.SIGTERM)
    assert stopped.progress == [*(f"evaluating: {done} of 4 batches" for done in range(3)), ""]
    assert stopped.evaluations == {} and stopped.statuses[-1].startswith("step 5: the evaluation is postponed")
    assert stopped.checkpoints == [5] and sorted(stopped.losses) == [1, 2, 3, 4, 5]
    resumed = train(trainer)
    assert resumed.start_step == 5 and resumed.evaluations == whole.evaluations
    if steps == 5:  # nor is it made twice, if nothing was saved after it
        assert train(trainer).evaluations == {}
    else:
        with pytest.raises(UserError, match="the run is at step 10 of 10 already"):
            train(trainer)
    assert resumed.early.state() == whole.early.state() and resumed.losses.keys() == set(range(6, steps + 1))


def test_a_signal_ends_samples_between_two_of_them(make_trainer, train, monkeypatch):
    sampler = lambda params: ((one, "") for one in "abc")  # noqa: E731
    monkeypatch.setattr(loop, "train", functools.partial(loop.train, sampler=sampler))
    stopped = train(make_trainer(evaluation=Evaluation(every=5)), evaluate=[2.0].__getitem__, signal_at="sample b")
    assert dataclasses.astuple(stopped.outcome) == (5, "interrupted", signal.SIGTERM)
    told = ["sampling: 0 texts", "sample a", "sampling: 1 texts", "sample b", ""]
    assert stopped.progress == told
    assert stopped.early.state() == {"best": 2.0, "bad": 0}  # the evaluation itself had come to its end


@pytest.mark.heavy
def test_early_stopping_survives_a_resume(make_trainer, train, tmp_path):
    losses = [5.0, 4.0, 4.5, 4.2, 4.1, 1.0]  # the best is the second; patience 3 ends after the fifth
    trainer = make_trainer(evaluation=Evaluation(every=2, patience=3), steps=12)
    whole = train(dataclasses.replace(trainer, model_dir=str(tmp_path / "whole")), evaluate=losses.__getitem__)
    assert (whole.outcome.step, whole.outcome.reason) == (10, "early_stopping") and whole.checkpoints == [10]

    first = train(dataclasses.replace(trainer, steps=6), evaluate=losses.__getitem__)
    assert first.outcome.reason == "finished" and first.early.state() == {"best": 4.0, "bad": 1}
    second = train(trainer, evaluate=lambda n: losses[3 + n])
    assert (second.outcome.step, second.outcome.reason) == (10, "early_stopping")
    with pytest.raises(UserError, match="the run stopped early at step 10: raise Evaluation.patience"):
        train(trainer, evaluate=losses.__getitem__)
    # More patience: it goes on.
    patient = dataclasses.replace(trainer, evaluation=Evaluation(every=2, patience=9))
    assert train(patient, evaluate=losses.__getitem__).outcome.step == 12


def test_nothing_is_trained_when_all_steps_are_done(make_trainer, train, monkeypatch):
    train(make_trainer(steps=2))
    with pytest.raises(UserError, match="the run is at step 2 of 2 already: raise TRAIN_STEPS"):
        train(make_trainer(steps=2))
    monkeypatch.setenv("CAPIBARA_BEAT", "3:1")  # a launcher has started it: for it this is the end
    again = train(make_trainer(steps=2, evaluation=Evaluation(every=1)))
    assert dataclasses.astuple(again.outcome) == (2, "finished", None)
    assert (again.batches, again.checkpoints, again.evaluations) == ([], [], {})


def test_retention(make_trainer, train, tmp_path):
    train(make_trainer(steps=9, checkpointing=Checkpointing(every=2, keep=2, keep_every=4)))
    assert sorted(int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir()) == [4, 8, 9]


def test_what_takes_time_is_said_and_watched_by_its_own_limit(make_trainer, train, monkeypatch):
    dogs, limits_s = [], {}

    class Noted(Watchdog):
        def __init__(self, *args):
            super().__init__(*args)
            dogs.append(self)

    def noting(name, method):
        def noted(*args, **options):
            limits_s[name] = dogs[0].limit_s
            return method(*args, **options)

        return noted

    monkeypatch.setattr(loop, "Watchdog", Noted)
    for of, name in ((Recovery, "begin"), (Recovery, "watch"), (Evaluator, "evaluate"), (Recovery, "save")):
        monkeypatch.setattr(of, name, noting(name, getattr(of, name)))
    watch = Watch(start_s=1001.0, evaluation_s=1002.0, save_s=1003.0)
    statuses = train(make_trainer(steps=2, watch=watch, evaluation=Evaluation(every=2, max_batches=1))).statuses
    assert statuses[0].startswith("data: train: ") and statuses[1].startswith("data: validation: ")
    assert statuses[2] == "compiling the train step for 8 devices" and statuses[3].startswith("compiled in ")
    assert limits_s == {"begin": 1001.0, "watch": 1001.0, "evaluate": 1002.0, "save": 1003.0}
    assert dogs[0].limit_s == 1003.0  # of the last save


@pytest.mark.heavy
def test_evaluations_are_as_long_with_accumulation_as_without(make_trainer, train):
    tokens = []
    for accumulation in (1, 2):
        plan = dataclasses.replace(make_trainer().plan, accumulation=accumulation)
        folder = make_trainer().model_dir + str(accumulation)
        trainer = make_trainer(steps=2, model_dir=folder, plan=plan, evaluation=Evaluation(every=2, max_batches=2))
        tokens.append(train(trainer).evaluations[2]["tokens"])
    assert tokens[1] == pytest.approx(tokens[0], rel=0.05)


def test_evaluation_batches_must_divide_over_the_mesh(make_trainer, train):
    with pytest.raises(UserError, match=r"Evaluation.batch_size \(6\) must be a multiple of 4 .*: try 8"):
        train(make_trainer(evaluation=Evaluation(batch_size=6)))


def test_the_streams_of_a_task_must_divide_the_rows(make_trainer, train):
    """Known before SeqIO is imported, not to say anything compiled: there is no such task."""
    dataset = Dataset(mixture_or_task_name="none", vocabulary=ByteVocabulary(), length=64, task_shards=3)
    with pytest.raises(UserError, match=r"Dataset.task_shards \(3\) must divide the \d+ rows of a batch.*: try 2"):
        train(make_trainer(dataset=dataset))


def test_other_data_than_before_is_refused_and_leaves_no_threads(make_trainer, train):
    import threading

    train(make_trainer(steps=2))
    before = set(threading.enumerate())  # loaders that other tests of this process left open are theirs
    dataset = dataclasses.replace(make_trainer().dataset, length=32)
    with pytest.raises(UserError, match="length was 64, is 32"):
        train(make_trainer(steps=4, dataset=dataset))
    assert not [
        thread
        for thread in set(threading.enumerate()) - before
        if thread.name.startswith("capibara") and "-files" not in thread.name
    ]


def test_hosts_that_read_different_data_end_before_the_first_step(make_trainer, train, monkeypatch):
    """Not at the first save, which finds it too."""
    gathered, steps = hosts.gathered, []

    def of_two(value):
        if not isinstance(value, dict) or "settings" not in value:
            return gathered(value)
        return [value, {**value, "settings": {**value["settings"], "data": {"documents": 3}}}]

    monkeypatch.setattr(hosts, "gathered", of_two)
    with pytest.raises(UserError, match="the hosts do not read the same data: .* on host 0 .* on host 1 3"):
        train(make_trainer(steps=2), after_step=steps.append)
    assert not steps


def test_a_state_that_is_not_finite_is_not_saved(make_trainer, train):
    optimizer = Optimizer(schedule=Schedule(kind="constant", learning_rate=10.0), weight_decay=0.0, clip_norm=None)
    trainer = make_trainer(optimizer=optimizer, checkpointing=Checkpointing(every=1), steps=3)
    poisoned = dataclasses.replace(trainer, z_loss=1e38, anomalies=Anomalies(skip_nonfinite=False))
    with pytest.raises(UserError, match=r"(loss|grad_norm) is (nan|inf) at step 1, not saved"):
        train(poisoned)
    assert not [name for name in os.listdir(os.path.join(trainer.model_dir, "checkpoints")) if name.isdigit()]


def test_compiler_options_reach_the_compiler_of_the_step(make_trainer):
    trainer = make_trainer()
    parts = trainer, api.build(trainer.model), sharding.make_mesh(trainer.plan)
    setup.compile_step(*parts, {"xla_backend_optimization_level": "0"})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        setup.compile_step(*parts, {"xla_no_such_option": "1"})


@pytest.mark.parametrize("fails", [True, False])
def test_callbacks_are_closed_also_where_an_error_ends_the_run(make_trainer, fails):
    """Their threads and processes must not outlive the run in a notebook; they know the arrays of the train state."""
    calls = []

    class Watching(Callback):
        def on_train_begin(self, run):
            calls.append(run.arrays)

        def on_step(self, step, metrics):
            if fails:
                raise RuntimeError("mine")

        def on_train_end(self, step, reason):
            calls.append("end")

        def close(self):
            calls.append("close")

    with pytest.raises(RuntimeError, match="mine") if fails else contextlib.nullcontext():
        loop.train(make_trainer(steps=2), Watching())
    assert calls[1:] == (["close"] if fails else ["end", "close"])
    assert calls[0]["step"] == ((), "int32") and (384, 32) in {shape for shape, _ in calls[0].values()}
