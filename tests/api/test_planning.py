"""Plans from Python answer the question that was asked."""

from __future__ import annotations

import capibara as cb
from capibara.planner.hardware import slices


def test_what_was_asked_is_what_is_planned(folder):
    found = cb.plan(cb.model_config(f"{folder}/hf"), "v5e-4", length=64, batch_size=16, headroom=0.5, most=3)
    usable = slices.parse("v5e-4").chip.device_usable_hbm_bytes
    assert len(found) == 3 and {one.hbm_limit_bytes for one in found} == {usable * 0.5}
    assert {one.plan.batch_size for one in found} == {16} and all(one.fits for one in found)
