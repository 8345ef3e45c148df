"""What the dashboard asks of a run folder: the planner's prediction for a run that draws beside training."""

from __future__ import annotations

import os

from capibara import config
from capibara.cli.composition import inspected_run, run_facts
from capibara.planner.search import automatic
from capibara.training import run_folder
from tests.planner.search.test_splits import run_of


def test_the_prediction_is_of_the_devices_that_train(monkeypatch):
    chosen, _ = automatic.planned(run_of("Grpo.rollout_devices=2", "BATCH_SIZE=48", "GROUP=8", "Plan.slice='v6e-8'"))
    monkeypatch.setenv("JAX_PLATFORMS", os.environ["JAX_PLATFORMS"])  # `plan` sets it
    monkeypatch.setattr(run_folder, "recorded", lambda folder: None)
    monkeypatch.setattr(config, "parse", lambda *_: None)
    monkeypatch.setattr(inspected_run, "run_of_gin", lambda: chosen)
    facts = run_facts.plan("run")
    assert facts["plan"]["slice"] == "6 of the 8 devices of v6e-8" and facts["predicted"]["step_s"] > 0
