"""Speed of generation with adapters beside the model, unmerged, against the same model with one merged.

    python benchmarks/adapters.py [--rank=16] [--slots=8] [--new=48] [--rounds=5] [--json=OUT]

One process, random weights in float32, a decoder of 28M parameters whose projections all have an adapter. Engines take
turns: one whose adapter is merged, and ones with 0, 1, 4 and 16 adapters beside the model, of which the rows of a batch
have each in turn. A turn is a whole call of `new` tokens for all slots and one of a single token, which is the time of
reading the prompts; what the whole call takes longer is decoding. A ratio is the median time over that of the merged one:
1.1 is 10% slower.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time

import jax
import numpy as np

from capibara.core import tree
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.sampling.sampling import Sampling
from capibara.models import api
from capibara.models.api import Adapter, DecoderConfig, Lora

COUNTS = (0, 1, 4, 16)
PROMPT = 32
SIZES = dict(vocab_size=8192, embed_dim=512, num_layers=8, num_heads=8, num_kv_heads=4, mlp_dim=1408, dtype="float32")


def engines(rank: int, slots: int, length: int) -> dict[str, tuple[Engine, list[str | None]]]:
    """By their names, with the adapter of each row."""
    plain = api.build(DecoderConfig(**SIZES))
    base = jax.jit(plain.init)(jax.random.key(0))
    lora = Lora(rank=rank, targets=("all-linear",))
    model = api.build(dataclasses.replace(plain.config, lora=lora))
    rng = np.random.default_rng(0)

    def drawn(number: int) -> api.Adapter:
        values = model.trained(jax.jit(model.adapt)(base, jax.random.key(number)))
        own = tree.map_with_names(lambda _, x: 0.02 * rng.standard_normal(x.shape).astype(np.float32), values)
        return Adapter(str(number), lora, own)

    every = [drawn(number) for number in range(max(COUNTS))]
    vocabulary, config = ByteVocabulary(), EngineConfig(slots=slots, prefix_cache_mib=0)
    merged = jax.jit(model.merge)(tree.joined(every[0].values, base))
    found = {"merged": (Engine(plain, merged, vocabulary, length, config), [None] * slots)}
    for count in COUNTS:
        beside = every[:count]
        names = [beside[row % count].name if count else None for row in range(slots)]
        found[f"{count} beside"] = Engine(plain, base, vocabulary, length, config, adapters=beside), names
    return found


def call_s(engine: Engine, names: list[str | None], new: int) -> float:
    """Seconds of a call for all slots."""
    sampling = Sampling(temperature=1.0, max_new_tokens=new)
    prompts = [[1 + (row + position) % 200 for position in range(PROMPT)] for row in range(len(names))]
    began_s = time.perf_counter()
    streams = [engine.submit(prompt, sampling, adapter=name) for prompt, name in zip(prompts, names)]
    tokens = sum(len(stream.result().tokens) for stream in streams)
    took_s = time.perf_counter() - began_s
    return took_s if tokens else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("rank", 16), ("slots", 8), ("new", 48), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json")
    args = parser.parse_args()
    every = engines(args.rank, args.slots, PROMPT + args.new)
    decode_s: dict[str, list[float]] = {name: [] for name in every}
    prefill_s: dict[str, list[float]] = {name: [] for name in every}
    for turn in range(1 + args.rounds):  # the first compiles
        for name, of in every.items():
            one, whole = call_s(*of, 1), call_s(*of, args.new)
            if turn:
                prefill_s[name].append(one)
                decode_s[name].append(whole - one)
    median = lambda times, name: statistics.median(times[name])  # noqa: E731
    rows = [
        {
            "engine": name,
            "decode_ms_per_step": 1e3 * median(decode_s, name) / (args.new - 1),
            "decode_ratio": median(decode_s, name) / median(decode_s, "merged"),
            "prefill_ratio": median(prefill_s, name) / median(prefill_s, "merged"),
        }
        for name in every
    ]
    print(f"rank {args.rank}, {args.slots} rows, {args.new} tokens after {PROMPT}, median of {args.rounds}")
    for row in rows:
        of_row = f"{row['decode_ms_per_step']:8.2f} ms a step, {row['decode_ratio']:.2f} of merged"
        print(f"{row['engine']:10} {of_row}; prompts {row['prefill_ratio']:.2f}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"platform": jax.default_backend(), "rows": rows} | vars(args), file, indent=1)


if __name__ == "__main__":
    main()
