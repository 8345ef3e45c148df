"""SeqIO's conventions: postprocess_fn, metrics of predictions and of scores, and what the file of predictions has."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import pathlib
import signal
import sys

import jax
import pytest

from capibara import sharding
from capibara.checkpoints.policy import Checkpointing
from capibara.core.types import UserError
from capibara.data.dataset import Dataset
from capibara.data.sources.sources import StdlibSource
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.evaluation import judging, seqio_tasks
from capibara.evaluation.predictions import Predictions
from capibara.evaluation.scoring import Pair, Scorer
from capibara.evaluation.seqio_tasks import SeqioEvaluation
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.sampling.sampling import Sampling
from capibara.models import api
from capibara.models.api import DecoderConfig, EncoderConfig
from capibara.optim import Optimizer, Schedule
from capibara.run.run import Run
from capibara.sharding import Plan
from capibara.training import loop
from capibara.training.base.callbacks import Callback
from capibara.training.base.options import Evaluation
from capibara.training.evaluation import evaluate, make_eval_step, with_tasks
from capibara.training.feed import validation_loader
from capibara.training.trainer import Trainer

GREEDY = Sampling(temperature=0.0, max_new_tokens=4)
OPTIONS = SeqioEvaluation(task_module="seqio_task", sampling=GREEDY)
TEXTS = [("1+1=", "2"), ("a", "bc"), ("x y", "z")]


@pytest.fixture(scope="module")
def seqio():
    """Imported with TensorFlow when the first test asks, which takes seconds."""
    return importlib.import_module("seqio")


@pytest.fixture(autouse=True, scope="module")
def _task_module():
    folder = str(pathlib.Path(__file__).parent)
    sys.path.append(folder)
    yield
    sys.path.remove(folder)


def test_a_task_is_judged_by_its_own_metrics(subject, tmp_path, seqio):
    path, shown = str(tmp_path / "p.jsonl"), []
    for _ in range(2):  # the second time from the file
        with Predictions(path, {}) as told:
            show = lambda topic, detail: shown.append(detail)  # noqa: E731
            found = seqio_tasks.evaluated(subject, "sums", OPTIONS, None, told, show)
        results = [subject.engine.submit(prompt, GREEDY).result() for prompt, _ in TEXTS]
        texts = [seqio.ByteVocabulary().decode(result.tokens) for result in results]  # without what is no UTF-8
        encode = subject.vocabulary.encode
        scores = subject.scorer([Pair([0, *encode(a)], encode(b)) for a, b in TEXTS])
        [(name, (metrics, count))] = found.items()
        assert (name, count) == ("sums", 3) and "3 of 3 answers" in shown
        assert metrics["length"].value == pytest.approx(sum(map(len, texts)) / 3) and metrics["targets"].value == 1
        assert metrics["score"].value == pytest.approx(sum(one.log_probability for one in scores), rel=1e-6)
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()][1:]
    assert [line["prediction"] for line in lines] == [result.text for result in results] and lines[0][
        "task"
    ] == "seqio:sums"
    with Predictions(None, {}) as told:
        assert seqio_tasks.evaluated(subject, "sums", OPTIONS, 2, told, show)["sums"][1] == 2


def test_mistakes(subject):
    for name, why in (("unjudged", "has no metric_fns"), ("sms", "did you mean sums")):
        with Predictions(None, {}) as told, pytest.raises(UserError, match=why):
            seqio_tasks.evaluated(subject, name, OPTIONS, None, told, lambda *_: None)


@pytest.mark.parametrize(
    "fault, said",
    [
        (
            ZeroDivisionError("no texts"),
            r"task 'faulty' fails in its .*seqio_task.py:\d+: ZeroDivisionError: no texts\): correct",
        ),
        ("many", "metric 'faulty' of SeqIO task 'faulty' is of type str, must be a finite number"),
        (None, "is of type NoneType"),
        (10**400, "is of type int, must be a finite number"),
    ],
)
def test_a_metric_that_fails_is_named(subject, fault, said):
    importlib.import_module("seqio_task").FAULTS[:] = [fault]
    with Predictions(None, {}) as told, pytest.raises(UserError, match=said):
        seqio_tasks.evaluated(subject, "faulty", OPTIONS, None, told, lambda *_: None)


class Told(Callback):
    def __init__(self):
        self.metrics, self.progress, self.stop_at = {}, [], None

    def on_evaluate(self, step, metrics):
        self.metrics[step] = metrics

    def on_progress(self, text):
        self.progress.append(text)
        if text == self.stop_at:
            self.stop_at = None
            signal.raise_signal(signal.SIGTERM)


@pytest.fixture
def mixture_run(tmp_path):
    """(changes of Evaluation's fields) -> a run of two steps on a mixture of two tasks with metric_fns, and one without."""

    def make(name="judged", **changes):
        dataset = Dataset(mixture_or_task_name=name, task_module="seqio_task", length=32, window_rows=2)
        model = DecoderConfig(vocab_size=384, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64, dtype="float32")
        return Trainer(
            model_dir=str(tmp_path / "run"), steps=2, model=model, plan=Plan(batch_size=8, fsdp=4, tensor=2),
            dataset=dataset, optimizer=Optimizer(schedule=Schedule(learning_rate=1e-2)), log_every=1,
            evaluation=Evaluation(every=2, **changes), checkpointing=Checkpointing(every=0),
        )  # fmt: skip

    return make


class Remembers:
    """A judge that keeps the parameters which it was given."""

    def __init__(self, trainer, model):
        self._judge = judging.TaskJudge(trainer, model, OPTIONS, EngineConfig(slots=2))
        self.prepare = self._judge.prepare

    def __call__(self, params, tell):
        self.params = jax.device_get(params)
        return self._judge(params, tell)


def test_each_task_of_a_mixture_is_judged_while_the_run_trains(mixture_run, seqio):
    """By the texts and probabilities of the parameters of the moment; its loss is the one that it has alone."""
    trainer, told, encode = mixture_run(task_metrics=True), Told(), ByteVocabulary().encode
    model = api.build(trainer.model)
    judge = Remembers(trainer, model)
    assert loop.train(trainer, told, judge=judge).reason == "finished"
    metrics, params = told.metrics[2], judge.params
    engine = Engine(model, params, ByteVocabulary(), 32, EngineConfig(slots=1))
    answers = [engine.submit([0, *encode(a)], GREEDY).result().tokens for a, _ in TEXTS]
    texts = [seqio.ByteVocabulary().decode(one) for one in answers]
    scores = Scorer(model, params, 32)([Pair([0, *encode(a)], encode(b)) for a, b in TEXTS])
    assert metrics["lengths/length"] == pytest.approx(sum(map(len, texts)) / 3) and metrics["lengths/targets"] == 1
    assert metrics["scores/score"] == pytest.approx(sum(one.log_probability for one in scores), rel=1e-5)
    mesh = sharding.make_mesh(trainer.plan)
    step = make_eval_step(model, trainer.plan, mesh, ByteVocabulary().token_bytes())
    for task in ("lengths", "scores"):
        dataset = dataclasses.replace(trainer.dataset, mixture_or_task_name=task)
        with contextlib.closing(validation_loader(dataclasses.replace(trainer, dataset=dataset), mesh)) as loader:
            alone = evaluate(step, params, loader, sharding.batch_sharding(mesh, trainer.plan.rules))
        assert metrics[f"{task}/loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert metrics[f"{task}/tokens"] == alone["tokens"] == metrics["tokens"] / 2
    assert metrics["loss"] == pytest.approx((metrics["lengths/loss"] + metrics["scores/loss"]) / 2, rel=1e-6)
    assert not [name for name in metrics if name.startswith("trained_only")]
    assert "judged: 3 of 3 answers" in told.progress and "judged: 3 of 3 scores" in told.progress


def test_a_metric_that_fails_does_not_end_the_run(mixture_run, caplog):
    """Nor is a later evaluation without it."""
    trainer, told = mixture_run("faulty", task_metrics=True), Told()
    trainer = dataclasses.replace(trainer, steps=4, evaluation=dataclasses.replace(trainer.evaluation, every=1))
    judge = judging.TaskJudge(trainer, api.build(trainer.model), OPTIONS, EngineConfig(slots=2))
    judge.prepare()
    importlib.import_module("seqio_task").FAULTS[:] = [ValueError("bad"), "text", float("nan")]
    assert loop.train(trainer, told, judge=judge).reason == "finished"
    assert [told.metrics[step].get("faulty/faulty") for step in (1, 2, 3, 4)] == [None, None, None, 3.0]
    assert told.metrics[3]["faulty/count"] == 3 and told.metrics[1]["loss"] > 0
    said = [record.getMessage() for record in caplog.records if record.name.endswith("judging")]
    assert len(said) == 3 and "ValueError: bad" in said[0] and "type str" in said[1] and "is nan" in said[2]


@pytest.mark.heavy
def test_a_run_that_is_to_stop_while_it_is_judged_does_so_when_it_goes_on(mixture_run):
    trainer, told = mixture_run(task_metrics=True), Told()
    judge = judging.TaskJudge(trainer, api.build(trainer.model), OPTIONS, EngineConfig(slots=2))
    told.stop_at = "judged: 1 of 3 answers"
    assert loop.train(trainer, told, judge=judge).reason == "interrupted" and not told.metrics
    assert loop.train(trainer, told, judge=judge).reason == "finished"
    assert {"lengths/length", "scores/score", "scores/loss"} <= told.metrics[2].keys()


def test_what_cannot_be_judged_is_told_before_the_first_step(mixture_run):
    trainer = mixture_run("trained_only", task_metrics=True)
    model = api.build(trainer.model)
    judge = judging.TaskJudge(trainer, model, OPTIONS, EngineConfig())
    with pytest.raises(UserError, match="'trained_only' has no metric_fns or no split 'validation'"):
        judge.prepare()
    masked = EncoderConfig(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, max_length=32)
    judge = judging.TaskJudge(mixture_run(task_metrics=True), api.build(masked), OPTIONS, EngineConfig())
    with pytest.raises(UserError, match="is a masked language model"):
        judge.prepare()
    with pytest.raises(UserError, match="Evaluation.task_metrics is True, and Dataset.source is no SeqIO task"):
        source = Dataset(source=StdlibSource(), vocabulary=ByteVocabulary(), length=32)
        dataclasses.replace(trainer, dataset=source)
    with pytest.raises(UserError, match="SeqioEvaluation.num_examples is 0, must be at least 1"):
        SeqioEvaluation(num_examples=0)
    assert Run(trainer=mixture_run()).judge(model) is None


def test_names_of_metrics_that_are_there_already():
    joined = with_tasks({"loss": 1.0, "a/loss": 2.0}, [("a", {"loss": 3.0, "f1": 4.0}), ("b", {"loss": 5.0})])
    assert joined == {"loss": 1.0, "a/loss": 2.0, "a/judged/loss": 3.0, "a/f1": 4.0, "b/loss": 5.0}
