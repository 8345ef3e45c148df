"""The memory model's parts against counts by hand; benchmarks/planner.py memory compares it with compiled steps."""

import dataclasses
import functools
import itertools
import math

import jax
import pytest
from cases import DENSE, EXPERTS, PAIRS, V5E, choice_of, work_of

from capibara import config as gin
from capibara import sharding
from capibara.cli.composition import inspected_run
from capibara.core import tree
from capibara.models import api
from capibara.models.parts.moe import Moe
from capibara.objectives.loss import ResidentArrays
from capibara.optim import Adafactor, Optimizer, StateDtype
from capibara.planner.hardware import chips, slices, tiling
from capibara.planner.model import cost, memory, workload
from capibara.planner.search import ranking
from capibara.sharding import Plan
from capibara.training.base import state as states

QLORA = dataclasses.replace(DENSE, lora=api.Lora(targets=("all-linear",), base_dtype="nf4"))
QLORA_EXPERTS = dataclasses.replace(EXPERTS, lora=QLORA.lora)
LARGE = api.DecoderConfig(vocab_size=4096, embed_dim=1024, num_layers=8, num_heads=8, mlp_dim=4096)
LARGE_EXPERTS = dataclasses.replace(LARGE, moe=Moe(num_experts=8, top_k=2, dispatch="capacity", capacity_factor=1.25))


@functools.cache
def model_and_work(config, optimizer):
    """The same for every mesh."""
    return api.build(config), work_of(config, optimizer=optimizer)


def state_cases():
    """Each model in each dtype on three axes; on two other meshes float32."""
    configs = {"dense": DENSE, "experts": EXPERTS, "pairs": PAIRS, "qlora": QLORA, "qlora_experts": QLORA_EXPERTS}
    meshes = [dict(fsdp=8), dict(fsdp=2, tensor=4), dict(fsdp=2, expert=2, tensor=2)]
    for (name, config), dtype, mesh in itertools.product(configs.items(), StateDtype, meshes):
        short = len(mesh) == 3 or dtype == "float32" and name in ("dense", "qlora")
        yield pytest.param(config, dtype, mesh, id=f"{name}-{dtype}-{mesh}", marks=() if short else pytest.mark.heavy)


@pytest.mark.parametrize("config, dtype, mesh", list(state_cases()))
def test_the_state_has_the_bytes_that_its_shards_have(config, dtype, mesh):
    optimizer = Optimizer(state_dtype=dtype)
    model, work = model_and_work(config, optimizer)
    plan = Plan(batch_size=8, **mesh)
    emulated = sharding.make_mesh(plan, jax.devices())
    tx = optimizer.build(10, model.trained(model.axes))
    shardings = states.state_shardings(model, tx, emulated, plan.rules, ema=False)
    state = states.abstract_state(model, tx, shardings, ema=False)
    leaves = jax.tree.leaves((state.params, state.opt_state))
    shapes = [(leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf in leaves]
    choice = dataclasses.replace(choice_of(**mesh), state_dtype=dtype)
    for chip, padding in ((chips.CPU, lambda shape: 1.0), (V5E.chip, tiling.padding)):
        real = sum(math.prod(shape) * itemsize * padding(shape) for shape, itemsize in shapes)
        predicted = memory.memory(work, choice, chip)
        # Scales of 8-bit blocks that do not divide stay whole.
        assert predicted.parameters + predicted.optimizer == pytest.approx(real, rel=0.02 if dtype == "int8" else 1e-4)


def test_adafactor_is_counted_as_it_factors():
    """T5 1.1 XXL: heads of 64 features leave nothing of attention unfactored, whatever the mesh."""
    xxl = api.EncoderDecoderConfig(
        vocab_size=32128, embed_dim=4096, num_layers=24, num_heads=64, head_dim=64, mlp_dim=10240
    )
    model, found = api.build(xxl), {}
    for factoring in ("matrices", "dimensions"):
        optimizer = Optimizer(name="adafactor", clip_norm=None, adafactor=Adafactor(factoring=factoring))
        work = workload.describe(model, optimizer, length=512, encoder_length=512)
        found[factoring] = work.state[StateDtype.FLOAT32]
    assert found["dimensions"].total() > 18 * 2**30 and found["matrices"].total() < 0.03 * 2**30
    one = found["matrices"].on_device(dict.fromkeys(("data", "fsdp", "tensor", "context", "expert", "stage"), 1))
    mesh = dict(data=1, fsdp=8, tensor=4, context=1, expert=1, stage=1)
    assert one == found["matrices"].total() and found["matrices"].on_device(mesh) < one / 3


@pytest.mark.parametrize("rows, compiled_gib", [(1, 1.404), (4, 1.504), (8, 1.613)])
def test_the_loss_of_a_large_vocabulary_needs_what_the_compiler_says(rows, compiled_gib):
    """Gemma 2 2B's head on v5e-64, rows of 2048: peak of the compiled gradients (jax 0.12, libtpu 0.0.50)."""
    gemma = api.DecoderConfig(
        vocab_size=256_000, embed_dim=2304, num_layers=2, num_heads=8, mlp_dim=9216, logit_soft_cap=30.0
    )
    found = memory.memory(work_of(gemma), choice_of(rows=rows, fsdp=64), V5E.chip).loss
    assert found == pytest.approx(compiled_gib * 2**30, rel=0.04)


def test_what_a_loss_holds_is_in_the_state_of_all_moments():
    model, choice = api.build(DENSE), choice_of(fsdp=4, tensor=2)
    spread_as = model.abstract_params, model.axes
    size = tree.byte_count(model.abstract_params)
    held = [
        ResidentArrays("reference", size, spread_as),
        ResidentArrays("engine", size // 2, spread_as),
        ResidentArrays("cache", 1000),
    ]
    none, many = work_of(), work_of(held=held)
    on_device = none.params.on_device(choice.mesh)
    found = memory.memory(many, choice, V5E.chip)
    assert found.held == pytest.approx(on_device * 1.5 + 1000)
    assert memory.memory(none, choice, V5E.chip).held == 0
    for moment, amount in memory.memory(none, choice, V5E.chip).moments.items():
        assert found.moments[moment] == pytest.approx(amount + found.held)
    v5e = slices.parse("v5e-16")
    smaller, larger = (ranking.search(work, v5e)[0].memory for work in (many, none))
    assert smaller.held > 0 == larger.held


def test_a_frozen_base_has_no_gradients():
    plain, lora, qlora = (
        work_of(dataclasses.replace(QLORA, lora=of)) for of in (None, api.Lora(), api.Lora(base_dtype="nf4"))
    )
    full, adapters, in_blocks = (
        memory.memory(work, choice_of(rows=8, fsdp=8), chips.CPU) for work in (plain, lora, qlora)
    )
    assert adapters.gradients < 0.05 * full.gradients and adapters.optimizer < 0.05 * full.optimizer
    assert 1.0 < adapters.parameters / full.parameters < 1.06 and in_blocks.parameters < 0.4 * full.parameters
    assert in_blocks.peak < adapters.peak < full.peak
    assert 0.66 < lora.model_flops_per_token / plain.model_flops_per_token < 0.8
    assert plain.model.param_count < lora.model.param_count == qlora.model.param_count


def test_adapters_of_experts_are_counted():
    """Their parameters, gradients and moments, what their products keep for a layer's backward pass, and their FLOPs."""
    all_linear, attention = api.Lora(rank=8, targets=("all-linear",)), api.Lora(rank=8, targets=("*attention*",))
    every, some = (work_of(dataclasses.replace(LARGE_EXPERTS, lora=of)) for of in (all_linear, attention))
    assert (every.stacks[0].adapted_experts, some.stacks[0].adapted_experts) == (3, 0)
    of_experts = 8 * 3 * 8 * 8 * (1024 + 4096)
    of_routers = 8 * 8 * (1024 + 8)
    assert every.trained.total() - some.trained.total() == 4 * (of_experts + of_routers)
    first, second = (memory.memory(work, choice_of(rows=8), chips.CPU) for work in (every, some))
    assert first.parameters - second.parameters == first.gradients - second.gradients == 4 * (of_experts + of_routers)
    assert first.optimizer - second.optimizer == pytest.approx(2 * 4 * (of_experts + of_routers), rel=1e-3)
    rows = 8 * 2048 * 2 * 1.25
    assert first.layer - second.layer == 3 * 2 * rows * 4096 * 2
    met = of_experts * 2 / 8 + of_routers
    assert every.model_flops_per_token - some.model_flops_per_token == pytest.approx(6 * met, rel=1e-6)


def test_what_a_frozen_base_is_stored_in_is_all_that_is_held_of_it():
    """No cast of the scales; of bfloat16 attention weights there is a copy in another layout."""
    dtypes = {name: api.Lora(targets=("all-linear",), base_dtype=name) for name in ("bfloat16", "int8", "int4", "nf4")}
    held = {name: work_of(dataclasses.replace(LARGE, lora=lora)) for name, lora in dtypes.items()}
    of = {name: memory.memory(work, choice_of(rows=8, fsdp=8), V5E.chip) for name, work in held.items()}
    weights = 8 * (4 * 1024 * 1024 + 3 * 1024 * 4096)
    # Factors lie whole where the weight's other dimension is not shared out, norms do everywhere.
    whole = held["nf4"].trained.on_device(choice_of(fsdp=8).mesh) + 17 * 1024 * 4
    for name, bytes_of_one in (("bfloat16", 2), ("int8", 1 + 4 / 64), ("int4", 0.5 + 4 / 64), ("nf4", 0.5 + 4 / 64)):
        expected = (bytes_of_one * weights + 2 * 4096 * 1024) / 8 + whole
        assert of[name].parameters == pytest.approx(expected, rel=1e-3)
    assert of["nf4"].casts == pytest.approx(whole / 2, rel=1e-3)
    assert of["bfloat16"].casts - of["nf4"].casts == pytest.approx(8 * 4 * 1024 * 1024 * 2 / 8)


def test_more_recomputation_keeps_less_and_more_rows_need_more():
    work = work_of()
    peaks = [
        memory.memory(work, choice_of(rows=8, remat=remat, fsdp=8), V5E.chip).peak
        for remat in ("none", "minimal", "full")
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert (
        memory.memory(work, choice_of(rows=16, fsdp=8), V5E.chip).peak
        > memory.memory(work, choice_of(rows=8, fsdp=8), V5E.chip).peak
    )


def test_offloaded_results_are_in_the_hosts_memory():
    work = work_of()
    kept, away = (
        memory.memory(work, choice_of(rows=8, remat=remat, fsdp=8), V5E.chip) for remat in ("save", "offload")
    )
    assert kept.host == 0 < away.host == pytest.approx(kept.saved - away.saved)


def test_offloaded_layer_inputs_leave_the_device():
    """All that remat full saves; what is on its way lies on the device for one layer."""
    work, names = work_of(), ("layer_input",)
    full = memory.memory(work, choice_of(rows=8, remat="full", fsdp=8), chips.V6E)
    away, kept = (
        memory.memory(work, choice_of(8, remat, names=names, fsdp=8), chips.V6E) for remat in ("offload", "save")
    )
    inputs = 4 * 8 * 2048 * 512 * 2
    assert away.host == inputs == full.saved - away.saved
    assert away.layer - full.layer == pytest.approx(2.5 * inputs / 4)
    assert kept == full
    with_queries = memory.memory(work, choice_of(8, "offload", names=(*names, "query"), fsdp=8), chips.V6E)
    # Heads of 64 features lie in tiles of 128 lanes.
    assert with_queries.host == 3 * inputs and with_queries.saved == away.saved


def test_the_cache_of_a_row_is_its_keys_and_values():
    assert memory.kv_cache_bytes(work_of(), choice_of()) == 4 * 2048 * 2 * 4 * 64 * 2  # bfloat16


def test_the_cache_of_a_hybrid_row_is_its_keys_and_its_states():
    """Qwen3-Next-80B's layers at 128K tokens: 12 of 48 keep keys and values, 36 a state whose size no length changes."""
    mixer = api.GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128, taps=4)
    pattern = ("recurrent", "recurrent", "recurrent", "global")
    sizes = dict(embed_dim=2048, num_layers=48, num_heads=16, num_kv_heads=2, head_dim=256, mlp_dim=5120)
    config = api.DecoderConfig(vocab_size=151_936, mixer=mixer, layer_pattern=pattern, **sizes)
    work = dataclasses.replace(work_of(config), length=131_072)
    keys = 12 * 2 * 131_072 * 2 * 256 * 2  # bfloat16
    states = 36 * 32 * 128 * 128 * 4  # float32
    convolved = 36 * 3 * (16 * 128 + 16 * 128 + 32 * 128) * 2
    assert memory.kv_cache_bytes(work, choice_of()) == keys + states + convolved == 3_298_492_416
    halves = memory.kv_cache_bytes(work, choice_of(tensor=2))
    assert halves == keys / 2 + states + convolved
    assert (
        memory.kv_cache_bytes(work, choice_of(tensor=4)) == keys + states + convolved
    )  # two heads are not cut in four


def test_layers_with_a_window_cache_the_window():
    config = dataclasses.replace(DENSE, window=256, layer_pattern=("local", "global"))
    assert memory.kv_cache_bytes(work_of(config), choice_of()) == 2 * (256 + 2048) * 2 * 4 * 64 * 2


def test_scores_without_a_kernel_need_memory_and_others_do_not():
    """Relative positions take no kernel: the encoder-decoder's self-attention makes [rows, N, T, T] in float32."""
    work = work_of(PAIRS)
    assert [sum(a.scores for a in stack.attentions) for stack in work.stacks] == [1024**2, 2048**2]
    scores = 8 * 2048**2 * 4

    def saved(choice):
        return memory.saved_bytes(work, memory.layer_results(work, work.stacks[1], choice), choice)[0]

    kept, twice = saved(choice_of(remat="none")), saved(choice_of(rows=2, remat="none"))
    assert kept > 2 * scores and twice == pytest.approx(2 * kept)
    assert saved(choice_of(remat="full")) < scores / 8
    assert not any(a.scores for stack in work_of().stacks for a in stack.attentions)


def test_keeping_all_products_makes_none_again_in_half_of_the_memory():
    work = work_of(dataclasses.replace(DENSE, embed_dim=2048, mlp_dim=8192))
    none, products = (dataclasses.replace(choice_of(rows=8, fsdp=64), remat=remat) for remat in ranking.REMATS[:2])
    assert cost.recomputed(work, products) == pytest.approx((0.0, 0.0), abs=1e-12)
    saved = [memory.memory(work, choice, V5E.chip).saved for choice in (none, products)]
    assert 0.3 < saved[1] / saved[0] < 0.6


def memory_of(config=LARGE, rows=16, most_bytes=math.inf, **mesh):
    parts = 2 * mesh["stage"] if "stage" in mesh else 1
    choice = dataclasses.replace(choice_of(rows, "full", **mesh), pipeline_microbatches=parts)
    return memory.memory(work_of(config), choice, V5E.chip, most_bytes=most_bytes)


def test_a_pipeline_holds_all_rows_twice_and_a_second_sum_of_gradients():
    one, staged = memory_of(fsdp=8), memory_of(fsdp=4, stage=2)
    assert one.pipeline == 0
    layers = 8 * (4 * 1024 * 1024 + 3 * 1024 * 4096)  # weights; norms are a rounding
    assert staged.pipeline == pytest.approx(2 * 16 * 2048 * 1024 * 2 + layers * 4 / 8, rel=0.01)
    assert staged.moments["backward"] > staged.state + staged.saved + staged.pipeline


@pytest.mark.parametrize(
    "config, mesh", [(LARGE, dict(fsdp=2, tensor=4)), (LARGE_EXPERTS, dict(fsdp=8))], ids=["tensor", "experts"]
)
def test_for_want_of_hbm_less_is_held_at_once(config, mesh):
    usual = memory_of(config, **mesh)
    assert usual == memory_of(config, most_bytes=usual.peak * 1.1, **mesh) and not usual.lean
    lean = memory_of(config, most_bytes=usual.peak * 0.99, **mesh)
    assert lean.lean and lean.peak < usual.peak and lean.saved == usual.saved and lean.state == usual.state


def test_rows_that_experts_exchange_are_padded():
    layers = {rows: memory_of(LARGE_EXPERTS, rows, fsdp=4, expert=2).layer for rows in (8, 9, 15, 16)}
    assert layers[9] > 1.5 * layers[8] and layers[15] > 0.97 * layers[16]
    assert memory_of(LARGE, 9, fsdp=8).layer == pytest.approx(memory_of(LARGE, 8, fsdp=8).layer * 9 / 8)


def test_an_expert_axis_keeps_what_it_exchanges():
    inside, across = memory_of(LARGE_EXPERTS, 8, fsdp=8), memory_of(LARGE_EXPERTS, 8, fsdp=4, expert=2, most_bytes=1)
    tokens = 8 * 2048 * 2 * 1.25 * 1024 * 2
    assert across.layer > 3 * tokens and inside.layer > 2 * tokens


@pytest.mark.parametrize(
    "name, base, rows, length, devices, compiled_gib",
    [("1b", "bfloat16", 4, 2048, 4, 2.042), ("1b", "nf4", 4, 2048, 4, 1.620)]
    + [("8b", "bfloat16", 2, 4096, 8, 6.772), ("8b", "nf4", 2, 4096, 8, 5.081)],
    ids=["1b-lora", "1b-qlora", "8b-lora", "8b-qlora"],
)
def test_adapters_need_what_the_tpu_compiler_said(name, base, rows, length, devices, compiled_gib):
    """Points of benchmarks/planner.py, compiled for v5e by libtpu 0.0.42.1 (jax 0.10.2); the constants were fitted on them."""
    double = f"Lora.double_quantization = {base == 'nf4'}"
    lora = ["DecoderConfig.lora = @Lora()", 'Lora.targets = ("all-linear",)', f'Lora.base_dtype = "{base}"', double]
    gin.parse([f"models/capibara_{name}.gin"], lora)
    work = workload.of_run(inspected_run.run_of_gin(length))
    predicted = memory.memory(work, choice_of(rows=rows, remat="full", fsdp=devices), V5E.chip)
    assert predicted.peak == pytest.approx(compiled_gib * 2**30, rel=0.03)


@pytest.mark.parametrize("base, devices, compiled_gib", [("bfloat16", 16, 14.907), ("nf4", 8, 12.532)])
def test_adapters_of_experts_need_what_the_tpu_compiler_said(base, devices, compiled_gib):
    """As above, compiled for v6e; the constant was fitted on the first."""
    lora = ["DecoderConfig.lora = @Lora()", 'Lora.targets = ("all-linear",)', f'Lora.base_dtype = "{base}"']
    gin.parse(["models/mixtral_8x7b.gin"], [*lora, f"Lora.double_quantization = {base == 'nf4'}"])
    work = workload.of_run(inspected_run.run_of_gin(4096))
    predicted = memory.memory(work, choice_of(rows=1, remat="full", fsdp=devices), V5E.chip)
    assert predicted.peak == pytest.approx(compiled_gib * 2**30, rel=0.03)


def test_a_tied_heads_gradient_is_stored_by_rows_of_whole_lanes():
    tied, separate = (dataclasses.replace(DENSE, vocab_size=50_000, embed_dim=576, num_heads=9, num_kv_heads=3, head=head)
                   for head in ("tied", "separate"))  # fmt: skip
    found = {}
    for config in (tied, separate):
        work = work_of(config)
        for chip in (V5E.chip, chips.CPU):
            trained = work.trained.in_memory(choice_of(fsdp=4).mesh, chip)
            found[config.head, chip.name] = memory.memory(work, choice_of(fsdp=4), chip).gradients - trained
    assert found["tied", "v5e"] == pytest.approx(50_000 * (256 - 144) * 4)
    assert found["tied", "cpu"] == found["separate", "v5e"] == found["separate", "cpu"] == 0


def test_layers_of_one_loop_body_make_their_attention_again_at_once():
    """On a v5e two of them."""
    six = dataclasses.replace(DENSE, num_layers=6)
    local = dataclasses.replace(six, window=256, layer_pattern=("local",) * 5 + ("global",))
    tokens = 8 * 2048 * 2
    attention = tokens * 2 * (8 + 4) * 128 + 3 * tokens * 512  # heads of 64 in whole lanes, and the residual stream
    for chip, again in ((V5E.chip, 1), (chips.V6E, 5)):
        for remat, more in (("full", again), ("minimal", 0), ("none", 0), ("save", 0)):
            one, all_ = (memory.memory(work_of(config), choice_of(8, remat, fsdp=8), chip) for config in (six, local))
            assert all_.layer - one.layer == pytest.approx(more * attention), (chip.name, remat)


def test_a_v5e_holds_more_weights_and_less_of_the_residual_stream_at_once():
    """With full remat; fewer weights if HBM is short."""
    wide = dataclasses.replace(DENSE, embed_dim=4096, num_heads=32, mlp_dim=14336, activation="reglu")
    work, full, saves = work_of(wide), choice_of(1, "full", fsdp=8), choice_of(1, "save", fsdp=8)
    v5e, v6e, saved, others = (
        memory.memory(work, choice, chip) for choice in (full, saves) for chip in (V5E.chip, chips.V6E)
    )
    layer = 2 * (2 * 4096 * 32 * 128 + 2 * 4096 * 4 * 128 + 3 * 4096 * 14336 + 2 * 4096)  # norms, too
    assert v5e.weights == pytest.approx(1.5 * layer) and v6e.weights == pytest.approx(0.6 * layer)
    assert v6e.layer - v5e.layer == pytest.approx(3.75 * 2048 * 4096 * 2)
    assert (saved.layer, saved.weights) == (others.layer, others.weights)
    inputs = choice_of(1, "save", names=("layer_input",), fsdp=8)  # which full remat saves, too
    assert memory.memory(work, inputs, V5E.chip) == v5e
    lean = memory.memory(work, full, V5E.chip, most_bytes=v5e.peak * 0.99)
    assert lean.layer == v5e.layer and lean.weights == v6e.weights
    normed = memory.memory(work_of(dataclasses.replace(wide, qk_norm="head")), full, V5E.chip)
    assert normed.layer - v5e.layer == pytest.approx(2048 * (32 + 4) * 128 * 2)


def test_a_gated_product_that_is_stored_is_held():
    """As kernels/gate.py decides: of a v5e's few tokens, and in full remat only if HBM is short."""
    wide = dataclasses.replace(DENSE, embed_dim=4096, num_heads=32, mlp_dim=14336)
    work, plain = (work_of(dataclasses.replace(wide, activation=name)) for name in ("swiglu", "reglu"))
    hidden = 2048 * 14336 * 2
    for rows, remat, chip, most_bytes, arrays in [
        (1, "save", V5E.chip, math.inf, 2), (4, "save", V5E.chip, math.inf, 0), (1, "save", chips.V6E, math.inf, 0),
        (1, "full", V5E.chip, math.inf, 0), (1, "full", V5E.chip, 1, 2),
    ]:  # fmt: skip
        choice = choice_of(rows, remat, fsdp=8)
        stored, again = (memory.memory(item, choice, chip, most_bytes=most_bytes).layer for item in (work, plain))
        assert stored - again == pytest.approx(arrays * hidden), (rows, remat, chip.name)


def test_a_layer_after_the_loop_runs_while_the_head_is_gathered():
    """Only whole patterns are in the loop; a stage has nothing else."""
    patterned = dataclasses.replace(DENSE, num_layers=6, window=256, layer_pattern=("local", "global"))
    odd = dataclasses.replace(patterned, num_layers=7)
    assert memory_of(DENSE, fsdp=8).forward == memory_of(patterned, fsdp=8).forward == 0
    few, many = (memory_of(odd, rows, fsdp=8) for rows in (8, 16))
    head, tokens = 1024 * 512 * 2, 8 * 2048 * 2
    layer = tokens * (
        2 * 1024 + 2 * (8 + 4) * 128 + 7 * 512
    )  # hidden units, heads of 64 in whole lanes, residual stream
    assert few.forward == pytest.approx(layer + head + few.weights)
    assert many.forward - few.forward == pytest.approx(layer)
    assert few.moments["forward"] == few.state + few.saved + few.casts + few.forward


def test_the_loss_is_that_of_the_chip_not_of_this_machine(monkeypatch):
    """A v5e's parts leave its hidden gradient on the chip where a v6e's are larger."""
    monkeypatch.setattr(sharding, "device_kind", lambda: pytest.fail("asks this machine"))
    work = work_of(dataclasses.replace(DENSE, vocab_size=100_000))
    v5e, v6e = (memory.memory(work, choice_of(8), slices.parse(name).chip).loss for name in ("v5e-8", "v6e-8"))
    assert v6e - v5e == pytest.approx(2 * (128 - 32) * 2**20)
    assert memory.memory(work, choice_of(8), chips.H100).loss > v6e  # by blocks of tokens


def test_without_recomputation_narrow_heads_are_saved_twice():
    work = work_of()
    none, full = (
        memory.saved_bytes(work, memory.layer_results(work, work.stacks[0], choice), choice)[0]
        for choice in (choice_of(8, "none"), choice_of(8, "full"))
    )
    tokens = 8 * 2048 * 2
    assert full == tokens * 512
    heads, hidden = tokens * 2 * (8 + 4) * 128, tokens * 1024
    assert none == pytest.approx(14.5 * tokens * 512 + heads + tokens * 8 * 64 + 6 * hidden)
