"""Predicts the time of a train step on a slice by roofline, from FLOPs, bytes of HBM and bytes over links.

Nothing here is measured. Compute runs at a stated share of the peak, HBM and links at their listed bandwidth. What a
compiled step does one after the other is added: products, then the element-wise work between them. Gathers of weights
are not assumed to be hidden either: published steps take as long as compute and collectives one after the other,
although XLA starts most gathers early (`EXPOSED`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from capibara.core import projections
from capibara.kernels.cross_entropy import by_vocabulary
from capibara.kernels.cross_entropy.dispatch import by_vocabulary_on
from capibara.planner.hardware import network
from capibara.planner.hardware.chips import Chip
from capibara.planner.hardware.network import Layout
from capibara.planner.hardware.slices import Slice
from capibara.planner.hardware.tiling import LANES
from capibara.planner.model import memory
from capibara.planner.model.choice import Choice
from capibara.planner.model.workload import Stack, Workload
from capibara.sharding import Remat

# The constants down to _ACTIVATIONS_EXPOSED were fitted together on 30 November 2026 (`benchmarks/time_model.py fit`) to eleven
# published rows of MaxText on v5e and v6e and to the compiler's cycles of seven steps of small models (libtpu 0.0.42.1);
# the other rows were not fitted. Shares of the peak FLOP/s that products reach; chips without a row have the share of the
# most similar chip.
_MATMUL = {
    "v4": 0.69,
    "v5e": 0.94,
    "v5p": 0.69,
    "v6e": 0.69,
    "tpu7x": 0.69,
    "h100": 0.60,
    "h200": 0.60,
    "cpu": 0.70,
}
_ATTENTION = 0.5  # of the peak: attention kernels run the softmax on the vector units
# Element-wise work of a layer (norms, rotations, activations, sums, casts, copies between layouts), as passes of its
# tokens over HBM at the listed bandwidth, with full remat: of the residual stream, and of queries, keys, values and
# results in whole lanes; for each expert of a token those of gathers and sums; of float32 scores without a kernel (one step
# of T5 1.1 large, fitted apart); of float32 logits by parts of the vocabulary.
_RESIDUAL_PASSES, _HEAD_PASSES, _EXPERT_PASSES, _SCORE_PASSES, _LOGIT_PASSES = 124.0, 8.5, 45.0, 22.0, 2.6
_ACTIVATIONS_EXPOSED = 0.5  # share of the time of activations' collectives that adds to the step
# Assumed, neither measured nor published: tokens of the busiest group of experts over the mean, without a capacity.
_IMBALANCE = 1.1
_QUANTIZED = {"int8": "int8", "fp8": "float8"}  # quantization -> dtype of chips.py
EXPOSED = 1.0  # share of the overlappable collectives' time that nevertheless adds to the step
# Share of the HBM bandwidth that is reached: that of element-wise operations, which only read and write.
HBM_REACHED = 0.85
# FLOPs of flash attention's backward pass over its forward pass: the forward pass makes two products, the backward
# kernel for the gradients of keys and values four, that for the queries' three.
_ATTENTION_BACKWARD = 3.5


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of one device and step, 2 per multiply-add of matmuls; attention under its mask.

    Attributes:
      forward, backward, recompute: of layers, experts included, attention excluded.
      attention: of all three passes.
      head: of the output head.
      experts: of experts' products, which are part of forward, backward and recompute.
      model: without recomputation: what MFU counts.
    """

    forward: float
    backward: float
    recompute: float
    attention: float
    head: float
    experts: float
    model: float

    @property
    def hardware(self) -> float:
        return self.forward + self.backward + self.recompute + self.attention + self.head


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of traffic over some mesh axes.

    Attributes:
      name: what is moved.
      kind: all-gather, reduce-scatter, all-reduce, all-to-all or permute.
      axes: mesh axes.
      bytes: per device and step, of the larger side.
      seconds: at the links' bandwidth.
      overlaps: whether compute could overlap it.
      exposed: the share of a blocking one's seconds that adds to the step.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    bytes: float
    seconds: float
    overlaps: bool
    exposed: float = 1.0


@dataclasses.dataclass(frozen=True)
class Cost:
    """The predicted step of a choice on a slice.

    Attributes:
      compute_s: matmuls and attention, each at its dtype's rate and the stated efficiency.
      elementwise_s: what runs between them on the vector units; adds to compute_s.
      hbm_s: HBM traffic at its bandwidth.
      host_s: activations offloaded to the host's memory and back, over PCIe.
      host_exposed_s: what of host_s adds to the step: the way there has the forward pass to hide behind, the way back the
        backward pass.
      update_s: the optimizer's update, which is HBM traffic only.
      links_s: collectives that could overlap with compute, of which the share EXPOSED counts.
      blocking_s: the exposed share of collectives that cannot.
      bubble: share of a pipeline's time in which a stage is idle.
      imbalance: tokens of the busiest group of experts over the mean; included in compute_s.
      peak_flops: FLOP/s of one device in the dtype of its weight products.
      flops: of one device.
      collectives: all of them.
      hbm_bytes: per device and step.
      tokens: per step, on all devices.
      step_s: the prediction.
    """

    compute_s: float
    elementwise_s: float
    hbm_s: float
    host_s: float
    host_exposed_s: float
    update_s: float
    links_s: float
    blocking_s: float
    bubble: float
    imbalance: float
    peak_flops: float
    flops: Flops
    collectives: tuple[Collective, ...]
    hbm_bytes: float
    tokens: int
    slice_: Slice

    @property
    def step_s(self) -> float:
        busy = max(self.compute_s + self.elementwise_s, self.hbm_s) + self.host_exposed_s
        busy += EXPOSED * self.links_s + self.blocking_s
        return busy / (1 - self.bubble) + self.update_s

    @property
    def bound(self) -> str:
        """What limits the step."""
        links = EXPOSED * self.links_s + self.blocking_s
        parts = {
            "compute": self.compute_s,
            "HBM": max(self.hbm_s, self.elementwise_s),
            "PCIe": self.host_s,
            "ICI": links,
        }
        return "bubble" if self.bubble > 0.2 else max(parts, key=parts.__getitem__)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def mfu(self) -> float:
        """Model FLOP/s over the peak in bfloat16, or in the dtype of quantized products (PaLM, appendix B)."""
        return self.flops.model / self.step_s / self.peak_flops

    @property
    def hfu(self) -> float:
        """Hardware FLOP/s utilisation: like `mfu`, with recomputation."""
        return self.flops.hardware / self.step_s / self.peak_flops

    def days(self, tokens: float) -> float:
        """Days to train on `tokens` tokens without interruption."""
        return tokens / self.tokens_per_s / 86_400

    def usd(self, tokens: float, usd_per_chip_hour: float | None = None) -> float | None:
        """Dollars to train on `tokens` tokens; None without a price."""
        hourly = self.slice_.price_per_hour(usd_per_chip_hour)
        return None if hourly is None else hourly * 24 * self.days(tokens)


def cost(work: Workload, choice: Choice, slice_: Slice) -> Cost:
    """The prediction.

    Raises:
      UserError: the mesh does not fit the slice.
    """
    layout = network.layout(slice_, choice.mesh)
    flops = step_flops(work, choice)
    chip = slice_.chip
    host = memory.host_bytes(work, choice) if choice.remat.kind is Remat.OFFLOAD else 0.0
    host_s = 2 * choice.accumulation * host / chip.device_pcie_bytes_per_s
    parts, between = compute(work, choice, slice_, flops), elementwise_bytes(work, choice, chip)
    compute_s, elementwise_s = sum(part.seconds for part in parts), between / chip.device_hbm_bytes_per_s
    forward = forward_s(work, choice, chip, flops, parts, between)
    layers_bytes, update_bytes = hbm_bytes(work, choice)
    bandwidth = chip.device_hbm_bytes_per_s * HBM_REACHED
    collectives = tuple(_collectives(work, choice, layout))
    return Cost(
        compute_s=compute_s,
        elementwise_s=elementwise_s,
        hbm_s=layers_bytes / bandwidth,
        host_s=host_s,
        host_exposed_s=_host_exposed_s(host_s, forward, compute_s + elementwise_s),
        update_s=update_bytes / bandwidth,
        links_s=sum(c.seconds for c in collectives if c.overlaps),
        blocking_s=sum(c.exposed * c.seconds for c in collectives if not c.overlaps),
        bubble=bubble(choice),
        imbalance=imbalance(work, choice),
        peak_flops=_weights_peak(work, slice_),
        flops=flops,
        collectives=collectives,
        hbm_bytes=layers_bytes + update_bytes,
        tokens=choice.tokens(work),
        slice_=slice_,
    )


class Compute(NamedTuple):
    """A part of the compute: FLOPs of a device and step at a share of its peak.

    Attributes:
      name: which products.
      flops: of the busiest device.
      share: share of the peak that they reach.
      peak_flops: FLOP/s of the device in their dtype.
    """

    name: str
    flops: float
    share: float
    peak_flops: float

    @property
    def seconds(self) -> float:
        return self.flops / (self.share * self.peak_flops)


def compute(work: Workload, choice: Choice, slice_: Slice, flops: Flops) -> tuple[Compute, ...]:
    """The parts of Cost.compute_s, which is the sum of their seconds.

    Only products with weights are quantized, not those of experts and the head.
    """
    full, share = slice_.chip.device_flops(), _MATMUL[slice_.chip.name]
    dense = flops.forward + flops.backward + flops.recompute - flops.experts
    parts = (
        Compute("layers", dense, share / _lanes_over_dims(work, slice_.chip), _weights_peak(work, slice_)),
        Compute("experts", imbalance(work, choice) * flops.experts, share, full),
        Compute("attention", flops.attention, _ATTENTION, full),
        Compute("head", flops.head, share, full),
    )
    return tuple(part for part in parts if part.flops)


def forward_s(
    work: Workload, choice: Choice, chip: Chip, flops: Flops, parts: tuple[Compute, ...], between: float
) -> float:
    """Seconds of the layers' forward pass: its share of `compute`'s parts and of the element-wise bytes between them."""
    seconds = {part.name: part.seconds for part in parts}
    products = seconds.get("layers", 0.0) + seconds.get("experts", 0.0)
    attention = seconds.get("attention", 0.0) / (1 + _ATTENTION_BACKWARD + recomputed(work, choice)[1])
    between -= _loss_elementwise_bytes(work, choice, chip)
    passes = 3 + (choice.remat.kind is not Remat.NONE)
    of_products = flops.forward / (flops.forward + flops.backward + flops.recompute)
    return of_products * products + attention + between / passes / chip.device_hbm_bytes_per_s


def _host_exposed_s(host_s: float, forward_s: float, busy_s: float) -> float:
    each = host_s / 2
    return max(0.0, each - forward_s) + max(0.0, each - (busy_s - forward_s))


def _lanes_over_dims(work: Workload, chip: Chip) -> float:
    """What products of a layer compute over what they need: those by heads of 96 fill 128 lanes, two heads of 64 share them."""
    size, weights = work.config.head_size, work.layer_weights
    if not chip.is_tpu or size <= LANES / 2:
        return 1.0
    by_heads = sum(weights[item.result] for item in projections.ATTENTION if item.result)
    return 1.0 + by_heads / sum(weights.values()) * (-size % LANES) / size


def _weights_peak(work: Workload, slice_: Slice) -> float:
    """FLOP/s of a device in the dtype of the weights' products; float32 uses bfloat16, JAX's default on TPUs."""
    return slice_.chip.device_flops(_QUANTIZED.get(str(work.config.quantization), "bfloat16"))


def bubble(choice: Choice) -> float:
    """Share of a pipeline's time in which a stage is idle: (stages - 1) / (parts + stages - 1)."""
    stages = choice.mesh["stage"]
    return (stages - 1) / (choice.pipeline_microbatches + stages - 1)


def imbalance(work: Workload, choice: Choice) -> float:
    """Tokens of the busiest group of experts over the mean; 1 with a capacity or a single group."""
    moe = work.config.moe
    uneven = moe is not None and str(moe.dispatch) != "capacity" and choice.mesh["expert"] > 1
    return _IMBALANCE if uneven else 1.0


def step_flops(work: Workload, choice: Choice) -> Flops:
    """FLOPs of one device: every mesh axis divides all of them, by tokens, by heads and hidden units, or by layers."""
    config, devices = work.config, choice.devices
    rows = choice.batch_size(work)
    forward = experts = attention = 0.0
    for stack in work.stacks:
        tokens = rows * stack.length
        of_experts = _expert_flops(work, stack) * tokens
        forward += 2 * stack.weights.total() * tokens + of_experts
        experts += of_experts
        seen = sum(a.seen_keys for a in stack.attentions)
        attention += stack.layers * tokens * 4 * config.num_heads * config.head_size * seen
    head = 2 * (1 + len(config.mtp_windows)) * config.vocab_size * config.embed_dim * rows * work.length
    by_weights = 1 if config.lora is None else 0  # passes for weight gradients; those of adapters are negligible
    again, attention_again = recomputed(work, choice)
    return Flops(
        forward=forward / devices,
        backward=(1 + by_weights) * forward / devices,
        recompute=again * forward / devices,
        attention=attention * (1 + _ATTENTION_BACKWARD + attention_again) / devices,
        head=head_passes(work, choice) * head / devices,
        experts=experts * (2 + by_weights + again) / devices,
        model=work.model_flops_per_token * choice.tokens(work) / devices,
    )


def head_passes(work: Workload, choice: Choice) -> int:
    """Products of the head: logits and their gradients; parts of the vocabulary make the logits twice."""
    return 2 + work.model.trains_head + _by_vocabulary(work, choice)


def _by_vocabulary(work: Workload, choice: Choice) -> bool:
    ids = work.config.vocab_size / choice.mesh["tensor"]
    return work.model.trains_head and by_vocabulary_on("tpu", ids, work.config.embed_dim)


def elementwise_bytes(work: Workload, choice: Choice, chip: Chip) -> float:
    """HBM bytes per device and step that take as long as the element-wise work of layers and loss."""
    c, mesh, size = work.config, choice.mesh, work.compute_bytes
    # Of the two units of the backward pass and one of each forward pass, full remat has four.
    passes = (3 + (choice.remat.kind is not Remat.NONE)) / 4
    residual = (_RESIDUAL_PASSES + _EXPERT_PASSES * (0 if c.moe is None else c.moe.top_k)) * c.embed_dim
    lanes = -(-c.head_size // LANES) * LANES
    heads = _HEAD_PASSES * (2 * c.num_heads + 2 * c.kv_heads) * lanes
    total = 0.0
    for stack in work.stacks:
        tokens = choice.rows * stack.length / mesh["context"] * choice.accumulation / mesh["stage"]
        width = residual + heads * len(stack.attentions)
        scores = (
            _SCORE_PASSES * 4 * c.num_heads * sum(attention.scores for attention in stack.attentions) / stack.length
        )
        total += passes * tokens * stack.layers * (width * size + scores) / mesh["tensor"]
        # What a layer saves is written by one pass and read by the other.
        saved = sum(memory.saved_bytes(work, memory.layer_results(work, stack, choice), choice))
        total += 2 * saved * stack.layers / mesh["stage"] * choice.accumulation
    return total + _loss_elementwise_bytes(work, choice, chip)


def _loss_elementwise_bytes(work: Workload, choice: Choice, chip: Chip) -> float:
    c, mesh = work.config, choice.mesh
    if not work.model.trains_head:
        return 0.0
    tokens = choice.rows * work.length / mesh["context"] / mesh["stage"]
    logits = tokens * c.vocab_size / mesh["tensor"] * 4
    if _by_vocabulary(work, choice):
        N, kind = math.ceil(tokens), chip.kind
        # Each part adds to the float32 gradient of the hidden states, unless that stays on the chip.
        parts = c.vocab_size / mesh["tensor"] / by_vocabulary.part_ids(N, c.embed_dim, kind)
        added = 0.0 if by_vocabulary.on_chip_ids(N, c.embed_dim, kind) else max(1.0, parts) * 8 * tokens * c.embed_dim
        return choice.accumulation * (_LOGIT_PASSES * logits + added)
    # Blocks of tokens: each reads and writes the head's float32 gradient, and its logits go through HBM five times.
    blocks = max(1.0, logits / min(memory.LOGITS_BYTES, logits / memory.FEWEST_BLOCKS))
    gradient = 8.0 * c.vocab_size / mesh["tensor"] * c.embed_dim
    return choice.accumulation * (blocks * gradient + 5 * logits) / HBM_REACHED


def _expert_flops(work: Workload, stack: Stack) -> float:
    """Per token in all layers of a stack: top_k experts, or all rows of a capacity, filled or not."""
    moe = work.config.moe
    if moe is None or not stack.expert_weights.parts:
        return 0.0
    slack = moe.capacity_factor if str(moe.dispatch) == "capacity" else 1.0
    return 2 * stack.expert_weights.total() * moe.top_k * slack / moe.num_experts


def recomputed(work: Workload, choice: Choice) -> tuple[float, float]:
    """Shares of the layers' forward matmuls and of forward attention that the backward pass recomputes."""
    remat = choice.remat
    match remat.kind:
        case Remat.NONE:
            return 0.0, 0.0
        case Remat.DOTS | Remat.MINIMAL:
            return 0.0, 1.0
        case Remat.FULL:
            # The last product of a layer is not recomputed: the backward pass does not read its result.
            return 1.0 - _last_share(work), 1.0
    weights = work.layer_weights
    total = sum(weights.values())
    retained = sum(weights.get(name, 0.0) for name in remat.names)
    last = "mlp_down" if "mlp_down" in weights else "expert_down"
    again = 1.0 - retained / total - (0.0 if last in remat.names else _last_share(work))
    return max(0.0, again), 0.0 if "attention" in remat.names else 1.0


def _last_share(work: Workload) -> float:
    weights = work.layer_weights
    return weights.get("mlp_down", weights.get("expert_down", 0.0)) / sum(weights.values())


def hbm_bytes(work: Workload, choice: Choice) -> tuple[float, float]:
    """HBM bytes per device and step of layers and head, and of the update.

    A weight is written when it is gathered or dequantized, and read by each pass; one pass writes its gradient. The
    quantized form of frozen weights is read in addition. Each product reads its input and writes its result; norms and
    activations read and write once more.
    """
    c, mesh, size = work.config, choice.mesh, work.compute_bytes
    passes = 2 + (c.lora is None) + (choice.remat.kind is not Remat.NONE)
    gathered = ("fsdp", "expert", "context", "data")
    total = 0.0
    for stack in work.stacks:
        n = choice.rows * stack.length / mesh["context"] * choice.accumulation / mesh["stage"] * stack.layers
        heads = (2 * c.num_heads + 2 * c.kv_heads) * c.head_size / mesh["tensor"]
        routed = 1 if c.moe is None else c.moe.top_k
        hidden = 3 * work.expert_dim * routed / mesh["tensor"]
        residual = 8 * c.embed_dim / mesh["tensor"] + 4 * c.embed_dim * routed
        total += passes * n * (residual + 2 * heads + 2 * hidden) * size
        # Scores without a kernel: written, read by the softmax, written as probabilities, and read again.
        scores = sum(a.scores for a in stack.attentions) / stack.length * c.num_heads / mesh["tensor"]
        total += passes * n * 4 * scores * 4
        weights = stack.weights.on_device(mesh, without=gathered)
        weights += stack.expert_weights.on_device(mesh, without=[a for a in gathered if a != "expert"])
        total += passes * 2 * weights * size * choice.accumulation * choice.ticks
    head = work.head.on_device(mesh, without=gathered)
    tokens = choice.rows * work.length / mesh["context"] / mesh["stage"] * choice.accumulation
    total += head * size * 3 * choice.accumulation + tokens * c.vocab_size / mesh["tensor"] * 4 * 4
    if c.lora is not None and c.lora.base_dtype.in_blocks:
        total += passes * work.params.on_device(mesh) * choice.accumulation
    state = work.trained.on_device(mesh)
    moments = work.state[choice.state_dtype].on_device(mesh)
    return total, 2 * (state + moments) + 3 * state + (2 * state if work.ema else 0.0)


def _collectives(work: Workload, choice: Choice, layout: Layout) -> Iterator[Collective]:
    """The traffic of the mesh's axes."""
    mesh, size = choice.mesh, work.compute_bytes
    micro = choice.accumulation
    shards = [axis for axis in work.rules.embed if mesh[axis] > 1]
    expert_shards = [axis for axis in work.rules.expert_embed if mesh[axis] > 1]
    copies = [axis for axis in ("data",) if mesh[axis] > 1]
    weights = sum(s.weights.on_device(mesh, without=shards) for s in work.stacks)
    experts = sum(s.expert_weights.on_device(mesh, without=expert_shards) for s in work.stacks)
    head = work.head.on_device(mesh, without=shards)
    # The backward pass gathers again: the weights of all layers would not fit. A pipeline does both at every tick.
    gathers = 2 * micro * choice.ticks
    for name, amount, axes in (("weights", weights, shards), ("experts' weights", experts, expert_shards)):
        if amount and axes:
            bytes_ = amount * size
            yield _gathered(f"gather {name}", layout, bytes_, axes, gathers)
            if work.config.lora is None:
                yield _reduced(f"reduce gradients of {name}", layout, bytes_, axes, micro * choice.ticks)
    if shards:
        yield _gathered("gather the head", layout, head * size, shards, micro)
    if shards and work.model.trains_head:
        yield _reduced("reduce the head's gradient", layout, head * 4, shards, micro)
    if copies:
        state = work.trained.on_device(mesh)
        yield Collective(
            "reduce gradients of copies", "all-reduce", tuple(copies), micro * state,
            micro * layout.reduce_s(state, copies), False,
        )  # fmt: skip
    yield from _activation_collectives(work, choice, layout)


def _activation_collectives(work: Workload, choice: Choice, layout: Layout) -> Iterator[Collective]:
    c, mesh, size, micro = work.config, choice.mesh, work.compute_bytes, choice.accumulation
    passes = 2 + (choice.remat.kind is not Remat.NONE)
    for stack in work.stacks:
        rows = choice.rows * stack.length / mesh["context"]
        layers = stack.layers / mesh["stage"] * micro
        if mesh["tensor"] > 1:  # sequence parallelism: gathered before attention and MLP, scattered after each
            amount = rows * c.embed_dim * size
            count = layers * 2 * (len(stack.attentions) + 1) * passes
            yield Collective(
                f"activations of the {stack.name}", "all-gather", ("tensor",), count * amount,
                count * layout.gather_s(amount, ["tensor"]), False, _ACTIVATIONS_EXPOSED,
            )  # fmt: skip
        if mesh["context"] > 1:
            amount = 2 * choice.rows * stack.length * c.kv_heads * c.head_size / mesh["tensor"] * size
            count = layers * len(stack.attentions) * passes
            yield Collective(
                f"keys and values of the {stack.name}", "all-gather", ("context",), count * amount,
                count * layout.gather_s(amount, ["context"]), False, _ACTIVATIONS_EXPOSED,
            )  # fmt: skip
        if mesh["expert"] > 1 and stack.expert_weights.parts and c.moe is not None:
            slack = c.moe.capacity_factor if str(c.moe.dispatch) == "capacity" else 1.0
            amount = rows * c.moe.top_k * slack * c.embed_dim * size
            count = layers * 2 * passes
            yield Collective(
                f"tokens to experts of the {stack.name}", "all-to-all", ("expert",), count * amount,
                count * layout.exchange_s(amount, ["expert"]), False, _ACTIVATIONS_EXPOSED,
            )  # fmt: skip
        if mesh["stage"] > 1:
            amount = rows / choice.pipeline_microbatches * c.embed_dim / mesh["tensor"] * size
            count = 2 * micro * (choice.pipeline_microbatches + mesh["stage"] - 1)
            yield Collective(
                f"activations between stages of the {stack.name}", "permute", ("stage",), count * amount,
                count * layout.pass_on_s(amount, "stage"), False, _ACTIVATIONS_EXPOSED,
            )  # fmt: skip


def _gathered(name: str, layout: Layout, size: float, axes: list[str], times: float) -> Collective:
    return Collective(name, "all-gather", tuple(axes), times * size, times * layout.gather_s(size, axes), True)


def _reduced(name: str, layout: Layout, size: float, axes: list[str], times: float) -> Collective:
    return Collective(name, "reduce-scatter", tuple(axes), times * size, times * layout.gather_s(size, axes), True)
