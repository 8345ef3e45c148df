"""Tasks whose prompts have retrieved chunks."""

from __future__ import annotations

import json

import pytest

import capibara as cb
from capibara.cli.composition import retrieving
from capibara.core.types import UserError
from capibara.evaluation.metrics import exact_match
from capibara.evaluation.tasks import EvalTask
from capibara.retrieval.contexts import Retrieval, numbered


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "qa.jsonl"
    lines = [{"question": f"number {i}:", "answer": "river"} for i in range(5)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def task(questions, folder, **fields):
    retrieval = Retrieval(index=folder, **fields)
    prompt = "{context}\nQuestion: {question}"
    return EvalTask(files=(questions,), metrics=(exact_match,), prompt=prompt, target="answer", retrieval=retrieval)


def test_prompts_have_the_nearest_chunks(questions, folder):
    items = retrieving.items("qa", task(questions, folder, k=3), 2)
    index = cb.index(folder)
    for i, item in enumerate(items):
        texts = [hit.text for hit in index.search(f"number {i}:", 3)]
        assert item.prompt == f"{numbered(texts)}\nQuestion: number {i}:" and item.target == "river"
    assert len(items) == 2 and numbered([" a ", "b"]) == "[1] a\n\n[2] b"


def test_evaluate_answers_with_retrieved_chunks(questions, folder, model):
    result = cb.evaluate(model, {"qa": task(questions, folder, k=1)}, limit=1)
    assert result["tasks"]["qa"]["k"] == 1 and result["tasks"]["qa"]["index"] == folder


def test_mistakes_are_named(questions, folder, tmp_path):
    with pytest.raises(UserError, match="Retrieval.k is 0, must be at least 1"):
        Retrieval(index=folder, k=0)
    with pytest.raises(UserError, match="EvalTask.prompt .* has no {context} where its chunks would stand"):
        EvalTask(files=(questions,), metrics=(exact_match,), prompt="{question}", retrieval=Retrieval(index=folder))
    with pytest.raises(
        UserError, match="qa/EvalTask.files, line 1 has no text in 'questin', which Retrieval.query names: did you"
    ):
        retrieving.items("qa", task(questions, folder, query="questin"), None)
    with pytest.raises(UserError, match="the index .*gone is no folder"):
        retrieving.items("qa", task(questions, str(tmp_path / "gone")), None)
