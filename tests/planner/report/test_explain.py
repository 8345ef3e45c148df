"""What --explain prints can be added up by hand."""

import dataclasses
import re

import pytest
from cases import DENSE, EXPERTS, V5E, work_of

from capibara.models import api
from capibara.planner.report import explain
from capibara.planner.search import ranking


def numbers(lines):
    """The first word of each line -> the number after it."""
    found = {}
    for line in lines:
        if match := re.match(r"\s+(?:in the )?([\w ]*?\w)\s+(\d+\.\d+)", line):
            found.setdefault(match[1], float(match[2]))
    return found


def test_the_terms_make_the_step_and_the_peak():
    work = work_of(EXPERTS)
    best = ranking.search(work, V5E)[0]
    found = numbers(explain.lines(best, work, V5E))
    state = sum(found[name] for name in ("parameters", "optimizer", "average", "batch"))
    assert found["state"] == pytest.approx(state, abs=0.002)
    held = ("saved", "casts", "summed", "gradients", "layer", "weights", "pipeline")
    assert found["backward"] > 0 and best.memory.moments["backward"] / 2**30 == pytest.approx(
        state + sum(found[name] for name in held), abs=0.005
    )
    busy = (
        max(found["compute_s"] + found["elementwise_s"], found["hbm_s"])
        + found["host_exposed_s"]
        + found["links_s"]
        + found["blocking_s"]
    )
    assert found["step_s"] == pytest.approx(busy / (1 - found["bubble"]) + found["update_s"], abs=0.002)


def test_shares_of_the_peak_are_said():
    work = work_of()
    best = ranking.search(work, V5E)[0]
    text = "\n".join(explain.lines(best, work, V5E))
    assert f"{best.memory.saved / 2**30:.3f}" in text and f"{best.cost.step_s:.4f}" in text
    parts = re.findall(r"(\w+) +([\d.]+)  = ([\d.]+) TFLOP / \(([\d.]+)% of (\d+) TFLOP/s\)", text)
    for part, seconds, flops, share, peak in parts:
        expected = float(flops) / (float(share) / 100 * float(peak))
        assert float(seconds) == pytest.approx(expected, rel=0.01, abs=5e-5), part  # four decimals are printed
    assert sum(float(part[1]) for part in parts) == pytest.approx(best.cost.compute_s, abs=0.001)


def test_a_frozen_base_has_no_gradients_in_the_explanation():
    adapted = dataclasses.replace(DENSE, lora=api.Lora(base_dtype="nf4"))
    for config, backward, head in ((DENSE, "2 x forward", 8), (adapted, "1 x forward: the base is frozen", 4)):
        work = work_of(config)
        best = ranking.search(work, V5E)[0]
        text, flops = "\n".join(explain.lines(best, work, V5E)), best.cost.flops
        assert backward in text and f"{head} x vocabulary x embedding x tokens" in text
        assert flops.backward == pytest.approx(int(backward[0]) * flops.forward)
