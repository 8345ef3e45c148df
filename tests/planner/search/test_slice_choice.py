"""The slice that meets a goal, among the best plans of each slice."""

import argparse
import dataclasses

import pytest

from capibara.core.types import UserError
from capibara.models import api
from capibara.optim import Optimizer
from capibara.planner.model import workload
from capibara.planner.search import advice, questions, slice_choice
from capibara.planner.search.ranking import Question

CONFIG = api.DecoderConfig(
    vocab_size=32_000, embed_dim=2048, num_layers=16, num_heads=16, mlp_dim=7168, dtype="bfloat16"
)
WORK = workload.describe(api.build(CONFIG), Optimizer(), length=2048)
QUESTION = Question(batch_size=256)  # each size more would take the search as long again


def args(goal="cheapest", chips="v5e,v6e", **values):
    parser = argparse.ArgumentParser()
    questions.add_arguments(parser)
    parsed = parser.parse_args([f"--goal={goal}", f"--chips={chips}"])
    return argparse.Namespace(**{**vars(parsed), **values})


@pytest.fixture(scope="module")
def found():
    return slice_choice.offers(WORK, args(), QUESTION)


def test_all_offers_fit_and_come_by_their_chips(found):
    assert [offer.slice_.chips for offer in found] == sorted(offer.slice_.chips for offer in found)
    assert all(offer.best.fits for offer in found) and {offer.slice_.chip.name for offer in found} == {"v5e", "v6e"}


def test_the_smallest_slice_has_the_fewest_chips_and_of_those_the_fastest(found):
    best = slice_choice.best(found, args("smallest_slice"))
    fewest = found[0].slice_.chips
    assert best.slice_.chips == fewest
    assert best.best.cost.tokens_per_s == max(o.best.cost.tokens_per_s for o in found if o.slice_.chips == fewest)


def test_the_cheapest_costs_least_for_the_tokens_and_is_done_in_time(found):
    tokens = 1e11
    best = slice_choice.best(found, args(tokens=tokens))
    assert best.best.cost.usd(tokens) == min(offer.best.cost.usd(tokens) for offer in found)
    days = sorted(offer.best.cost.days(tokens) for offer in found)
    hurried = slice_choice.best(found, args(tokens=tokens, max_days=days[1] * 1.001))
    assert hurried.best.cost.days(tokens) <= days[1] * 1.001
    with pytest.raises(UserError, match=r"no slice trains 1e\+11 tokens in 0.001 days: the fastest takes"):
        slice_choice.best(found, args(tokens=tokens, max_days=0.001))


def test_a_target_is_reached_by_the_fewest_chips(found):
    speeds = {offer.slice_.name: offer.best.cost.tokens_per_s for offer in found}
    best = slice_choice.best(found, args("target_throughput", tokens_per_s=speeds["v5e-64"]))
    assert best.best.cost.tokens_per_s >= speeds["v5e-64"] and best.slice_.chips <= 64
    smaller = [offer for offer in found if offer.slice_.chips < best.slice_.chips]
    assert all(offer.best.cost.tokens_per_s < speeds["v5e-64"] for offer in smaller)
    with pytest.raises(UserError, match="no slice reaches 1,000,000,000,000 tokens/s: v6e-256 is predicted to make"):
        slice_choice.best(found, args("target_throughput", tokens_per_s=1e12))


def test_a_model_that_fits_no_slice_is_one_line():
    huge = dataclasses.replace(CONFIG, embed_dim=16384, num_heads=128, num_layers=512, mlp_dim=65536)
    work = workload.describe(api.build(huge), Optimizer(), length=2048)
    found = slice_choice.offers(work, args(chips="v5e"), QUESTION)
    with pytest.raises(UserError, match="no slice of these chips has a plan that fits"):
        slice_choice.best(found, args("smallest_slice"))


def test_no_more_slices_are_searched_than_the_objective_needs(found):
    """Of the large chips the largest slices take minutes."""
    searched = []
    smallest = slice_choice.offers(WORK, args("smallest_slice", chips="v6e,v5e,v6e"), QUESTION, searched.append)
    fewest = found[0].slice_.chips
    assert {offer.slice_.chips for offer in smallest} == {fewest} and len(set(searched)) == len(searched)
    speed = found[0].best.cost.tokens_per_s
    reached = slice_choice.offers(WORK, args("target_throughput", tokens_per_s=speed * 0.99), QUESTION)
    assert reached[-1].slice_.chips == fewest


def test_rules_say_what_their_papers_say():
    """Step Law's own example (1 B weights, 100 B tokens), and DeepSeek's choice for its 7 B model on 2 T tokens."""
    step_law, _ = advice.advice(1e9, 6e9, 1e11)
    assert step_law.learning_rate == pytest.approx(1.79 * 1e9**-0.713 * 1e11**0.307)
    assert 0.9e6 < step_law.batch_tokens < 1.3e6 and 1e-3 < step_law.learning_rate < 2e-3
    _, deepseek = advice.advice(6.5e9, 4.3e10, 2e12)
    assert deepseek.learning_rate == pytest.approx(4.2e-4, rel=0.15)  # theirs
    assert deepseek.batch_tokens == pytest.approx(2304 * 4096, rel=0.15)  # theirs
