"""What each strategy asks, which text it takes, and what it says of that."""

from __future__ import annotations

import math

import pytest

import capibara as cb
from capibara.core.types import UserError
from capibara.inference.thinking.strategy import Draw

SAMPLED, GREEDY = cb.Sampling(temperature=1.0), cb.Sampling(temperature=0.0)


class Model:
    """Answers with given texts, by prompt and sample, and keeps what it was asked."""

    def __init__(self, *texts):
        self.texts, self.asked = texts, []

    def __call__(self, drafts):
        self.asked.append([(draft.number, draft.text, draft.sample) for draft in drafts])
        texts = self.texts[len(self.asked) - 1]
        return [Draw(text, len(text), ("<think>", "</think>")) for text in texts]


def test_most_votes_win_and_a_tie_is_told():
    model = Model(["4", "5 ", " 5", "<think>4 or 4</think>4", "5", "6", "a", "b"])
    first, second = cb.SelfConsistency(samples=4).answers(["2+2?", "x?"], model, None)
    assert model.asked == [[(n, text, sample) for n, text in enumerate(("2+2?", "x?")) for sample in range(4)]]
    # Two of each: the one that was drawn first.
    assert first.text == "4" and first.about == {"votes": 2, "tie": True, "answers": {"4": 2, "5": 2}}
    assert second.text == "5" and second.about["tie"] and second.about["votes"] == 1
    assert first.texts == 4 and first.tokens == sum(map(len, model.texts[0][:4]))
    [answer] = cb.SelfConsistency(samples=3).answers(["?"], Model(["no", "Yes  sir", "yes SIR"]), None)
    assert answer.text == "Yes  sir" and answer.about == {"votes": 2, "tie": False, "answers": {"no": 1, "yes sir": 2}}


def test_a_pattern_says_what_a_text_votes_for():
    texts = ["so 1, or 12", "it is 12.", "no number", "<think>3 3</think>7"]
    [answer] = cb.SelfConsistency(samples=4, pattern=r"\d+").answers(["?"], Model(texts), None)
    assert answer.text == "so 1, or 12" and answer.about == {"votes": 2, "tie": False, "answers": {"12": 2, "7": 1}}
    [answer] = cb.SelfConsistency(samples=4, pattern=r"(\d)\.").answers(["?"], Model(texts), None)
    assert answer.text == "it is 12." and answer.about["answers"] == {"2": 1}
    [answer] = cb.SelfConsistency(samples=4, pattern="z").answers(["?"], Model(texts), None)
    assert answer.text == texts[0] and answer.about == {"votes": 0, "tie": False, "answers": {}}


def test_a_thought_that_has_not_ended_is_no_answer():
    texts = ["<think>maybe 3, or 3", "<think>no 3</think>4 <think>or 3", "<think>3</think>5"]
    [answer] = cb.SelfConsistency(samples=3, pattern=r"\d").answers(["?"], Model(texts), None)
    assert answer.text == texts[2] and answer.about["answers"] == {"5": 1}
    model = Model(["<think>so far"], ["7"])
    [answer] = cb.Rounds(again="{prompt}|{answer}|").answers(["?"], model, None)
    assert model.asked[1] == [(0, "?||", 0)] and answer.about == {"answers": ["", "7"]}


def test_the_highest_reward_wins_by_all_steps_or_one():
    rewards = {"a": [0.5], "bb": [3.0, -1.0], "ccc": [1.0, 1.0, 1.0], "d": [-2.0, 4.0]}
    chosen = {}
    for steps in ("product", "min", "last"):
        strategy = cb.BestOfN(reward="x", samples=3, steps=steps)
        [answer] = strategy.answers(["?"], Model(["bb", "ccc", "d"]), lambda number, texts: [rewards[t] for t in texts])
        chosen[steps] = answer.text
        if steps == "product":
            want = [sum(-math.log(1 + math.exp(-score)) for score in rewards[text]) for text in ("bb", "ccc", "d")]
            assert answer.about["rewards"] == pytest.approx(want)
    assert chosen == {"product": "ccc", "min": "ccc", "last": "d"}
    seen = []

    def rate(number, texts):
        seen.append((number, list(texts)))
        return [float(len(text)) for text in texts]

    draws = Model(["<think>long</think> a", "bb", "c", ""])
    first, second = cb.BestOfN(reward="x", samples=2).answers(["?", "!"], draws, rate)
    assert seen == [(0, ["a", "bb"]), (1, ["c", ""])], "the thought has no reward"
    assert first.text == "bb" and second.text == "c" and first.about == {"rewards": [1.0, 2.0]}
    [answer] = cb.BestOfN(reward="x", samples=3).answers(["?"], Model(["a", "bb", "cc"]), rate)
    assert answer.text == "bb", "of equal rewards the first"
    [answer] = cb.BestOfN(reward="x", samples=2).answers(["?"], Model(["", "c"]), lambda n, t: [[], [-5.0]])
    assert answer.text == "c" and answer.about == {"rewards": [None, pytest.approx(-5.0 - math.log1p(math.exp(-5.0)))]}


@pytest.mark.parametrize("steps", ["product", "min", "last"])
def test_an_answer_of_one_step_is_compared_with_longer_ones_on_the_same_scale(steps):
    """The probability that 0.5 is right is 0.62, that both of 3 and 3 are 0.91."""
    strategy = cb.BestOfN(reward="x", samples=2, steps=steps)
    [answer] = strategy.answers(["?"], Model(["one", "two"]), lambda number, texts: [[0.5], [3.0, 3.0]])
    assert answer.text == "two"


def test_a_round_has_the_answer_of_the_one_before():
    model = Model(["<think>hm</think> 3", "{prompt}"], ["4", "y"], ["5", "z"])
    strategy = cb.Rounds(rounds=3, again="{prompt} Was {answer}. {x}")
    first, second = strategy.answers(["1+2?", "{answer}?"], model, None)
    assert model.asked[1] == [(0, "1+2? Was 3. {x}", 0), (1, "{answer}? Was {prompt}. {x}", 0)]
    assert model.asked[2] == [(0, "1+2? Was 4. {x}", 0), (1, "{answer}? Was y. {x}", 0)]
    assert first.text == "5" and first.about == {"answers": ["3", "4", "5"]} and first.texts == 3
    assert second.text == "z" and second.tokens == len("{prompt}") + 2


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: cb.Rounds(rounds=0), "Rounds.rounds is 0, must be from 1 to 64"),
        (lambda: cb.Rounds(again="{prompt}"), "Rounds.again is '{prompt}', must have {answer}"),
        (lambda: cb.SelfConsistency(samples=0), "SelfConsistency.samples is 0, must be from 1 to 1024"),
        (lambda: cb.SelfConsistency(pattern="("), "SelfConsistency.pattern is '\\(', which is no regular expression"),
        (lambda: cb.BestOfN(reward=""), "BestOfN.reward is empty: name the folder"),
        (lambda: cb.BestOfN(reward="x", samples=2000), "BestOfN.samples is 2000, must be from 1 to 1024"),
        (lambda: cb.SelfConsistency().check(GREEDY), "Sampling.temperature is 0, and SelfConsistency needs texts that"),
        (
            lambda: cb.BestOfN(reward="x").check(GREEDY),
            "Sampling.temperature is 0, and BestOfN needs texts that differ",
        ),
        (
            lambda: cb.Rounds().check(cb.Sampling(num_decodes=2)),
            "Sampling.num_decodes is 2, and Rounds chooses among texts itself: set it to 1",
        ),
        (
            lambda: cb.Rounds().check(cb.Sampling(beams=cb.BeamSearch(), temperature=0.0)),
            "Sampling.beams is set, and Rounds draws texts",
        ),
        (
            lambda: cb.EvalTask(files=("x",), choices="c", thinking=cb.Rounds()),
            "EvalTask.thinking is @Rounds\\(\\), and EvalTask.choices are ranked",
        ),
        (
            lambda: cb.EvalTask(
                files=("x",), metrics=(len,), num_samples=2, sampling=SAMPLED, thinking=cb.SelfConsistency()
            ),
            "which gives one answer, and EvalTask.num_samples 2: set it to 1",
        ),
        (
            lambda: cb.EvalTask(files=("x",), metrics=(len,), thinking=cb.SelfConsistency()),
            "Sampling.temperature is 0, and SelfConsistency",
        ),
    ],
)
def test_what_does_not_fit_is_named(make, message):
    with pytest.raises(UserError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_one_text_needs_no_temperature():
    for strategy in (cb.Rounds(), cb.SelfConsistency(samples=1), cb.BestOfN(reward="x", samples=1)):
        strategy.check(GREEDY)
