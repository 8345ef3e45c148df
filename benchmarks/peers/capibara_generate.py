"""Our side of benchmarks/generate.py: the package's own engine on one CPU device.

Says `ready` in one JSON line, then answers each line of standard input with one JSON line: {"op": "decode", "batch": B,
"new": N, "positions": of a row} and {"op": "mixed", "requests": [[prompt tokens, new tokens], ...], "continuous": bool}.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))

import jax
import numpy as np

from capibara.core import allocator
from capibara.data.tokenizers.vocabulary import Vocabulary
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.sampling.sampling import Sampling
from capibara.models import api
from capibara.models.layers.rope import Rope


class Ids(Vocabulary):
    """Ids that stand for nothing, none of which ends a text."""

    size_multiple, extra_ids, pad_id, eos_id, bos_id = 1, 0, 0, -1, 0

    def __init__(self, size: int):
        self._count = size

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    @functools.cached_property
    def pieces(self) -> list[bytes]:
        return [b""] * self._count


def build(shape: dict[str, Any]) -> api.Model:
    names = ("vocab_size", "embed_dim", "num_layers", "num_heads", "num_kv_heads", "mlp_dim", "norm_eps")
    sizes = {name: shape[name] for name in names}
    return api.build(api.DecoderConfig(**sizes, dtype="float32", rope=Rope(theta=shape["rope_theta"])))


def write_weights(params: dict, path: str) -> None:
    """The parameters as transformers names and shapes them."""
    layers = jax.tree.map(np.asarray, params["layers"])
    tensors = {"embed_tokens.weight": np.asarray(params["embedding"]), "norm.weight": params["final_norm"]["scale"]}
    for i in range(len(layers["mlp"]["up"])):
        layer = jax.tree.map(lambda x: x[i], layers)
        attention, mlp = layer["attention"], layer["mlp"]
        for name, ours in (("q", "query"), ("k", "key"), ("v", "value")):
            weight = attention[ours]
            tensors[f"layers.{i}.self_attn.{name}_proj.weight"] = weight.reshape(len(weight), -1).T
        out = attention["out"]
        tensors[f"layers.{i}.self_attn.o_proj.weight"] = out.reshape(-1, out.shape[-1]).T
        for name in ("gate", "up", "down"):
            tensors[f"layers.{i}.mlp.{name}_proj.weight"] = mlp[name].T
        tensors[f"layers.{i}.input_layernorm.weight"] = layer["attention_norm"]["scale"]
        tensors[f"layers.{i}.post_attention_layernorm.weight"] = layer["mlp_norm"]["scale"]
    np.savez(path, **tensors)


def prompts_of(shape: dict[str, Any], lengths: list[int]) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, shape["vocab_size"], length).tolist() for length in lengths]


class Runner:
    """One engine at a time, with the requested slots and positions."""

    def __init__(self, shape: dict[str, Any], weights: str):
        self._shape, self._model = shape, build(shape)
        self._params = jax.jit(self._model.init)(jax.random.key(0))
        write_weights(self._params, weights)
        self._engines: dict[tuple[int, int], Engine] = {}  # the one used last

    def _engine(self, slots: int, length: int) -> Engine:
        if (slots, length) not in self._engines:
            config = EngineConfig(slots=slots, prefix_cache_mib=0)
            vocabulary = Ids(self._shape["vocab_size"])
            self._engines = {(slots, length): Engine(self._model, self._params, vocabulary, length, config)}
        return self._engines[slots, length]

    def decode(self, batch: int, new: int, positions: int) -> list[list[int]]:
        engine = self._engine(batch, positions)
        asked = Sampling(temperature=0.0, max_new_tokens=new)
        prompts = prompts_of(self._shape, [self._shape["prompt"]] * batch)
        streams = [engine.submit(prompt, asked) for prompt in prompts]
        return [stream.result().tokens for stream in streams]

    def mixed(self, requests: list[list[int]], continuous: bool, batch: int) -> list[list[int]]:
        engine, prompts = (
            self._engine(batch, self._shape["length"]),
            prompts_of(self._shape, [length for length, _ in requests]),
        )
        streams = []
        for number, (prompt, (_, new)) in enumerate(zip(prompts, requests)):
            if not continuous and number % batch == 0:
                engine.run()
            streams.append(engine.submit(prompt, Sampling(temperature=0.0, max_new_tokens=new)))
        engine.run()
        return [stream.result().tokens for stream in streams]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", required=True, help="JSON")
    parser.add_argument("--weights", required=True, help="file to write the weights to")
    args = parser.parse_args()
    allocator.keep_freed_memory()
    runner = Runner(json.loads(args.shape), args.weights)
    print(json.dumps({"ready": {"version": f"jax {jax.__version__}"}}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        call = getattr(runner, request.pop("op"))
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = call(**request)
        answer = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "tokens": tokens}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
