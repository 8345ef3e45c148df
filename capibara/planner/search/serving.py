"""Finds the mesh for generation on a slice, its slots and its speed; these are predictions, nothing is compiled here.

A decode step reads every weight and the keys and values of all rows: both must fit the HBM, and their bytes divided by
its bandwidth are the step time. `tensor` shards weights and heads, and adds collectives; `data` replicates the weights,
and shards the slots.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax

from capibara.core import tree
from capibara.core.types import UserError
from capibara.models.api import Model
from capibara.planner.hardware import network, slices
from capibara.planner.hardware.slices import Slice
from capibara.planner.model import cost
from capibara.sharding import MESH_AXES, Rules

GIB = 2**30
COMPILED = 1.02
"""Most bytes of the compiled step over the least possible, if JAX's kernel reads rows (benchmarks/tpu_decode.py)."""
_COMPILED_INT8 = 1.12
"""The same for 8-bit keys and values alone, which XLA reads: of each token it writes tiles, and scales (8b-v5e-4-int8)."""
_MATMUL = 0.6  # share of the peak FLOP/s; matters only for hundreds of slots
_ROOMY = ("v6e", "v5p")  # chips to suggest if the requested ones are too small in any number
_HOP_S = 1e-6  # assumed, neither measured nor published: time of an all-reduce per device of its ring
_HISTORY_BYTES = 1 + 4 + 4  # of a token: whether the text has it, how often, its bias
_MOST_SLOTS = 1024  # of all devices: more would wait for prefill


@dataclasses.dataclass(frozen=True)
class Engine:
    """The engine to plan for.

    Attributes:
      length: token capacity of a slot.
      cache_dtype: dtype of keys and values: "bfloat16", "int8", ...
      slots: of all devices; None: as many as fit.
      prefill_tokens: prompt tokens that are read at a time.
      prefix_bytes: size of the prefix cache, on all devices of the tensor axis together.
    """

    length: int
    cache_dtype: str
    slots: int | None = None
    prefill_tokens: int = 1024
    prefix_bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class Serving:
    """One mesh with one kind of cache.

    Attributes:
      tensor, data: sizes of ServingMesh.
      engine: the engine's configuration.
      slots: the number it has, or could have at most; 0: not even the weights fit.
      weights, keys_values, prefixes, working: bytes on one device: parameters, all slots, the prefix cache, and the
        working memory of prefill.
      limit_bytes: bytes that may be used.
      step_s: time of a decode step with full rows.
      seconds: its parts: hbm, compute, links.
    """

    tensor: int
    data: int
    engine: Engine
    slots: int
    weights: float
    keys_values: float
    prefixes: float
    working: float
    limit_bytes: float
    step_s: float
    seconds: dict[str, float]

    @property
    def bytes(self) -> float:
        """Total bytes on one device."""
        return self.weights + self.keys_values + self.prefixes + self.working

    @property
    def fits(self) -> bool:
        return self.slots >= max(1, self.data) and self.bytes <= self.limit_bytes

    @property
    def tokens_per_s(self) -> float:
        """Of all slots, if all are busy."""
        return self.slots / self.step_s if self.slots else 0.0

    @property
    def mesh(self) -> str:
        return f"tensor={self.tensor}" + (f" x data={self.data}" if self.data > 1 else "")


def ranked(model: Model, slice_: Slice, engine: Engine, headroom: float) -> list[Serving]:
    """Every mesh of a slice's devices: those that fit first, by speed; then the others, by size.

    Args:
      model: a decoder or an encoder-decoder.
      slice_: the slice.
      engine: the engine's configuration.
      headroom: share of the HBM to keep free.
    """
    result = [predict(model, slice_, tensor, engine, headroom) for tensor in tensors(model, slice_)]
    return sorted(result, key=lambda item: (not item.fits, -item.tokens_per_s if item.fits else item.bytes))


def predict(model: Model, slice_: Slice, tensor: int, engine: Engine, headroom: float) -> Serving:
    """Predicts one mesh: groups of `tensor` devices share each layer, and replicate each other."""
    data = slice_.devices // tensor
    limit = slice_.chip.device_usable_hbm_bytes * (1 - headroom)
    whole, read, _ = _weights(model.plain, tensor)
    row = _row_bytes(model.plain, engine, tensor)
    prefixes, working = engine.prefix_bytes / tensor, _working_bytes(model.plain, engine, tensor)
    free = limit - whole - prefixes - working
    most = min(max(0, math.floor(free / row)) * data, _MOST_SLOTS // data * data)
    # Slots that the data axis does not divide are replicated.
    slots = most if engine.slots is None else engine.slots
    local_slots = slots // data if slots % data == 0 else slots
    moved = COMPILED * read + (_COMPILED_INT8 if engine.cache_dtype == "int8" else COMPILED) * local_slots * row
    seconds = _seconds(model.plain, slice_, tensor, local_slots, moved)
    step_s = max(seconds["hbm"], seconds["compute"]) + seconds["links"]
    return Serving(tensor, data, engine, slots, whole, local_slots * row, prefixes, working, limit, step_s, seconds)


def prefill_s(model: Model, slice_: Slice, tensor: int, tokens: int) -> float:
    """Seconds in which a group of `tensor` devices reads so many tokens of prompts at a time."""
    seconds = _seconds(model.plain, slice_, tensor, tokens, COMPILED * _weights(model.plain, tensor)[1])
    return max(seconds["hbm"], seconds["compute"]) + seconds["links"]


def does_not_fit(model: Model, slice_: Slice, layouts: Sequence[Serving], headroom: float) -> UserError:
    """An error that says what the smallest mesh lacks, and what would help."""
    best, unit = layouts[0], slice_.chip.unit
    ways = []
    if best.engine.slots is not None:
        fewer = dataclasses.replace(best.engine, slots=None)
        most = ranked(model, slice_, fewer, headroom)[0]
        if most.fits:
            ways.append(f"EngineConfig.slots = {most.slots}")
    if best.engine.cache_dtype != "int8":
        smaller = ranked(model, slice_, dataclasses.replace(best.engine, cache_dtype="int8"), headroom)[0]
        if smaller.fits:
            ways.append("EngineConfig.cache_dtype = 'int8'")
    larger = [item for item in slices.sizes(slice_.chip) if item.devices > slice_.devices]
    larger += [item for chip in _ROOMY for item in slices.sizes(chip) if item.chip != slice_.chip]
    fitting = next((item for item in larger if ranked(model, item, best.engine, headroom)[0].fits), None)
    if fitting is not None:
        ways.append(f"--slice={fitting.name}")
    room = "a slot" if best.engine.slots is None else f"{best.engine.slots} slots"
    need = best.bytes if best.slots else best.bytes + _row_bytes(model.plain, best.engine, best.tensor)
    return UserError(
        f"{slice_.name} has no room for {room} of {best.engine.length} tokens: the leanest mesh ({best.mesh}) needs "
        f"{need / GIB:.2f} GiB a {unit}, weights {best.weights / GIB:.2f}, and may use {best.limit_bytes / GIB:.2f}: try "
        f"{', or '.join(ways) or 'a shorter --length'}"
    )


def tensors(model: Model, slice_: Slice) -> Iterator[int]:
    """The sizes of the tensor axis that ServingMesh accepts."""
    shapes, axes = model.plain.abstract_params, model.plain.axes
    rules, sizes = Rules(), set(model.config.cached_head_counts)
    for leaf, names in zip(jax.tree.leaves(shapes), jax.tree.leaves(axes, is_leaf=tree.is_axes), strict=True):
        sizes |= {
            n for name, n in zip(names, leaf.shape) if name != "vocab" and name and "tensor" in getattr(rules, name)
        }
    for tensor in range(1, slice_.devices + 1):
        if slice_.devices % tensor == 0 and all(size % tensor == 0 for size in sizes):
            yield tensor


def _weights(model: Model, tensor: int) -> tuple[float, float, float]:
    """For the parameters on one device: stored bytes, bytes that a step reads, elements multiplied per token."""
    rules, whole, unread, active, size = Rules(), 0.0, 0.0, 0.0, model.config.dtype.value
    moe = model.config.moe
    paths = tree.path_names(model.abstract_params)
    leaves = zip(jax.tree.leaves(model.abstract_params), jax.tree.leaves(model.axes, is_leaf=tree.is_axes), strict=True)
    for path, (leaf, names) in zip(paths, leaves, strict=True):
        retained = leaf.dtype.itemsize if {"norm", "router"} & set(names) else jax.numpy.dtype(size).itemsize
        cuts = any(
            name and "tensor" in getattr(rules, name) and extent % tensor == 0
            for name, extent in zip(names, leaf.shape)
        )
        leaf_bytes = math.prod(leaf.shape) * retained / (tensor if cuts else 1)
        whole += leaf_bytes
        looked_up = path == "embedding" and str(model.config.head) == "separate"  # reads only a few rows
        unread += leaf_bytes if looked_up else 0.0
        share = moe.top_k / moe.num_experts if moe is not None and "experts" in names else 1.0
        active += 0.0 if looked_up else share * leaf_bytes / retained
    return whole, whole - unread, active


def _row_bytes(model: Model, engine: Engine, tensor: int) -> float:
    """Bytes of a slot on its devices: keys and values, and what its text has, for the penalties (`sampler.History`)."""
    encoder, dtype = None if model.encode is None else engine.length, engine.cache_dtype
    row = jax.eval_shape(lambda: model.start_cache(1, engine.length, dtype=dtype, encoder_length=encoder))
    return (tree.byte_count(row["layers"]) + _HISTORY_BYTES * model.config.vocab_size) / tensor


def _working_bytes(model: Model, engine: Engine, tensor: int) -> float:
    """Working memory of prefill: two copies of a row, a layer's activations, and scores if the prompt is split."""
    c = model.config
    tokens = min(engine.prefill_tokens, engine.length)
    row = 2 * _row_bytes(model, engine, tensor)
    hidden = tokens * (8 * c.embed_dim + 4 * (c.mlp_dim + c.num_heads * c.head_size) / tensor) * 2
    scores = 2 * 4 * tokens * engine.length * c.num_heads / tensor if engine.length > tokens else 0.0
    return row + hidden + scores + 4 * c.vocab_size / tensor * (engine.slots or 32)


def _seconds(model: Model, slice_: Slice, tensor: int, rows: int, moved: float) -> dict[str, float]:
    """Time of a step with `rows` rows on each device, by part."""
    c, chip = model.config, slice_.chip
    mesh = dict.fromkeys(MESH_AXES, 1) | {"tensor": tensor, "data": slice_.devices // tensor}
    layout = network.layout(slice_, mesh)
    reduced = layout.reduce_s(rows * c.embed_dim * 2, ("tensor",)) + 2 * (tensor - 1) * _HOP_S if tensor > 1 else 0.0
    flops = 2 * rows * _weights(model, tensor)[2]
    return {
        "hbm": moved / (chip.device_hbm_bytes_per_s * cost.HBM_REACHED),
        "compute": flops / (chip.device_flops() * _MATMUL),
        "links": (2 * c.num_layers + 2) * reduced,
    }


def lines(layouts: Sequence[Serving], model: Model, slice_: Slice, name: str) -> Iterator[str]:
    """A description of the best mesh, and a table of all."""
    best = layouts[0]
    dtype, gib = str(model.config.dtype), {k: v / GIB for k, v in dataclasses.asdict(best).items() if k in _PARTS}
    parts = ", ".join(f"{label} {gib[key]:.2f}" for key, label in _PARTS.items())
    yield f"{name} ({model.param_count / 1e9:.1f} B parameters) on {slice_.name}, {slice_.hosts} host(s): {best.mesh}"
    yield f"  weights in {dtype}, keys and values in {best.engine.cache_dtype}"
    yield (
        f"  HBM a {slice_.chip.unit} (predicted): {best.bytes / GIB:.2f} of {best.limit_bytes / GIB:.2f} GiB that may be used: "
        f"{parts}"
    )
    seconds = ", ".join(f"{name} {1e3 * value:.2f}" for name, value in best.seconds.items())
    yield (
        f"  {best.slots} slots of {best.engine.length} tokens; a decode step of full rows {1e3 * best.step_s:.2f} ms "
        f"({seconds}), {best.tokens_per_s:,.0f} tokens/s: predicted"
    )
    yield ""
    yield f"  {'mesh':22}{'cache':>10}{'length':>9}{'slots':>7}{'GiB':>8}{'step ms':>9}{'tokens/s':>10}   predicted"
    for item in layouts:
        fits = "" if item.fits else "   does not fit"
        yield (
            f"  {item.mesh:22}{item.engine.cache_dtype:>10}{item.engine.length:>9}{item.slots:>7}{item.bytes / GIB:>8.2f}"
            f"{1e3 * item.step_s:>9.2f}{item.tokens_per_s:>10,.0f}{fits}"
        )


_PARTS = {"weights": "weights", "keys_values": "slots", "prefixes": "prefixes", "working": "reading a prompt"}


def bindings(best: Serving) -> list[str]:
    """Gin statements that configure `serve` and `infer` so."""
    return [
        f"ServingMesh.tensor = {best.tensor}",
        f"ServingMesh.data = {best.data}",
        f"EngineConfig.slots = {best.slots}",
        f"EngineConfig.cache_dtype = '{best.engine.cache_dtype}'",
        f"Dataset.length = {best.engine.length}",
    ]
