"""The report of a split slice: which half waits, and the table of divisions."""

from __future__ import annotations

import dataclasses

from capibara.planner.report import halves
from tests.planner.search.test_splits import layout_of


def test_the_line_says_which_half_waits_and_how_long():
    layout = layout_of("v5e-8", "Grpo.rollout_devices=4")
    (split,) = layout.splits
    text = "\n".join(halves.lines(layout))
    assert (
        "4 of the 8 devices of v5e-8 train, the last 4 draw answers: ServingMesh.tensor = 1, ServingMesh.data = 4"
        in text
    )
    assert "64 answers of 512 tokens in 16 slots: 2048 decode steps of" in text and "measured" not in text
    share = 1 - split.train_s / split.draw_s
    assert f"training waits {share:.0%} of the" in text and "divisions" not in text and "idle" not in text
    slow = dataclasses.replace(split, engine=dataclasses.replace(split.engine, step_s=1e-6))
    assert halves.waits(slow).startswith(f"drawing waits {1 - slow.draw_s / slow.train_s:.0%} of the ")


def test_halves_that_wait_for_each_other_are_no_shares():
    layout = layout_of("v5e-8", "Grpo.rollout_devices=4", "Grpo.max_staleness=0")
    assert halves.waits(layout.splits[0]).startswith("each half waits for the other, since max_staleness is 0: ")


def test_the_table_has_all_divisions():
    layout = layout_of("v6e-8", "Grpo.rollout_devices=-1", "rollout/EngineConfig.slots=12")
    lines = [*halves.lines(layout)]
    table = lines[lines.index("  divisions of the slice, the best first, all figures predicted") + 1 :]
    assert [line.split()[:2] for line in table[1:]] == [
        [str(item.part.devices), str(item.engine.devices)] for item in layout.splits
    ]
    assert table[0].split()[:4] == ["train", "draw", "tensor", "data"] and len(table) == 4
    assert [float(line.split()[-1]) for line in table[1:]] == [round(64 / item.period_s, 1) for item in layout.splits]
    refused = layout_of("v6e-8", "Grpo.rollout_devices=-1", "rollout/ServingMesh.data=4")
    assert sum("must divide Grpo.rollout_devices" in line for line in halves.lines(refused)) == 2


def test_idle_devices_are_counted():
    text = "\n".join(halves.lines(layout_of("v5e-8", "Grpo.rollout_devices=6")))
    assert "4 of these are idle, beyond tensor x data, which shares 16 EngineConfig.slots" in text


def test_json_has_the_figures_of_the_lines():
    layout = layout_of("v6e-8", "Grpo.rollout_devices=-1", "rollout/ServingMesh.data=4")
    first, *refused = halves.as_json(layout)["splits"]
    (split,) = layout.splits
    assert first["rollout_devices"] == first["training_devices"] == 4 and (first["tensor"], first["data"]) == (1, 4)
    times = {name: getattr(split, name) for name in ("decode_steps", "prompts_s", "draw_s", "train_s", "period_s")}
    assert first["predicted"] == times | {"decode_step_s": split.engine.step_s}
    assert sum(first["engine_bytes"].values()) == split.engine.bytes < first["limit_bytes"]
    assert [item["rollout_devices"] for item in refused] == [2, 6] and all(item["refused"] for item in refused)
    assert halves.as_json(layout_of("v5e-8")) == {} and [*halves.lines(layout_of("v5e-8"))] == []
