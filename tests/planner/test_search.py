"""The planner's numbers against counts by hand, and its ranking against a plain search over everything."""

import dataclasses
import math

import jax
import pytest

from capibara import sharding
from capibara.models import api
from capibara.models.moe import Moe
from capibara.optim import Optimizer, StateDtype
from capibara.planner import cost, memory, report, search, slices, verify, workload
from capibara.planner.choice import Choice, of_plan
from capibara.planner.search import Objective, Question
from capibara.sharding import MESH_AXES, Plan, Remat, RematPolicy
from capibara.training import state as states
from capibara.types import UserError

DENSE = api.DecoderConfig(
    vocab_size=1024, embed_dim=512, num_layers=4, num_heads=8, num_kv_heads=4, mlp_dim=1024, head="separate"
)
EXPERTS = dataclasses.replace(DENSE, moe=Moe(num_experts=8, top_k=2))
PAIRS = api.EncoderDecoderConfig(
    vocab_size=1024, embed_dim=512, num_layers=2, num_encoder_layers=4, num_heads=8, mlp_dim=1024
)
V5E = slices.parse("v5e-64")


def work_of(config=DENSE, *, optimizer=Optimizer(), length=2048, **options):
    encoder = 1024 if isinstance(config, api.EncoderDecoderConfig) else None
    return workload.describe(api.build(config), optimizer, length=length, encoder_length=encoder, **options)


def choice_of(rows=1, remat="none", accumulation=1, names=RematPolicy.names, **mesh):
    sizes = tuple(mesh.get(axis, 1) for axis in MESH_AXES)
    return Choice(sizes=sizes, rows=rows, accumulation=accumulation, remat=RematPolicy(Remat(remat), names))


@pytest.mark.parametrize("mesh", [dict(fsdp=8), dict(fsdp=2, tensor=4), dict(fsdp=2, expert=2, tensor=2)], ids=str)
@pytest.mark.parametrize("dtype", list(StateDtype))
@pytest.mark.parametrize("config", [DENSE, EXPERTS, PAIRS], ids=["dense", "experts", "pairs"])
def test_the_state_has_the_bytes_that_its_shards_have(config, dtype, mesh):
    optimizer = Optimizer(state_dtype=dtype)
    model = api.build(config)
    plan = Plan(batch_size=8, **mesh)
    emulated = sharding.make_mesh(plan, jax.devices())
    tx = optimizer.build(10, model.axes)
    shardings = states.state_shardings(model, tx, emulated, plan.rules, ema=False)
    state = states.abstract_state(model, tx, shardings, ema=False)
    real = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves((state.params, state.opt_state))
    )
    predicted = memory.memory(work_of(config, optimizer=optimizer), dataclasses.replace(
        choice_of(**mesh), state_dtype=dtype
    ))
    # Scales of 8-bit blocks that do not divide stay whole.
    assert predicted.parameters + predicted.optimizer == pytest.approx(real, rel=0.02 if dtype == "int8" else 1e-4)


def test_flops_are_six_a_weight_and_recomputation_is_the_forward_pass_again():
    work = work_of()
    plain, full = (cost.step_flops(work, choice_of(remat=remat, fsdp=8)) for remat in ("none", "full"))
    weights = sum(stack.weights.total() for stack in work.stacks)
    tokens = 8 * 2048 / 8
    assert plain.forward == pytest.approx(2 * weights * tokens)
    assert plain.forward + plain.backward == pytest.approx(6 * weights * tokens)
    assert plain.recompute == 0 < full.recompute < full.forward
    assert full.model == plain.model == pytest.approx(work.model.flops_per_token(2048) * tokens)


def test_what_is_kept_by_name_is_not_recomputed():
    work = work_of()
    again = {
        names: cost.recomputed(work, choice_of(remat="save", names=names, fsdp=8))
        for names in [("query",), ("query", "key", "value"), ("query", "key", "value", "attention")]
    }
    matmuls, attention = zip(*again.values())
    assert matmuls[0] > matmuls[1] == matmuls[2] and attention == (1.0, 1.0, 0.0)


def test_experts_cost_what_a_token_meets():
    dense, experts = (cost.step_flops(work_of(c), choice_of(fsdp=8)) for c in (DENSE, EXPERTS))
    attention_weights = 4 * 512 * (2 * 8 + 2 * 4) * 64
    mlp = 4 * 3 * 512 * 1024
    router = 4 * 512 * 8
    assert dense.forward / experts.forward == pytest.approx((attention_weights + mlp) / (attention_weights + 2 * mlp + router), rel=0.01)


def test_more_recomputation_keeps_less_and_more_rows_need_more():
    work = work_of()
    peaks = [memory.memory(work, choice_of(rows=8, remat=remat, fsdp=8)).peak for remat in ("none", "minimal", "full")]
    assert peaks == sorted(peaks, reverse=True)
    assert memory.memory(work, choice_of(rows=16, fsdp=8)).peak > memory.memory(work, choice_of(rows=8, fsdp=8)).peak


def test_offloaded_results_are_in_the_hosts_memory():
    work = work_of()
    kept, away = (memory.memory(work, choice_of(rows=8, remat=remat, fsdp=8)) for remat in ("save", "offload"))
    assert kept.host == 0 < away.host == pytest.approx(kept.saved - away.saved)


@pytest.mark.parametrize("config", [DENSE, EXPERTS, PAIRS], ids=["dense", "experts", "pairs"])
def test_every_mesh_that_is_found_can_be_made(config):
    work, model = work_of(config), api.build(config)
    found = list(search.meshes(work, slices.parse("cpu-8")))
    assert len(found) > 10
    for sizes in found[:: max(1, len(found) // 8)]:
        plan = Choice(sizes=sizes, rows=8, pipeline_microbatches=8).plan(work)
        mesh = sharding.make_mesh(plan, jax.devices())
        sharding.shardings(mesh, plan.rules, model.axes, model.abstract_params)


def test_the_first_choice_is_the_best_of_all(monkeypatch):
    """Every mesh, rows and recomputation by brute force: none that fits is faster."""
    work = work_of(length=4096)
    question = Question(batch_size=256)
    best = search.search(work, V5E, question)[0]
    limit = V5E.chip.device_usable_hbm_bytes * (1 - question.headroom)
    fastest = 0.0
    for name in ("_MOST_TENSOR", "_MOST_CONTEXT", "_MOST_STAGES"):
        monkeypatch.setattr(search, name, 1024)
    for sizes in search.meshes(work, V5E):
        shards = Choice(sizes=sizes, rows=1).batch_shards(work)
        stages = dict(zip(MESH_AXES, sizes))["stage"]
        for accumulation in (1, 2, 4, 8, 16, 32, 64):
            rows = 256 // shards // accumulation
            if not rows or rows * shards * accumulation != 256 or rows % stages:
                continue
            for remat in search.REMATS:
                parts = max(n for n in range(1, 4 * stages + 1) if rows % n == 0) if stages > 1 else 1
                one = Choice(sizes=sizes, rows=rows, accumulation=accumulation, remat=remat, pipeline_microbatches=parts)
                if memory.memory(work, one).peak <= limit:
                    fastest = max(fastest, cost.cost(work, one, V5E).tokens_per_s)
    assert best.cost.tokens_per_s >= 0.98 * fastest  # of plans that are within a percent the plainest is first


@pytest.mark.parametrize("config", [DENSE, EXPERTS, PAIRS], ids=["dense", "experts", "pairs"])
def test_the_largest_batch_is_the_largest_of_all_that_fit(config):
    wide = dataclasses.replace(config, embed_dim=2048, mlp_dim=8192)
    work = work_of(wide)
    ranked = search.search(work, slices.parse("v5e-16"), Question(objective=Objective.LARGEST_BATCH))
    assert ranked[0].fits
    assert ranked[0].choice.batch_size(work) == max(one.choice.batch_size(work) for one in ranked if one.fits)
    for sizes in ((1, 1, 16, 1, 1, 1), (1, 1, 4, 1, 1, 4), (1, 1, 8, 1, 2, 1)):
        of_mesh = [one.choice for one in ranked if one.choice.sizes == sizes and one.fits]
        if of_mesh:
            most = max(of_mesh, key=lambda choice: choice.rows)
            more = dataclasses.replace(most, rows=most.rows + 1)
            assert memory.memory(work, more, most_bytes=ranked[0].limit_bytes).peak > ranked[0].limit_bytes


@pytest.mark.parametrize("most, guess", [(1, 1), (1, 50), (7, 1), (31, 30), (100, 3), (100, 1000), (64, 64)])
def test_the_most_that_fits_is_found_from_any_guess(most, guess):
    asked = []
    assert search._most(lambda n: asked.append(n) or n <= most, 100, guess) == most
    assert len(asked) <= 14 and len(set(asked)) == len(asked)


def test_a_pipeline_gathers_at_every_tick():
    """All its weights pass through each stage once for each part of the rows, and for the bubbles."""
    work = work_of(length=4096)
    plain, staged = (
        dataclasses.replace(choice_of(rows=16, remat="full", **mesh), pipeline_microbatches=parts)
        for mesh, parts in ((dict(fsdp=64), 1), (dict(stage=4, fsdp=16), 16))
    )
    assert (plain.ticks, staged.ticks) == (1, 19)
    gathered = [
        sum(c.bytes for c in cost.cost(work, choice, V5E).collectives if c.name == "gather weights") for choice in (plain, staged)
    ]
    assert gathered[1] / gathered[0] == pytest.approx(19 / 4, rel=0.01)


def test_why_a_plan_lost_is_what_it_has_more_of():
    work = work_of(length=4096)
    walk = verify.unproven(search.search(work, V5E, Question(batch_size=256)), Question(batch_size=256))
    best = walk.ranked[0]
    slower = next(one for one in walk.ranked if one.choice.mesh["tensor"] == 4 and one.choice.remat == best.choice.remat)
    assert "ICI in the way of compute" in report.why_not(slower, walk, work)


def test_any_batch_fits_with_enough_accumulation():
    """The leanest plan has a row a device at a time, however many micro-batches that takes."""
    work = work_of(dataclasses.replace(DENSE, embed_dim=2048, num_layers=24, mlp_dim=8192))
    assert search.search(work, slices.parse("v5e-4"), Question(batch_size=4096))[0].fits


def test_fixed_axes_and_batches_are_kept():
    work = work_of()
    ranked = search.search(work, V5E, Question(batch_size=128, fixed=(("tensor", 4),)))
    assert all(one.choice.mesh["tensor"] == 4 and one.choice.batch_size(work) == 128 for one in ranked)
    with pytest.raises(UserError, match=r"no mesh of v5e-64 with tensor=3: the axes must divide its 64 devices: try axes that multiply to 2"):
        search.search(work, V5E, Question(fixed=(("tensor", 3),)))
    with pytest.raises(UserError, match=r"batch_size \(3\) divides over no mesh of v5e-64 with fsdp=64: try a multiple of 64"):
        search.search(work, V5E, Question(batch_size=3, fixed=(("fsdp", 64),)))


def test_what_does_not_fit_says_by_how_much_and_where_it_would():
    big = work_of(dataclasses.replace(DENSE, embed_dim=8192, num_layers=64, mlp_dim=32768, head_dim=128))
    slice_ = slices.parse("v5e-16")
    best = search.search(big, slice_)[0]
    assert not best.fits
    text = str(search.no_plan(best, big, slice_, Question()))
    assert "no plan fits v5e-16" in text and "v5e has 15.75 usable" in text and "use v5e-" in text and "\n" not in text


def test_a_plan_in_gin_is_the_plan(tmp_path):
    from capibara import config

    work = work_of()
    best = search.search(work, V5E, Question(batch_size=256))[0]
    path = tmp_path / "plan.gin"
    path.write_text(report.gin(verify.unproven([best], Question()), work, V5E))
    config.parse([str(path)], [], [])
    plan = config.build(Plan)
    assert of_plan(plan, work, V5E.devices) == best.choice and plan.slice == "v5e-64"


def test_explained_terms_add_up():
    work = work_of()
    best = search.search(work, V5E)[0]
    parts = best.memory
    backward = parts.state + parts.saved + parts.casts + parts.summed + parts.gradients + parts.layer + parts.weights
    assert parts.moments["backward"] == pytest.approx(backward)
    text = "\n".join(report.explain(best, work, V5E))
    assert f"{parts.saved / 2**30:.3f}" in text and f"{best.cost.step_s:.4f}" in text
    plain = report.as_json(best, work, V5E, tokens=1e12, usd=1.0)
    assert plain["predicted"]["usd"] == pytest.approx(64 * 24 * plain["predicted"]["days"])


def test_the_step_is_the_sum_of_what_explain_prints():
    """compute or the like, links, what blocks; stretched by the bubble; then the update."""
    work = work_of()
    for mesh in (dict(fsdp=64), dict(fsdp=16, tensor=4), dict(stage=4, fsdp=16), dict(data=8, fsdp=8)):
        c = cost.cost(work, dataclasses.replace(choice_of(rows=8, **mesh), pipeline_microbatches=8), V5E)
        busy = max(c.compute_s, c.hbm_s, c.host_s) + cost.EXPOSED * c.links_s + c.blocking_s
        assert c.step_s == pytest.approx(busy / (1 - c.bubble) + c.update_s)
        assert (c.bubble > 0) == ("stage" in mesh) and (c.blocking_s > 0) == (mesh != dict(fsdp=64))


def test_offloaded_activations_cross_pcie_twice():
    work = work_of()
    choice = choice_of(rows=8, remat="offload", fsdp=64)
    host = memory.memory(work, choice).host
    assert host > 0 and cost.cost(work, choice, V5E).host_s == pytest.approx(2 * host / V5E.chip.pcie_bytes_per_s)


def test_experts_are_uneven_only_across_devices_and_without_a_capacity():
    capacity = dataclasses.replace(EXPERTS, moe=Moe(num_experts=8, top_k=2, dispatch="capacity", capacity_factor=1.25))
    shared, alone = choice_of(fsdp=8, expert=8), choice_of(fsdp=64)
    assert cost.imbalance(work_of(EXPERTS), shared) > 1 == cost.imbalance(work_of(EXPERTS), alone)
    assert cost.imbalance(work_of(capacity), shared) == cost.imbalance(work_of(), alone) == 1


def test_the_cache_of_a_row_is_its_keys_and_values():
    assert memory.kv_cache_bytes(work_of(), choice_of()) == 4 * 2048 * 2 * 4 * 64 * 2  # bfloat16


def test_scores_without_a_kernel_need_memory_and_others_do_not():
    """Relative positions take no kernel: the encoder-decoder's self-attention makes [rows, N, T, T] in float32."""
    work = work_of(PAIRS)
    assert [sum(a.scores for a in stack.attentions) for stack in work.stacks] == [1024**2, 2048**2]
    scores = 8 * 2048**2 * 4
    kept = memory.saved_bytes(work, work.stacks[1], choice_of(remat="none"))[0]
    twice = memory.saved_bytes(work, work.stacks[1], choice_of(rows=2, remat="none"))[0]
    assert kept > 2 * scores and twice == pytest.approx(2 * kept)
    assert memory.saved_bytes(work, work.stacks[1], choice_of(remat="full"))[0] < scores / 8
    assert not any(a.scores for stack in work_of().stacks for a in stack.attentions)


def test_utilisation_stays_below_the_peak_in_every_dtype():
    """Quantised are the weights' products alone; float32 is multiplied in bfloat16, as JAX does by default."""
    steps = {}
    for dtype, quantization in (("bfloat16", "none"), ("float32", "none"), ("bfloat16", "int8")):
        work = work_of(dataclasses.replace(DENSE, embed_dim=4096, mlp_dim=16384, dtype=dtype, quantization=quantization))
        found = cost.cost(work, choice_of(rows=8, fsdp=64), V5E)
        assert 0 < found.mfu < 1
        steps[dtype, quantization] = found
    plain, full, int8 = steps.values()
    assert full.compute_s == pytest.approx(plain.compute_s)
    assert 0.5 * plain.compute_s < int8.compute_s < 0.75 * plain.compute_s


def test_keeping_all_products_makes_none_again_in_half_of_the_memory():
    work = work_of(dataclasses.replace(DENSE, embed_dim=2048, mlp_dim=8192))
    none, products = (dataclasses.replace(choice_of(rows=8, fsdp=64), remat=remat) for remat in search.REMATS[:2])
    assert cost.recomputed(work, products) == pytest.approx((0.0, 0.0), abs=1e-12)
    saved = [memory.memory(work, choice).saved for choice in (none, products)]
    assert 0.3 < saved[1] / saved[0] < 0.6
