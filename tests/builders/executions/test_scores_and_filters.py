"""Scores are what their documentation says; filters name the setting by which they exclude."""

from __future__ import annotations

import pytest

from capibara import config
from capibara.builders.executions import reading, scores
from capibara.builders.executions.filters import ExecutionFilter, Outcome, Undated
from capibara.builders.executions.reading import Execution, Failure, Form
from capibara.builders.executions.runs import analysed
from capibara.core.types import UserError

pytest.importorskip("tree_sitter_sql")
ERROR = Failure(name="ValueError", value="bad", traceback="")


def execution(code="x = 1", **fields):
    return Execution(**{"path": "a", "line": 1, "form": Form.EXECUTION, "code": code, "language": "python", **fields})


def run(code="x = 1", **fields):
    return analysed(execution(code, **fields), "a:1")


@pytest.mark.parametrize(
    ("fields", "success"),
    [
        ({"stdout": "1\n"}, 1.0),
        ({}, 0.9),
        ({"form": Form.COMMAND, "exit_code": 0}, 1.0),
        ({"form": Form.SESSION}, 1.0),
        ({"stdout": "1", "stderr": "warning"}, 0.9),
        ({"stderr": "Traceback (most recent call last)"}, 0.6),
        ({"failure": ERROR, "stdout": "1"}, 0.0),
        ({"exit_code": 2, "stdout": "1"}, 0.0),
    ],
)
def test_success(fields, success):
    assert scores.success_of(execution(**fields)) == pytest.approx(success)


def test_the_weights_sum_to_one():
    assert sum(scores.WEIGHTS.values()) == pytest.approx(1.0)


GOOD = '''
def mean(values):
    """The mean."""
    if not values:
        raise ValueError("empty")
    return sum(value for value in values) / len(values)

# Print it.
for group in ([1, 2], [3]):
    print(mean(group))
'''


def test_quality_is_the_weighted_mean_of_its_parts():
    found = run(GOOD, stdout="1.5\n3.0\n").scores
    assert found.quality == pytest.approx(
        sum(scores.WEIGHTS[name] * part for name, part in found.parts.items()), abs=1e-3
    )
    assert found.parts == {
        "syntax": 1.0, "outcome": 1.0, "size": 1.0, "structure": 1.0, "language": 1.0, "evidence": 1.0, "comments": 1.0,
    }  # fmt: skip
    assert found.quality == 1.0


def test_better_examples_have_higher_quality():
    good = run(GOOD, stdout="1.5\n3.0\n").scores.quality
    fails = run(GOOD, failure=ERROR).scores.quality
    broken = run(GOOD.replace(":", ""), failure=ERROR).scores.quality
    fragment = run("x").scores.quality
    assert good > fails > broken > 0
    assert good > fragment
    for one in (good, fails, broken, fragment):
        assert 0 <= one <= 1


def test_code_without_a_grammar_has_medium_syntax_and_structure():
    parts = run("x <- 1", language="r").scores.parts
    assert (parts["syntax"], parts["structure"]) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("settings", "fields", "reason"),
    [
        ({"languages": ("py", "sql")}, {}, None),
        ({"languages": ("sql",)}, {}, "languages"),
        ({"languages": ("sql",)}, {"language": "postgres", "code": "SELECT 1"}, None),
        ({"start": "2026-01-01"}, {"time_s": reading.time_of("2025-12-31T23:59:59")}, "start"),
        ({"start": "2026-01-01"}, {"time_s": reading.time_of("2026-01-01")}, None),
        ({"end": "2026-01-01"}, {"time_s": reading.time_of("2026-01-01")}, "end"),
        ({"start": "2025-01-01T00:00:00+02:00", "end": "2026-01-01"}, {"time_s": reading.time_of("2025-06-01")}, None),
        ({"start": "2026-01-01"}, {}, "undated"),
        ({"start": "2026-01-01", "undated": Undated.KEEP}, {}, None),
        ({"outcome": Outcome.PASSED}, {"failure": ERROR}, "outcome"),
        ({"outcome": "failed"}, {"failure": ERROR}, None),
        ({"min_quality": 0.99}, {}, "min_quality"),
        ({"min_success": 0.95}, {}, "min_success"),
        ({"min_success": 0.95}, {"stdout": "1"}, None),
        ({"min_language_confidence": 0.5}, {"language": None}, "min_language_confidence"),
        ({"max_code_characters": 4}, {}, "max_code_characters"),
        ({"max_output_characters": 4}, {"stdout": "12", "stderr": "345"}, "max_output_characters"),
    ],
)
def test_a_filter_names_the_setting(settings, fields, reason):
    assert ExecutionFilter(**settings).rejects(run(**fields)) == reason


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_quality": 2.0}, r"ExecutionFilter.min_quality \(2.0\) must lie between 0 and 1"),
        ({"max_code_characters": 0}, r"ExecutionFilter.max_code_characters \(0\) must be positive"),
        ({"start": "soon"}, r"ExecutionFilter.start \('soon'\) must be a time in ISO 8601"),
        ({"start": "2026-01-02", "end": "2026-01-01"}, r"ExecutionFilter.end .* must be later than start"),
        ({"outcome": "good"}, "outcome"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        ExecutionFilter(**settings)


def test_gin_sets_the_filter():
    config.parse([], ['ExecutionFilter.languages = ("sql",)', 'ExecutionFilter.outcome = "passed"'], [])
    found = config.build(ExecutionFilter)
    assert found == ExecutionFilter(languages=("sql",), outcome=Outcome.PASSED)
