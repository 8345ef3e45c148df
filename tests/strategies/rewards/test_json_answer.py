"""Answers in JSON, by the schema of their record."""

from __future__ import annotations

import json
import os
import resource
import signal
import time

import pytest

from capibara.core.types import UserError
from capibara.strategies.rewards import json_answer, math_process
from capibara.strategies.rewards.json_answer import JsonAnswer
from capibara.strategies.rewards.math_answer import MathAnswer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
RIGHT = '{"name": "Ada", "age": 36}'


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (RIGHT, 1),
        (f" {RIGHT}\n", 1),
        (f"Here:\n```json\n{RIGHT}\n```\nDone.", 1),
        (f"```\n{RIGHT}\n```", 1),
        (f"```json\n{RIGHT}\n```\n```json\n{RIGHT}\n```", 0),
        (f"It is {RIGHT}", 0),
        ('{"name": "Ada", "age": -1}', 0),
        ('{"name": "Ada", "age": 36, "name": "Eve"}', 0),
        ('{"name": "Ada", "age": NaN}', 0),
        ('{"name": "Ada"}', 0),
        ("", 0),
        ("[" * 100_000, 0),
        ('{"name": "Ada", "age": 1e400}', 0),
    ],
)
def test_the_schema_decides(answer, reward):
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        assert JsonAnswer()("", answer, {"schema": schema}) == reward


def test_references_stay_within_the_schema():
    inner = {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}
    assert [JsonAnswer()("", answer, {"schema": inner}) for answer in ("1", '"1"')] == [1, 0]
    with pytest.raises(UserError, match="must be a JSON Schema"):
        JsonAnswer().check_record({"schema": {"$ref": "http://localhost:1/schema.json"}})


@pytest.mark.parametrize(
    ("schema", "answer", "reward"),
    [
        ({"multipleOf": 0.1}, "1" + "0" * 400, 0),  # which no float has
        ({"multipleOf": 0.5}, "2.5", 1),
        ({"type": "number"}, "-Infinity", 0),
        ({"type": "integer"}, "1e2", 1),
        ({"enum": [{"$ref": "#/none", "pattern": "("}]}, '{"$ref": "#/none", "pattern": "("}', 1),  # data, no keywords
        ({"properties": {"enum": {"type": "integer"}, "$ref": {}}}, '{"enum": "1"}', 0),
        ({"$id": "http://a/b", "$defs": {"n": {"$id": "c", "type": "integer"}}, "$ref": "c"}, "1", 1),
    ],
)
def test_numbers_and_ids(schema, answer, reward):
    JsonAnswer().check_record({"schema": schema})
    assert JsonAnswer()("", answer, {"schema": schema}) == reward


def test_an_expression_that_does_not_end_is_wrong_and_the_next_answer_is_read():
    verifier, begin_s = JsonAnswer(seconds=1.0), time.monotonic()
    record = {"schema": {"pattern": "^(a|a)+$"}}
    verifier.check_record(record)
    assert verifier("", json.dumps("a" * 60 + "b"), record) == 0
    assert time.monotonic() - begin_s < 60
    assert JsonAnswer(seconds=60.0)("", '"aa"', record) == 1
    for seconds in (0, float("inf")):
        with pytest.raises(UserError, match="JsonAnswer.seconds is .*, must be finite and above 0"):
            JsonAnswer(seconds=seconds)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integre"}, "{", {"minimum": "3"}, [1], {"$ref": "#"}, {"properties": {"a": {"$ref": "#/$defs/none"}}},
        {"items": {"pattern": "["}}, {"properties": {"default": {"pattern": "["}}}, {"patternProperties": {"\\p{L}": {}}},
    ],
)  # fmt: skip
def test_a_record_without_a_schema_is_refused(schema):
    with pytest.raises(UserError, match=r"JsonAnswer.field \('schema'\) of a record is .*, must be a JSON Schema"):
        JsonAnswer().check_record({"schema": schema})
    with pytest.raises(UserError, match="a record has no field 'schema'"):
        JsonAnswer().check_record({"answer": schema})


def test_a_process_that_something_else_ends_is_started_again():
    verifier, record = JsonAnswer(seconds=60.0), {"schema": {"type": "integer"}}
    for ask, result in ((lambda: verifier("", "1", record), 1), (lambda: verifier.check_record(record), None)):
        verifier("", "1", record)
        for process in [process._process for process in json_answer._processes()._all if process._process]:
            os.kill(process.pid, signal.SIGKILL)
        assert ask() == result


def test_references_are_looked_up_in_one_pass():
    many = {"anyOf": [{"$ref": "#/$defs/n"}] * 4000, "$defs": {"n": {"type": "integer"}}}
    begin_s = time.monotonic()
    JsonAnswer().check_record({"schema": many})
    assert time.monotonic() - begin_s < 10  # one pass for each reference takes 20 s


def test_processes_of_verifiers_have_bounds_on_their_memory():
    """Of their address space, once they are ready."""
    assert JsonAnswer(seconds=60.0)("", "1", {"schema": {"type": "integer"}}) == 1
    MathAnswer(seconds=60.0).check_record({"answer": "$71$"})
    everyone = [*json_answer._processes()._all, *math_process.verifying()._processes._all]
    limits = [resource.prlimit(item._process.pid, resource.RLIMIT_AS) for item in everyone if item._process]
    assert len(limits) >= 2 and {*limits} == {(2**31, 2**31)}
