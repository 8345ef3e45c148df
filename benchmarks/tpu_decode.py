"""What the TPU compiler says of a decode step: bytes over HBM against the least possible, and collectives; no TPU needed.

    python benchmarks/tpu_decode.py [--rows=8b-v5e-4,8b-v6e-4-pages] [--json=OUT]

Needs libtpu (in requirements.lock). The engine's own step is lowered for the mesh and compiled; nothing is run, and
nothing is timed. A row takes one to four minutes on two cores. Bytes are of one chip and one step:

- least: every weight once as the engine keeps it (of the embedding only the rows of the slots), and the keys and values
  of the tokens that rows have: `live` of them each, in the chip's share of slots and heads.
- compiled: what every instruction of the optimised program reads and writes in HBM (planner/compiler/hlo.py), with the padding of
  its layout. The insides of fusions, and arrays that the compiler put into the chip's own memory, are no traffic; a copy
  between both counts once, on the side of HBM; an update in place counts as what is updated, read and written. Loops count
  as often as they turn. Of a conditional the cheaper branch counts: no request has a temperature or a penalty. "sampled"
  counts the dearer one: top_k and top_p of all rows.
- JAX's paged attention kernel is given whole buffers, and reads blocks of 512 positions up to each row's length: it counts
  as that, for rows of `live` tokens (models/decode_kernel.bytes_moved); what else it takes and gives is in it.

Collectives are those of the cheaper branches: how many, and bytes of the larger side. The goal is a ratio of at most 1.25
with rows that are full.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))  # the checkout's package, installed or not
GOAL = 1.25
LENGTH = 2048


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
ROWS = {
    "8b-v5e-4": Row(_8B, "v5e-4", 4),
    "8b-v6e-4": Row(_8B, "v6e-4", 4),
    "8b-v5e-4-pages": Row(_8B, "v5e-4", 4, page_size=32),
    "8b-v6e-4-pages": Row(_8B, "v6e-4", 4, page_size=32),
    "8b-v6e-4-data": Row(_8B, "v6e-4", 2, data=2),
    "8b-v5e-4-int8": Row(_8B, "v5e-4", 4, cache_dtype="int8"),
    "8b-v6e-4-int8": Row(_8B, "v6e-4", 4, cache_dtype="int8"),
    "8b-v5e-4-int8-pages": Row(_8B, "v5e-4", 4, page_size=32, cache_dtype="int8"),
    "70b-v6e-16": Row(_70B, "v6e-16", 8, data=2),
}


def measure(row: Row) -> dict[str, Any]:
    """Compiles a row's step, and reads what it says."""
    from capibara import config, sharding
    from capibara.inference.engine.placement import lowering
    from capibara.models import api
    from capibara.planner.compiler import hlo
    from capibara.planner.hardware import topology

    config.parse([row.model], [], [])
    model = api.build(config.build(api.DecoderConfig))
    plan = sharding.Plan(batch_size=row.slots, data=row.data, fsdp=1, tensor=row.tensor)
    mesh = sharding.make_mesh(plan, topology.slice_devices(row.slice))
    step = lowering.Step(model, _engine(row), LENGTH, mesh)
    begin_s = time.perf_counter()
    compiled = step.lower().compile()
    compile_s, memory = time.perf_counter() - begin_s, compiled.memory_analysis()
    module = hlo.parse(compiled.as_text())
    found = [_counted(row, model.config, step, module, live) for live in row.live]
    return {
        **dataclasses.asdict(row),
        "compile_s": compile_s,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "copied_state_bytes": lowering.device_bytes(step.state["cache"]) - _aliased(memory, step),
        "live": found,
    }


def _engine(row: Row):
    from capibara.inference.engine.cache.batching import CacheDtype, EngineConfig

    return EngineConfig(slots=row.slots, page_size=row.page_size, cache_dtype=CacheDtype(row.cache_dtype))


def _aliased(memory, step) -> int:
    from capibara.inference.engine.placement import lowering

    return min(memory.alias_size_in_bytes, lowering.device_bytes(step.state["cache"]))


def _counted(row: Row, sizes, step, module, live: int) -> dict[str, Any]:
    """Least and compiled bytes where every row has `live` tokens."""
    from capibara.inference.engine.placement import lowering
    from capibara.kernels.cached_attention import tpu as paged_attention
    from capibara.planner.compiler import hlo

    embedding = lowering.device_bytes(step.params["embedding"])
    tied = "output" not in step.params
    weights = lowering.device_bytes(step.params) - (0 if tied else embedding)
    weights += row.slots // row.data * sizes.embed_dim * 2  # rows of the embedding
    kv_heads, heads, slots = sizes.kv_heads // row.tensor, sizes.num_heads // row.tensor, row.slots // row.data
    of_head = 2 * sizes.head_size if row.cache_dtype == "bfloat16" else sizes.head_size + 4  # with its scale
    keys = sizes.num_layers * slots * live * 2 * kv_heads * of_head
    kernel = paged_attention.bytes_moved(
        [live] * slots, row.page_size or LENGTH, heads, kv_heads, sizes.head_size, whole_rows=not row.page_size
    )
    known = {paged_attention.NAME: kernel}
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help=f"comma-separated: {', '.join(ROWS)}")
    parser.add_argument("--json", help="write the results there")
    options = parser.parse_args()
    names = options.rows.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"--rows has {unknown[0]!r}: known are {', '.join(ROWS)}")
    os.environ["JAX_PLATFORMS"] = "cpu"
    results = {}
    for name in names:
        results[name] = measure(ROWS[name])
        show(name, results[name])
    full = [result["live"][0]["ratio"] for result in results.values()]
    print(f"\nfull rows: {max(full):.3f} times the least at most (goal: {GOAL})")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    return 1 if max(full) > GOAL else 0


if __name__ == "__main__":
    sys.exit(main())
