"""A model is laid out by its run's plan, or over whatever devices there are; its answers are in one process."""

from __future__ import annotations

import jax
import pytest

from capibara.core.types import UserError
from capibara.evaluation.subject import open_subject

from .conftest import SMALL_ROWS


def test_the_plan_of_another_machine_gives_way(run_dir, tmp_path, subject):
    (tmp_path / "two.gin").write_text("Plan.fsdp = 2\nPlan.batch_size = 6\n")
    found = open_subject(run_dir, [str(tmp_path / "two.gin")], SMALL_ROWS[:1])
    assert found.mesh.shape["fsdp"] == 8 and found.trainer.plan.batch_size == 8
    assert {leaf.sharding.mesh.size for leaf in jax.tree.leaves(found.params)} == {8}
    assert found.about == {"model": run_dir, "step": 0, "weights": "raw"} | {"cache_dtype": "compute", "length": 64}
    with pytest.raises(UserError, match="needs 2 devices"):  # whoever says so now means it
        open_subject(run_dir, bindings=[*SMALL_ROWS, "Plan.fsdp = 2"])


def test_parts_are_made_once(subject):
    assert subject.engine is subject.engine and subject.scorer is subject.scorer and subject.slots == 8
