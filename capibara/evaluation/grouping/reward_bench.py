"""The sections of RewardBench, version 1 (Lambert et al. 2024, arXiv:2403.13787, table 1)."""

from __future__ import annotations

from collections.abc import Mapping

# The subsets of each section, in parts that weigh the same, as the package rewardbench 0.1.4 has them (rewardbench/constants.py): it
# counts math-prm, of 447 pairs, as the 984 pairs of code.
_SECTIONS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "Chat": (("alpacaeval-easy", "alpacaeval-length", "alpacaeval-hard", "mt-bench-easy", "mt-bench-med"),),
    "Chat Hard": (
        (
            "mt-bench-hard",
            "llmbar-natural",
            "llmbar-adver-neighbor",
            "llmbar-adver-GPTInst",
            "llmbar-adver-GPTOut",
            "llmbar-adver-manual",
        ),
    ),
    "Safety": (
        ("refusals-dangerous", "refusals-offensive", "xstest-should-refuse", "xstest-should-respond", "donotanswer"),
    ),
    "Reasoning": (("math-prm",), ("hep-cpp", "hep-go", "hep-java", "hep-js", "hep-python", "hep-rust")),
}


def sections(values: Mapping[str, float], counts: Mapping[str, int]) -> dict[str, float]:
    """The value of each section of which all subsets are here; none, if a group is no subset of RewardBench.

    A part of a section is the mean of its subsets, weighted by their numbers of pairs; a section is the mean of its parts.

    Args:
      values: subset -> the mean over its pairs.
      counts: subset -> the number of its pairs.
    """
    known = {name for parts in _SECTIONS.values() for part in parts for name in part}
    if not values.keys() <= known:
        return {}
    return {
        section: sum(_mean(part, values, counts) for part in parts) / len(parts)
        for section, parts in _SECTIONS.items()
        if all(name in values for part in parts for name in part)
    }


def _mean(names: tuple[str, ...], values: Mapping[str, float], counts: Mapping[str, int]) -> float:
    return sum(values[name] * counts[name] for name in names) / sum(counts[name] for name in names)
