"""What a sweep varies, from text."""

import math

import pytest

from capibara import config
from capibara.core.types import UserError
from capibara.jobs.sweeps import space
from capibara.jobs.sweeps.space import Kind, parse
from capibara.multihost import exits


def test_values_are_kept_as_gin_reads_them():
    values = "[1e-3, -2, 'a b', True, None, (1, 'x'), [1.5], {'k': 1}]"
    assert parse(f"A = {values}").values == ("0.001", "-2", "'a b'", "True", "None", "(1, 'x')", "[1.5]", "{'k': 1}")
    for text in parse("a/b.Schedule.kind = ['wsd', \"it's\", '%A', '@B()', 'line\\nline', 'é']").values:
        (statement,) = config.statements_of(f"A = {text}", "here")
        assert statement.value == eval(text)


@pytest.mark.parametrize(
    ("text", "kind", "low", "high"),
    [
        ("LEARNING_RATE = log(1e-4, 1e-2)", Kind.LOG, 1e-4, 1e-2),
        ("x=uniform(0, 1)", Kind.UNIFORM, 0.0, 1.0),
        (" scope/DecoderConfig.num_layers  =  int( -2, 8 ) ", Kind.INT, -2, 8),
    ],
)
def test_ranges(text, kind, low, high):
    parameter = parse(text)
    assert (parameter.kind, parameter.low, parameter.high) == (kind, low, high)
    assert parse(parameter.text) == parameter


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be NAME = [value, ...], log(low, high)"),
        ("LEARNING_RATE", "must be NAME = "),
        ("1x = [1]", "NAME as in a Gin file"),
        ("A.b c = [1]", "NAME as in a Gin file"),
        ("A =", "with values as in Python"),
        ("A = 1e-3", "with values as in Python"),
        ("A = [1, 2", "with values as in Python"),
        ("A = [1, b]", "with values as in Python"),
        ("A = [__import__('os').getcwd()]", "with values as in Python"),
        ("A = [@Adam()]", "with values as in Python"),
        ("A = [1]\nB = 2", "with values as in Python"),
        ("A = [1 for _ in 'ab']", "with values as in Python"),
        ("A = " + "[" * 5000, "with values as in Python"),
        ("A = 'x'.join(1, 2)", "with values as in Python"),
        ("A = values(1, 2)", "with values as in Python"),
        ("A = []", "the list is empty"),
        ("A = [1, 2, 1]", "1 is there twice"),
        ("A = [1e-3, 0.001]", "0.001 is there twice"),
        ("A = [1e999]", "inf must be a finite number"),
        ("A = [(1, -1e999)]", "-inf must be a finite number"),
        ("A = [{1, 2}]", "must be a number, a text"),
        ("A = [b'x']", "must be a number, a text"),
        ("A = [1j]", "must be a number, a text"),
        ("A = log(0, 1)", "the low end of log is 0, must be above 0"),
        ("A = log(1)", "log must have two numbers: log(low, high)"),
        ("A = uniform(low=0, high=1)", "uniform must have two numbers"),
        ("A = uniform(0, *[1])", "with values as in Python"),
        ("A = uniform(1, 1)", "the low end (1) must be below the high end (1)"),
        ("A = uniform(0, 1e999)", "inf must be a finite number"),
        ("A = uniform(True, 2)", "True must be a finite number"),
        ("A = uniform('a', 2)", "'a' must be a finite number"),
        ("A = int(1, 2.5)", "2.5 must be a whole number"),
        ("A = int(0, 9007199254740992)", "must be a whole number"),
        ("MODEL_DIR = ['a', 'b']", "the sweep itself sets MODEL_DIR"),
        ("Trainer.model_dir = ['a']", "the sweep itself sets Trainer.model_dir"),
        ("A = ['" + "x" * 10_000 + "']", "must have at most 10,000"),
    ],
)
def test_a_text_that_is_none_is_one_line(text, message, capsys):
    def main(_):
        parse(text)

    assert exits.run_verb(main) == 2
    line = capsys.readouterr().err
    assert message in line and line.startswith("error: --vary=") and line.count("\n") == 1 and len(line) < 400


def test_a_name_that_comes_twice_and_no_name():
    with pytest.raises(UserError, match="--vary=A = ... is there twice"):
        space.parse_all(["A = [1]", "B = [1]", "A = int(1, 2)"])
    with pytest.raises(UserError, match="--vary is not set"):
        space.parse_all([])


def test_quantiles_cover_a_range():
    last = math.nextafter(1.0, 0.0)
    assert [parse("A = ['a', 'b', 'c']").sample(q) for q in (0.0, 0.34, last)] == ["'a'", "'b'", "'c'"]
    assert [parse("A = int(2, 4)").sample(q) for q in (0.0, 0.5, last)] == ["2", "3", "4"]
    assert [parse("A = uniform(-1, 1)").sample(q) for q in (0.0, 0.5, last)] == ["-1.0", "0.0", "1.0"]
    assert [parse("A = log(1e-4, 1e-2)").sample(q) for q in (0.0, 0.5, last)] == ["0.0001", "0.001", "0.01"]


@pytest.mark.parametrize(
    "text",
    ["log(1e-300, 1e300)", "log(1, 1.0000000000000002)", "uniform(1e9, 1000000000.5)", "uniform(0, 1e-300)",
     "uniform(-1e300, 1e300)"],
)  # fmt: skip
def test_no_range_is_too_wide_or_too_narrow(text):
    parameter = parse(f"A = {text}")
    numbers = [float(parameter.sample(i / 20)) for i in range(20)]
    assert all(parameter.low <= number <= parameter.high for number in numbers) and numbers == sorted(numbers)
    assert len({*numbers}) > 1


def test_values_in_json_and_as_numbers():
    assert [space.plain(text) for text in ("0.001", "2", "'a'", "True", "None", "(1, 2)")] == [
        0.001, 2, "a", True, None, "(1, 2)",
    ]  # fmt: skip
    assert [space.number_of(text) for text in ("0.001", "2", "'a'", "True")] == [0.001, 2.0, None, None]
