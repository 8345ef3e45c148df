"""Every program of the engine, lowered and compiled by the TPU compiler for real slices, with sharded parameters."""

from __future__ import annotations

import dataclasses
import math
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix import MODELS, compiles_on, mesh_of, replicated, running, shown

from capibara import sharding
from capibara.core import tree
from capibara.inference.engine import beam_requests, beam_search
from capibara.inference.engine.engine import EngineConfig
from capibara.inference.engine.placement import footprint, lowering
from capibara.inference.engine.programs import programs
from capibara.inference.sampling.sampler import GREEDY, History, Settings
from capibara.models import api
from capibara.models.api import Adapter, BatchAdapters, Lora, unmerged
from capibara.planner.compiler import compile as compiler
from capibara.sharding import Rules

LENGTH, SLOTS, READ = 512, 8, 256
GENERATING = MODELS | {"prefix LM": dataclasses.replace(MODELS["decoder"], inputs_attention="bidirectional")}
CACHES = {
    "rows": {},
    "int8": dict(cache_dtype="int8"),
    "pages": dict(page_size=64),
    "guesses": dict(draft_tokens=4),
    "one slot": dict(slots=1),  # as samples are made during training
}
# With adapters that are not merged: each row has its own.
BESIDE = {"rows, adapters": {}, "guesses, adapters": dict(draft_tokens=4)}
# Meshes that serve, and those of runs, which sample, evaluate and roll out on them.
SERVING = {
    "v5e-4": [dict(tensor=4), dict(data=2, tensor=2)],
    "v5e-8": [dict(data=2, tensor=4)],
    "v5e-16": [dict(data=4, tensor=4)],
    "v6e-4": [dict(tensor=4)],
    "v6e-8": [dict(tensor=2, data=4)],
}
TRAINING = {
    "v5e-4": [dict(fsdp=4)],
    "v5e-8": [dict(fsdp=2, expert=2, tensor=2), dict(fsdp=4, context=2)],
    "v5e-16": [dict(tensor=4, fsdp=4)],
    "v6e-8": [dict(fsdp=2, stage=2, tensor=2)],
}
SHORT = [
    ("v5e-4", dict(tensor=4), "decoder", "pages"),
    ("v6e-4", dict(tensor=4), "encoder-decoder", "rows"),
]
# What partitions by hand -> a model and a cache whose programs have it.
WITHIN = {
    "kernels/cached_attention/tpu.py attend": ("decoder", "pages"),
    "kernels/token_writes.py append": ("decoder", "int8"),
    "kernels/token_writes.py _append": ("decoder", "int8"),
}


def cases():
    """Slice, mesh, model and cache: all caches where it serves, those of a run on its own mesh."""
    for meshes, caches in ((SERVING, CACHES.keys() - {"one slot"}), (TRAINING, ("rows", "one slot"))):
        for slice_name, of_slice in meshes.items():
            for sizes in of_slice:
                for model in ("decoder", "windows", "experts", "encoder-decoder"):
                    for cache in sorted(caches):
                        if model == "encoder-decoder" and cache in ("guesses", "pages"):
                            continue  # the engine has none for these
                        yield slice_name, sizes, model, cache
                yield slice_name, sizes, "decoder LoRA", "guesses"  # adapters are merged for the engine
                yield slice_name, sizes, "prefix LM", "int8"
                yield slice_name, sizes, "gpt-oss", "pages" if meshes is SERVING else "rows"
                if compiles_on("gemma3n", sizes):
                    yield slice_name, sizes, "gemma3n", "pages" if meshes is SERVING else "rows"
                if compiles_on("entries", sizes):
                    yield slice_name, sizes, "entries", "rows"
                if meshes is SERVING:
                    yield from ((slice_name, sizes, "decoder", cache) for cache in BESIDE)


def matrix():
    for slice_name, sizes, model, cache in cases():
        case = (slice_name, sizes, model, cache)
        marks = () if case in SHORT else pytest.mark.heavy
        yield pytest.param(*case, marks=marks, id=f"{model}-{cache}-{slice_name}-{shown(sizes)}")


class Abstract:
    """The programs of an engine on a slice, and what they are given: shapes that lie on its mesh."""

    def __init__(self, slice_name: str, sizes: dict, name: str, cache: str):
        self.config = EngineConfig(**{"slots": SLOTS, "decode_steps": 1} | (CACHES | BESIDE)[cache])
        self.model, self.slots = api.build(GENERATING[name]), self.config.slots
        self.mesh = mesh_of(sizes, slice_name)
        self.encoder_length = 128 if name == "encoder-decoder" else None
        self.sizes = footprint.sizes_of(self.model, self.config, LENGTH, self.encoder_length)
        self.programs = programs.build(self.model, self.model.config.vocab_size, self.sizes, self.mesh, Rules())
        self.layers = self._adapters() if cache in BESIDE else ()
        self.reports: dict[str, compiler.Compiled] = {}

    def _adapters(self):
        """Three of rank 8 of all projections."""
        lora = Lora(rank=8, targets=("all-linear",))
        model = api.build(dataclasses.replace(self.model.config, lora=lora))
        values = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), model.trained(model.abstract_params))
        found = unmerged.stack_factors(
            [Adapter(str(n), lora, values) for n in range(3)], 2, self.model.config.dtype.value
        )
        placed = lambda names, x: jax.ShapeDtypeStruct(  # noqa: E731
            x.shape, x.dtype, sharding=sharding.named_sharding(self.mesh, Rules(), names, x.shape)
        )
        return jax.tree.map(placed, unmerged.axes_of(self.model, found), found, is_leaf=tree.is_axes)

    def beside(self, rows: int) -> BatchAdapters | None:
        return BatchAdapters(self.layers, self.here(rows)) if self.layers else None

    def here(self, *shape: int, dtype=jnp.int32):
        return replicated(self.mesh, *shape, dtype=dtype)

    def run(self, name: str, *args):
        """Lowers and compiles a program; the shapes of its result, as they lie on the mesh."""
        lowered = getattr(self.programs, name).lower(*args)
        begin_s = time.perf_counter()
        compiled = lowered.compile()
        self.reports[name] = compiler.read(compiled, time.perf_counter() - begin_s)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), lowered.out_info, compiled.output_shardings
        )

    def settings(self, rows: int) -> Settings:
        return Settings(*(self.here(rows, *np.shape(x)[1:], dtype=np.asarray(x).dtype) for x in GREEDY))

    def next_tokens(self, rows: int) -> programs.NextTokens:
        words = programs.allowed_words(self.model.config.vocab_size)
        return programs.NextTokens(self.here(rows), self.here(rows), self.here(rows, words, dtype=jnp.uint32))

    def batch(self, rows: int) -> dict:
        read = 1 if self.encoder_length else READ
        batch = {"tokens": self.here(rows, read), "counts": self.here(rows), "adapters": self.beside(rows)}
        if self.encoder_length:
            batch |= {f"encoder_{x}": self.here(rows, 128) for x in ("tokens", "segment_ids", "positions")}
        if self.reads_whole:
            batch["inputs"] = self.here(rows)
        return batch

    @property
    def reads_whole(self) -> bool:
        return self.model.config.data_kind == "prefix"

    def served(self):
        """The parameters as programs read them."""
        model = self.model
        shardings = sharding.shardings(self.mesh, Rules(), model.axes, model.abstract_params)
        params = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), model.abstract_params, shardings
        )
        if self.layers:  # DoRA's factor, of one projection
            own = params["layers"]["attention"]["query"]
            given = (self.here(*shape, dtype=jnp.float32) for shape in ((2, 256, 8), (2, 8, 8, 128), (2, 8, 128)))
            programs.on_mesh(self.mesh, Rules(), unmerged.gain).lower(own, *given).compile()
        return self.run("serving", params)

    def search(self, num_decodes: int):
        """The programs of beam search, by which it replaces those of the engine; the state between them."""
        served, rows = self.served(), beam_requests.prompts_at_once(self.slots, num_decodes, self.mesh, Rules())
        sizes = beam_search.Sizes(num_decodes, 64, LENGTH, self.encoder_length, self.sizes.dtype)
        self.programs = beam_search.build(self.model, self.model.config.vocab_size, sizes, self.mesh, Rules())
        scalar = self.here(dtype=jnp.float32)
        asked = beam_search.BeamRequests(self.here(rows), self.here(rows), self.here(rows, 1), scalar, scalar)
        state, _ = self.run("begin", served, self.batch(rows), asked)
        state, _ = self.run("advance", served, state, asked, self.here())
        self.run("results", state)
        return state

    def all(self):
        """Every program that the engine calls."""
        vocab, served = self.model.config.vocab_size, self.served()
        state = self.run("start")
        pool = self.sizes.pool
        table = self.here(self.slots, pool.of_slot(LENGTH)) if pool else None
        _, rows = self.run("prefill", served, self.batch(2))
        row = self.run("take_row", rows, self.here())
        if not self.encoder_length and not self.reads_whole:
            logits, row = self.run("resume", served, self.batch(1), row, LENGTH)
        one = self.settings(1)
        history = History(*(self.here(1, vocab, dtype=dtype) for dtype in (jnp.bool_, jnp.int32, jnp.float32)))
        admitted = (
            self.here(1, vocab, dtype=jnp.float32),
            self.here(),
            one,
            self.next_tokens(1),
            history,
            table,
            0,
        )
        state, _ = self.run("admit", state, row, *admitted)
        of_all = (self.settings(self.slots), self.next_tokens(self.slots))
        if self.config.draft_tokens:
            guesses = (self.here(self.slots, self.config.draft_tokens), self.here(self.slots))
            state, _ = self.run("verify", served, state, *of_all, *guesses, table, 0, self.beside(self.slots))
        else:
            state, _ = self.run("step", served, state, *of_all, self.here(), table, 0, self.beside(self.slots))
        self.run("row", state, self.here(), table, READ)
        return state


@pytest.mark.parametrize("slice_name, sizes, name, cache", list(matrix()))
def test_every_program_of_the_engine_compiles_for_the_slice(slice_name, sizes, name, cache, tell):
    engine = Abstract(slice_name, sizes, name, cache)
    with running(
        "inference/engine/programs/programs.py on_mesh.active",
        *(site for site, of in WITHIN.items() if of == (name, cache)),
    ):
        state = engine.all()
    for program, report in engine.reports.items():
        assert report.fits
        tell(f"engine: {program}", f"{name}, {cache}", slice_name, sizes, report)
    for layer in state["cache"]["layers"]:
        key = layer.get("key", layer.get("key_pages"))
        assert key.sharding.shard_shape(key.shape)[1] == key.shape[1] // sizes.get("tensor", 1)


@pytest.mark.parametrize("pages", [{}, dict(page_size=32)], ids=["rows", "pages"])
def test_no_step_turns_a_cache_in_8_bits(pages):
    """Every array of its size, of the step, has the order of the donated one; an update of all heads has another."""
    config = EngineConfig(slots=32, cache_dtype="int8", **pages)
    model = api.build(dataclasses.replace(MODELS["decoder"], num_layers=1, num_kv_heads=8))
    step = lowering.Step(model, config, 2048, mesh_of(dict(tensor=4), "v5e-4", rows=32))
    text = step.lower().compile().as_text()
    size = 32 * 2 * 2048 * model.config.head_size
    found = re.findall(r"s8\[([\d,]+)\]\{([\d,]+)[:}]", text)
    orders = {order for dims, order in found if math.prod(map(int, dims.split(","))) >= size}
    assert orders and all(order == ",".join(map(str, reversed(range(order.count(",") + 1)))) for order in orders)


SEARCHED = [("v5e-4", dict(data=2, tensor=2), "encoder-decoder", "rows")]


def searches():
    """Slice, mesh, model and cache of beam search: rows of their own, whatever the engine's cache is."""
    for slice_name, of_slice in SERVING.items():
        for sizes in of_slice:
            cases = [("decoder", "int8"), ("windows", "rows"), ("encoder-decoder", "rows"), ("prefix LM", "rows")]
            for case in [(slice_name, sizes, *one) for one in cases]:
                marks = () if case in SEARCHED else pytest.mark.heavy
                yield pytest.param(*case, marks=marks, id=f"{case[2]}-{case[3]}-{slice_name}-{shown(sizes)}")


@pytest.mark.parametrize("slice_name, sizes, name, cache", list(searches()))
def test_beam_search_compiles_for_the_slice(slice_name, sizes, name, cache, tell):
    """Its cache stays spread over the slice, heads and prompts, while its rows are put in another order."""
    engine = Abstract(slice_name, sizes, name, cache)
    state = engine.search(4)
    for program, report in engine.reports.items():
        assert report.fits
        if program != "serving":
            tell(f"beam search: {program}", f"{name}, {cache}", slice_name, sizes, report)
    moved = sum(engine.reports["advance"].costs.collective_bytes.values())
    for layer in state["cache"]["layers"]:
        for key in (layer[name] for name in ("key", "cross_key") if name in layer):
            shard = key.sharding.shard_shape(key.shape)
            assert shard[1] == key.shape[1] // sizes.get("tensor", 1)
            assert shard[0] == key.shape[0] // sizes.get("data", 1)
    assert moved < np.prod(key.shape)  # no array of it is gathered
