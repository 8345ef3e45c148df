"""The file of predictions: goes on where it ends, and belongs to one model and one list of questions."""

from __future__ import annotations

import json

import pytest

from capibara.core.types import UserError
from capibara.evaluation.predictions import Predictions

MODEL = {"model": "m", "step": 3}


def fill(path, asked, model=MODEL):
    made = []
    with Predictions(str(path), model) as told:
        for about in asked:
            if told.known(about) is None:
                made.append(about["n"])
                told.add(about, {"prediction": f"p{about['n']}"})
    return made


def test_it_goes_on_where_it_ends(tmp_path):
    path, asked = tmp_path / "deep" / "p.jsonl", [{"n": n} for n in range(4)]
    assert fill(path, asked[:2]) == [0, 1]
    with path.open("a") as file:
        file.write('{"n": 2, "predic')  # cut off
    assert fill(path, asked) == [2, 3] and fill(path, asked) == []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"predictions_of": MODEL}, *({"n": n, "prediction": f"p{n}"} for n in range(4))]
    with Predictions(None, MODEL) as told:
        assert told.known({"n": 0}) is None and told.add({"n": 0}, {"x": 1}) == {"n": 0, "x": 1}


def test_others_are_refused(tmp_path):
    path = tmp_path / "p.jsonl"
    fill(path, [{"n": 0}])
    with pytest.raises(UserError, match="of another model"):
        fill(path, [{"n": 0}], MODEL | {"step": 4})
    with pytest.raises(UserError, match="line 2 is of another request"):
        fill(path, [{"n": 1}])
    for text in ("hello\n", "hello", '{"important": 1}', "[" * 50000 + "\n"):
        (tmp_path / "text").write_text(text)
        with pytest.raises(UserError, match="not a file of predictions"):
            fill(tmp_path / "text", [])
        assert (tmp_path / "text").read_text() == text
    (tmp_path / "cut").write_text('{"predictions_of": {"mod')
    assert fill(tmp_path / "cut", [{"n": 0}]) == [0]
    with pytest.raises(UserError, match="cannot be written"):
        fill(tmp_path, [])


def test_two_evaluations_do_not_write_one_file(tmp_path):
    path = tmp_path / "p.jsonl"
    with Predictions(str(path), MODEL) as first:
        path.write_text(path.read_text() + '{"n": 0, "predic')  # as `first` is about to write the rest
        before = path.read_text()
        with pytest.raises(UserError, match="--predictions=.*p.jsonl is being written by another process"):
            Predictions(str(path), MODEL)
        assert path.read_text() == before
        del first
    with Predictions(str(path), MODEL):
        assert path.read_text() == before[: before.index("\n") + 1]
