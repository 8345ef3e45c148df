"""Where the constants of the planner's time come from (capibara/planner/model/cost.py). No TPU is needed.

    python benchmarks/time_model.py cycles [--points=qwen3-0.6b,...] [--compile] [--json=OUT]
    python benchmarks/time_model.py fit

cycles: predicted against compiled time of steps of small models: the sum of the compiler's cycles, without kernels and
  collectives, over products and element-wise work as predicted. --compile asks the compiler again (libtpu; half a minute
  to some minutes a step); else its cycles of 29 November 2026 (libtpu 0.0.42.1) stand for it.
fit: the constants by least squares on logarithms, from these cycles and the published rows in planner.FITTED, and what they make
  of all rows. Published times and the compiler's have shares of the peak of their own: the compiler's products are faster
  than those of a v6e.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
import planner
from planner import Point

_ALL = ("query", "key", "value", "attention", "attention_out", "mlp_up", "mlp_gate")
# Constants of planner/model/cost.py that are passes over HBM -> the field of Row that has a pass of them.
_PASSES = {
    "_RESIDUAL_PASSES": "residual",
    "_HEAD_PASSES": "heads",
    "_EXPERT_PASSES": "experts",
    "_LOGIT_PASSES": "logits",
}
_COMPILED_SHARE = 0.92  # of the peak, which the compiler says that products reach
# Seconds: cycles over the clock in planner/hardware/chips.py.
CYCLES = {
    "qwen3-0.6b": (Point("qwen3_0.6b", "v5e-4", {"fsdp": 4}, 8), 0.617),
    "smollm2-135m-save": (Point("smollm2_135m", "v5e-4", {"fsdp": 4}, 16, "save", _ALL), 0.485),
    "llama3.2-1b": (Point("llama3.2_1b", "v5e-8", {"fsdp": 8}, 8), 1.171),
    "gemma2-2b": (Point("gemma2_2b", "v5e-16", {"fsdp": 16}, 2, length=4096), 1.108),
    "gpt2-355m": (Point("gpt2_355m", "v5e-4", {"fsdp": 4}, 8, length=1024), 0.215),
    "llama3.1-8b-save": (Point("llama3.1_8b", "v6e-16", {"fsdp": 16}, 2, "save", length=4096), 0.736),
    "olmoe-7b": (Point("olmoe_7b", "v6e-16", {"fsdp": 16}, 2, length=4096), 0.259),
    # Compiled when the constants stood.
    "phi3-mini": (Point("phi3_mini", "v5e-16", {"fsdp": 16}, 4), 1.761),
    "gemma3-1b": (Point("gemma3_1b", "v6e-4", {"fsdp": 4}, 4, length=4096), 0.327),
    "capibara-1b-none": (Point("capibara_1b", "v5e-16", {"fsdp": 16}, 2, "none"), 0.231),
    "llama3.2-1b-save": (Point("llama3.2_1b", "v5e-4", {"fsdp": 4}, 4, "save"), 0.552),
    "mistral-7b-hidden": (planner.MEMORY["7b-hidden"], 1.466),
    "narrow-none": (planner.MEMORY["narrow-none"], 0.203),
    # By libtpu 0.0.50.1. Mistral's SiLU is computed again for each tile of the MLP's gradients (kernels/gate.py), for 1.1 s.
    "llama3.1-8b-few": (planner.MEMORY["8b-few"], 1.493),
    "mistral-7b-limit": (planner.MEMORY["mistral-7b-limit"], 7.775),
    "capibara-1b-limit": (planner.MEMORY["1b-limit"], 5.761),
    "gemma3-4b": (planner.MEMORY["gemma3-4b-rest"], 1.679),
    "t5-large-minimal": (
        Point("t5_1_1_large", "v5e-16", {"fsdp": 16}, 8, "minimal", length=512, encoder_length=512), 0.396,
    ),
}  # fmt: skip
TEST = (
    "phi3-mini",
    "gemma3-1b",
    "capibara-1b-none",
    "llama3.2-1b-save",
    "mistral-7b-hidden",
    "narrow-none",
    "llama3.1-8b-few",
    "mistral-7b-limit",
    "capibara-1b-limit",
    "gemma3-4b",
)  # compiled when the constants stood; T5's step gave its own constant, of scores


@dataclasses.dataclass(frozen=True)
class Row:
    """A step's seconds, and those of its parts at the peak and at the listed bandwidth.

    Attributes:
      name: as it is printed.
      seconds: published or compiled.
      compiled: whether kernels and collectives are left out.
      chip: of the slice.
      products, attention: FLOPs at the peak.
      residual, heads, experts: a pass of element-wise work each.
      logits: a pass of those of parts of the vocabulary.
      counted: what is not fitted with the others: loss by blocks of tokens, scores, results that are saved.
      links, activations, rest: collectives of weights and activations, the others with the update.
    """

    name: str
    seconds: float
    compiled: bool
    chip: str
    products: float
    attention: float
    residual: float
    heads: float
    experts: float
    logits: float
    counted: float
    links: float
    activations: float
    rest: float


def row(name: str, seconds: float, compiled: bool, work: Any, choice: Any, slice_: Any) -> Row:
    """The parts of a step."""
    from capibara.planner.model import cost

    def seconds_of(pass_: str = "") -> float:
        for constant in _PASSES:
            setattr(cost, constant, float(constant == pass_))
        return cost.elementwise_bytes(work, choice, slice_.chip) / slice_.chip.device_hbm_bytes_per_s

    constants = {constant: getattr(cost, constant) for constant in _PASSES}
    found = cost.cost(work, choice, slice_)
    share = cost._MATMUL[slice_.chip.name]
    parts = {part.name: part.seconds * share for part in cost.compute(work, choice, slice_, found.flops)}
    counted = seconds_of()
    passes = {field: seconds_of(constant) - counted for constant, field in _PASSES.items()}
    for constant, value in constants.items():
        setattr(cost, constant, value)
    attention = parts.pop("attention") / share * cost._ATTENTION
    activations = sum(one.seconds for one in found.collectives if one.exposed < 1)
    copies = sum(one.seconds for one in found.collectives if not one.overlaps and one.exposed == 1)
    return Row(
        name, seconds, compiled, slice_.chip.name, sum(parts.values()), attention, **passes, counted=counted,
        links=found.links_s,
        activations=activations, rest=copies + found.update_s,
    )  # fmt: skip


def rows(names: list[str]) -> Iterator[Row]:
    """All published rows, and the named compiled ones."""
    from capibara.planner.hardware import slices
    from capibara.planner.model import choice
    from capibara.sharding import MESH_AXES, Remat, RematPolicy

    for name, one in planner.TIME.items():
        remat = RematPolicy(Remat.OFFLOAD, one.kept) if one.kept else RematPolicy(Remat.FULL)
        sizes = tuple(one.mesh.get(axis, 1) for axis in MESH_AXES)
        plan = choice.Choice(sizes=sizes, rows=one.rows, remat=remat)
        yield row(name, planner.published(one)[0], False, planner.workload_of(one), plan, slices.parse(one.slice))
    for name in names:
        case = planner.case(CYCLES[name][0])
        yield row(name, CYCLES[name][1], True, case.work, case.choice, case.slice_)


def predicted(one: Row, constants: np.ndarray) -> float:
    """Seconds of a row; the constants are those that `fit` prints, in its order."""
    compiled, v5e, v6e, residual, heads, experts, logits, exposed = constants
    share = compiled if one.compiled else v5e if one.chip == "v5e" else v6e
    passes = residual * one.residual + heads * one.heads + experts * one.experts + logits * one.logits
    seconds = one.products / share + passes + one.counted
    if one.compiled:
        return seconds
    return seconds + one.attention / 0.5 + one.links + exposed * one.activations + one.rest


def fit(options: argparse.Namespace) -> dict[str, Any]:
    """Fits the constants; prints them, and every row."""
    from scipy.optimize import least_squares

    every = list(rows(list(CYCLES)))
    used = [
        one
        for one in every
        if one.name in planner.FITTED or one.compiled and one.name not in (*TEST, "t5-large-minimal")
    ]
    names = (
        "compiled share",
        "v5e share",
        "v6e share",
        "residual passes",
        "head passes",
        "expert passes",
        "logit passes",
        "exposed",
    )
    solution = least_squares(
        lambda constants: [np.log(predicted(one, constants) / one.seconds) for one in used],
        (0.92, 0.92, 0.75, 100.0, 10.0, 20.0, 2.0, 0.5),
        bounds=((0.85, 0.6, 0.5, 10, 0, 0, 0, 0.3), (1.0, 1.0, 1.0, 400, 60, 800, 20, 1.0)),
        loss="soft_l1", f_scale=0.05,
    ).x  # fmt: skip
    print("  ".join(f"{name} {value:.3g}" for name, value in zip(names, solution, strict=True)))
    errors = {one.name: predicted(one, solution) / one.seconds - 1 for one in every}
    for one in every:
        print(f"{one.name:28}{one.seconds:9.3f}{errors[one.name]:8.1%}  {'fitted' if one in used else ''}")
    rest = [abs(errors[one.name]) for one in every if one not in used]
    print(f"not fitted: {len(rest)} rows, median {statistics.median(rest):.1%}, worst {max(rest):.1%}")
    return {"constants": dict(zip(names, solution.tolist(), strict=True)), "errors": errors}


def cycles(options: argparse.Namespace) -> dict[str, Any]:
    """Predicted against compiled seconds."""
    results: dict[str, Any] = {}
    for name in options.points.split(",") if options.points else CYCLES:
        case = planner.case(CYCLES[name][0])
        seconds = CYCLES[name][1]
        if options.compile:
            compiled = planner.compiled(case, name, options.deadline).compiled
            seconds = compiled.costs.cycles / case.slice_.chip.clock_hz
        parts = row(name, seconds, True, case.work, case.choice, case.slice_)
        from capibara.planner.model import cost

        found = cost.cost(case.work, case.choice, case.slice_)
        ours = parts.products / _COMPILED_SHARE + found.elementwise_s
        results[name] = {"compiled_s": seconds, "predicted_s": ours, "error": ours / seconds - 1}
        kind = "" if name in TEST else "fitted"
        print(f"{name:28}{seconds:9.3f}{ours:9.3f}{ours / seconds - 1:8.1%}  {kind}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="cycles", choices=("cycles", "fit"))
    parser.add_argument("--points", help="comma-separated names; default: all")
    parser.add_argument("--compile", action="store_true", help="ask the compiler again")
    parser.add_argument("--deadline", type=float, default=1800.0, help="seconds for a compile")
    parser.add_argument("--json", help="write the results there")
    options = parser.parse_args()
    results = {"cycles": cycles, "fit": fit}[options.part](options)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
