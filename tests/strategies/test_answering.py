"""Whose chips answer: where parameters fit is found alike on all processes, which else would wait for each other for ever."""

from __future__ import annotations

import types

import pytest

from capibara.inference.engine.placement import own_chips
from capibara.inference.engine.requests.stream import Finish
from capibara.multihost import hosts
from capibara.strategies.answering import Answerer, Finished
from capibara.strategies.generating import Generator, Prompt
from capibara.strategies.grpo import Grpo


class Documents(list):
    """Prompts without records."""

    def record(self, number):
        return {}


@pytest.mark.parametrize("others, want", [([60, 95], 60), ([99, 98], 93), ([99, None], None)])
def test_the_fullest_device_of_all_processes_counts_beside_the_train_step(others, want, monkeypatch):
    run = types.SimpleNamespace(step_temp_bytes=7)
    monkeypatch.setattr(own_chips, "free_bytes", lambda reserved, devices: 100 - reserved)
    monkeypatch.setattr(hosts, "gathered", lambda own: [others[0], own, others[1]])
    generator = object.__new__(Generator)
    generator._run, generator._devices = run, ()
    assert generator._free_bytes() == want


@pytest.mark.parametrize(("weights", "total"), [(None, 3.0 + 5.0), ((1.0, -2.0), 3.0 - 10.0)])
def test_rewards_are_summed_by_their_weights(weights, total):
    answerer = object.__new__(Answerer)
    answerer._grpo = Grpo(rewards=(lambda *_: 3, lambda *_: 5.0), reward_weights=weights)
    answerer._documents = {"train": Documents(["question"])}
    said = types.SimpleNamespace(
        **dict(text="so", tokens=[7, 8], drawn=[-1.0, -2.0], end=None, end_drawn=None, finish=Finish.LENGTH)
    )
    answer = answerer._answer("train", Prompt(0, 0, [1, 2]), Finished(said))
    assert answer.reward == total and answer.parts == (3.0, 5.0)
