"""Executions of every form are read; malformed ones are counted with file and line."""

from __future__ import annotations

import gzip
import json

import pytest

from capibara.builders.executions import reading, sessions
from capibara.builders.executions.reading import Form, Malformed, of_record, time_of
from capibara.builders.files.problems import Problems

ERROR = {"name": "ValueError", "value": "bad", "traceback": "\x1b[0;31mTraceback\x1b[0m\nValueError: bad"}
PLAIN = {
    "code": "1 + 1",
    "results": [{"text": "2", "is_main_result": True}],
    "logs": {"stdout": ["a", "b\n"], "stderr": []},
    "error": None,
    "execution_count": 3,
}


def record(value):
    return of_record(value, "a.jsonl", 1)


def test_an_execution_is_read():
    one = record({**PLAIN, "language": "python", "session_id": "s", "timestamp": 1_700_000_000, "task": "Add."})
    assert (one.form, one.code, one.value, one.stdout, one.passed) == (Form.EXECUTION, "1 + 1", "2", "ab\n", True)
    assert (one.execution_count, one.time_s, one.session, one.task) == (3, 1_700_000_000.0, "s", "Add.")


def test_the_doubly_encoded_form_is_read():
    encoded = json.dumps({
        "results": [{"text": "x"}, {"png": "aGk=", "text": "<Figure>"}],
        "logs": json.dumps({"stdout": ["out"], "stderr": ["err"]}),
        "error": json.dumps(ERROR),
    })  # fmt: skip
    one = record({"code": "f()", "execution": encoded})
    assert (one.stdout, one.stderr, one.passed) == ("out", "err", False)
    assert one.failure.traceback == "Traceback\nValueError: bad"
    assert one.results[1].formats == ("png", "text") and one.results[1].texts == {"text": "<Figure>"}
    assert one.value == "<Figure>"  # the last result with a text is the cell's value


def test_the_real_package_writes_what_is_read():
    """E2B's own classes, not our idea of them."""
    models = pytest.importorskip("e2b_code_interpreter.models")
    error = models.ExecutionError("ValueError", "bad", "Traceback\nValueError: bad")
    made = models.Execution(
        results=[models.Result(text="2", json={"a": 1}, is_main_result=True), models.Result(html="<b>", text="t")],
        logs=models.Logs(stdout=["a", "b"], stderr=["c"]),
        error=error,
        execution_count=1,
    )
    one = record({"code": "f()", "execution": made.to_json()})
    assert (one.stdout, one.stderr) == ("ab", "c")
    assert one.failure == reading.Failure(name="ValueError", value="bad", traceback="Traceback\nValueError: bad")
    assert [result.texts for result in one.results] == [{"text": "2", "json": '{"a":1}'}, {"text": "t"}]
    handle = pytest.importorskip("e2b.sandbox.commands.command_handle")
    result = handle.CommandResult(stderr="no", stdout="", exit_code=2, error="exit status 2")
    one = record({"command": "ls x", "result": vars(result)})
    assert (one.form, one.exit_code, one.stderr, one.passed) == (Form.COMMAND, 2, "no", False)


def test_a_command_is_read():
    one = record({"cmd": "ls", "exit_code": 0, "stdout": "a\r\nb\r\n", "stderr": "", "error": None})
    assert (one.form, one.stdout, one.passed) == (Form.COMMAND, "a\nb\n", True)
    assert not record({"command": "ls", "exitCode": 1, "stdout": ""}).passed


def test_the_errors_of_jupyter_are_read():
    error = {"ename": "NameError", "evalue": "x", "traceback": ["\x1b[31mline 1\x1b[0m", "line 2"]}
    failure = record({"code": "x", "error": error}).failure
    assert (failure.name, failure.value, failure.traceback) == ("NameError", "x", "line 1\nline 2")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"results": []}, "it has no code"),
        ({"code": "  ", "logs": {}}, "its code must be a text that is not empty"),
        ({"code": 3, "logs": {}}, "its code must be a text"),
        ({"code": "x"}, "it has no outcome"),
        ({"code": "x", "logs": [1]}, "logs must be an object"),
        ({"code": "x", "logs": {"stdout": 5}}, "stdout must be a text"),
        ({"code": "x", "logs": {"stdout": [1]}}, "stdout must be a text"),
        ({"code": "x", "results": {"text": "a"}}, "results must be a list of objects"),
        ({"code": "x", "results": ["a"]}, "results must be a list of objects"),
        ({"code": "x", "error": 5}, "error must be an object"),
        ({"code": "x", "error": {"other": 1}}, "error has neither name"),
        ({"code": "x", "error": {"name": ["a", {}], "value": 3}}, "error.value must be a text"),
        ({"code": "x", "exit_code": "1"}, "exit_code must be a whole number"),
        ({"code": "x", "logs": {}, "execution_count": True}, "execution_count must be a whole number"),
        ({"code": "x", "logs": {}, "language": ["py"]}, "language/lang must be a text"),
        ({"code": "x", "logs": {}, "session_id": {}}, "session_id/session must be a text"),
    ],
)
def test_a_malformed_record_is_refused(value, reason):
    with pytest.raises(Malformed, match=reason):
        record(value)


def test_good_records_among_malformed_ones_are_read(tmp_path):
    good = json.dumps(PLAIN)
    lines = [good, '{"code": "x"}', "{bad", "", good, '{"code": "x", "logs": 3}', "[1]", '{"code": "cut']
    for name, packed in (("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress)):
        path = tmp_path / name
        path.write_bytes(packed("\n".join(lines).encode()))
        problems = Problems()
        assert [one.line for one in reading.read(str(path), problems)] == [1, 5]
        assert sorted((one.line, str(one.kind)) for one in problems) == [
            (2, "malformed"), (3, "malformed"), (6, "malformed"), (7, "malformed"), (8, "truncated"),
        ]  # fmt: skip


def test_a_json_list_is_read(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([PLAIN, {"no": 1}, PLAIN]))
    problems = Problems()
    assert [one.line for one in reading.read(str(tmp_path / "a.json"), problems)] == [1, 3]
    assert problems.total == 1


@pytest.mark.parametrize(
    ("value", "time_s"),
    [
        (1_700_000_000, 1.7e9),
        (1_700_000_000_000, 1.7e9),
        (1_700_000_000_000_000, 1.7e9),
        (1_700_000_000_000_000_000, 1.7e9),
        ("1700000000.5", 1_700_000_000.5),
        ("2023-11-14T22:13:20Z", 1.7e9),
        ("2023-11-14T23:13:20+01:00", 1.7e9),
        ("2023-11-14 22:13:20", 1.7e9),
        ("yesterday", None),
        (True, None),
        (-5, None),
        (10**30, None),
        (float("inf"), None),
        ([], None),
    ],
)
def test_times_of_all_units_are_read(value, time_s):
    assert time_of(value) == time_s


SESSION = """Prose.

>>> def f(x):
...     return x + 1
...
>>> f(1)
2

>>> f("a")
Traceback (most recent call last):
  ...
TypeError: can only concatenate str (not "int") to str

More prose.

    >>> print("a\\nb")
    a
    b
    >>> random()  # doctest: +ELLIPSIS
    0...
"""


def test_interactive_sessions_are_read(tmp_path):
    (tmp_path / "doc.rst").write_text(SESSION)
    found = list(reading.read(str(tmp_path / "doc.rst"), Problems()))
    assert [(one.line, one.code, one.stdout) for one in found] == [
        (3, "def f(x):\n    return x + 1", ""),
        (6, "f(1)", "2\n"),
        (9, 'f("a")', ""),
        (16, 'print("a\\nb")', "a\nb\n"),
    ]
    assert found[2].failure.name == "TypeError" and found[2].failure.value.startswith("can only")
    assert {one.form for one in found} == {Form.SESSION}
    assert found[0].session == found[2].session != found[3].session


def test_a_session_with_a_wrong_line_is_read_up_to_it():
    found = list(sessions.examples(">>> a = 1\n>>> b = 2\n>>>c = 3\n4\n"))
    assert [one.code for one in found] == ["a = 1", "b = 2"]


def test_prompts_are_removed_from_code():
    assert record({**PLAIN, "code": ">>> x = 1\n>>> x\n1\n"}).code == "x = 1\nx"
    assert record({**PLAIN, "code": "x >>> 1"}).code == "x >>> 1"


def test_lines_of_a_text_keep_their_numbers_where_one_is_skipped(tmp_path):
    (tmp_path / "doc.txt").write_bytes(b">>> 1\n1\n\n>>> b'\xff'\n>>> 2\n2\n")
    problems = Problems()
    found = list(reading.read(str(tmp_path / "doc.txt"), problems))
    assert [(one.line, one.code) for one in found] == [(1, "1"), (5, "2")]
    assert found[0].session != found[1].session  # the line between them may be of either
    assert [one.line for one in problems] == [4]


def test_a_long_session_is_read_in_several(monkeypatch):
    monkeypatch.setattr(sessions, "LONGEST", 20)
    found = list(sessions.examples(">>> 1\n1\n" * 9))
    assert [one.line for one in found] == list(range(1, 19, 2))
    assert 1 < len({one.session for one in found}) < 9


@pytest.mark.parametrize("number", [10**399, -1e300, float("nan"), float("inf")])
def test_a_number_that_is_no_time_is_none(number):
    assert time_of(number) is None


def test_half_a_character_within_json_is_replaced():
    one = record(
        {"code": "f()", "execution": '{"stdout": "cut \\ud83d", "results": [{"\\udc00": 1, "text": "\\ud83d\\ude00"}]}'}
    )
    assert (one.stdout, one.value) == ("cut \ufffd", "\U0001f600")
    assert one.results[0].formats == ("text", "\ufffd")


def test_all_that_is_text_can_be_replaced():
    one = record({"code": "f()", "results": [{"a-secret-name": "x", "text": "y"}], "error": ERROR})
    changed = reading.with_texts(one, [text.upper() for text in reading.texts_of(one)])
    assert changed.results[0].formats == ("A-SECRET-NAME", "TEXT")
    assert (changed.value, changed.failure.value) == ("Y", "BAD")
