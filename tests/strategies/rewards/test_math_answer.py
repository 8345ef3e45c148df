"""math-verify as a reward: which formulas are equal, which records are refused, and formulas that never end."""

from __future__ import annotations

import time

import pytest

from capibara.core.types import UserError
from capibara.strategies.rewards.bounded_process import BoundedProcess
from capibara.strategies.rewards.math_answer import MathAnswer
from capibara.strategies.rewards.math_process import MathProcesses, is_readable
from capibara.strategies.rewards.math_worker import formula_of

pytest.importorskip("math_verify")


@pytest.mark.parametrize(
    ("right", "answer", "reward"),
    [
        ("42", "The answer is 42.", 1),
        ("42", "41", 0),
        ("1/2", r"so $\frac{1}{2}$", 1),
        (r"\frac{1}{2}", r"\boxed{0.5} or 3", 1),
        ("2^{10}", "1024", 1),  # unmarked, math-verify 0.9.0 reads the 2 alone
        ("2^{10}", "2", 0),
        ("3:2", "3", 0),
        ("1.5e3", "1500", 1),
        (r"3\frac{1}{2}", "3.5", 1),
        ("1{,}000", "1000", 1),
        ("We add.\n#### 1,234", "#### 1234", 1),
        (r"\{1,2\}", r"$\{2,1\}$", 1),
        ("x+1", "$1+x$", 1),
        (r"x \in [0,1)", r"$x \in [0,1]$", 0),
        ("5", "", 0),
        ("5", "$\\frac{", 0),
    ],
)
def test_formulas_are_compared(right, answer, reward):
    assert MathAnswer()("", answer, {"answer": right}) == reward


def test_only_a_box_counts_if_it_is_asked_for():
    verifier = MathAnswer(boxed=True, field="n")
    assert [verifier("", answer, {"n": 7}) for answer in ("7", r"\boxed{7}", r"7, not \boxed{8}")] == [0, 1, 0]


@pytest.mark.parametrize("right", ["12 apples", "pi/2", "72 dollars per 8 hours", "", "True"])
def test_a_record_without_one_formula_is_refused(right):
    with pytest.raises(
        UserError, match=r"MathAnswer.field \('answer'\) of a record is .*, must be one number or formula"
    ):
        MathAnswer().check_record({"answer": right})


def test_marked_words_are_latex():
    assert formula_of(r"the angle is $\pi/2$") == r"the angle is $\pi/2$"
    assert formula_of(r"5\text{ apples}") == r"$5\text{ apples}$"
    MathAnswer().check_record({"answer": r"5\text{ apples}"})


def test_a_formula_that_does_not_end_is_wrong_and_the_next_one_is_read():
    processes = MathProcesses()
    try:
        assert processes.readable("1", 60)
        begin_s = time.monotonic()
        assert not processes.equal("72", "$9^{9^{9^{9}}}$", 1.0, False)
        assert time.monotonic() - begin_s < 20
        assert processes.equal("72", "72", 60, False)
    finally:
        processes.close()


def test_options_are_checked():
    for seconds in (0, float("inf")):
        with pytest.raises(UserError, match="MathAnswer.seconds is .*, must be above 0"):
            MathAnswer(seconds=seconds)
    with pytest.raises(UserError, match=r"no field 'answer' \(it has: n\): set MathAnswer.field"):
        MathAnswer().check_record({"n": 1})


def test_the_answer_of_a_record_is_read_once_for_a_group(monkeypatch):
    asked: list[str] = []

    def ask(self, request, seconds):
        asked.append(request["right"])
        return request["right"] != "two words"

    monkeypatch.setattr(BoundedProcess, "ask", ask)
    is_readable.cache_clear()
    for right in ("72", "72", "73", "72"):
        MathAnswer().check_record({"answer": right})
    assert asked == ["72", "73"]
    MathAnswer(seconds=9.0).check_record({"answer": "72"})  # more time may read more
    assert asked == ["72", "73", "72"]
    for _ in range(2):
        with pytest.raises(UserError, match="of a record is 'two words', must be one number or formula"):
            MathAnswer().check_record({"answer": "two words"})
    assert is_readable.cache_info().maxsize is not None
    is_readable.cache_clear()
