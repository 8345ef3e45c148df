"""What the TPU compiler says of an engine's programs: bytes over HBM against the least possible, and collectives; no TPU needed.

    python benchmarks/tpu_decode.py [--rows=8b-v5e-4,8b-v6e-4-pages] [--mixed] [--layers=4] [--json=OUT] [--hlo=FOLDER]

Needs libtpu (in requirements.lock). The engine's own programs are lowered for the mesh and compiled; nothing is run, and
nothing is timed. A row takes one to four minutes on two cores, --mixed as much again. Bytes are of one chip. Of a decode step:

- least: every weight once as the engine keeps it (of the embedding only the rows of the slots), and the keys and values
  of the tokens that rows have: `live` of them each, in the chip's share of slots and heads; of a layer with a window those in
  the window. Every expert is chosen by some row.
- compiled: what every instruction of the optimised program reads and writes in HBM (planner/compiler/hlo.py), with the padding of
  its layout. The insides of fusions, and arrays that the compiler put into the chip's own memory, are no traffic; a copy
  between both counts once, on the side of HBM; an update in place counts as what is updated, read and written. Loops count
  as often as they turn. Of a conditional the cheaper branch counts: no request has a temperature or a penalty. "sampled"
  counts the dearer one: top_k and top_p of all rows.
- JAX's paged attention kernel is given whole buffers, and reads blocks of 512 positions up to each row's length: it counts
  as that, for rows of `live` tokens (kernels/cached_attention/tpu.bytes_moved). The kernel of experts counts as often as its
  tiles read rows and matrices (kernels/grouped_matmul/tpu.bytes_moved), that of a token's keys and values as the tiles that it
  reads and writes (kernels/token_writes.bytes_moved). What else they take and give is in it.

--mixed adds a part of a prompt, as the engine reads it between two decode steps: PART tokens of a new prompt, which its slot
then takes, and as many after KNOWN of a longer one. Its least is every weight once (of the embedding the part's rows), and its
keys and values written, those before it read. The engine runs one program after the other, each of which reads the weights: a
mixed step's least is the sum of both.

Collectives are those of the cheaper branches: how many, and bytes of the larger side. The goals are ratios of at most 1.10
with rows that are full, and 1.15 of mixed steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))  # the checkout's package, installed or not
GOAL, MIXED_GOAL = 1.10, 1.15
LENGTH = 2048
PART, KNOWN = 512, 1024


@dataclasses.dataclass(frozen=True)
class Row:
    """One compilation.

    Attributes:
      model: a Gin file.
      slice: the TPU slice.
      tensor, data: sizes of the mesh's axes.
      slots: of LENGTH positions.
      page_size, cache_dtype: of EngineConfig; the kernel is for bfloat16.
      live: tokens that every row has, counted one after another.
    """

    model: str
    slice: str
    tensor: int
    data: int = 1
    slots: int = 32
    page_size: int = 0
    cache_dtype: str = "bfloat16"
    live: tuple[int, ...] = (LENGTH, LENGTH // 2)


_8B, _70B = "models/llama3_8b.gin", "models/llama3_70b.gin"
_LLAMA, _QWEN, _GPT_OSS = "models/llama3.1_8b.gin", "models/qwen3_4b.gin", "models/gpt_oss_20b.gin"
ROWS = {
    "8b-v5e-4": Row(_8B, "v5e-4", 4),
    "8b-v6e-4": Row(_8B, "v6e-4", 4),
    "8b-v5e-4-pages": Row(_8B, "v5e-4", 4, page_size=32),
    "8b-v6e-4-pages": Row(_8B, "v6e-4", 4, page_size=32),
    "8b-v6e-4-data": Row(_8B, "v6e-4", 2, data=2),
    "8b-v5e-4-int8": Row(_8B, "v5e-4", 4, cache_dtype="int8"),
    "8b-v6e-4-int8": Row(_8B, "v6e-4", 4, cache_dtype="int8"),
    "8b-v5e-4-int8-pages": Row(_8B, "v5e-4", 4, page_size=32, cache_dtype="int8"),
    "llama3.1-8b-v5e-4": Row(_LLAMA, "v5e-4", 4),
    "llama3.1-8b-v6e-1": Row(_LLAMA, "v6e-1", 1),
    "llama3.1-8b-v6e-4": Row(_LLAMA, "v6e-4", 4),
    "qwen3-4b-v5e-4": Row(_QWEN, "v5e-4", 4),
    "qwen3-4b-v6e-1": Row(_QWEN, "v6e-1", 1),
    "qwen3-4b-v6e-4": Row(_QWEN, "v6e-4", 4),
    "gpt-oss-20b-v5e-4": Row(_GPT_OSS, "v5e-4", 4),
    "gpt-oss-20b-v6e-4": Row(_GPT_OSS, "v6e-4", 4),
    "70b-v6e-16": Row(_70B, "v6e-16", 8, data=2),
}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Compiles a row's programs, and reads what they say."""
    from capibara import config, sharding
    from capibara.inference.engine.placement import lowering
    from capibara.models import api
    from capibara.planner.hardware import topology

    row = ROWS[name]
    config.parse([row.model], [], [])
    built = config.build(api.DecoderConfig)
    model = api.build(dataclasses.replace(built, num_layers=options.layers) if options.layers else built)
    plan = sharding.Plan(batch_size=row.slots, data=row.data, fsdp=1, tensor=row.tensor)
    mesh = sharding.make_mesh(plan, topology.slice_devices(row.slice))
    step = lowering.Step(model, _engine(row), LENGTH, mesh)
    cache = lowering.device_bytes(step.state["cache"])
    hlo_of = lambda program: options.hlo and os.path.join(options.hlo, f"{name}.{program}.txt")  # noqa: E731
    with sharding.activate(mesh, sharding.Rules()):  # tiles of kernels are those of these devices
        compiled = _compiled(step.lower(), hlo_of("step"))
        decoded = [_decoded(row, model.config, step, compiled["module"], live) for live in row.live]
        mixed = {"mixed": _mixed(row, model.config, step, decoded[0], hlo_of)} if options.mixed else {}
    result = dataclasses.asdict(row) | {
        key: compiled[key] for key in ("compile_s", "argument_bytes", "temporary_bytes")
    }
    return result | {"copied_state_bytes": cache - min(compiled["alias_bytes"], cache), "live": decoded} | mixed


def _engine(row: Row):
    from capibara.inference.engine.cache.batching import CacheDtype, EngineConfig

    return EngineConfig(slots=row.slots, page_size=row.page_size, cache_dtype=CacheDtype(row.cache_dtype))


def _compiled(lowered: Any, path: str | None) -> dict[str, Any]:
    from capibara.planner.compiler import hlo

    begin_s = time.perf_counter()
    compiled = lowered.compile()
    compile_s, memory, text = time.perf_counter() - begin_s, compiled.memory_analysis(), compiled.as_text()
    if path:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    return {
        "compile_s": compile_s,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "module": hlo.parse(text),
        "shardings": compiled.output_shardings,
    }


def _weights_bytes(sizes, step, tokens: int) -> int:
    """Every weight once; of the embedding the rows of so many tokens."""
    from capibara.inference.engine.placement import lowering

    embedding = lowering.device_bytes(step.params["embedding"])
    tied = "output" not in step.params
    return lowering.device_bytes(step.params) - (0 if tied else embedding) + tokens * sizes.embed_dim * 2


def _token_bytes(row: Row, sizes) -> int:
    """Keys and values of one token in one layer."""
    of_head = 2 * sizes.head_size if row.cache_dtype == "bfloat16" else sizes.head_size + 4  # with its scale
    return 2 * sizes.kv_heads // row.tensor * of_head


def _experts_bytes(row: Row, sizes, tokens: int) -> dict[str, float]:
    """Of the kernel of experts: the mean of the products of a layer, each over the choices of so many tokens."""
    from capibara.kernels.grouped_matmul import dispatch
    from capibara.kernels.grouped_matmul import tpu as grouped_matmul

    if (moe := sizes.moe) is None:
        return {}
    rows, experts, D = tokens * moe.top_k, moe.num_experts, sizes.embed_dim
    hidden = (moe.expert_dim or sizes.mlp_dim) // row.tensor
    tile = dispatch.row_tile(rows, experts)
    shapes = [(D, hidden)] * (1 + sizes.activation.gated) + [(hidden, D)]
    moved = [grouped_matmul.bytes_moved(rows, experts, *shape, tile) for shape in shapes]
    return {grouped_matmul.NAME: sum(moved) / len(moved)}


def _decoded(row: Row, sizes, step, module, live: int) -> dict[str, Any]:
    """Least and compiled bytes of a decode step where every row has `live` tokens."""
    from capibara.kernels import token_writes
    from capibara.kernels.cached_attention import tpu as paged_attention
    from capibara.planner.compiler import hlo

    kv_heads, heads, slots = sizes.kv_heads // row.tensor, sizes.num_heads // row.tensor, row.slots // row.data
    weights = _weights_bytes(sizes, step, slots)
    seen = sum(min(live, window or live) for window in sizes.windows)
    keys = slots * seen * _token_bytes(row, sizes)
    kernel = paged_attention.bytes_moved(
        [live] * slots, row.page_size or LENGTH, heads, kv_heads, sizes.head_size, whole_rows=not row.page_size
    )
    written = token_writes.bytes_moved(slots, kv_heads, sizes.head_size, 2 if row.cache_dtype == "bfloat16" else 1)
    known = {paged_attention.NAME: kernel, token_writes.NAME: written} | _experts_bytes(row, sizes, slots)
    greedy, sampled = (hlo.costs(module, kernel_bytes=known, dearest=dearest) for dearest in (False, True))
    return {
        "live": live,
        "weights_bytes": weights,
        "keys_values_bytes": keys,
        "least_bytes": weights + keys,
        "compiled_bytes": greedy.hbm_bytes,
        "sampled_bytes": sampled.hbm_bytes,
        "ratio": greedy.hbm_bytes / (weights + keys),
        "sampled_ratio": sampled.hbm_bytes / (weights + keys),
        "collectives": dict(greedy.collective_counts),
        "collective_bytes": dict(greedy.collective_bytes),
        "sampled_collectives": dict(sampled.collective_counts),
        "kernels": dict(greedy.kernels),
    }


def _mixed(row: Row, sizes, step, decoded: dict[str, Any], hlo_of: Callable[[str], str | None]) -> list[dict[str, Any]]:
    """Of a decode step and a part of a prompt, which begins or continues it: least and compiled bytes."""
    from capibara.inference.engine.placement import lowering
    from capibara.planner.compiler import hlo

    first = step.lower_prefill(PART)
    prefill = _compiled(first, hlo_of("prefill"))
    outputs, before = (lowering.outputs(of, prefill["shardings"]) for of in (first, step.lower_prefill(KNOWN)))
    admit = _compiled(step.lower_admit(*outputs), hlo_of("admit"))
    resume = _compiled(step.lower_resume(before[1], PART), hlo_of("resume"))
    result = []
    for known, programs in ((0, (prefill, admit)), (KNOWN, (resume,))):
        tokens = sum(PART + min(known, window or known) for window in sizes.windows)
        least = _weights_bytes(sizes, step, PART) + tokens * _token_bytes(row, sizes)
        kernels = _experts_bytes(row, sizes, PART)
        moved = [hlo.costs(of["module"], kernel_bytes=kernels, dearest=False).hbm_bytes for of in programs]
        whole, both = decoded["compiled_bytes"] + sum(moved), decoded["least_bytes"] + least
        part = {"known": known, "least_bytes": least, "compiled_bytes": moved, "ratio": whole / both}
        result.append(part | {"temporary_bytes": max(of["temporary_bytes"] for of in programs)})
    return result


def show(name: str, result: dict[str, Any]) -> None:
    """Prints a row."""
    mesh = f"tensor={result['tensor']}" + (f" x data={result['data']}" if result["data"] > 1 else "")
    pages = f", pages of {result['page_size']}" if result["page_size"] else ""
    pages += f", {result['cache_dtype']}"
    print(f"\n{name}: {result['model']} on {result['slice']} ({mesh}), {result['slots']} slots of {LENGTH}{pages}")
    gib = {key: result[f"{key}_bytes"] / 2**30 for key in ("argument", "temporary", "copied_state")}
    print(
        f"  a chip holds {gib['argument']:.2f} GiB of weights, keys and values, and {gib['temporary']:.3f} GiB of temporaries;"
        f" {gib['copied_state']:.3f} GiB of keys and values are copied; compiled in {result['compile_s']:.0f} s"
    )
    for one in result["live"]:
        collectives = ", ".join(
            f"{count:.0f} {kind} ({one['collective_bytes'][kind] / 1e6:.2f} MB)"
            for kind, count in sorted(one["collectives"].items())
        )
        kernels = sum(n for kind, n in one["kernels"].items() if not kind[:1].isupper())
        print(
            f"  rows of {one['live']:5}: least {one['least_bytes'] / 1e9:6.3f} GB (weights "
            f"{one['weights_bytes'] / 1e9:.3f}, keys and values {one['keys_values_bytes'] / 1e9:.3f}), compiled "
            f"{one['compiled_bytes'] / 1e9:6.3f} GB: {one['ratio']:.3f} times; sampled {one['sampled_ratio']:.3f}"
        )
        print(f"  {'':14}{collectives}; {kernels:.0f} kernels", flush=True)
    for part in result.get("mixed", ()):
        moved = " + ".join(f"{size / 1e9:.3f}" for size in part["compiled_bytes"])
        print(
            f"  with {PART} tokens of a prompt after {part['known']:4}: their least {part['least_bytes'] / 1e9:6.3f} GB, compiled {moved} "
            f"GB; both steps {part['ratio']:.3f} times",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help=f"comma-separated: {', '.join(ROWS)}")
    parser.add_argument("--mixed", action="store_true", help="compile the programs that read a part of a prompt, too")
    parser.add_argument("--layers", type=int, help="of every row in place of its own: a quick look")
    parser.add_argument("--hlo", help="folder to keep the optimised HLO in")
    parser.add_argument("--json", help="write the results there")
    options = parser.parse_args()
    names = options.rows.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"--rows has {unknown[0]!r}: known are {', '.join(ROWS)}")
    os.environ["JAX_PLATFORMS"] = "cpu"
    results = {}
    for name in names:
        results[name] = measure(name, options)
        show(name, results[name])
        if options.json:  # as they come: a row is minutes of work
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(results, file, indent=1)
    full = max(result["live"][0]["ratio"] for result in results.values())
    mixed = max((part["ratio"] for result in results.values() for part in result.get("mixed", ())), default=0.0)
    print(f"\nfull rows: {full:.3f} times the least at most (goal: {GOAL:.2f})")
    if mixed:
        print(f"mixed steps: {mixed:.3f} times the least at most (goal: {MIXED_GOAL:.2f})")
    return 1 if full > GOAL or mixed > MIXED_GOAL else 0


if __name__ == "__main__":
    sys.exit(main())
