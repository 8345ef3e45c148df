"""A cache in pages against one of whole rows, on a CPU: what a step costs, and what the same memory answers.

    python benchmarks/pages.py [--model=llama_28m|smollm2_135m] [--page_size=32] [--rounds=5] [--requests=64]
        [--cores=0] [--json=OUT]

Both engines have the same random weights in float32 and answer greedily in turns; their texts must agree.

  step    one token more (EngineConfig.decode_steps = 1) of eight slots of 256 positions that hold 32, 128 and 240 tokens
          each, with a pool for all of them.
  mixed   the mixed requests of generate.py: eight slots of whole rows against sixteen slots on a pool of the same bytes
          (the page that is nobody's is one of it).

Medians of CPU and wall seconds. A ratio is the rows' time over the pages'.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

import generate

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "peers"))
SLOTS, STEPS = 8, 12
FILLED = (32, 128, 240)


class Contender:
    """An engine, and the seconds that it took."""

    def __init__(self, name: str, model: Any, params: Any, shape: dict, **config):
        from capibara_generate import Ids

        from capibara.inference.engine.engine import Engine, EngineConfig

        settings = EngineConfig(prefix_cache_mib=0, **config)
        self.name, self.engine = name, Engine(model, params, Ids(shape["vocab_size"]), shape["length"], settings)
        self.seconds: list[tuple[float, float]] = []

    def timed(self, call, *args, counts: bool) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        found = call(*args)
        took = time.perf_counter() - wall, time.process_time() - cpu
        self.seconds += [took] if counts else []
        return found

    def steps(self, prompts: list[list[int]], rounds: int) -> list[list[int]]:
        """The texts after so many prompts as there are slots; each of some steps in the middle is timed."""
        from capibara.inference.sampling.sampling import Sampling

        asked = Sampling(temperature=0.0, max_new_tokens=STEPS)
        for turn in range(rounds + 1):
            streams = [self.engine.submit(prompt, asked) for prompt in prompts]
            while any(request is None or not request.written for request in self.engine.core.scheduler.slots):
                self.engine.step()
            for _ in range(STEPS // 2):
                self.timed(self.engine.step, counts=turn > 0)
            texts = [stream.result().tokens for stream in streams]
        return texts

    def mixed(self, prompts: list[list[int]], news: list[int]) -> list[list[int]]:
        from capibara.inference.sampling.sampling import Sampling

        asked = [Sampling(temperature=0.0, max_new_tokens=new) for new in news]
        streams = [self.engine.submit(prompt, one) for prompt, one in zip(prompts, asked)]
        self.engine.run()
        return [stream.result().tokens for stream in streams]

    def medians(self) -> dict[str, float]:
        walls, cpus = zip(*self.seconds)
        self.seconds = []
        return {"wall_s": statistics.median(walls), "cpu_s": statistics.median(cpus)}


def cache_bytes(engine: Any) -> int:
    """Of keys and values, as they lie on the device."""
    import jax

    return sum(x.nbytes for x in jax.tree.leaves(engine.core.runner.state["cache"]["layers"]))


def compared(texts: list) -> None:
    if any(found != texts[0] for found in texts):
        raise RuntimeError("the texts with pages differ from those with rows")


def steps(contenders: list[Contender], shape: dict, rounds: int) -> dict[str, Any]:
    from capibara_generate import prompts_of

    results = {}
    for filled in FILLED:
        prompts = prompts_of(shape, [filled] * SLOTS)
        compared([one.steps(prompts, rounds) for one in contenders])
        results[f"step_{filled}"] = {one.name: one.medians() for one in contenders}
        show(
            f"a step of {SLOTS} slots that hold {filled} of {shape['length']} tokens", results[f"step_{filled}"], SLOTS
        )
    return results


def mixed(contenders: list[Contender], shape: dict, count: int, new: int, rounds: int) -> dict[str, Any]:
    from capibara_generate import prompts_of

    requests = generate.mixed_requests(count, shape, new)
    prompts, news = prompts_of(shape, [prompt for prompt, _ in requests]), [new for _, new in requests]
    for turn in range(rounds + 1):
        for one in contenders:
            one.engine.statistics.preempted = one.engine.statistics.steps = 0
        compared([one.timed(one.mixed, prompts, news, counts=turn > 0) for one in contenders])
    found = {one.name: one.medians() for one in contenders}
    for one in contenders:
        about = {"preempted": one.engine.statistics.preempted, "steps": one.engine.statistics.steps}
        found[one.name] |= about | {"cache_mib": cache_bytes(one.engine) / 2**20}
    show(f"{count} mixed requests, {sum(news)} tokens", found, sum(news))
    return found


def show(title: str, results: dict[str, dict], tokens: int) -> None:
    """Prints one comparison; the first contender has rows."""
    rows = next(iter(results.values()))
    more = [name for name in ("steps", "preempted", "cache_mib") if name in rows]
    print(f"\n{title}")
    print(
        f"{'':28}{'tokens/s':>10}{'wall s':>9}{'ratio':>7}{'CPU s':>9}{'ratio':>7}" + "".join(f"{m:>11}" for m in more)
    )
    for name, one in results.items():
        line = f"{name:28}{tokens / one['wall_s']:10.1f}"
        line += "".join(f"{one[key]:9.4f}{rows[key] / one[key]:7.2f}" for key in ("wall_s", "cpu_s"))
        print(line + "".join(f"{one[m]:11.1f}" for m in more), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(generate.MODELS), default="llama_28m")
    parser.add_argument("--page_size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=64, help="of the mixed comparison; 0: leave it out")
    parser.add_argument("--cores", default="0", help="comma-separated numbers of the cores to use")
    parser.add_argument("--json", help="file to write the figures to")
    args = parser.parse_args()
    os.sched_setaffinity(0, [int(core) for core in args.cores.split(",")])
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    from capibara_generate import build

    from capibara.core import allocator

    allocator.keep_freed_memory()
    shape = generate.MODELS[args.model]
    model = build(shape)
    params = jax.jit(model.init)(jax.random.key(0))
    made = lambda name, **config: Contender(name, model, params, shape, **config)  # noqa: E731
    pool = SLOTS * -(-shape["length"] // args.page_size)
    each = {"slots": SLOTS, "decode_steps": 1}
    whole = made(f"rows, {SLOTS} slots", **each)
    same = made(f"pages, {SLOTS} slots", **each, page_size=args.page_size)
    summary = {"model": args.model, "page_size": args.page_size, "cores": args.cores}
    summary |= steps([whole, same], shape, args.rounds)
    if args.requests:
        whole.engine = same.engine = None  # their memory
        whole = made(f"rows, {SLOTS} slots", slots=SLOTS)
        more = made(f"pages, {2 * SLOTS} slots", slots=2 * SLOTS, page_size=args.page_size, pages=pool - 1)
        new = generate.NEW[args.model]
        summary["mixed"] = mixed([whole, more], shape, args.requests, new, max(1, args.rounds // 2))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(summary, file, indent=2)


if __name__ == "__main__":
    main()
