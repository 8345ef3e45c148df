"""`capibara plan --serve`: finds a mesh and a number of slots for generation, and has the compiler check them."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from capibara import config, sharding
from capibara.core.types import UserError
from capibara.inference.engine.cache.batching import PREFILL_TOKENS, CacheDtype, EngineConfig
from capibara.inference.engine.placement import lowering
from capibara.models.api import Model
from capibara.planner.compiler import compile as compiler
from capibara.planner.hardware import topology
from capibara.planner.hardware.slices import Slice
from capibara.planner.search import ranking, serving
from capibara.planner.search.serving import Engine, Serving
from capibara.storage import outputs

_LONGER = (4, 16)  # multiples of the requested length that the table shows too


def plan(args: argparse.Namespace, model: Model, length: int, slice_: Slice) -> int:
    """Ranks the meshes, compiles for the first one if requested, and reports; returns the exit code.

    Args:
      args: of the verb.
      model: the model to serve.
      length: token capacity of a slot.
      slice_: the TPU slice.

    Raises:
      UserError: nothing fits, or the model does not generate.
    """
    ranking.check_headroom(args.headroom)
    if model.read is None:
        raise UserError(
            f"--serve is for models that generate, which {type(model.config).__name__} is not: leave it out"
        )
    options = config.build(EngineConfig)
    dtype = str(options.cache_dtype)
    engine = Engine(
        length=length,
        cache_dtype=str(model.config.dtype) if options.cache_dtype is CacheDtype.COMPUTE else dtype,
        slots=options.slots if config.is_bound("EngineConfig.slots") else None,
        prefill_tokens=options.prefill_tokens or PREFILL_TOKENS,
        prefix_bytes=0.0 if model.encode else options.prefix_cache_mib * 2**20,
    )
    result = serving.ranked(model, slice_, engine, args.headroom)
    best = result[0]
    if not best.fits:
        raise serving.does_not_fit(model, slice_, result, args.headroom)
    name = args.gin_file[-1].rpartition("/")[2].removesuffix(".gin")
    table = [*result, *_others(model, slice_, best, args.headroom)]
    print("\n".join(serving.lines(table, model, slice_, name)))
    proof = _compiled(model, slice_, best, options) if args.verify else None
    if proof is not None:
        print("\n".join(_proof_lines(proof, best)))
    lines = [f"# {name} on {slice_.name}: capibara plan --serve", *serving.bindings(best)]
    print("\nfor serve and infer:\n" + "\n".join(f"  --gin.{line.replace(' = ', '=')}" for line in lines[1:]))
    if args.output:
        outputs.save(args.output, "\n".join(lines) + "\n")
    if args.json:
        plans = [dataclasses.asdict(item) | {"fits": item.fits, "tokens_per_s": item.tokens_per_s} for item in table]
        shown = {"slice": slice_.name, "predicted": plans, "compiled": proof}
        outputs.save(args.json, json.dumps(shown, indent=1))
    return 0 if proof is None or proof["fits"] else 1


def _others(model: Model, slice_: Slice, best: Serving, headroom: float) -> Iterator[Serving]:
    """The same mesh with longer slots, and with an 8-bit cache: as many slots as fit."""
    for times in (1, *_LONGER):
        for dtype in dict.fromkeys((best.engine.cache_dtype, "int8")):
            engine = dataclasses.replace(best.engine, length=best.engine.length * times, cache_dtype=dtype, slots=None)
            if times > 1 or dtype != best.engine.cache_dtype:
                yield serving.predict(model, slice_, best.tensor, engine, headroom)


def _compiled(model: Model, slice_: Slice, best: Serving, options: EngineConfig) -> dict[str, Any]:
    """The TPU compiler's result for the engine's own decode step with these slots."""
    topology.check(slice_.name)
    plan_ = sharding.Plan(batch_size=best.data, data=best.data, fsdp=1, tensor=best.tensor)
    mesh = sharding.make_mesh(plan_, topology.slice_devices(slice_.name))
    rules = sharding.Rules(vocab=()) if model.config.vocab_size % best.tensor else sharding.Rules()
    engine = dataclasses.replace(options, slots=best.slots)
    report = compiler.compile_train_step(lowering.Step(model, engine, best.engine.length, mesh, rules).lower())
    names = ("fits", "peak_bytes", "limit_bytes", "argument_bytes", "temporary_bytes", "compile_s")
    result = {name: getattr(report, name) for name in names}
    return result | {"collectives": dict(report.costs.collective_counts), "kernels": dict(report.costs.kernels)}


def _proof_lines(proof: dict[str, Any], best: Serving) -> Iterator[str]:
    peak = f"{(proof['peak_bytes'] or 0) / serving.GIB:.2f} GiB"
    if not proof["fits"]:
        yield f"  compiled: the decode step does not fit, it needs {peak} per device: try fewer EngineConfig.slots"
        return
    predicted = (best.weights + best.keys_values) / serving.GIB
    yield (
        f"  compiled in {proof['compile_s']:.0f} s: the decode step needs {peak} per device, {predicted:.2f} predicted for "
        "weights and slots; prefill is not included"
    )
