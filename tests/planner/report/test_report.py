"""A plan's report agrees with its predictions, and its Gin file with the plan."""

import pytest
from cases import V5E, work_of

from capibara.planner.compiler import verify
from capibara.planner.model.choice import of_plan
from capibara.planner.report import report
from capibara.planner.search import ranking
from capibara.planner.search.ranking import Question
from capibara.sharding import Plan


def test_why_a_plan_lost_is_what_it_has_more_of():
    work = work_of(length=4096)
    walk = verify.unproven(ranking.search(work, V5E, Question(batch_size=256)), Question(batch_size=256))
    best = walk.ranked[0]
    slower = next(
        one for one in walk.ranked if one.choice.mesh["tensor"] == 4 and one.choice.remat == best.choice.remat
    )
    assert "ICI in the way of compute" in report.reason_ranked_lower(slower, walk, work)


def test_a_plan_in_gin_is_the_plan(tmp_path):
    from capibara import config

    work = work_of()
    best = ranking.search(work, V5E, Question(batch_size=256))[0]
    path = tmp_path / "plan.gin"
    path.write_text(report.gin(verify.unproven([best], Question()), work, V5E))
    config.parse([str(path)], [], [])
    plan = config.build(Plan)
    assert of_plan(plan, work, V5E.devices) == best.choice and plan.slice == "v5e-64"


def test_figures_add_up():
    work = work_of()
    best = ranking.search(work, V5E)[0]
    parts = best.memory
    backward = parts.state + parts.saved + parts.casts + parts.summed + parts.gradients + parts.layer + parts.weights
    assert parts.moments["backward"] == pytest.approx(backward)
    plain = report.as_json(best, work, V5E, tokens=1e12, usd=1.0)
    assert plain["predicted"]["usd"] == pytest.approx(64 * 24 * plain["predicted"]["days"])
