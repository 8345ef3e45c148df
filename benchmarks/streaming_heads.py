"""Streaming heads: passkeys that are answered, bytes of the cache, and HBM bytes of a decode step that is compiled for v6e-1.

    python benchmarks/streaming_heads.py --out=build/streaming_heads [--decode]

A small decoder is trained here, in a minute on two cores, to find a passkey of two words in rows of 128 and 512 tokens. It has no
positions, and its queries grow with the length, so that it finds passkeys in longer texts, too. @DuoAttention() then trains its gates,
the largest ones retrieve, and both models answer through the engine: `right` is the share of whole passkeys. Bytes are
those of the engine's arrays. The filler is the standard library's source; the words have ids of their own. --decode compiles the
decode step of a wider model for a TPU and counts as benchmarks/tpu_decode.py; nothing is run on one.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # the checkout's package, installed or not

import capibara as cb  # noqa: E402
from capibara.core import tree  # noqa: E402
from capibara.core.types import Params  # noqa: E402
from capibara.data.tokenizers.vocabulary import ByteVocabulary  # noqa: E402
from capibara.inference.engine.engine import Engine, EngineConfig  # noqa: E402
from capibara.inference.sampling.sampling import Sampling  # noqa: E402
from capibara.models import api, head_patterns  # noqa: E402
from capibara.models.api import DecoderConfig, StreamingHeads  # noqa: E402

LONGEST = 32_768  # tokens of a prompt
STAGES = ((128, 32, 450), (512, 8, 100))  # of the training: tokens of a row, rows, steps
WORDS, KINDS = 2, 40  # words of a passkey; words that may be at each place of it
GATE_WEIGHT = 2.0  # the small model's hidden states differ less than a large one's
MARK, FIRST_WORD = 260, 262  # ids of ByteVocabulary that no text has
CONFIG = DecoderConfig(
    vocab_size=384, embed_dim=64, num_layers=2, num_heads=4, head_dim=16, mlp_dim=128, dtype="float32", max_length=LONGEST,
    positions="none", query_growth=1.0, query_growth_length=64,
)  # fmt: skip


@functools.cache
def filler() -> np.ndarray:
    """Bytes of the standard library's source."""
    files = sorted(pathlib.Path(json.__file__).parent.parent.glob("*.py"))
    return np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8).astype(np.int32)


def passkeys(rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
    """A row [length] of filler with a passkey in it and the question at its end.

    Returns:
      its tokens, which end with the answer; and 1 where a word of the answer follows.
    """
    words = FIRST_WORD + KINDS * np.arange(WORDS) + rng.integers(0, KINDS, WORDS)
    key = np.concatenate([[MARK], words])
    room = length - 2 * len(key)
    start = int(rng.integers(0, len(filler()) - room))
    text, at = filler()[start : start + room], int(rng.integers(0, room))
    weights = np.zeros(length, np.float32)
    weights[length - len(key) : length - 1] = 1
    return np.concatenate([text[:at], key, text[at:], key]).astype(np.int32), weights


def training_batch(rng: np.random.Generator, rows: int, length: int) -> dict[str, np.ndarray]:
    """Rows of `length` tokens."""
    tokens, weights = map(np.stack, zip(*(passkeys(rng, length) for _ in range(rows)), strict=True))
    return {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=1),
        "weights": weights,
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        "segment_ids": np.ones_like(tokens),
    }


def train() -> Params:
    """Trains the decoder on answers."""
    model = api.build(CONFIG)
    params, rng = jax.jit(model.init)(jax.random.key(0)), np.random.default_rng(0)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, 50, sum(steps for _, _, steps in STAGES), 2e-4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))
    state = optimizer.init(params)

    def loss(params, batch):
        logits = model.logits(params, batch)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        right = jnp.sum((logits.argmax(-1) == batch["targets"]) * batch["weights"])
        return jnp.sum(nll * batch["weights"]) / jnp.sum(batch["weights"]), right / jnp.sum(batch["weights"])

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, batch):
        (value, right), gradient = jax.value_and_grad(loss, has_aux=True)(params, batch)
        change, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, change), state, value, right

    for length, rows, steps in STAGES:
        for step in range(steps):
            params, state, value, right = update(params, state, training_batch(rng, rows, length))
            if step % 50 == 0 or step == steps - 1:
                print(f"{length} tokens, step {step}: loss {value:.4f}, right words {right:.3f}", flush=True)
    return params


def trained_gates(params: Params, sizes: StreamingHeads, steps: int) -> np.ndarray:
    """Gates [L, K] by @DuoAttention(), on rows that are longer than the window."""
    model = api.build(dataclasses.replace(CONFIG, streaming=sizes))
    dataset = cb.Dataset(source=cb.StdlibSource(), vocabulary=ByteVocabulary(), length=1024)
    objective = cb.DuoAttention(passkeys=1, passkey_words=1, gate_weight=GATE_WEIGHT).objective(model, dataset)
    gates = jnp.ones((CONFIG.num_layers, CONFIG.kv_heads))
    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0.002, 0.02, steps // 5, steps, 0.002))
    state, rng = optimizer.init(gates), np.random.default_rng(1)

    @jax.jit
    def update(gates, state, batch):
        def loss(gates):
            value, totals, _ = objective.sums(params | {api.GATES: gates}, batch, None, None)
            return value / totals.weight

        value, gradient = jax.value_and_grad(loss)(gates)
        change, state = optimizer.update(gradient, state)
        return optax.apply_updates(gates, change), state, value

    for step in range(steps):
        gates, state, value = update(gates, state, training_batch(rng, 8, 512))
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {value:.4f}, mean gate {float(jnp.mean(jnp.clip(gates, 0, 1))):.3f}", flush=True)
    return np.clip(np.asarray(gates), 0, 1)


def answered(config: DecoderConfig, params: Params, length: int, count: int) -> dict[str, float]:
    """The share of `count` passkeys in prompts of `length` tokens that an engine answers wholly, and its cache's bytes."""
    options = EngineConfig(slots=1, prefix_cache_mib=0, prefill_tokens=length)
    engine = Engine(api.build(config), params, ByteVocabulary(), length, options)
    rng, right, begin_s = np.random.default_rng(length), 0, time.perf_counter()
    for _ in range(count):
        tokens, _ = passkeys(rng, length)
        greedy = Sampling(temperature=0.0, max_new_tokens=WORDS)
        answer = engine.submit(tokens[:-WORDS].tolist(), greedy).result().tokens
        right += int(np.array_equal(answer, tokens[-WORDS:]))
    layers = engine.core.runner.state["cache"]["layers"]
    return {
        "right": right / count,
        "cache_bytes": tree.byte_count(layers),
        "s": (time.perf_counter() - begin_s) / count,
    }


def decode_bytes(streaming: int) -> dict[str, float]:
    """What the TPU compiler says of a decode step on v6e-1, where so many of 8 heads of each layer stream."""
    from capibara import sharding
    from capibara.inference.engine.placement import lowering
    from capibara.kernels.cached_attention import tpu
    from capibara.planner.compiler import hlo
    from capibara.planner.hardware import topology

    sizes = dict(vocab_size=1024, embed_dim=1024, num_layers=2, num_heads=8, head_dim=128, mlp_dim=2048)
    pattern = StreamingHeads(heads=(tuple(range(streaming)),) * 2) if streaming else None
    model, slots = api.build(DecoderConfig(**sizes, streaming=pattern)), 16  # too much for the memory on the chip
    mesh = sharding.make_mesh(sharding.Plan(batch_size=slots, fsdp=1), topology.slice_devices("v6e-1"))
    step = lowering.Step(model, EngineConfig(slots=slots), LONGEST, mesh)
    compiled = step.lower().compile()
    calls = [[LONGEST, 8 - streaming], [StreamingHeads().capacity, streaming]]
    moved = [tpu.bytes_moved([n] * slots, n, heads, heads, 128, whole_rows=True) for n, heads in calls if heads]
    known = {tpu.NAME: sum(moved) / len(moved)}
    return {
        "streaming": streaming,
        "cache_bytes": lowering.device_bytes(step.state["cache"]),
        "argument_bytes": compiled.memory_analysis().argument_size_in_bytes,
        "hbm_bytes": hlo.costs(hlo.parse(compiled.as_text()), kernel_bytes=known).hbm_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="weights and results; weights that are there are used"
    )
    parser.add_argument("--share", type=float, default=0.375, help="of the heads, those that retrieve")
    parser.add_argument("--prompts", default="1024:20,8192:20,32768:20", help="LENGTH:COUNT, ...")
    parser.add_argument("--decode", action="store_true", help="compile decode steps for v6e-1 alone")
    options = parser.parse_args()
    out = pathlib.Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    if options.decode:
        table = [decode_bytes(streaming) for streaming in (0, 4, 6)]
        for row in table:
            shares = (f"{row[n] / table[0][n]:.3f}" for n in ("cache_bytes", "hbm_bytes"))
            print(
                f"{row['streaming']} of 8 heads stream: {row['hbm_bytes'] / 1e6:,.0f} MB of HBM, shares of cache and HBM",
                *shares,
            )
        (out / "decode.json").write_text(json.dumps(table))
        return
    weights, model = out / "weights.npz", api.build(CONFIG)
    if not weights.exists():
        values = train()
        np.savez(weights, **dict(zip(tree.path_names(values), map(np.asarray, jax.tree.leaves(values)), strict=True)))
    stored = dict(np.load(weights))
    params = tree.map_with_names(lambda name, _: jnp.asarray(stored[name]), model.abstract_params)
    sizes = StreamingHeads(sink_tokens=16, recent_window=128)
    gates = trained_gates(params, sizes, 100)
    heads = head_patterns.streaming(gates, share=options.share, threshold=None)
    pattern = dataclasses.replace(sizes, heads=heads)
    (out / head_patterns.FILE).write_text(head_patterns.written(pattern, gates))
    print("gates", gates.round(3).tolist(), "streaming", heads, flush=True)
    table = []
    for length, count in (map(int, item.split(":")) for item in options.prompts.split(",")):
        for name, streaming in (("all retrieve", None), ("pattern", pattern)):
            row = answered(dataclasses.replace(CONFIG, streaming=streaming), params, length, count)
            table.append({"length": length, "model": name, "prompts": count} | row)
            print(
                f"{length:6} tokens, {name}: {row['right']:.3f} right, {row['cache_bytes']:,} bytes of cache, {row['s']:.1f} s a prompt",
                flush=True,
            )
    (out / "passkeys.json").write_text(json.dumps(table))


if __name__ == "__main__":
    main()
