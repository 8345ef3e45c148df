"""Answers that are programs, and their tests in a sandbox."""

from __future__ import annotations

import pytest

from capibara.core.types import UserError
from capibara.strategies.rewards.passes_tests import PassesTests

CHECK = {"test": "def check(f):\n    assert f(2, 3) == 5\n    assert f(-1, 1) == 0", "entry_point": "add"}
ADD, WRONG = "def add(a, b):\n    return a + b\n", "def add(a, b):\n    return a * b\n"


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (ADD, 1),
        (f"Sure:\n```python\n{ADD}```\nIt adds.", 1),
        (f"```python\nx = 1\n```\nthen\n```python\n{ADD}```", 1),
        (WRONG, 0),
        ("I do not know.", 0),
        ("import os\nos._exit(0)", 0),
    ],
)
def test_the_tests_decide(answer, reward):
    assert PassesTests()("a question in words", answer, CHECK | {"prompt": "Add two numbers."}) == reward


def test_statements_and_a_setup_are_tests_too():
    record = {"asserts": ["assert twice(2) == 4", "assert twice(math.pi) == 2 * math.pi"], "setup": "import math"}
    verifier = PassesTests(field="asserts")
    assert [verifier("", f"def twice(x): return {value}", record) for value in ("2 * x", "x + 2")] == [1, 0]


@pytest.mark.parametrize("setup", [{"test_setup_code": "import math"}, {"test_imports": ["import math", "import re"]}])
def test_a_record_of_mbpp_has_a_setup_of_other_names(setup):
    record = {"test_list": ["assert twice(math.pi) == 2 * math.pi"], **setup}
    verifier = PassesTests(field="test_list")
    assert [verifier("", f"def twice(x): return {value}", record) for value in ("2 * x", "x + 2")] == [1, 0]


def test_records_are_checked():
    with pytest.raises(UserError, match="'setup' must be a text, not 3"):
        PassesTests().check_record(CHECK | {"test_imports": ["import math", 3]})
    with pytest.raises(UserError, match=r"no field 'test' \(it has: answer\): set PassesTests.field"):
        PassesTests().check_record({"answer": "5"})
    with pytest.raises(UserError, match="'entry_point' must be a text"):
        PassesTests().check_record(CHECK | {"entry_point": 3})
    PassesTests().check_record(CHECK)
