"""Reports how a slice is split between training and drawing answers: lines, a table of divisions, and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from capibara.models import api
from capibara.objectives.loss import ResidentArrays
from capibara.planner.hardware.chips import GIB
from capibara.planner.model.units import seconds
from capibara.planner.model.workload import Run
from capibara.planner.search.splits import Layout, Split

_ROW = "  {:>7}{:>7}{:>8}{:>6}{:>11}{:>11}{:>11}{:>10}"
_COLUMNS = ("train", "draw", "tensor", "data", "draw time", "train time", "rollout", "answers/s")


def lines(layout: Layout) -> Iterator[str]:
    """The engine beside training, which half waits, and the other divisions if they were searched; nothing if all train."""
    if not layout.splits:
        return
    split = layout.splits[0]
    engine, rollout = split.engine, split.rollout
    yield (
        f"  {split.part.title} train, the last {engine.devices} draw answers: ServingMesh.tensor = {engine.tensor}, "
        f"ServingMesh.data = {engine.data}"
    )
    yield _bytes_line(engine.devices, engine.arrays)
    idle = engine.devices - engine.tensor * engine.data
    if idle:
        yield f"  {idle} of these are idle, beyond tensor x data, which shares {rollout.slots} EngineConfig.slots"
    yield (
        f"  predicted: {seconds(split.draw_s)} to draw a rollout, {rollout.answers} answers of {rollout.answer_tokens} tokens in "
        f"{rollout.slots} slots: {split.decode_steps} decode steps of {1e3 * engine.step_s:.2f} ms, {seconds(split.prompts_s)} for "
        "prompts, without rewards and environments"
    )
    steps = "a step" if rollout.steps == 1 else f"{rollout.steps} steps"
    yield f"  predicted: {seconds(split.train_s)} to train on it in {steps}; {waits(split)}"
    if len(layout.splits) + len(layout.refused) > 1:
        yield from _table(layout)


def engine_lines(run: Run) -> list[str]:
    """The bytes on each device that draws answers and does not train, for a run whose plan is set; none: all train."""
    if run.loss is None or not run.loss.rollout_devices:
        return []
    arrays = run.loss.rollout_arrays(api.build(run.model), run.dataset)
    return [_bytes_line(run.loss.rollout_devices, arrays)]


def _bytes_line(devices: int, arrays: Sequence[ResidentArrays]) -> str:
    total, parts = sum(item.bytes for item in arrays), (f"{item.name} {item.bytes / GIB:.2f}" for item in arrays)
    return f"  on each of the {devices} that draw answers {total / GIB:.2f} GiB: {', '.join(parts)}"


def waits(split: Split) -> str:
    """Which half waits for the other, and for how much of the time."""
    if split.rollout.in_turn:
        return f"each half waits for the other, since max_staleness is 0: {seconds(split.period_s)} a rollout"
    half = "training" if split.draw_s > split.train_s else "drawing"
    share = 1 - min(split.draw_s, split.train_s) / split.period_s
    return f"{half} waits {share:.0%} of the {seconds(split.period_s)} from one rollout to the next"


def as_json(layout: Layout) -> dict[str, Any]:
    """All divisions as plain values, the best first; empty if all devices train."""
    if not layout.splits:
        return {}
    refused = [{"rollout_devices": devices, "refused": why} for devices, why in layout.refused.items()]
    return {"splits": [*map(_split_json, layout.splits), *refused]}


def _table(layout: Layout) -> Iterator[str]:
    yield "  divisions of the slice, the best first, all figures predicted"
    yield _ROW.format(*_COLUMNS)
    for split in layout.splits:
        times = map(seconds, (split.draw_s, split.train_s, split.period_s))
        engine = split.engine
        rate = f"{split.rollout.answers / split.period_s:.1f}"
        yield _ROW.format(split.part.devices, engine.devices, engine.tensor, engine.data, *times, rate)
    for devices, why in layout.refused.items():
        yield f"  not with {devices} that draw: {why}"


def _split_json(split: Split) -> dict[str, Any]:
    engine = split.engine
    return {
        "rollout_devices": engine.devices,
        "training_devices": split.part.devices,
        "plan": split.ranked[0].choice.describe(),
        "tensor": engine.tensor,
        "data": engine.data,
        "engine_bytes": {item.name: item.bytes for item in engine.arrays},
        "limit_bytes": engine.limit_bytes,
        "predicted": {
            "decode_step_s": engine.step_s,
            "decode_steps": split.decode_steps,
            "prompts_s": split.prompts_s,
            "draw_s": split.draw_s,
            "train_s": split.train_s,
            "period_s": split.period_s,
        },
    }
