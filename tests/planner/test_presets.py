"""The plans in gin/slices/: what the file says is what was compiled, and what the planner still predicts."""

import json
import pathlib

import pytest

from capibara import config
from capibara.planner import memory, slices, workload
from capibara.planner.choice import of_plan
from capibara.training import trainer

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORDS = sorted((ROOT / "gin" / "slices").glob("*/*.json"))


def test_every_plan_has_its_record():
    plans = {path.with_suffix("") for path in (ROOT / "gin" / "slices").glob("*/*.gin")}
    assert RECORDS and plans == {path.with_suffix("") for path in RECORDS}


def records():
    """All of them; those of a slice's largest models alone in the short suite."""
    for path in RECORDS:
        short = path.stem in ("capibara_120b", "mixtral_8x7b")
        yield pytest.param(path, id=f"{path.parent.name}-{path.stem}", marks=() if short else pytest.mark.heavy)


@pytest.mark.parametrize("path", list(records()))
def test_a_plan_is_what_was_compiled(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    compiled = record["compiled"]
    assert compiled["fits"] and compiled["peak_bytes"] <= compiled["limit_bytes"] and record["versions"]["libtpu"]
    config.parse([f"slices/{path.parent.name}/{path.stem}.gin"], [], [])
    run = trainer.of_gin()
    slice_ = slices.parse(run.plan.slice)
    work = workload.of_run(run)
    choice = of_plan(run.plan, work, slice_.devices, run.optimizer.state_dtype)
    assert run.dataset.length == record["length"] and run.plan.batch_size == record["batch_size"]
    assert choice.mesh == record["mesh"] and choice.rows == record["rows"]
    assert choice.accumulation == record["accumulation"] and str(choice.remat.kind) == record["remat"]
    assert record["remat"] != "save" or list(choice.remat.names) == record["remat_names"]
    assert str(choice.state_dtype) == record["state_dtype"]
    predicted = memory.memory(work, choice, most_bytes=slice_.chip.device_usable_hbm_bytes)
    assert predicted.peak == pytest.approx(compiled["peak_bytes"], rel=0.15)
