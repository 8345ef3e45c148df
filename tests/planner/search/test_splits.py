"""A slice is split between training and drawing: what fits, which part is chosen, and what is refused."""

from __future__ import annotations

import dataclasses
import math

import pytest

from capibara import config
from capibara.cli.composition.inspected_run import run_of_gin
from capibara.core.types import UserError
from capibara.planner.hardware import slices
from capibara.planner.model import workload
from capibara.planner.search import automatic, ranking, serving, splits
from capibara.planner.search.ranking import Question

FILES = ["models/smollm2_135m.gin", "tasks/prompts.gin", "runs/grpo.gin"]
GIVEN = ["MODEL_DIR=unused", "INIT_FROM=unused", "TOKENIZER=unused", "TRAIN_STEPS=10", "FILES=('a.jsonl',)"]
LARGE = ["models/smollm2_1.7b.gin", *FILES[1:]]


def run_of(*bindings, files=FILES):
    config.reset()
    config.parse(files, [*GIVEN, "REWARDS=(@exact_answer,)", *bindings])
    return run_of_gin()


def layout_of(name, *bindings, files=FILES, batch_size=64, headroom=0.06):
    run = run_of(*bindings, files=files)
    work = workload.of_run(run)
    return splits.search(run, slices.parse(name), work, Question(batch_size=batch_size, headroom=headroom))


def test_without_devices_that_draw_all_train():
    run = run_of()
    work, v5e = workload.of_run(run), slices.parse("v5e-8")
    layout = splits.search(run, v5e, work, Question(batch_size=64))
    assert layout.part == v5e and not layout.splits and not layout.bindings and layout.divided(run) is run
    assert layout.ranked == ranking.search(work, v5e, Question(batch_size=64))


@pytest.mark.parametrize("name", ["v5e-8", "v6e-8"])
def test_the_devices_that_are_left_are_planned_as_their_box_is(name):
    layout = layout_of(name, "Grpo.rollout_devices=2")
    (split,) = layout.splits
    assert layout.part.shape == (2, 3) and {item.choice.devices for item in layout.ranked} == {6}
    assert layout.ranked[0].fits and split.ranked == layout.ranked and not layout.refused
    assert {item.choice.batch_size(split.work) for item in layout.ranked} == {64}
    assert (split.engine.devices, split.engine.tensor, split.engine.data) == (2, 1, 2)
    assert split.loss.rollout_devices == 2 and (split.rollout.tensor, split.rollout.data) == (1, 2)


def test_the_tensor_axis_is_the_smallest_whose_bytes_fit():
    axes, sizes = [], []
    for slots in (16, 32, 64):
        layout = layout_of(
            "v5e-8", "Grpo.rollout_devices=4", f"rollout/EngineConfig.slots={slots}", files=LARGE, batch_size=64
        )
        engine = layout.splits[0].engine
        axes.append((engine.tensor, engine.data))
        sizes.append(engine.bytes)
        whole = (
            layout.splits[0].loss.with_rollouts(4, 1, 4).rollout_arrays(layout.splits[0].work.model, run_of().dataset)
        )
        assert engine.bytes == pytest.approx(sum(item.bytes for item in whole) / engine.tensor, rel=1e-6)
        assert engine.bytes <= engine.limit_bytes == 0.9 * slices.parse("v5e-8").chip.device_usable_hbm_bytes
    assert axes == [(1, 4), (2, 2), (2, 2)] and 2 * sizes[1] > engine.limit_bytes


def test_less_may_be_used_than_the_engine_asks_for():
    first, second = (layout_of("v5e-8", "Grpo.rollout_devices=4", headroom=x).splits[0].engine for x in (0.06, 0.5))
    assert second.limit_bytes == first.limit_bytes / 0.9 * 0.5


def test_axes_that_the_run_sets_stay():
    engine = layout_of("v5e-8", "Grpo.rollout_devices=6", "rollout/ServingMesh.tensor=3").splits[0].engine
    assert (engine.tensor, engine.data) == (3, 2)
    engine = layout_of("v5e-8", "Grpo.rollout_devices=6", "rollout/ServingMesh.data=1").splits[0].engine
    assert (engine.tensor, engine.data) == (1, 1)


def test_slots_are_shared_by_as_many_groups_as_they_divide_by():
    engine = layout_of("v5e-8", "Grpo.rollout_devices=6").splits[0].engine
    assert (engine.tensor, engine.data) == (1, 2)  # 16 slots are no multiple of 6, and 3 chips of a 2x4 no box
    engine = layout_of("v5e-8", "Grpo.rollout_devices=6", "rollout/EngineConfig.slots=12").splits[0].engine
    assert (engine.tensor, engine.data) == (1, 6)


def test_drawing_takes_the_decode_steps_that_the_serving_planner_predicts():
    (split,) = layout_of("v5e-8", "Grpo.rollout_devices=4").splits
    quarter = slices.parse("v5e-4")
    engine = serving.Engine(length=768, cache_dtype="bfloat16", slots=16)
    assert split.engine.step_s == serving.predict(split.work.model, quarter, 1, engine, 0.0).step_s
    (small,) = layout_of("v5e-8", "Grpo.rollout_devices=4", "rollout/EngineConfig.cache_dtype='int8'").splits
    engine = dataclasses.replace(engine, cache_dtype="int8")
    assert (
        small.engine.step_s == serving.predict(split.work.model, quarter, 1, engine, 0.0).step_s != split.engine.step_s
    )
    assert split.rollout.answers == 64 and split.decode_steps == 64 // 16 * 512
    flops = 2 * 64 * 256 * split.work.model.param_count
    assert split.prompts_s == pytest.approx(flops / (4 * 0.6 * quarter.chip.device_flops()), rel=0.05)
    assert split.draw_s == split.decode_steps * split.engine.step_s + split.prompts_s
    assert split.train_s == split.ranked[0].cost.step_s
    (longer,) = layout_of("v5e-8", "Grpo.rollout_devices=4", "MINI_BATCHES=2", "Grpo.updates=3").splits
    assert longer.decode_steps == 2 * split.decode_steps and longer.train_s == 6 * longer.ranked[0].cost.step_s
    (partial,) = layout_of("v5e-8", "Grpo.rollout_devices=4", batch_size=72).splits
    assert partial.decode_steps == 5 * 512  # the last slots are not full


def test_a_rollout_takes_as_long_as_the_slower_half_or_both_where_they_wait_for_each_other():
    (beside,) = layout_of("v5e-8", "Grpo.rollout_devices=4").splits
    assert beside.period_s == max(beside.draw_s, beside.train_s) == beside.draw_s
    (in_turn,) = layout_of("v5e-8", "Grpo.rollout_devices=4", "Grpo.max_staleness=0").splits
    assert in_turn.period_s == beside.draw_s + beside.train_s


def test_each_half_is_faster_on_more_devices():
    few, more = (layout_of("v6e-8", f"Grpo.rollout_devices={count}").splits[0] for count in (2, 4))
    assert more.draw_s < few.draw_s and more.train_s != few.train_s
    less, most = (layout_of("v6e-8", f"Grpo.rollout_devices={count}").splits[0] for count in (6, 4))
    assert most.train_s < less.train_s


def test_the_division_with_the_least_time_for_an_answer_is_chosen():
    layout = layout_of("v6e-8", "Grpo.rollout_devices=-1")
    assert splits.divisions(slices.parse("v6e-8")) == [2, 4, 6]
    assert sorted(item.engine.devices for item in layout.splits) == [2, 4, 6]
    periods = [item.period_s for item in layout.splits]
    assert periods == sorted(periods) and layout.splits[0].engine.devices == 4
    alone = layout_of("v6e-8", "Grpo.rollout_devices=4")
    assert layout.ranked == alone.ranked and layout.bindings == alone.bindings and layout.part == alone.part
    assert layout.divided(run_of("Grpo.rollout_devices=-1")).loss.rollout_devices == 4


def test_divisions_that_cannot_be_are_listed_with_the_reason():
    layout = layout_of("v5e-8", "Grpo.rollout_devices=-1", "rollout/ServingMesh.data=4")
    assert [item.engine.devices for item in layout.splits] == [4]
    assert sorted(layout.refused) == [2, 6] and "must divide Grpo.rollout_devices (2)" in layout.refused[2]


def test_plans_in_another_order_stay_in_their_division():
    layout = layout_of("v6e-8", "Grpo.rollout_devices=-1")
    last = layout.ranked[1]
    again = layout.ranked_again([last])
    assert again.splits[0].train_s == last.cost.step_s and again.ranked == [last]
    assert again.splits[1:] == layout.splits[1:] and again.bindings == layout.bindings


@pytest.mark.parametrize(
    ("name", "bindings", "files", "message"),
    [
        (
            "v5e-8",
            ["Grpo.rollout_devices=3"],
            FILES,
            r"v5e-8 \(2x4\) has no box of 5 devices .* try Grpo.rollout_devices = 2",
        ),
        (
            "v5e-8",
            ["Grpo.rollout_devices=7"],
            FILES,
            "no box of 1 devices .* of 7 that draw, .*: try Grpo.rollout_devices = 6",
        ),
        ("v5e-8", ["Grpo.rollout_devices=8"], FILES, "must be below the 8 devices of the run: try 4"),
        ("v5e-16", ["Grpo.rollout_devices=4"], FILES, "v5e-16 has 4 hosts with a process each: .*, try v5e-8$"),
        ("2xv5e-8", ["Grpo.rollout_devices=-1"], FILES, "2xv5e-8 has 2 hosts with a process each: .*, try v5e-8$"),
        ("v5e-1", ["Grpo.rollout_devices=-1"], FILES, "v5e-1 has no two parts: set Grpo.rollout_devices = 0"),
        (
            "v5e-8",
            ["Grpo.rollout_devices=4", "rollout/ServingMesh.tensor=2"],
            FILES,
            r"^ServingMesh.tensor \(2\) is no mesh of the 4 devices that draw, on which the model's tensor axis may be 1: leave",
        ),
        (
            "v5e-8",
            ["Grpo.rollout_devices=2", "rollout/EngineConfig.slots=256"],
            LARGE,
            r"with tensor=2 each of these devices needs [\d.]+ GiB \(engine's parameters .*, of which 14.18 may be used on v5e: "
            "try Grpo.rollout_devices = 4, or fewer EngineConfig.slots$",
        ),
        (
            "v5e-8",
            ["Grpo.rollout_devices=2", "rollout/EngineConfig.slots=64", "rollout/ServingMesh.tensor=1"],
            LARGE,
            "may be used on v5e: try ServingMesh without tensor and data, or fewer EngineConfig.slots$",
        ),
        (
            "v5e-8",
            ["Grpo.rollout_devices=-1", "rollout/EngineConfig.slots=1024"],
            LARGE,
            "^Grpo.rollout_devices is -1, and no division of v5e-8 works: with 2 that draw: .*; with 4 that draw: .*; with 6 that",
        ),
        (
            "v5e-8",
            ["Grpo.rollout_devices=6", "rollout/EngineConfig.slots=30"],
            LARGE,
            "no plan fits 2 of the 8 devices of v5e-8: the leanest .*: rollout_devices = 4, or use a smaller --batch_size$",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_the_fix(name, bindings, files, message):
    with pytest.raises(UserError, match=message) as error:
        layout_of(name, *bindings, files=files)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("bindings", [[], ["Grpo.rollout_devices=4"], ["Grpo.rollout_devices=-1"]])
@pytest.mark.parametrize(("batch_size", "multiple"), [(4, 8), (20, 16)])
def test_a_batch_of_parts_of_groups_is_refused(bindings, batch_size, multiple):
    message = (
        rf"batch_size \({batch_size}\) must be a multiple of the 8 rows that @Grpo\(\) has of a prompt: try {multiple}$"
    )
    with pytest.raises(UserError, match=message):
        layout_of("v6e-8", *bindings, batch_size=batch_size)


def test_hosts_are_counted_before_a_number_of_devices_is_proposed():
    with pytest.raises(UserError, match="v5e-16 has 4 hosts with a process each: .*, try v5e-8$"):
        splits.training_part(run_of("Grpo.rollout_devices=-1"), slices.parse("v5e-16"))


def test_the_way_out_that_is_named_fits():
    assert layout_of("v5e-8", "Grpo.rollout_devices=4", "rollout/EngineConfig.slots=30", files=LARGE).ranked[0].fits


def test_a_run_that_names_its_slice_gets_both_halves():
    run, line = automatic.planned(run_of("Grpo.rollout_devices=-1", "Plan.slice='v6e-8'"))
    assert math.prod(run.plan.mesh_shape(4).values()) == 4 and run.plan.slice == "v6e-8"
    assert (run.loss.rollout_devices, run.loss.mesh.tensor, run.loss.mesh.data) == (4, 1, 4)
    assert "; 4 of the devices draw, tensor=1 x data=4: predicted" in line
    assert splits.training_part(run, slices.parse("v6e-8")).devices == 4
    assert automatic.planned(run) == (run, "")
    assert dataclasses.replace(run, plan=run_of().plan, loss=run_of().loss) == run_of()
