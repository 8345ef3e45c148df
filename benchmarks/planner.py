"""The planner's predictions beside what the TPU compiler says and what others published. No TPU is needed.

    python benchmarks/planner.py memory [--points=7b-save,8b-tensor] [--json=OUT]
    python benchmarks/planner.py limit | time | plans | search | largest

memory: predicted against compiled peak HBM of a chip, over models, slices, meshes and remat policies. The memory
  model's constants (planner/model/memory.py) were fitted on the points marked "calibrate"; the others are the test.
limit: plans around what a chip holds: no plan that is called fitting may be refused by the compiler.
time: predicted against published step times of MaxText on v5e and v6e. Nothing is measured here: other people's
  measurements are compared with predictions, of our step, on what they ran.
plans: our first plan for the published batches on v6e: predicted tokens/s over those that others measured.
search: the first plan against all plans, and how long `capibara plan` takes for 120 B parameters on 256 chips.
largest: how much of the HBM the largest batch of a plan uses that `capibara plan --verify` proves.

memory, limit and largest need libtpu; a compile takes half a minute to some minutes on two cores. Verdicts are kept in
~/.cache/capibara/verdicts: what was compiled once, with the same code and versions, is not compiled again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))  # the checkout's package, installed or not
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
GIB = 2**30
QKV = ("query", "key", "value")
INPUTS = ("layer_input",)


@dataclasses.dataclass(frozen=True)
class Point:
    """A train step.

    Attributes:
      model: file in gin/models/.
      slice: the TPU slice.
      mesh: mesh axes; those that are not named are 1.
      rows: of one micro-batch on one device that has rows of its own.
      remat, names: Plan.remat and remat_names.
      length, encoder_length: positions of a row.
      accumulation: micro-batches.
      bindings: more Gin statements.
      calibrate: whether the constants of the model were fitted on it.
      compiled_gib: what libtpu 0.0.42.1, or the one that is named, said on 30 November 2026; None: it was not asked since.
    """

    model: str
    slice: str
    mesh: dict[str, int]
    rows: int
    remat: str = "full"
    names: tuple[str, ...] = QKV
    length: int = 2048
    encoder_length: int | None = None
    accumulation: int = 1
    bindings: tuple[str, ...] = ()
    calibrate: bool = False
    compiled_gib: float | None = None


_LORA = ("DecoderConfig.lora = @Lora()", 'Lora.targets = ("all-linear",)', 'Lora.base_dtype = "bfloat16"')
_QLORA = (*_LORA[:2], 'Lora.base_dtype = "nf4"', "Lora.double_quantization = True")
_NARROW = ("embed_dim = 512", "num_layers = 8", "num_heads = 8", "num_kv_heads = 8", "head_dim = 64", "mlp_dim = 2048")
_NARROW = tuple(f"DecoderConfig.{line}" for line in (*_NARROW, "vocab_size = 32000", 'qk_norm = "none"'))
_CAPACITY = ('Moe.dispatch = "capacity"', "Moe.capacity_factor = 1.25")
MEMORY = {
    # Dense, fsdp.
    "1b-full": Point("capibara_1b", "v5e-64", {"fsdp": 64}, 12, calibrate=True),
    "1b-none": Point("capibara_1b", "v5e-16", {"fsdp": 16}, 2, "none", calibrate=True),
    "1b-minimal": Point("capibara_1b", "v6e-16", {"fsdp": 16}, 6, "minimal"),
    "125m-data": Point("capibara_125m", "v5e-16", {"data": 4, "fsdp": 4}, 16, "full"),
    "7b-save": Point("llama2_7b", "v5e-64", {"fsdp": 64}, 4, "save"),
    "7b-full": Point("llama2_7b", "v5e-64", {"fsdp": 64}, 8, calibrate=True),
    "8b-full": Point("llama3.1_8b", "v6e-64", {"fsdp": 64}, 2, length=8192),
    "8b-save-attention": Point(
        "llama3.1_8b", "v6e-16", {"fsdp": 16}, 2, "save", (*QKV, "attention"), 4096, calibrate=True
    ),
    "8b-accumulate": Point(
        "capibara_8b", "v6e-64", {"fsdp": 64}, 2, "save", length=4096, accumulation=4, calibrate=True
    ),
    "gemma2-9b": Point("gemma2_9b", "v6e-64", {"fsdp": 64}, 2, length=4096),
    # Tensor and context.
    "7b-tensor": Point("llama2_7b", "v5e-64", {"fsdp": 16, "tensor": 4}, 16, calibrate=True),
    "8b-tensor-minimal": Point("llama3.1_8b", "v6e-64", {"fsdp": 16, "tensor": 4}, 4, "minimal", length=4096),
    "70b-tensor": Point("llama2_70b", "v6e-256", {"fsdp": 64, "tensor": 4}, 4, length=4096),
    "1b-context": Point("capibara_1b", "v5e-16", {"fsdp": 4, "context": 4}, 2, length=16384, calibrate=True),
    "8b-context": Point("llama3.1_8b", "v6e-64", {"fsdp": 16, "context": 4}, 1, length=32768),
    # Experts.
    "mixtral-dropless": Point("mixtral_8x7b", "v6e-64", {"fsdp": 64}, 2, length=4096, calibrate=True),
    "mixtral-expert": Point("mixtral_8x7b", "v6e-64", {"fsdp": 16, "expert": 4}, 2, length=4096, bindings=_CAPACITY),
    "mixtral-capacity": Point(
        "mixtral_8x7b", "v6e-64", {"fsdp": 64}, 2, length=4096, bindings=_CAPACITY, calibrate=True
    ),
    "qwen3-30b-expert": Point(
        "qwen3_30b_a3b", "v6e-64", {"fsdp": 16, "expert": 4}, 2, bindings=_CAPACITY, calibrate=True
    ),
    # Encoder-decoder.
    "t5-xl": Point("t5_1_1_xl", "v5e-64", {"fsdp": 64}, 8, length=512, encoder_length=1024, calibrate=True),
    "t5-large-none": Point(
        "t5_1_1_large", "v6e-16", {"fsdp": 16}, 8, "none", length=512, encoder_length=512, calibrate=True
    ),
    "t5-xxl-tensor": Point("t5_1_1_xxl", "v6e-64", {"fsdp": 16, "tensor": 4}, 16, length=512, encoder_length=512),
    # Added when the constants stood; heads of 64 showed with the first two of these that they are kept padded.
    "qwen3-8b-none": Point("qwen3_8b", "v6e-64", {"fsdp": 64}, 1, "none"),
    "gpt2-minimal": Point("gpt2_1558m", "v5e-16", {"data": 2, "fsdp": 8}, 4, "minimal", length=1024, calibrate=True),
    "llama3.2-1b-context": Point(
        "llama3.2_1b", "v5e-16", {"fsdp": 8, "context": 2}, 4, "save", length=8192, calibrate=True
    ),
    "gemma3-4b": Point("gemma3_4b", "v6e-64", {"fsdp": 64}, 2, "minimal", length=4096, calibrate=True),
    "t5-large-minimal": Point(
        "t5_large", "v5e-16", {"fsdp": 16}, 8, "minimal", length=256, encoder_length=512, calibrate=True
    ),
    "mixtral-8x22b": Point("mixtral_8x22b", "v6e-256", {"fsdp": 64, "expert": 4}, 2, length=4096, bindings=_CAPACITY),
    "1b-stage": Point("capibara_1b", "v5e-16", {"stage": 4, "fsdp": 4}, 16, calibrate=True),
    "smollm2-minimal": Point("smollm2_1.7b", "v5e-16", {"fsdp": 16}, 4, "minimal"),
    "gemma2-2b-save": Point("gemma2_2b", "v5e-64", {"fsdp": 64}, 4, "save", length=4096),
    "8b-stage": Point("llama3.1_8b", "v6e-64", {"stage": 4, "fsdp": 16}, 16, length=4096, calibrate=True),
    # Added last, to test: models that no other point has, on all kinds of meshes; the model was not changed after them.
    "qwen2-7b-tensor": Point("qwen2_7b", "v5e-64", {"fsdp": 16, "tensor": 4}, 8, "save"),
    "phi3-mini-context": Point("phi3_mini", "v5e-16", {"fsdp": 4, "context": 4}, 2, length=8192),
    "neox-20b-full": Point("gpt_neox_20b", "v5e-64", {"fsdp": 64}, 4),
    "mistral-7b-context": Point("mistral_7b", "v6e-16", {"fsdp": 8, "context": 2}, 1, "save", length=16384),
    "gemma-7b-minimal": Point("gemma_7b", "v6e-64", {"fsdp": 64}, 1, "minimal", length=4096),
    "qwen3-235b-expert": Point(
        "qwen3_235b_a22b", "v6e-256", {"fsdp": 64, "expert": 4}, 1, length=4096, bindings=_CAPACITY
    ),
    "t5-11b-full": Point("t5_11b", "v6e-64", {"fsdp": 64}, 8, length=256, encoder_length=512),
    "20b-stage": Point("capibara_20b", "v6e-64", {"stage": 4, "fsdp": 16}, 8, length=4096),
    # Several residual streams, and an embedding of each layer.
    "gemma3n-e2b-full": Point("gemma3n_e2b", "v5e-64", {"fsdp": 64}, 2),
    "gemma3n-e2b-none": Point("gemma3n_e2b", "v6e-64", {"fsdp": 64}, 1, "none", length=1024),
    "gemma3n-e2b-minimal": Point("gemma3n_e2b", "v6e-64", {"fsdp": 64}, 1, "minimal"),
    # Adapters beside a frozen base.
    "1b-lora": Point("capibara_1b", "v5e-4", {"fsdp": 4}, 4, bindings=_LORA, calibrate=True),
    "1b-qlora": Point("capibara_1b", "v5e-4", {"fsdp": 4}, 4, bindings=_QLORA, calibrate=True),
    "8b-lora": Point("capibara_8b", "v5e-8", {"fsdp": 8}, 2, length=4096, bindings=_LORA, calibrate=True),
    "8b-qlora": Point("capibara_8b", "v5e-8", {"fsdp": 8}, 2, length=4096, bindings=_QLORA, calibrate=True),
    "mixtral-lora": Point("mixtral_8x7b", "v6e-16", {"fsdp": 16}, 1, length=4096, bindings=_LORA, calibrate=True),
    "mixtral-qlora": Point("mixtral_8x7b", "v6e-8", {"fsdp": 8}, 1, length=4096, bindings=_QLORA),
    "qwen3-30b-qlora": Point("qwen3_30b_a3b", "v6e-8", {"fsdp": 2, "expert": 4}, 2, bindings=(*_QLORA, *_CAPACITY)),
    # Arrays that are padded, and several layers of one loop body.
    "gemma2-2b": Point("gemma2_2b", "v5e-16", {"fsdp": 16}, 2, length=4096, calibrate=True, compiled_gib=4.962),
    "phi3-mini": Point("phi3_mini", "v5e-16", {"fsdp": 16}, 4, calibrate=True, compiled_gib=6.958),
    "narrow-none": Point(
        "capibara_125m", "v5e-4", {"fsdp": 4}, 16, "none", bindings=_NARROW, calibrate=True, compiled_gib=12.855
    ),
    "smollm2-135m-data": Point("smollm2_135m", "v5e-4", {"data": 4}, 16, compiled_gib=3.874),
    "llama3.2-1b-save": Point("llama3.2_1b", "v5e-4", {"fsdp": 4}, 4, "save", compiled_gib=7.879),
    # Layers after the loop: four of Gemma 3's 34 are no whole pattern (libtpu 0.0.50.1).
    "gemma3-4b-rest": Point("gemma3_4b", "v5e-64", {"fsdp": 64}, 4, calibrate=True, compiled_gib=4.244),
    # As many rows as fit, and few; by libtpu 0.0.50.1.
    "1b-limit": Point("capibara_1b", "v5e-16", {"fsdp": 16}, 48, calibrate=True, compiled_gib=14.789),
    "8b-few": Point("llama3.1_8b", "v5e-64", {"fsdp": 64}, 2, calibrate=True, compiled_gib=4.084),
    # As many rows as are called fitting, when the constants stood.
    "mistral-7b-limit": Point("mistral_7b", "v5e-16", {"fsdp": 16}, 5, length=4096, compiled_gib=15.214),
    # Results in the host's memory.
    "70b-inputs": Point("llama3_70b", "v6e-64", {"fsdp": 64}, 2, "offload", INPUTS, length=8192, calibrate=True),
    "7b-hidden": Point(
        "mistral_7b",
        "v5e-16",
        {"fsdp": 16},
        1,
        "offload",
        (*INPUTS, *QKV, "attention", "mlp_up"),
        4096,
        compiled_gib=8.776,
    ),  # fmt: skip
    "8b-inputs-qkv": Point(
        "llama3_8b", "v5e-64", {"fsdp": 64}, 2, "offload", (*INPUTS, *QKV), length=4096, calibrate=True
    ),
}


# Configurations whose rows are varied around what a chip holds.
LIMIT = {
    "1b-full": Point("capibara_1b", "v5e-16", {"fsdp": 16}, 1),
    "1b-none": Point("capibara_1b", "v5e-64", {"fsdp": 64}, 1, "none"),
    "7b-save": Point("llama2_7b", "v5e-64", {"fsdp": 64}, 1, "save"),
    "7b-tensor": Point("llama2_7b", "v5e-64", {"fsdp": 16, "tensor": 4}, 1),
    "8b-minimal": Point("llama3.1_8b", "v6e-64", {"fsdp": 64}, 1, "minimal"),
    "20b-full": Point("capibara_20b", "v6e-64", {"fsdp": 64}, 1, length=4096),
    "mixtral-capacity": Point("mixtral_8x7b", "v6e-64", {"fsdp": 64}, 1, length=2048, bindings=_CAPACITY),
    "t5-xl": Point("t5_1_1_xl", "v5e-64", {"fsdp": 64}, 1, "minimal", length=512, encoder_length=1024),
    "4b-save": Point("qwen3_4b", "v5e-64", {"fsdp": 64}, 1, "save", (*QKV, "attention")),
    "qwen3-30b": Point("qwen3_30b_a3b", "v6e-64", {"fsdp": 16, "expert": 4}, 1, bindings=_CAPACITY),
}


@dataclasses.dataclass(frozen=True)
class Published:
    """A step time that others measured with MaxText.

    Attributes:
      sizes: DecoderConfig's; `experts` makes it a mixture with capacity 1.25 and top 2.
      slice: the TPU slices.
      mesh: mesh axes.
      rows, length: of one chip, or of the chips of a tensor axis together.
      kept: results of a layer that are not made again (they had them in the host's memory); none: full remat.
      seconds: of a step; of the v5e rows from their TFLOP/s a chip, which count 6 x parameters, both embedding tables
        included, and the causal half of attention.
    """

    sizes: dict[str, Any]
    slice: str
    mesh: dict[str, int]
    rows: int
    length: int
    kept: tuple[str, ...]
    seconds: float | None = None
    tflops: float | None = None


def _decoder(embed: int, layers: int, heads: int, kv: int, mlp: int, vocab: int, **more) -> dict[str, Any]:
    sizes = {"embed_dim": embed, "num_layers": layers, "num_heads": heads, "num_kv_heads": kv, "mlp_dim": mlp}
    return sizes | {"vocab_size": vocab, "head_dim": 128, "head": "separate"} | more


_8B = _decoder(4096, 32, 32, 8, 14336, 128_256)
_70B = _decoder(8192, 80, 64, 8, 28672, 128_256)
_7B = _decoder(4096, 32, 32, 8, 14336, 32_000)
_GEMMA = _decoder(
    3840, 48, 16, 8, 15360, 262_144, head_dim=256, head="tied", activation="geglu",
    layer_pattern=("local",) * 5 + ("global",), window=1024,
)  # fmt: skip
_GPT = _decoder(12288, 96, 96, 96, 49152, 50_304, head="tied", activation="gelu")
_V5E = {
    "16B": (_decoder(4096, 32, 64, 64, 28672, 32_000), 6, {"fsdp": 256}),
    "32B": (_decoder(8192, 32, 64, 64, 28672, 32_000), 4, {"fsdp": 256}),
    "64B": (_decoder(8192, 64, 64, 64, 28672, 32_000), 2, {"fsdp": 256}),
    "128B": (_decoder(8192, 64, 128, 128, 57344, 32_000), 16, {"fsdp": 16, "tensor": 16}),
}
_V5E_TFLOPS = {
    "16B": (120, 117, 117, 115, 111, 108),
    "32B": (132, 128, 126, 125, 123, 119),
    "64B": (118, 112, 110, 108, 105, 99),
    "128B": (110, 110, 108, 104, 100, 91),
}
_QKVO = (*QKV, "attention_out")
# v6e: github.com/AI-Hypercomputer/tpu-recipes, training/trillium, logs in the README of each; v5e: the table in MaxText's
# README with MaxText/configs/v5e/*.sh (of 128B's remat no definition was found: full is assumed).
TIME = {
    "Llama 3.1 8B v6e-256": Published(_8B, "v6e-256", {"fsdp": 256}, 4, 8192, _QKVO, 4.546),
    "Llama 2 70B v6e-256": Published(_70B | {"vocab_size": 32_000}, "v6e-256", {"fsdp": 256}, 2, 4096, QKV, 9.052),
    "Mixtral 8x7B v6e-256": Published(_7B | {"experts": 8}, "v6e-256", {"fsdp": 256}, 12, 4096, _QKVO, 13.484),
    "Mixtral 8x22B v6e-256": Published(
        _decoder(6144, 56, 48, 8, 16384, 32_768, experts=8), "v6e-256", {"fsdp": 64, "expert": 4}, 8, 4096, _QKVO, 24.706,
    ),  # fmt: skip
    "Mistral 7B v6e-8": Published(_7B, "v6e-8", {"fsdp": 8}, 6, 8192, _QKVO, 6.320),
    **{
        f"Llama 3.1 8B v6e-{n}": Published(_8B, f"v6e-{n}", {"fsdp": n}, rows, 8192, _QKVO, seconds)
        for n, rows, seconds in ((8, 3, 3.443), (16, 3, 3.393), (32, 3, 3.495), (64, 5, 5.652), (128, 4, 4.602))
    },
    **{
        f"Llama 3.1 70B v6e-{n}": Published(_70B, f"v6e-{n}", {"fsdp": n}, rows, 8192, QKV, seconds)
        for n, rows, seconds in ((64, 2, 18.688), (128, 4, 34.786), (256, 5, 42.656))
    },
    "Llama 3.1 405B 2xv6e-256": Published(
        _decoder(16384, 126, 128, 8, 53248, 128_256), "2xv6e-256", {"fsdp": 512}, 1, 8192, (), 54.803
    ),
    "GPT-3 175B v6e-256": Published(_GPT, "v6e-256", {"fsdp": 256}, 3, 2048, (), 17.182),
    **{
        f"Gemma 3 12B {slice_}": Published(_GEMMA, slice_, {"data": n, "fsdp": 256}, 1, 32_768, (), seconds)
        for slice_, n, seconds in (("v6e-256", 1, 7.318), ("2xv6e-256", 2, 7.793), ("4xv6e-256", 4, 8.390))
    },
    **{
        f"{name} {n} x v5e-256": Published(
            sizes, "v5e-256" if n == 1 else f"{n}xv5e-256", mesh | {"data": n}, rows, 2048, (), tflops=tflops,
        )
        for name, (sizes, rows, mesh) in _V5E.items()
        for n, tflops in zip((1, 2, 4, 8, 16, 32), _V5E_TFLOPS[name])
    },
}  # fmt: skip


# The rows that the constants of planner/model/cost.py were fitted to (benchmarks/time_model.py); the others are the test.
FITTED = (
    "Llama 3.1 8B v6e-256",
    "Llama 3.1 8B v6e-8",
    "Llama 3.1 70B v6e-64",
    "Llama 3.1 405B 2xv6e-256",
    "Mixtral 8x7B v6e-256",
    "Mixtral 8x22B v6e-256",
    "Gemma 3 12B v6e-256",
    "16B 1 x v5e-256",
    "32B 1 x v5e-256",
    "64B 16 x v5e-256",
    "128B 1 x v5e-256",
)


@dataclasses.dataclass
class Case:
    """A point with what the planner makes of it."""

    point: Point
    run: Any
    work: Any
    slice_: Any
    choice: Any
    configuration: Any


def case(point: Point, rows: int | None = None) -> Case:
    """The run of a point, read from Gin as the verbs do."""
    from capibara import config, sharding
    from capibara.cli.composition import inspected_run
    from capibara.planner.compiler import proof
    from capibara.planner.hardware import slices
    from capibara.planner.model import choice, workload
    from capibara.sharding import MESH_AXES, Remat, RematPolicy

    slice_ = slices.parse(point.slice)
    sizes = tuple(point.mesh.get(axis, 1) for axis in MESH_AXES)
    remat = RematPolicy(Remat(point.remat), point.names)
    parts = 2 * sizes[MESH_AXES.index("stage")] if point.mesh.get("stage", 1) > 1 else 1
    chosen = choice.Choice(
        sizes=sizes, rows=rows or point.rows, accumulation=point.accumulation, remat=remat, pipeline_microbatches=parts
    )
    rules = sharding.Rules()
    batch = chosen.rows * chosen.accumulation * math.prod(chosen.mesh[axis] for axis in rules.batch)
    config.reset()
    files = [f"models/{point.model}.gin"]
    bindings = [*point.bindings, f"Plan.batch_size = {batch}"]
    config.parse(files, bindings, [])
    work = workload.of_run(inspected_run.run_of_gin(point.length, point.encoder_length))
    bindings += chosen.bindings(work, slice_.name)
    config.reset()
    config.parse(files, bindings, [])
    run = inspected_run.run_of_gin(point.length, point.encoder_length)
    given = proof.Configuration(files, bindings, (), point.length, point.encoder_length)
    return Case(point, run, work, slice_, chosen, given)


def compiled(one: Case, name: str, deadline_s: float) -> Any:
    """The compiler's verdict."""
    from capibara.monitoring.status import StatusLine
    from capibara.planner.compiler import proof

    with StatusLine() as line:
        return proof.prove(
            one.run, one.configuration, one.slice_, deadline_s=deadline_s,
            status=lambda elapsed_s, phase: line.show(f"{name}: {phase}", f"{elapsed_s:.0f} s"),
        )  # fmt: skip


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """Predicted and compiled peaks of the chosen points."""
    from capibara.planner.model import memory as model

    names = options.points.split(",") if options.points else list(MEMORY)
    results: dict[str, Any] = {}
    print(f"{'':20}{'slice':>9}  {'mesh, rows, remat':44}{'predicted':>10}{'compiled':>10}{'error':>8}")
    for name in names:
        one = case(MEMORY[name])
        predicted = model.memory(
            one.work, one.choice, one.slice_.chip, most_bytes=one.slice_.chip.device_usable_hbm_bytes
        )
        verdict = compiled(one, name, options.deadline)
        line = f"{name:20}{one.point.slice:>9}  {one.choice.describe():44}{predicted.peak / GIB:10.3f}"
        result = {"point": dataclasses.asdict(one.point), "predicted": dataclasses.asdict(predicted)}
        result |= {"predicted_peak": predicted.peak, "outcome": str(verdict.outcome), "message": verdict.message}
        if verdict.compiled is None or not verdict.compiled.fits:
            print(f"{line}  {verdict.outcome}: {verdict.message or ''}", flush=True)
        else:
            result |= {"compiled": verdict.compiled.to_json(), "versions": dict(verdict.versions)}
            result["error"] = predicted.peak / verdict.compiled.peak_bytes - 1
            kind = "calibrate" if one.point.calibrate else ""
            print(f"{line}{verdict.compiled.peak_bytes / GIB:10.3f}{result['error']:8.1%}  {kind}", flush=True)
        results[name] = result
    for calibrate, text in ((True, "calibrated on"), (False, "others")):
        errors = [abs(r["error"]) for r in results.values() if r["point"]["calibrate"] is calibrate and "error" in r]
        if errors:
            print(f"{text}: {len(errors)} points, median {statistics.median(errors):.1%}, worst {max(errors):.1%}")
    return results


def limit(options: argparse.Namespace) -> dict[str, Any]:
    """Around what a chip holds: the most rows that are called fitting, a tenth more, and a quarter more."""
    from capibara.planner.model import memory as model

    names = options.points.split(",") if options.points else list(LIMIT)
    results: dict[str, Any] = {}
    for name in names:
        point = LIMIT[name]
        one = case(point)
        usable = one.slice_.chip.device_usable_hbm_bytes

        def predicted(rows: int) -> float:
            choice = dataclasses.replace(one.choice, rows=rows)
            return model.memory(one.work, choice, one.slice_.chip, most_bytes=usable * (1 - options.headroom)).peak

        rows = 1
        while predicted(rows + 1) <= usable * (1 - options.headroom):
            rows += 1
        for n in sorted({rows, math.ceil(rows * 1.1), math.ceil(rows * 1.25)}):
            now = case(point, n)
            share = predicted(n) / usable
            verdict = compiled(now, f"{name} {n} rows", options.deadline)
            said, is_so = share <= 1 - options.headroom, verdict.compiled.fits if verdict.compiled else None
            peak = (verdict.compiled.peak_bytes or 0) / usable if verdict.compiled else math.nan
            wrong = "" if said == is_so else "  WRONG: called fitting" if said else "  called too big, compiles"
            results[f"{name}-{n}"] = {"predicted": share, "compiled": peak, "called": said, "fits": is_so}
            print(
                f"{name:20}{n:5} rows  predicted {share:6.1%}  compiled {peak:6.1%}  {verdict.outcome}{wrong}",
                flush=True,
            )
    bad = sum(r["called"] and not r["fits"] for r in results.values())
    small = sum(not r["called"] and bool(r["fits"]) for r in results.values())
    print(f"{len(results)} plans: {bad} called fitting that do not compile, {small} called too big that do")
    return results


def workload_of(row: Published) -> Any:
    """The model of a row, with AdamW in float32."""
    from capibara.models import api
    from capibara.models.parts.moe import Moe
    from capibara.optim import Optimizer
    from capibara.planner.model import workload

    sizes = dict(row.sizes)
    experts = sizes.pop("experts", None)
    moe = Moe(num_experts=experts, top_k=2, dispatch="capacity", capacity_factor=1.25) if experts else None
    model = api.build(api.DecoderConfig(dtype="bfloat16", moe=moe, **sizes))
    return workload.describe(model, Optimizer(), length=row.length)


def published(row: Published) -> tuple[float, Any]:
    """(published seconds, predicted cost) of a row."""
    from capibara.planner.hardware import slices
    from capibara.planner.model import choice, cost
    from capibara.sharding import MESH_AXES, Remat, RematPolicy

    work = workload_of(row)
    model = work.model
    remat = RematPolicy(Remat.OFFLOAD, row.kept) if row.kept else RematPolicy(Remat.FULL)
    plan = choice.Choice(sizes=tuple(row.mesh.get(axis, 1) for axis in MESH_AXES), rows=row.rows, remat=remat)
    seconds = row.seconds
    if seconds is None:
        attention = 6 * model.config.num_layers * model.config.num_heads * model.config.head_size * row.length
        tokens = row.rows * row.length / row.mesh.get("tensor", 1)
        seconds = (6 * model.param_count + attention) * tokens / row.tflops / 1e12
    return seconds, cost.cost(work, plan, slices.parse(row.slice))


def time_(options: argparse.Namespace) -> dict[str, Any]:
    """Predicted against published seconds."""
    results: dict[str, Any] = {}
    print(f"{'':28}{'published, s':>13}{'predicted, s':>13}{'error':>8}")
    for name, row in TIME.items():
        seconds, cost = published(row)
        error = cost.step_s / seconds - 1
        results[name] = {"published_s": seconds, "predicted_s": cost.step_s, "fitted": name in FITTED, "error": error}
        print(f"{name:28}{seconds:13.3f}{cost.step_s:13.3f}{error:8.1%}  {'fitted' if name in FITTED else ''}")
    for fitted, text in ((True, "fitted"), (False, "others")):
        errors = [abs(r["error"]) for r in results.values() if r["fitted"] is fitted]
        print(f"{text}: {len(errors)} rows, median {statistics.median(errors):.1%}, worst {max(errors):.1%}")
    return results


def plans(options: argparse.Namespace) -> dict[str, Any]:
    """Our first plan for the batch of each row on v6e."""
    from capibara.planner.hardware import slices
    from capibara.planner.search import ranking

    results: dict[str, Any] = {}
    for name, row in TIME.items():
        slice_ = slices.parse(row.slice)
        if slice_.chip.name != "v6e":
            continue
        rows = row.rows * slice_.devices
        best = ranking.search(workload_of(row), slice_, ranking.Question(batch_size=rows))[0]
        share = best.cost.tokens_per_s / (rows * row.length / row.seconds)
        results[name] = {"share": share, "plan": best.choice.describe(), "step_s": best.cost.step_s, "fits": best.fits}
        print(f"{name:28}{share:6.2f}  {best.cost.step_s:7.2f} s  {best.choice.describe()}", flush=True)
    return results


def search_(options: argparse.Namespace) -> dict[str, Any]:
    """The first plan against the best of all, and the time of the verb."""
    import subprocess
    import time

    from capibara.planner.model import cost, memory
    from capibara.planner.model.choice import Choice
    from capibara.planner.search import ranking
    from capibara.planner.search.ranking import Question
    from capibara.sharding import MESH_AXES

    results: dict[str, Any] = {}
    asked = {"capibara_8b": ("v5e-64", 512), "mixtral_8x7b": ("v6e-256", 1024), "capibara_120b": ("v6e-256", 1024)}
    for model, (slice_, batch) in asked.items():
        one = case(Point(model, slice_, {"fsdp": int(slice_.partition("-")[2])}, 1, length=4096))
        begin_s = time.perf_counter()
        first = ranking.search(one.work, one.slice_, Question(batch_size=batch))[0]
        search_s = time.perf_counter() - begin_s
        best, count = 0.0, 0
        limit_bytes = one.slice_.chip.device_usable_hbm_bytes * (1 - Question().headroom)
        for sizes in ranking.meshes(one.work, one.slice_):
            stages = sizes[MESH_AXES.index("stage")]
            shards = Choice(sizes=sizes, rows=1).batch_shards(one.work)
            for accumulation in range(1, batch // shards + 1):
                rows = batch // shards // accumulation
                if rows * shards * accumulation != batch or rows % stages:
                    continue
                parts = [n for n in range(1, 4 * stages + 1) if rows % n == 0] if stages > 1 else [1]
                for remat in ranking.REMATS:
                    for n in parts:
                        plan = Choice(
                            sizes=sizes, rows=rows, accumulation=accumulation, remat=remat, pipeline_microbatches=n
                        )
                        count += 1
                        need = memory.memory(one.work, plan, one.slice_.chip, most_bytes=limit_bytes)
                        if need.peak <= limit_bytes and need.host <= first.host_limit_bytes:
                            best = max(best, cost.cost(one.work, plan, one.slice_).tokens_per_s)
        share = first.cost.tokens_per_s / best
        results[model] = {"search_s": search_s, "plans": count, "share_of_best": share}
        print(f"{model} on {slice_}: {search_s:.2f} s; the first plan makes {share:.1%} of the best of {count} plans")
    command = [sys.executable, "-m", "capibara.plan", "--gin_file=models/capibara_120b.gin", "--slice=v6e-256"]
    begin_s = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    results["process_s"] = time.perf_counter() - begin_s
    print(f"capibara plan, 120 B on v6e-256, process start included: {results['process_s']:.2f} s (measured)")
    return results


def largest(options: argparse.Namespace) -> dict[str, Any]:
    """The proven plan of the largest batch, as the compiler counts its HBM."""
    import subprocess
    import tempfile

    asked = {"capibara_1b": "v5e-16", "llama2_7b": "v5e-64", "llama3.1_8b": "v6e-64"}
    names = options.points.split(",") if options.points else list(asked)
    results: dict[str, Any] = {}
    for model in names:
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "plan.json")
            command = [
                sys.executable,
                "-m",
                "capibara.plan",
                f"--gin_file=models/{model}.gin",
                f"--slice={asked[model]}",
            ]
            command += ["--goal=largest_batch", "--verify", f"--json={out}", "--top=1"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            with open(out, encoding="utf-8") as file:
                found = json.load(file)
        compiled = found["plans"][0]["verdict"]["compiled"]
        share = compiled["peak_bytes"] / compiled["limit_bytes"]
        results[model] = {"share": share, "batch_size": found["plans"][0]["batch_size"], "tried": len(found["tried"])}
        print(f"{model:16}{asked[model]:>8}  batch {results[model]['batch_size']:6}  compiled peak {share:.1%} of the usable "
              f"HBM, after {len(found['tried'])} compiles", flush=True)  # fmt: skip
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "part", nargs="?", default="time", choices=("memory", "limit", "time", "plans", "search", "largest")
    )
    parser.add_argument("--points", help="comma-separated names; default: all")
    parser.add_argument("--deadline", type=float, default=1800.0, help="seconds for a compile")
    parser.add_argument("--headroom", type=float, default=0.0, help="of limit: share of the HBM to keep free")
    parser.add_argument("--json", help="write the results there")
    options = parser.parse_args()
    parts = {"memory": memory, "limit": limit, "time": time_, "plans": plans, "search": search_, "largest": largest}
    results = parts[options.part](options)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
