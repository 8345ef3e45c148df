"""Compiling down a ranking, with a fake compiler whose results the test sets."""

import dataclasses

import pytest

from capibara.core.types import UserError
from capibara.models import api
from capibara.optim import Optimizer
from capibara.planner.compiler import verify
from capibara.planner.compiler.compile import Compiled
from capibara.planner.compiler.compile_cache import Outcome, Verdict
from capibara.planner.hardware import slices
from capibara.planner.model import memory, workload
from capibara.planner.search import ranking
from capibara.planner.search.ranking import Goal, Question
from capibara.sharding.remat import Remat, RematPolicy

WORK = workload.describe(
    api.build(
        api.DecoderConfig(
            vocab_size=32_000, embed_dim=2048, num_layers=16, num_heads=16, mlp_dim=7168, dtype="bfloat16"
        )
    ),
    Optimizer(),
    length=2048,
)
V5E = slices.parse("v5e-16")
USABLE = V5E.chip.device_usable_hbm_bytes
# Without offloading, which the host's memory bounds.
QUESTION = Question(
    goal=Goal.LARGEST_BATCH, headroom=0.05, remats=tuple(map(RematPolicy, (Remat.NONE, Remat.DOTS, Remat.FULL)))
)


def compiler(scale, seen=None):
    """A compiler for which everything but the state takes `scale` times the prediction."""

    def prove(ranked):
        peak = memory.memory(WORK, ranked.choice, V5E.chip, scale).peak
        if seen is not None:
            seen.append(ranked)
        fits = peak <= USABLE
        compiled = Compiled(fits=fits, peak_bytes=int(peak), limit_bytes=int(USABLE), compile_s=1.0)
        return Verdict(Outcome.FITS if fits else Outcome.DOES_NOT_FIT, compiled, 1.0)

    return prove


@pytest.mark.parametrize("scale", [0.6, 0.97, 1.0, 1.2, 2.5])
def test_the_walk_ends_at_a_proven_plan_that_leaves_as_much_as_was_asked_and_no_more(scale):
    walk = verify.walk(WORK, V5E, QUESTION, compiler(scale))
    peak = walk.proven.verdict.compiled.peak_bytes
    assert 0.85 * USABLE <= peak <= 0.95 * USABLE
    assert walk.ranked[0].choice == walk.proven.ranked.choice
    assert walk.question.scale(walk.proven.ranked.choice) == pytest.approx(scale, rel=0.03) and len(walk.tried) <= 5
    # No plan of that kind with more rows fits: the proven one has the largest batch.
    rows = walk.proven.ranked.choice.batch_size(WORK)
    assert all(one.choice.batch_size(WORK) <= 1.01 * rows for one in walk.ranked if one.fits)


def test_what_is_learned_is_the_correction_of_all_but_the_state():
    ranked = ranking.search(WORK, V5E, QUESTION)[0]
    assert verify.correction_from(WORK, ranked, compiler(0.8)(ranked)) == pytest.approx(0.8, rel=1e-6)
    failed = Verdict(Outcome.TIMED_OUT, None, 1.0, "stopped")
    assert verify.correction_from(WORK, ranked, failed) is None


def test_a_plan_that_does_not_fit_is_not_proposed_again_even_if_the_compiler_names_no_need():
    seen = []

    def prove(ranked):
        verdict = compiler(1.3, seen)(ranked)
        if verdict.outcome is Outcome.FITS:
            return verdict
        return dataclasses.replace(verdict, compiled=Compiled(fits=False, peak_bytes=None, compile_s=1.0))

    walk = verify.walk(WORK, V5E, QUESTION, prove, most=30)
    assert walk.proven and len({one.choice for one in seen}) == len(seen)
    bad = {one.ranked.choice for one in walk.tried if not one.is_usable}
    assert bad and not bad & {one.choice for one in walk.ranked}


def test_a_plan_that_cannot_be_compiled_is_passed_by():
    first = ranking.search(WORK, V5E, QUESTION)[0].choice

    def prove(ranked):
        if ranked.choice == first:
            return Verdict(Outcome.TIMED_OUT, None, 1.0, "stopped after 1 s")
        return compiler(1.0)(ranked)

    walk = verify.walk(WORK, V5E, QUESTION, prove)
    assert walk.proven.ranked.choice != first and first not in {one.choice for one in walk.ranked}


@pytest.mark.parametrize(
    "prove, most, message",
    [
        (lambda ranked: Verdict(Outcome.FAILED, None, 1.0, "libtpu is not installed"), 1, "libtpu is not installed"),
        (compiler(50.0), 6, "no plan fits v5e-16 with 5% to spare: the leanest that was compiled needs"),
    ],
)
def test_without_a_proof_one_line_says_why(prove, most, message):
    with pytest.raises(UserError, match=message):
        verify.walk(WORK, V5E, QUESTION, prove, most=most)


def test_what_is_learned_of_one_kind_says_nothing_of_another():
    """Plans with a tensor axis need half of the prediction, all others exactly the prediction."""

    def prove(ranked):
        return compiler(0.5 if ranked.choice.mesh["tensor"] > 1 else 1.0)(ranked)

    walk = verify.walk(WORK, V5E, QUESTION, prove, most=30)
    for one in walk.ranked:
        wanted = 0.5 if one.choice.mesh["tensor"] > 1 else 1.0
        learned = walk.question.scale(one.choice)
        assert learned == 1.0 or learned == pytest.approx(wanted, rel=0.01)  # 1: not compiled
    assert walk.proven.verdict.compiled.peak_bytes == pytest.approx(walk.ranked[0].memory.peak, rel=0.01)
