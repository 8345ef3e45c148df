"""Whose chips answer: where parameters fit is found alike on all processes, which else would wait for each other for ever."""

from __future__ import annotations

import types

import pytest

from capibara.inference.engine.placement import own_chips
from capibara.multihost import hosts
from capibara.strategies.generating import Generator


@pytest.mark.parametrize("others, want", [([60, 95], 60), ([99, 98], 93), ([99, None], None)])
def test_the_fullest_device_of_all_processes_counts_beside_the_train_step(others, want, monkeypatch):
    run = types.SimpleNamespace(step_temp_bytes=7)
    monkeypatch.setattr(own_chips, "free_bytes", lambda reserved, devices: 100 - reserved)
    monkeypatch.setattr(hosts, "gathered", lambda own: [others[0], own, others[1]])
    generator = object.__new__(Generator)
    generator._run, generator._devices = run, ()
    assert generator._free_bytes() == want
