"""Multi-token prediction: the loss of a small decoder trained with and without it, and generation with its drafts.

    python benchmarks/multi_token_prediction.py --out=build/mtp [--steps=300] [--seeds=2]

Decoders of bytes are trained here on the standard library's source, with @Mtp() and without, from the same initial weights
and batches. `loss` is that of the next token on held-out files, in nats; `acceptance` is the share of tokens after the next
one there that the module predicts right. Then the first model with modules continues held-out prompts greedily: without
drafts, by prompt lookup and by its module, one prompt at a time and all together; the settings alternate, and rates are
medians. All texts must be equal.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # the checkout's package, installed or not

from capibara.core.types import Params  # noqa: E402
from capibara.data.tokenizers.vocabulary import ByteVocabulary  # noqa: E402
from capibara.inference.engine.engine import Engine, EngineConfig  # noqa: E402
from capibara.inference.sampling.sampling import Sampling  # noqa: E402
from capibara.models import api  # noqa: E402
from capibara.models.api import DecoderConfig, Mtp  # noqa: E402
from capibara.objectives.base import of_cross_entropy  # noqa: E402
from capibara.sharding import RematPolicy  # noqa: E402

VOCABULARY = ByteVocabulary()
ROWS, LENGTH, HELD_OUT = 16, 128, 8  # rows and tokens of a batch; batches that are evaluated
PROMPTS, PROMPT, NEW, REPEATS = 8, 64, 96, 3
CONFIG = DecoderConfig(
    vocab_size=VOCABULARY.size, embed_dim=128, num_layers=4, num_heads=4, mlp_dim=384, dtype="float32", max_length=256
)
SETTINGS: dict[str, dict[str, Any]] = {
    "no drafts": {"decode_steps": 1},
    "lookup, 2": {"draft_tokens": 2},
    "mtp, 1": {"drafts": "mtp", "draft_tokens": 1},
    "mtp, 2": {"drafts": "mtp", "draft_tokens": 2},
}


@functools.cache
def text() -> tuple[np.ndarray, np.ndarray]:
    """Ids of the standard library's source: of files to train on, and of held-out ones."""
    files = sorted(pathlib.Path(json.__file__).parent.parent.glob("*.py"))
    parts = (b"".join(path.read_bytes() for path in some) for some in (files[10:], files[:10]))
    train, held_out = (np.asarray(VOCABULARY.encode(part.decode(errors="ignore")), np.int32) for part in parts)
    return train, held_out


def batch_of(ids: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    starts = rng.integers(0, len(ids) - LENGTH - 1, ROWS)
    rows = np.stack([ids[start : start + LENGTH + 1] for start in starts])
    ones = np.ones((ROWS, LENGTH), np.int32)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:], "segment_ids": ones, "positions": positions}
    return batch | {"weights": ones.astype(np.float32)}


def trained(config: DecoderConfig, seed: int, steps: int) -> tuple[Params, dict[str, float]]:
    """Parameters, and the metrics on held-out files."""
    model, rng = api.build(config), np.random.default_rng(seed)
    objective, tx = of_cross_entropy(model, 0.0), optax.adam(optax.cosine_decay_schedule(3e-3, steps))

    def sums(params: Params, batch: dict[str, jax.Array]) -> Any:
        return objective.sums(params, batch, RematPolicy(), jnp.int32(0))

    @jax.jit
    def step(params: Params, state: Any, batch: dict[str, jax.Array]) -> tuple[Params, Any]:
        grads = jax.grad(lambda p: sums(p, batch)[0] / (ROWS * LENGTH))(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state

    params = api.build(dataclasses.replace(CONFIG, mtp=Mtp())).init(jax.random.key(seed))
    params = {name: params[name] for name in model.abstract_params}
    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state, batch_of(text()[0], rng))
    evaluate = jax.jit(lambda params, batch: sums(params, batch)[1])
    held_out = np.random.default_rng(0)
    each = [evaluate(params, batch_of(text()[1], held_out)) for _ in range(HELD_OUT)]
    total = jax.tree.map(lambda *parts: sum(map(float, parts)), *each)
    return params, {name: float(value) for name, value in objective.metrics(total, total.weight).items()}


def generated(params: Params, slots: int) -> list[dict[str, Any]]:
    """Rates of all settings, with `slots` rows at a time."""
    model, starts = api.build(dataclasses.replace(CONFIG, mtp=Mtp())), np.random.default_rng(1)
    prompts = [
        text()[1][start : start + PROMPT].tolist() for start in starts.integers(0, len(text()[1]) - PROMPT, PROMPTS)
    ]
    greedy = Sampling(max_new_tokens=NEW, temperature=0.0)
    options = {name: EngineConfig(slots=slots, prefix_cache_mib=0, **config) for name, config in SETTINGS.items()}
    engines = {name: Engine(model, params, VOCABULARY, 256, config) for name, config in options.items()}

    def texts(engine: Engine) -> list[list[int]]:
        return [stream.result().tokens for stream in [engine.submit(prompt, greedy) for prompt in prompts]]

    want = texts(engines["no drafts"])
    for name, engine in engines.items():
        assert texts(engine) == want, name  # compiles, too
        engine.statistics.clear()
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(REPEATS):
        for name, engine in engines.items():
            began = time.perf_counter()
            count = sum(map(len, texts(engine)))
            rates[name].append(count / (time.perf_counter() - began))
    return [
        {"slots": slots, "drafts": name, "tokens_per_s": statistics.median(rates[name])}
        | {"acceptance": engine.statistics.acceptance, "steps": engine.statistics.steps // REPEATS}
        for name, engine in engines.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder of the results")
    parser.add_argument("--steps", type=int, default=300, help="of the training")
    parser.add_argument("--seeds", type=int, default=2, help="trainings of each model")
    options = parser.parse_args()
    (out := pathlib.Path(options.out)).mkdir(parents=True, exist_ok=True)
    table, models = [], []
    for seed in range(options.seeds):
        for name, mtp in (("without", None), ("weight 0.1", Mtp()), ("weight 0.3", Mtp(loss_weight=0.3))):
            params, metrics = trained(dataclasses.replace(CONFIG, mtp=mtp), seed, options.steps)
            models += [params] if mtp is not None else []
            row = {"seed": seed, "mtp": name, "loss": metrics["loss"], "acceptance": metrics.get("mtp_acceptance")}
            table.append(row)
            print(row, flush=True)
    for slots in (1, PROMPTS):
        for row in generated(models[0], slots):
            table.append(row)
            print(row, flush=True)
    (out / "mtp.json").write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
