"""`capibara train --profile`: what it binds, and what it refuses."""

from __future__ import annotations

import pytest

from capibara import config
from capibara.cli import train as verb
from capibara.cli.composition import training_run
from capibara.core.types import UserError
from capibara.training.loop import Outcome
from capibara.training.profiling.profile import Profile
from capibara.training.trainer import Trainer


def test_profile_binds_the_steps(monkeypatch, tmp_path):
    found = []

    def run(files, bindings, paths, emulate, **options):
        config.parse(files, bindings, paths)
        found.append(config.build(Trainer).profile)
        return Outcome(1, "finished")

    monkeypatch.setattr(training_run, "train_gin", run)
    common = ["--gin_file=quickstart.gin", f"--gin.MODEL_DIR={tmp_path}"]
    assert verb.main([*common, "--profile=100:102"]) == 0 and verb.main(common) == 0
    assert found == [Profile(start=100, stop=102), None]


@pytest.mark.parametrize("steps", ["100", "a:b", "5:", "-1:3", "1:2:3", "9" * 5000 + ":1", "", ":"])
def test_profile_needs_two_steps(steps):
    with pytest.raises(UserError, match=r"--profile .* must be START:STOP"):
        verb.main(["--gin_file=quickstart.gin", f"--profile={steps}"])
