"""Numbers as people write them: the table of readings, by arithmetic, and numbers written in each way at random."""

from __future__ import annotations

import math
import random

import pytest

from capibara.core.types import UserError
from capibara.strategies.rewards import functions
from capibara.strategies.rewards.numbers import last_number
from capibara.strategies.rewards.reward import check_record

READINGS = {
    # Signs.
    "5": 5, "-5": -5, "+5": 5, "\u22125": -5, "x=-3": -3, "is \u22123.": -3, "\u20135": -5, "$-5": -5, "-$5.00": -5,
    "a - 5": 5, "(-5)": -5, "COVID-19": 19,
    # What stands around it.
    "5.": 5, "$1,250.00!": 1250, "12 and so 1250.": 1250, "#### 1,250": 1250, "50%": 50, r"50\%": 50, "5 km": 5, "5km": 5,
    "5th": 5, "**5**": 5, r"\boxed{5}": 5, "x^2 = 5": 5, "5 cm^2": 5, "5 cm²": 5, "3 of H2O": 3, "答案是5。": 5,
    "1, 2, 3": 3, "9*2=18": 18, "3 and 250": 250, ".5": 0.5, "-.5": -0.5, "Rs.5": 5, "１２": 12, "٣": 3,
    # Groups of three.
    "1,234": 1234, "1,234,567.5": 1234567.5, "1'234": 1234, "1\u2019234.5": 1234.5, "1 234": 1234, "1_000": 1000,
    "1\u202f234 567": 1234567, "1\u00a0234": 1234, r"1{,}234": 1234, r"1\,234": 1234, "1.234": 1.234,
    "1.234.567": 1234567, "1.234,5": 1234.5, "1.234.567,89": 1234567.89,
    # Fractions.
    "3/4": 0.75, "-3/4": -0.75, "3 / 4": 0.75, "1 1/2": 1.5, "-1 1/2": -1.5, "1½": 1.5, "½": 0.5, "3\u20444": 0.75,
    r"\frac{3}{4}": 0.75, r"-\frac{3}{4}": -0.75, r"\dfrac34": 0.75, r"1\frac{1}{2}": 1.5, r"2 \tfrac{1}{4}": 2.25,
    r"\frac{-3}{4}": -0.75, "1,234/2": 617, r"\boxed{\frac{7}{2}}": 3.5, "1.5/2": 0.75,
    # Powers of ten.
    "1e5": 1e5, "1.5E-3": 1.5e-3, "1e\u22125": 1e-5, "1.5×10^3": 1500, "1.5 x 10^3": 1500, r"1.5\times10^{3}": 1500,
    r"1.5 \times 10^{-3}": 0.0015, "10⁻³": 0.001, "2·10³": 2000, "10^3": 1000, "10**3": 1000,
}  # fmt: skip
UNREADABLE = (
    "", "none", "nan", "inf", "H2O", "1e999", "3/0", "1,5", "0,123", "1,23,456", "1,2,3", "(1,2)", "1.2.3", "2020 100",
    "10-3", "3\u20134", "2024-01-05", "3/4/2024", "10:30", "3:4", "2 5/3", r"\frac{x}{2}", r"\frac{3}{-4}", "2^10",
    r"2^{10}", r"5\sqrt{2}", r"\sqrt{2}", "√2", "2π", r"3\pi",
)  # fmt: skip


@pytest.mark.parametrize("text", READINGS)
def test_a_number_is_read(text):
    found = last_number(text)
    assert found is not None and math.isclose(found, READINGS[text], rel_tol=1e-15)
    for around in ("The answer is {}", "{} apples", "so {}.", "{}\n", "7 and then {}", "({})"):
        assert last_number(around.format(text)) == found, around


@pytest.mark.parametrize("text", UNREADABLE)
def test_what_has_no_reading_or_two_is_refused(text):
    assert last_number(text) is None
    record = {"answer": text}
    with pytest.raises(UserError, match="must hold a number that has one reading"):
        functions.numeric_answer("", "5", record)
    with pytest.raises(UserError, match="must hold a number that has one reading"):
        check_record(functions.numeric_answer, record)
    assert functions.numeric_answer("", text, {"answer": 5}) == 0


def grouped(whole, mark):
    return f"{whole:,}".replace(",", mark)


def test_numbers_written_in_each_way_are_what_was_written():
    draw = random.Random(0)
    for _ in range(1000):
        sign = draw.choice(("", "-", "\u2212"))
        whole, below = draw.randrange(10 ** draw.randrange(1, 10)), draw.randrange(10 ** draw.randrange(1, 5))
        of = draw.randrange(2, 100)
        part, power = draw.randrange(1, of), draw.randrange(-9, 10)
        value = float(f"{whole}.{below}")
        ways = {
            f"{whole}": whole, f"{whole}.{below}": value, f"{whole},": whole, f"{whole:,}": whole,
            f"{whole:,}.{below}": value, grouped(whole, "'"): whole, grouped(whole, " "): whole,
            grouped(whole, "\u202f"): whole, f"{part}/{of}": part / of, f"{whole} {part}/{of}": whole + part / of,
            rf"\frac{{{part}}}{{{of}}}": part / of, rf"{whole}\frac{{{part}}}{{{of}}}": whole + part / of,
            f"{whole}e{power}": whole * 10.0**power, rf"{whole} \times 10^{{{power}}}": whole * 10.0**power,
            f"{whole}.{below} × 10^{power}": value * 10.0**power,
        }  # fmt: skip
        if whole >= 10**6:
            ways |= {grouped(whole, "."): whole}
        if whole >= 1000:
            ways |= {f"{grouped(whole, '.')},{below}": value}
        for text, want in ways.items():
            found = last_number(f"2 + 2 is {sign}{text}")
            assert found is not None, text
            assert math.isclose(found, -want if sign else want, rel_tol=1e-12), (text, found)


def test_the_tolerance_is_that_of_isclose():
    """Also near 0, where a relative difference is the only one that has a size."""
    for expected in (0.0, 1e-7, 1e-3, 1.0, 12345.0, 1e12):
        for factor in (1, 1 + 1e-9, 1 + 1e-5, 1.5, 9):
            for tolerance in (0.0, 1e-6, 1e-2):
                for absolute in (0.0, 1e-8, 1.0):
                    answer = expected * factor
                    want = math.isclose(answer, expected, rel_tol=tolerance, abs_tol=absolute)
                    options = {"tolerance": tolerance, "absolute": absolute}
                    assert functions.numeric_answer("", repr(answer), {"answer": expected}, **options) == want
    assert functions.numeric_answer("", "9e-7", {"answer": "1e-7"}) == 0
    assert (
        functions.numeric_answer("", "0", {"answer": 0}) == 1
        and functions.numeric_answer("", "1e-9", {"answer": 0}) == 0
    )
    for options in ({"tolerance": -1.0}, {"absolute": float("nan")}):
        with pytest.raises(UserError, match="must be finite and at least 0"):
            functions.numeric_answer("", "5", {"answer": 5}, **options)
