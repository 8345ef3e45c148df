"""SeqIO's conventions: postprocess_fn, metrics of predictions and of scores, and what the file of predictions has."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest
import seqio

from capibara.evaluation import seqio_tasks
from capibara.evaluation.predictions import Predictions
from capibara.evaluation.scoring import Pair
from capibara.evaluation.seqio_tasks import SeqioEvaluation
from capibara.inference.sampling import Sampling
from capibara.types import UserError

GREEDY = Sampling(temperature=0.0, max_new_tokens=4)
OPTIONS = SeqioEvaluation(task_module="seqio_task", sampling=GREEDY)
TEXTS = [("1+1=", "2"), ("a", "bc"), ("x y", "z")]


@pytest.fixture(autouse=True, scope="module")
def _task_module():
    folder = str(pathlib.Path(__file__).parent)
    sys.path.append(folder)
    yield
    sys.path.remove(folder)


def test_a_task_is_judged_by_its_own_metrics(subject, tmp_path):
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
