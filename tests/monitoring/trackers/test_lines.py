"""metrics.jsonl, read from a position while it grows."""

import json

import pytest

from capibara.core.types import UserError
from capibara.monitoring.trackers import lines
from capibara.monitoring.trackers.lines import Position, Tail


def line(step, kind="train", **fields):
    return json.dumps({"kind": kind, "step": step, "time": 1.0} | fields) + "\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def steps(found):
    return [one.record["step"] for one in found if one.record and not one.is_void]


def test_a_file_that_grows(path):
    tail = Tail(str(path))
    assert tail.read() == []
    path.write_text(line(1) + line(2)[:10])
    assert steps(tail.read()) == [1] and tail.read() == []
    path.write_text(line(1) + line(2) + line(3))
    assert [(one.number, one.record["step"]) for one in tail.read()] == [(1, 2), (2, 3)]
    assert tail.position == Position(len(line(1)) * 3, 3) and tail.remaining() == 0


def test_from_a_position(path):
    path.write_text(line(1) + line(2) + line(3))
    tail = Tail(str(path), Position(len(line(1)), 1))
    assert tail.remaining() == 2
    assert [one.number for one in tail.read()] == [1, 2]


def test_lines_of_any_length_across_blocks(path, monkeypatch):
    monkeypatch.setattr(lines, "BLOCK_BYTES", 64)
    texts = [line(step, text="x" * (37 * step)) for step in range(1, 30)]
    path.write_text("".join(texts))
    tail, found = Tail(str(path)), []
    while some := tail.read():
        found += some
    assert steps(found) == [*range(1, 30)] and [one.number for one in found] == [*range(29)]
    assert tail.position.byte == path.stat().st_size


def test_what_a_killed_run_left_incomplete_has_no_record(path):
    path.write_text(line(1) + line(2)[:12] + "\n" + "[1]\n" + '{"kind": 3, "step": 1}\n' + "\n" + line(3))
    assert [one.record and one.record["step"] for one in Tail(str(path)).read()] == [1, None, None, None, None, 3]


def test_steps_that_are_repeated_later_are_void(path):
    path.write_text(
        line(0, "event", event="start") + line(1) + line(2) + line(3) + line(1, "event", event="roll_back") + line(2)
    )
    found = Tail(str(path)).read()
    assert [(one.record["step"], one.is_void) for one in found if one.record["kind"] == "train"] == [
        (1, False),
        (2, True),
        (3, True),
        (2, False),
    ]


def test_a_roll_back_in_a_later_block_is_known_before(path, monkeypatch):
    monkeypatch.setattr(lines, "BLOCK_BYTES", 100)
    path.write_text("".join(line(step) for step in range(1, 20)) + line(5, "event", event="start") + line(6))
    tail, found = Tail(str(path)), []
    while some := tail.read():
        found += some
    assert steps([one for one in found if one.record["kind"] == "train"]) == [1, 2, 3, 4, 5, 6]


def test_a_position_of_another_file(path):
    path.write_text(line(1) + line(2))
    assert lines.is_within(str(path), Position()) and lines.is_within(str(path), Position(len(line(1)), 1))
    assert not lines.is_within(str(path), Position(5, 1)) and not lines.is_within(str(path), Position(10_000, 70))
    assert not lines.is_within(str(path.with_name("gone.jsonl")), Position(5, 1))


def test_a_line_without_an_end_does_not_fill_the_memory(path, monkeypatch):
    monkeypatch.setattr(lines, "BLOCK_BYTES", 16)
    monkeypatch.setattr(lines.limits, "LINE_BYTES", 1000)
    with open(path, "a") as file:
        file.write("x" * 900)
    assert Tail(str(path)).read() == []
    with open(path, "a") as file:
        file.write("x" * 900)
    with pytest.raises(UserError, match="has a line of more than 1,000 bytes at byte 0"):
        Tail(str(path)).read()
