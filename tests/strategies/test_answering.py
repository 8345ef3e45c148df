"""Whose chips answer: where parameters fit is found alike on all processes, which else would wait for each other for ever."""

from __future__ import annotations

import types

import pytest

from capibara.inference import own_chips
from capibara.strategies.answering import Answerer
from capibara.training import hosts


@pytest.mark.parametrize("others, want", [([60, 95], 60), ([99, 98], 93), ([99, None], None)])
def test_the_fullest_device_of_all_processes_counts_beside_the_train_step(others, want, monkeypatch):
    about = types.SimpleNamespace(temp_size_in_bytes=7)
    run = types.SimpleNamespace(train_step=types.SimpleNamespace(memory_analysis=lambda: about))
    monkeypatch.setattr(own_chips, "free_bytes", lambda reserved=0: 100 - reserved)
    monkeypatch.setattr(hosts, "gathered", lambda own: [others[0], own, others[1]])
    answerer = object.__new__(Answerer)
    answerer._run = run
    assert answerer._free_bytes() == want
