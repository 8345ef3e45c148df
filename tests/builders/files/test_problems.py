"""Problems are counted by kind, and the first of each kept, no matter who found them in which order."""

from __future__ import annotations

import json
import pickle
import random

import pytest

from capibara.builders.files.problems import SHOWN, Kind, Problems
from capibara.core.types import UserError


def of(*found: tuple[str, int, str]) -> Problems:
    problems = Problems()
    for path, line, kind in found:
        problems.add(path, line, kind, f"line {line} is bad")
    return problems


def test_problems_are_counted_and_the_first_of_each_kind_kept():
    problems = of(*[("a", line, Kind.MALFORMED) for line in range(1, 101)], ("b", 3, Kind.ENCODING))
    assert problems.total == 101 and problems.counts == {"encoding": 1, "malformed": 100}
    assert [(one.path, one.line) for one in problems] == [("b", 3), *[("a", line) for line in range(1, SHOWN + 1)]]


@pytest.mark.parametrize("seed", range(3))
def test_neither_order_nor_division_among_workers_matters(seed):
    every = [(f"f{i % 7}", i, kind) for i in range(200) for kind in ("malformed", "own")]
    shuffled = random.Random(seed).sample(every, len(every))
    merged = Problems()
    for begin in range(0, len(shuffled), 61):
        merged.merge(of(*shuffled[begin : begin + 61]))
    assert merged == of(*every) == of(*shuffled)
    assert merged.text() == of(*every).text()


def test_json_and_pickle_give_the_same_back():
    problems = of(("a", 1, Kind.TOO_LONG), ("a", 2, Kind.TOO_LONG), ("ü\udcff", 0, "own"))
    text = json.dumps(problems.as_json(), ensure_ascii=False, allow_nan=False)
    text.encode()  # a file name that is no UTF-8 does not make the manifest unwritable
    assert Problems.from_json(json.loads(text)) == problems
    assert pickle.loads(pickle.dumps(problems)) == problems


def test_merging_after_json_counts_what_is_not_shown():
    many = of(*[("a", line, "own") for line in range(SHOWN + 5)])
    again = Problems.from_json(many.as_json())
    again.merge(of(("a", 0, "own")))
    assert again.counts == {"own": SHOWN + 6}


@pytest.mark.parametrize("value", [{}, {"counts": 3, "first": []}, {"counts": {}, "first": [{}]}, {"counts": {}}])
def test_json_of_another_form_is_refused(value):
    with pytest.raises(UserError, match="build it again"):
        Problems.from_json(value)


def test_the_text_names_file_and_line_on_one_line_each():
    problems = of(*[("a.jsonl", line, Kind.MALFORMED) for line in range(1, SHOWN + 3)])
    problems.add("b.jsonl", 0, Kind.UNREADABLE, "a message\nof two lines\x1b[31m")
    lines = problems.text().splitlines()
    assert lines[0] == f"skipped {SHOWN + 3} pieces of input: {SHOWN + 2} malformed, 1 unreadable"
    assert lines[1] == "  a.jsonl:1: malformed: line 1 is bad"
    assert lines[SHOWN + 1] == "  ... and 2 more that are malformed"
    assert lines[-1] == "  b.jsonl: unreadable: a message of two lines\\x1b[31m"


def test_a_long_message_is_cut():
    problems = Problems()
    problems.add("a", 1, "own", "x" * 10_000)
    assert len(problems.as_json()["first"][0]["message"]) == 300


def test_no_problems_say_nothing():
    assert not Problems() and Problems().text() == ""
