"""The ranking against a brute-force search: legal meshes, the fields that it keeps, and errors if nothing fits."""

import dataclasses

import jax
import pytest
from cases import DENSE, EXPERTS, PAIRS, V5E, work_of

from capibara import sharding
from capibara.core.types import UserError
from capibara.models import api
from capibara.planner.hardware import slices
from capibara.planner.model import cost, memory
from capibara.planner.model.choice import Choice
from capibara.planner.search import ranking
from capibara.planner.search.ranking import Goal, Question
from capibara.sharding import MESH_AXES, Remat, RematPolicy


@pytest.mark.parametrize("config", [DENSE, EXPERTS, PAIRS], ids=["dense", "experts", "pairs"])
def test_every_mesh_that_is_found_can_be_made(config):
    work, model = work_of(config), api.build(config)
    found = list(ranking.meshes(work, slices.parse("cpu-8")))
    assert len(found) > 10
    for sizes in found[:: max(1, len(found) // 8)]:
        plan = Choice(sizes=sizes, rows=8, pipeline_microbatches=8).plan(work)
        mesh = sharding.make_mesh(plan, jax.devices())
        sharding.shardings(mesh, plan.rules, model.axes, model.abstract_params)


def test_the_first_choice_is_the_best_of_all(monkeypatch):
    """Every mesh, rows and recomputation by brute force: none that fits is faster."""
    work = work_of(length=4096)
    question = Question(batch_size=256)
    best = ranking.search(work, V5E, question)[0]
    limit = V5E.chip.device_usable_hbm_bytes * (1 - question.headroom)
    fastest = 0.0
    for name in ("_MOST_TENSOR", "_MOST_CONTEXT", "_MOST_STAGES"):
        monkeypatch.setattr(ranking, name, 1024)
    for sizes in ranking.meshes(work, V5E):
        shards = Choice(sizes=sizes, rows=1).batch_shards(work)
        stages = dict(zip(MESH_AXES, sizes))["stage"]
        for accumulation in (1, 2, 4, 8, 16, 32, 64):
            rows = 256 // shards // accumulation
            if not rows or rows * shards * accumulation != 256 or rows % stages:
                continue
            for remat in ranking.REMATS:
                parts = max(n for n in range(1, 4 * stages + 1) if rows % n == 0) if stages > 1 else 1
                one = Choice(
                    sizes=sizes, rows=rows, accumulation=accumulation, remat=remat, pipeline_microbatches=parts
                )
                if memory.memory(work, one, V5E.chip).peak <= limit:
                    fastest = max(fastest, cost.cost(work, one, V5E).tokens_per_s)
    assert best.cost.tokens_per_s >= 0.98 * fastest  # of plans that are within a percent the plainest is first


@pytest.mark.parametrize("config", [DENSE, EXPERTS, PAIRS], ids=["dense", "experts", "pairs"])
def test_the_largest_batch_is_the_largest_of_all_that_fit(config):
    wide = dataclasses.replace(config, embed_dim=2048, mlp_dim=8192)
    work = work_of(wide)
    ranked = ranking.search(work, slices.parse("v5e-16"), Question(goal=Goal.LARGEST_BATCH))
    assert ranked[0].fits
    assert ranked[0].choice.batch_size(work) == max(one.choice.batch_size(work) for one in ranked if one.fits)
    for sizes in ((1, 1, 16, 1, 1, 1), (1, 1, 4, 1, 1, 4), (1, 1, 8, 1, 2, 1)):
        of_mesh = [one.choice for one in ranked if one.choice.sizes == sizes and one.fits]
        most = max(of_mesh, key=lambda choice: choice.rows)
        more = dataclasses.replace(most, rows=most.rows + 1)
        assert memory.memory(work, more, V5E.chip, most_bytes=ranked[0].limit_bytes).peak > ranked[0].limit_bytes


@pytest.mark.parametrize("most, guess", [(1, 1), (1, 50), (7, 1), (31, 30), (100, 3), (100, 1000), (64, 64)])
def test_the_most_that_fits_is_found_from_any_guess(most, guess):
    asked = []
    assert ranking._most(lambda n: asked.append(n) or n <= most, 100, guess) == most
    assert len(asked) <= 14 and len(set(asked)) == len(asked)


def test_any_batch_fits_with_enough_accumulation():
    """The smallest plan has one row per device at a time, however many micro-batches that takes."""
    work = work_of(dataclasses.replace(DENSE, embed_dim=2048, num_layers=24, mlp_dim=8192))
    assert ranking.search(work, slices.parse("v5e-4"), Question(batch_size=4096))[0].fits


def test_fixed_axes_and_batches_are_kept():
    work = work_of()
    ranked = ranking.search(work, V5E, Question(batch_size=128, fixed=(("tensor", 4),)))
    assert all(one.choice.mesh["tensor"] == 4 and one.choice.batch_size(work) == 128 for one in ranked)
    with pytest.raises(
        UserError,
        match=r"no mesh of v5e-64 with tensor=3: the axes must divide its 64 devices: try axes that multiply to 2",
    ):
        ranking.search(work, V5E, Question(fixed=(("tensor", 3),)))
    with pytest.raises(
        UserError, match=r"batch_size \(3\) divides over no mesh of v5e-64 with fsdp=64: try a multiple of 64"
    ):
        ranking.search(work, V5E, Question(batch_size=3, fixed=(("fsdp", 64),)))


def test_what_does_not_fit_says_by_how_much_and_where_it_would():
    big = work_of(dataclasses.replace(DENSE, embed_dim=8192, num_layers=64, mlp_dim=32768, head_dim=128))
    slice_ = slices.parse("v5e-16")
    best = ranking.search(big, slice_)[0]
    assert not best.fits
    text = str(ranking.no_plan(best, big, slice_, Question()))
    assert "no plan fits v5e-16" in text and "v5e has 15.75 usable" in text and "use v5e-" in text and "\n" not in text


WIDE = dataclasses.replace(
    DENSE, embed_dim=4096, num_heads=32, num_kv_heads=8, mlp_dim=14336, num_layers=32, vocab_size=32768
)


def test_inputs_go_to_the_host_where_the_batch_fits_at_once_only_so():
    """Mistral 7B on v6e-8 with 48 rows of 8192: faster than more micro-batches."""
    work, slice_ = work_of(WIDE, length=8192), slices.parse("v6e-8")
    best = ranking.search(work, slice_, Question(batch_size=48))[0]
    without = tuple(remat for remat in ranking.REMATS if remat.kind is not Remat.OFFLOAD)
    other = ranking.search(work, slice_, Question(batch_size=48, remats=without))[0]
    assert best.choice.remat.kind is Remat.OFFLOAD and "layer_input" in best.choice.remat.names
    assert best.choice.accumulation < other.choice.accumulation
    assert best.cost.tokens_per_s > 1.05 * other.cost.tokens_per_s


def test_a_plan_needs_no_more_of_the_hosts_memory_than_there_is():
    work, slice_ = work_of(WIDE, length=8192), slices.parse("v6e-8")
    machine = slice_.machine
    small = dataclasses.replace(machine, memory_bytes=machine.chips * 20 * 2**30)
    chip = dataclasses.replace(slice_.chip, machines=(small,), machine_chips=small.chips)
    ranked = ranking.search(work, dataclasses.replace(slice_, chip=chip), Question())
    most = max(one.memory.host for one in ranked if one.fits)
    assert 10 * 2**30 < most <= 0.7 * 20 * 2**30
    assert max(one.memory.host for one in ranking.search(work, slice_, Question()) if one.fits) > most


def test_of_equal_plans_the_one_without_host_memory_is_first():
    inputs, full = RematPolicy(Remat.OFFLOAD, ("layer_input",)), RematPolicy(Remat.FULL)
    best = ranking.search(work_of(), V5E, Question(batch_size=64, remats=(inputs, full)))[0]
    assert best.choice.remat == full


def test_what_the_hosts_memory_lacks_is_named():
    work, slice_ = work_of(WIDE, length=8192), slices.parse("v6e-8")
    question = Question(
        batch_size=8 * 64, accumulation=1, remats=(RematPolicy(Remat.OFFLOAD, ("layer_input", "mlp_up")),)
    )
    best = ranking.search(work, slice_, question)[0]
    assert not best.fits
    with pytest.raises(UserError, match="in the host's memory, of which 117.3 GiB are for it: name fewer results"):
        raise ranking.no_plan(best, work, slice_, question)


def test_only_tpus_have_plans_that_offload_by_themselves():
    for name, offloads in (("h100-8", False), ("v6e-8", True)):
        ranked = ranking.search(work_of(), slices.parse(name), Question())
        assert any(one.choice.remat.kind is Remat.OFFLOAD for one in ranked) == offloads
    asked = Question(remats=(RematPolicy(Remat.OFFLOAD, ("query",)),))
    assert ranking.search(work_of(), slices.parse("h100-8"), asked)[0].fits
