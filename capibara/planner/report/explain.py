"""Prints every term of a plan's prediction with its formula and value."""

from __future__ import annotations

from collections.abc import Iterator

from capibara.planner.hardware.chips import GIB
from capibara.planner.hardware.slices import Slice
from capibara.planner.model import cost as costs
from capibara.planner.model.cost import EXPOSED, HBM_REACHED
from capibara.planner.model.memory import kv_cache_bytes
from capibara.planner.model.workload import Workload
from capibara.planner.report.report import MEMORY_PARTS
from capibara.planner.search.ranking import Ranked

_STATE = "parameters + optimizer + average + batch + held"
_MOMENTS = {
    "forward": "{scale}(saved + casts + summed + forward)",
    "loss": "{scale}(saved + casts + summed + loss)",
    "backward": "{scale}(saved + casts + summed + gradients + layer + weights + pipeline)",
    "update": "{scale}gradients",
}
_FLOPS = {
    "forward": "2 x weights of the layers x tokens, of experts top_k of them",
    "backward": "{backward}",
    "recompute": "share of forward that the remat policy does again",
    "attention": "scores and values under the mask: forward, 3.5 times that backward, and what is done again",
    "head": "{head} x vocabulary x embedding x tokens",
    "hardware": "all of them",
    "model": "without recomputation: what MFU counts",
}
_STEP = {
    "links_s": "of traffic that could hide behind compute",
    "blocking_s": "of traffic in its way",
    "bubble": "(stages - 1) / (parts of a row's way + stages - 1)",
    "imbalance": "tokens of the busiest group of experts over the mean",
}


def lines(best: Ranked, work: Workload, slice_: Slice) -> Iterator[str]:
    """A line for every term.

    Args:
      best: the plan.
      work, slice_: what it was made for.
    """
    yield from _memory(best, work)
    yield from _flops(best, work)
    yield "traffic of a device and step (predicted)"
    for part in best.cost.collectives:
        overlap = "could hide behind compute" if part.overlaps else "in its way"
        axes = " ".join(part.axes)
        yield f"  {part.name:<36}{part.kind:<15}{axes:<22}{part.bytes / 1e9:9.2f} GB {part.seconds:8.3f} s  {overlap}"
    yield from _step(best, work, slice_)


def _memory(best: Ranked, work: Workload) -> Iterator[str]:
    memory = best.memory
    yield "memory of a device, GiB (predicted)"
    for name, text in MEMORY_PARTS.items():
        yield f"  {name:<12}{getattr(memory, name) / GIB:10.3f}  {text}"
    scale = f"{memory.scale:.2f} x " if memory.scale != 1 else ""
    yield f"  {'state':<12}{memory.state / GIB:10.3f}  = {_STATE}"
    for moment, amount in memory.moments.items():
        peak = ", the peak" if moment == memory.peak_moment else ""
        formula = _MOMENTS[moment].format(scale=scale)
        yield f"  in the {moment:<9}{amount / GIB:8.3f} = state + {formula}{peak}"
    cache = kv_cache_bytes(work, best.choice)
    yield f"  {'KV cache':<12}{cache / GIB:10.3f}  per row, in generation: not part of the step"


def _flops(best: Ranked, work: Workload) -> Iterator[str]:
    yield "TFLOP of a device and step (predicted)"
    frozen = "1 x forward: the base is frozen, and the adapters' FLOPs are not counted"
    factors = {
        "backward": "2 x forward" if work.config.lora is None else frozen,
        "head": 2 * costs.head_passes(work, best.choice),
    }
    for name, text in _FLOPS.items():
        text = text.format(**factors)
        yield f"  {name:<12}{getattr(best.cost.flops, name) / 1e12:10.2f}  {text}"


def _step(best: Ranked, work: Workload, slice_: Slice) -> Iterator[str]:
    cost = best.cost
    exposed = f"{EXPOSED:g} x links"  # the share of overlappable traffic that published steps do not hide
    yield f"step, s (predicted) = (max(compute + elementwise, HBM) + host exposed + {exposed} + blocking) / (1 - bubble) + update"
    yield f"  {'compute_s':<12}{cost.compute_s:10.4f}  the sum of"
    for part in costs.compute(work, best.choice, slice_, cost.flops):
        speed = f"{part.share:.1%} of {part.peak_flops / 1e12:.0f} TFLOP/s"
        yield f"    {part.name:<10}{part.seconds:10.4f}  = {part.flops / 1e12:.2f} TFLOP / ({speed})"
    between, listed = costs.elementwise_bytes(work, best.choice, slice_.chip), slice_.chip.device_hbm_bytes_per_s
    text = f"= {between / 1e9:.2f} GB / {listed / 1e9:.0f} GB/s: norms, rotations, activations, copies"
    yield f"  {'elementwise_s':<13}{cost.elementwise_s:9.4f}  {text}"
    layers, update = costs.hbm_bytes(work, best.choice)
    speed = f"({HBM_REACHED:.0%} of {slice_.chip.device_hbm_bytes_per_s / 1e9:.0f} GB/s)"
    yield f"  {'hbm_s':<12}{cost.hbm_s:10.4f}  = {layers / 1e9:.2f} GB / {speed}"
    yield f"  {'host_s':<12}{cost.host_s:10.4f}  offloaded activations, out and back over PCIe"
    yield f"  {'host_exposed_s':<14}{cost.host_exposed_s:8.4f}  what neither pass of the layers hides of it"
    for name, text in _STEP.items():
        yield f"  {name:<12}{getattr(cost, name):10.4f}  {text}"
    yield f"  {'update_s':<12}{cost.update_s:10.4f}  = {update / 1e9:.2f} GB / {speed}"
    yield f"  {'step_s':<12}{cost.step_s:10.4f}"
