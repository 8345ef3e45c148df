"""FLOPs, traffic and time of a step against counts by hand."""

import dataclasses

import pytest
from cases import DENSE, EXPERTS, V5E, choice_of, work_of

from capibara.models import api
from capibara.models.parts.moe import Moe
from capibara.planner.hardware import slices
from capibara.planner.model import cost, memory


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
    assert dense.forward / experts.forward == pytest.approx(
        (attention_weights + mlp) / (attention_weights + 2 * mlp + router), rel=0.01
    )


def test_a_pipeline_gathers_at_every_tick():
    """All its weights pass through each stage once per part of the rows, and in bubbles."""
    work = work_of(length=4096)
    plain, staged = (
        dataclasses.replace(choice_of(rows=16, remat="full", **mesh), pipeline_microbatches=parts)
        for mesh, parts in ((dict(fsdp=64), 1), (dict(stage=4, fsdp=16), 16))
    )
    assert (plain.ticks, staged.ticks) == (1, 19)
    gathered = [
        sum(c.bytes for c in cost.cost(work, choice, V5E).collectives if c.name == "gather weights")
        for choice in (plain, staged)
    ]
    assert gathered[1] / gathered[0] == pytest.approx(19 / 4, rel=0.01)


def test_the_step_is_the_sum_of_what_explain_prints():
    """The largest of compute, HBM and host, plus links and blocking traffic, times the bubble; then the update."""
    work = work_of()
    for mesh in (dict(fsdp=64), dict(fsdp=16, tensor=4), dict(stage=4, fsdp=16), dict(data=8, fsdp=8)):
        c = cost.cost(work, dataclasses.replace(choice_of(rows=8, **mesh), pipeline_microbatches=8), V5E)
        busy = max(c.compute_s + c.elementwise_s, c.hbm_s) + c.host_exposed_s + cost.EXPOSED * c.links_s + c.blocking_s
        assert c.step_s == pytest.approx(busy / (1 - c.bubble) + c.update_s)
        assert (c.bubble > 0) == ("stage" in mesh) and (c.blocking_s > 0) == (mesh != dict(fsdp=64))


def test_element_wise_work_grows_with_passes_experts_and_whole_lanes():
    seconds = {
        name: cost.cost(work_of(config), choice_of(rows=8, remat=remat, fsdp=64), V5E).elementwise_s
        for name, config, remat in (
            ("full", DENSE, "full"),
            ("none", DENSE, "none"),
            ("experts", dataclasses.replace(EXPERTS, vocab_size=DENSE.vocab_size), "full"),
        )
    }
    assert seconds["experts"] > seconds["full"]
    saved = {
        remat: memory.memory(work_of(), choice_of(rows=8, remat=remat, fsdp=64), V5E.chip).saved
        for remat in ("none", "full")
    }
    rest = {remat: seconds[remat] - 2 * amount / 819e9 for remat, amount in saved.items()}
    assert 0.75 * rest["full"] < rest["none"] < 0.8 * rest["full"]  # beside the loss, which has as much in both
    narrow, wide = (work_of(dataclasses.replace(DENSE, head_dim=size)) for size in (64, 128))
    full = choice_of(rows=8, remat="full", fsdp=64)
    assert cost.elementwise_bytes(narrow, full, V5E.chip) == cost.elementwise_bytes(wide, full, V5E.chip)


def test_what_a_layer_saves_passes_through_memory_twice():
    full, saves = (choice_of(rows=8, remat=remat, fsdp=64) for remat in ("full", "save"))
    found = {choice: cost.elementwise_bytes(work_of(), choice, V5E.chip) for choice in (full, saves)}
    held = {choice: memory.memory(work_of(), choice, V5E.chip).saved for choice in (full, saves)}
    assert found[saves] - found[full] == pytest.approx(2 * (held[saves] - held[full]))
    assert held[saves] > held[full]


def test_heads_between_one_and_two_registers_make_their_products_on_whole_lanes():
    """The compiler's cycles of Phi-3 mini: 130 TFLOP/s for products by heads of 96, 150 to 190 for those of its MLP."""
    choice = choice_of(rows=8, remat="full", fsdp=64)
    shares = {}
    for size in (64, 96, 128, 256):
        work = work_of(dataclasses.replace(DENSE, head_dim=size))
        parts = cost.compute(work, choice, V5E, cost.step_flops(work, choice))
        shares[size] = next(part.share for part in parts if part.name == "layers")
        by_heads = 2 * (8 + 4) * size * 512
        assert by_heads + 3 * 512 * 1024 == sum(work.layer_weights.values())
    assert shares[64] == shares[128] == shares[256] == cost._MATMUL["v5e"]
    by_heads = 24 * 96 * 512
    assert shares[128] / shares[96] == pytest.approx(1 + by_heads / 3 / (by_heads + 3 * 512 * 1024))


def test_parts_of_the_vocabulary_make_the_logits_twice_and_blocks_of_tokens_pass_over_the_gradient():
    wide = dataclasses.replace(DENSE, embed_dim=4096, num_heads=32, num_kv_heads=32, head_dim=128)
    few, many = (work_of(dataclasses.replace(wide, vocab_size=vocab)) for vocab in (32_000, 50_000))
    choice = choice_of(rows=8, remat="full", fsdp=64)
    by_few, by_many = (cost.cost(work, choice, V5E).flops.head / work.config.vocab_size for work in (few, many))
    assert by_many == pytest.approx(4 / 3 * by_few)
    row = choice_of(rows=1, remat="full", fsdp=64)
    assert cost.elementwise_bytes(few, row, V5E.chip) > cost.elementwise_bytes(many, row, V5E.chip)


def test_parts_of_the_vocabulary_pass_over_the_hidden_gradient_unless_it_stays_on_the_chip():
    """On a v5e that of 2 rows of 512 lies in vector memory, that of 16 does not; a v6e has larger parts."""
    work = work_of(dataclasses.replace(DENSE, vocab_size=100_000))
    v6e = slices.parse("v6e-64").chip
    logits = 4 * 2048 * 100_000 * cost._LOGIT_PASSES
    for chip, rows, parts in ((V5E.chip, 2, 0.0), (V5E.chip, 16, 100_000 / 1024), (v6e, 16, 100_000 / 1024)):
        choice = choice_of(rows=rows, remat="full", fsdp=64)
        found = cost._loss_elementwise_bytes(work, choice, chip)
        assert found == pytest.approx(rows * (logits + parts * 8 * 2048 * 512))


def test_of_the_listed_bandwidth_85_percent_are_reached():
    found = cost.cost(work_of(), choice_of(rows=8, fsdp=64), V5E)
    assert found.hbm_s + found.update_s == pytest.approx(found.hbm_bytes / (0.85 * 819e9))


@pytest.mark.parametrize("config", [DENSE, EXPERTS, dataclasses.replace(DENSE, quantization="int8")])
def test_compute_is_the_sum_of_its_parts(config):
    work = work_of(config)
    for choice in (choice_of(rows=8, remat="full", fsdp=64), choice_of(rows=8, fsdp=16, context=4)):
        found = cost.cost(work, choice, V5E)
        parts = cost.compute(work, choice, V5E, found.flops)
        assert sum(part.seconds for part in parts) == pytest.approx(found.compute_s)
        flops = {part.name: part.flops for part in parts}
        flops["experts"] = flops.get("experts", 0.0) / found.imbalance
        assert sum(flops.values()) == pytest.approx(found.flops.hardware)
        assert ("experts" in {part.name for part in parts}) == (config is EXPERTS)


def test_offloaded_activations_cross_pcie_twice():
    work = work_of()
    choice = choice_of(rows=8, remat="offload", fsdp=64)
    host = memory.memory(work, choice, V5E.chip).host
    assert host > 0 and cost.cost(work, choice, V5E).host_s == pytest.approx(2 * host / V5E.chip.pcie_bytes_per_s)


def test_offloaded_layer_inputs_are_recomputed_from():
    """As with remat full; PCIe adds nothing where compute takes longer."""
    work = work_of(dataclasses.replace(DENSE, embed_dim=4096, mlp_dim=16384))
    full, away = (
        cost.cost(work, choice_of(8, remat, names=("layer_input",), fsdp=64), V5E) for remat in ("full", "offload")
    )
    assert away.flops == full.flops and 0 < away.host_s < away.compute_s and away.step_s == full.step_s


def test_what_goes_to_the_host_hides_behind_the_forward_pass_alone():
    """Compiled for Mistral 7B on v5e-16, one row of 4096: 14.7 ms a layer over PCIe, beside 12.1 ms of its forward pass."""
    mistral = api.DecoderConfig(
        vocab_size=32_000, embed_dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, mlp_dim=14_336, head="separate",
        dtype="bfloat16",
    )  # fmt: skip
    work = work_of(mistral, length=4096)
    inputs = ("layer_input", "key", "value", "query", "attention")
    few, more = (
        cost.cost(work, choice_of(1, "offload", names=names, fsdp=64), V5E) for names in (inputs, (*inputs, "mlp_up"))
    )
    assert few.host_exposed_s == 0 < few.host_s < more.host_s < more.compute_s
    assert more.host_s / 2 / 32 == pytest.approx(14.7e-3, rel=0.05)
    forward_s = more.host_s / 2 - more.host_exposed_s
    assert forward_s / 32 == pytest.approx(12.1e-3 + 2 * 4096 * 4096 * 4096 / (0.5 * 197e12), rel=0.1)


def test_the_loss_is_not_between_the_products_of_the_forward_pass():
    choice, seconds = choice_of(8, fsdp=64), []
    for size in (DENSE.vocab_size, 4 * DENSE.vocab_size):
        work = work_of(dataclasses.replace(DENSE, vocab_size=size))
        flops, between = cost.step_flops(work, choice), cost.elementwise_bytes(work, choice, V5E.chip)
        seconds.append((cost.forward_s(work, choice, V5E.chip, flops, (), between), between))
    (small, fewer), (large, more) = seconds
    assert more > fewer and large == pytest.approx(small)


def test_experts_are_uneven_only_across_devices_and_without_a_capacity():
    capacity = dataclasses.replace(EXPERTS, moe=Moe(num_experts=8, top_k=2, dispatch="capacity", capacity_factor=1.25))
    shared, alone = choice_of(fsdp=8, expert=8), choice_of(fsdp=64)
    assert cost.imbalance(work_of(EXPERTS), shared) > 1 == cost.imbalance(work_of(EXPERTS), alone)
    assert cost.imbalance(work_of(capacity), shared) == cost.imbalance(work_of(), alone) == 1


def test_utilisation_stays_below_the_peak_in_every_dtype():
    """Only products with weights are quantized; float32 is multiplied in bfloat16, JAX's default."""
    steps = {}
    for dtype, quantization in (("bfloat16", "none"), ("float32", "none"), ("bfloat16", "int8")):
        work = work_of(
            dataclasses.replace(DENSE, embed_dim=4096, mlp_dim=16384, dtype=dtype, quantization=quantization)
        )
        found = cost.cost(work, choice_of(rows=8, fsdp=64), V5E)
        assert 0 < found.mfu < 1
        steps[dtype, quantization] = found
    plain, full, int8 = steps.values()
    assert full.compute_s == pytest.approx(plain.compute_s)
    assert 0.5 * plain.compute_s < int8.compute_s < 0.75 * plain.compute_s
