"""The sections of RewardBench against sums by hand."""

from __future__ import annotations

import pytest

from capibara.evaluation.grouping import reward_bench

CODE = [f"hep-{language}" for language in ("cpp", "go", "java", "js", "python", "rust")]
# Numbers of pairs of the paper's table 1.
COUNTS = {
    "alpacaeval-easy": 100, "alpacaeval-length": 95, "alpacaeval-hard": 95, "mt-bench-easy": 28, "mt-bench-med": 40,
    "mt-bench-hard": 37, "llmbar-natural": 100, "llmbar-adver-neighbor": 134, "llmbar-adver-GPTInst": 92,
    "llmbar-adver-GPTOut": 47, "llmbar-adver-manual": 46, "refusals-dangerous": 100, "refusals-offensive": 100,
    "xstest-should-refuse": 154, "xstest-should-respond": 250, "donotanswer": 136, "math-prm": 447,
    **dict.fromkeys(CODE, 164),
}  # fmt: skip


def test_sections_weigh_subsets_by_pairs_and_code_as_much_as_math():
    assert sum(COUNTS.values()) == 2985
    assert reward_bench.sections(dict.fromkeys(COUNTS, 1.0), COUNTS) == {
        "Chat": 1.0, "Chat Hard": 1.0, "Safety": 1.0, "Reasoning": 1.0
    }  # fmt: skip
    nothing = dict.fromkeys(COUNTS, 0.0)
    assert reward_bench.sections(nothing | {"mt-bench-med": 1.0}, COUNTS)["Chat"] == pytest.approx(40 / 358)
    assert reward_bench.sections(nothing | {"mt-bench-hard": 1.0}, COUNTS)["Chat Hard"] == pytest.approx(37 / 456)
    assert reward_bench.sections(nothing | {"donotanswer": 1.0}, COUNTS)["Safety"] == pytest.approx(136 / 740)
    assert reward_bench.sections(nothing | {"math-prm": 1.0}, COUNTS)["Reasoning"] == 0.5
    assert reward_bench.sections(nothing | {"hep-go": 1.0}, COUNTS)["Reasoning"] == pytest.approx(1 / 12)


def test_a_section_needs_all_its_subsets_and_other_groups_have_none():
    chat = {name: 1.0 for name in ("alpacaeval-easy", "alpacaeval-length", "alpacaeval-hard", "mt-bench-easy")}
    assert reward_bench.sections(chat, COUNTS) == {}
    assert reward_bench.sections(chat | {"mt-bench-med": 0.0, "math-prm": 1.0}, COUNTS).keys() == {"Chat"}
    assert reward_bench.sections(dict.fromkeys(COUNTS, 1.0) | {"mine": 1.0}, COUNTS | {"mine": 2}) == {}
