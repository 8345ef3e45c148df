"""benchmarks/experts.py: questions, the table and what its exit code says."""

from __future__ import annotations

import json
import pathlib

import pytest
from rich.console import Console

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "experts.py"


@pytest.fixture(scope="module")
def experts(load_benchmark):
    """The benchmark as a module."""
    return load_benchmark("experts")


def test_the_right_piece_of_a_question_goes_on_with_its_text(experts, tmp_path):
    texts = [
        {"text": f"{d} {n} ".ljust(160, "x") + f"{d}{n}".ljust(50, "y"), "domain": d}
        for d in experts.DOMAINS
        for n in range(5)
    ]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    file = experts.asked(tmp_path / "test.jsonl", tmp_path / "questions.jsonl", 3)
    questions = [json.loads(line) for line in pathlib.Path(file).read_text().splitlines()]
    assert len(questions) == 18
    for question in questions:
        name = "".join(question["prompt"].split()[:2])
        assert question["choices"][question["target"]].startswith(name)
        assert len({*question["choices"]}) == 4
        assert all(choice.startswith(name[:-1]) for choice in question["choices"])  # of the same domain


def results(experts, activation, upcycled):
    losses = lambda mean: dict.fromkeys(experts.DOMAINS, mean) | {"mean": mean}  # noqa: E731
    row = lambda before, after: {"before": losses(before), "after": None if after is None else losses(after)}  # noqa: E731
    mixed = {"prune by activation": row(activation, 2.0)}
    mixed |= {f"prune at random {seed}": row(2.5 + 0.1 * seed, None) for seed in experts.RANDOM_SEEDS}
    made = {"upcycled": row(2.6, upcycled), "mixture from scratch, half of the steps": row(3.0, 2.4)}
    return mixed, made


@pytest.mark.parametrize(
    ("activation", "upcycled", "holds"), [(2.55, 2.3, True), (2.65, 2.3, False), (2.55, 2.45, False)]
)
def test_the_exit_code_is_that_of_both_claims(experts, activation, upcycled, holds):
    assert experts.holds(*results(experts, activation, upcycled)) == holds


def test_table_and_picture_show_what_was_not_healed(experts, tmp_path):
    mixed, made = results(experts, 2.4, 2.3)
    with (console := Console(width=140)).capture() as shown:
        console.print(experts.table("title", mixed))
    assert "prune at random 2" in shown.get() and "2.700" in shown.get()
    experts.draw({"a": mixed, "b": made}, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
