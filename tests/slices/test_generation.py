"""Every program of the engine, lowered and compiled by the TPU compiler for real slices, with sharded parameters."""

from __future__ import annotations


import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from capibara import sharding
from capibara.inference import footprint, programs
from capibara.inference.choose import GREEDY, Settings
from capibara.inference.engine import EngineConfig
from capibara.models import api
from capibara.models.api import DecoderConfig, EncoderDecoderConfig
from capibara.models.moe import Moe
from capibara.planner import topology
from capibara.sharding import Plan, Rules

LENGTH, SLOTS, READ = 512, 8, 256
SIZES = dict(vocab_size=1024, embed_dim=1024, num_layers=2, num_heads=8, head_dim=128, mlp_dim=2048, dtype="bfloat16")
CONFIGS = {
    "decoder": DecoderConfig(**SIZES, num_kv_heads=4),
    "windows": DecoderConfig(
        **SIZES, num_kv_heads=4, layer_pattern=("local", "global"), window=128, attention_soft_cap=50.0
    ),
    "experts": DecoderConfig(**SIZES, num_kv_heads=4, moe=Moe(num_experts=8, top_k=2, expert_dim=512)),
    "encoder_decoder": EncoderDecoderConfig(**SIZES),
}
CACHES = {"rows": {}, "int8": dict(cache_dtype="int8"), "pages": dict(page_size=64), "guesses": dict(draft_tokens=4)}
SLICES = {
    "v5e-4": [dict(tensor=4, fsdp=1), dict(data=2, tensor=2, fsdp=1), dict(fsdp=4)],
    "v5e-8": [dict(tensor=4, fsdp=2), dict(data=2, tensor=4, fsdp=1)],
    "v5e-16": [dict(tensor=4, data=4, fsdp=1), dict(tensor=4, fsdp=4)],
    "v6e-4": [dict(tensor=4, fsdp=1), dict(fsdp=4)],
    "v6e-8": [dict(tensor=4, fsdp=2), dict(tensor=2, data=4, fsdp=1)],
}
SHORT = [
    ("v5e-4", SLICES["v5e-4"][0], "decoder", "rows"),
    ("v5e-4", SLICES["v5e-4"][0], "windows", "pages"),
    ("v5e-4", SLICES["v5e-4"][2], "experts", "rows"),
    ("v6e-4", SLICES["v6e-4"][1], "encoder_decoder", "rows"),
]


def matrix():
    for name, meshes in SLICES.items():
        for sizes in meshes:
            for model in CONFIGS:
                for cache in CACHES:
                    if model == "encoder_decoder" and cache in ("guesses", "pages"):
                        continue  # the engine has none for these
                    case = (name, sizes, model, cache)
                    yield pytest.param(*case, marks=() if case in SHORT else pytest.mark.heavy)


class Abstract:
    """The programs of an engine on a slice, and what they are given: shapes that lie on its mesh."""

    def __init__(self, slice_name: str, sizes: dict, name: str, cache: str):
        self.config = EngineConfig(slots=SLOTS, decode_steps=1, **CACHES[cache])
        self.model = api.build(CONFIGS[name])
        self.mesh = sharding.make_mesh(Plan(batch_size=SLOTS, **sizes), topology.slice_devices(slice_name))
        self.encoder_length = 128 if name == "encoder_decoder" else None
        self.sizes = footprint.sizes_of(self.model, self.config, LENGTH, self.encoder_length)
        self.programs = programs.build(self.model, self.model.config.vocab_size, self.sizes, self.mesh, Rules())
        self.compiled: dict[str, jax.stages.Compiled] = {}

    def here(self, *shape: int, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, PartitionSpec()))

    def run(self, name: str, *args):
        """Lowers and compiles a program; the shapes of its result, as they lie on the mesh."""
        lowered = getattr(self.programs, name).lower(*args)
        self.compiled[name] = compiled = lowered.compile()
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), lowered.out_info, compiled.output_shardings
        )

    def settings(self, rows: int) -> Settings:
        return Settings(*(self.here(rows, *np.shape(x)[1:], dtype=np.asarray(x).dtype) for x in GREEDY))

    def batch(self, rows: int) -> dict:
        read = 1 if self.encoder_length else READ
        batch = {"tokens": self.here(rows, read), "counts": self.here(rows)}
        if self.encoder_length:
            batch |= {f"encoder_{x}": self.here(rows, 128) for x in ("tokens", "segment_ids", "positions")}
        return batch

    def all(self):
        """Every program that the engine calls."""
        model, vocab = self.model, self.model.config.vocab_size
        shardings = sharding.shardings(self.mesh, Rules(), model.axes, model.abstract_params)
        params = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), model.abstract_params, shardings
        )
        served = self.run("serving", params)
        state = self.run("start")
        pool = self.sizes.pool
        table = self.here(SLOTS, pool.of_slot(LENGTH)) if pool else None
        _, rows = self.run("begin", served, self.batch(2))
        row = self.run("one", rows, self.here())
        if not self.encoder_length:
            logits, row = self.run("resume", served, self.batch(1), row, LENGTH)
        one = self.settings(1)
        seen = self.here(1, vocab, dtype=jnp.bool_)
        admitted = (
            self.here(1, vocab, dtype=jnp.float32),
            self.here(),
            one,
            self.here(1),
            self.here(1),
            seen,
            table,
            0,
        )
        state, _ = self.run("admit", state, row, *admitted)
        of_all = (self.settings(SLOTS), self.here(SLOTS), self.here(SLOTS))
        if self.config.draft_tokens:
            guesses = (self.here(SLOTS, self.config.draft_tokens), self.here(SLOTS))
            state, _ = self.run("verify", served, state, *of_all, *guesses, table, 0)
        else:
            state, _ = self.run("step", served, state, *of_all, self.here(), table, 0)
        self.run("row", state, self.here(), table, READ)
        return state


@pytest.mark.parametrize("slice_name, sizes, name, cache", list(matrix()), ids=str)
def test_every_program_compiles_for_the_slice(slice_name, sizes, name, cache):
    programs_ = Abstract(slice_name, sizes, name, cache)
    state = programs_.all()
    heads = sizes.get("tensor", 1)
    for layer in state["cache"]["layers"]:
        key = layer.get("key", layer.get("key_pages"))
        assert key.sharding.shard_shape(key.shape)[1] == key.shape[1] // heads
