"""Reports the planner's results: for a terminal, as JSON and as a Gin file for train."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from capibara.config.literals import quoted
from capibara.planner.compiler.compile_cache import Verdict
from capibara.planner.compiler.verify import VerifiedRanking
from capibara.planner.hardware.chips import GIB
from capibara.planner.hardware.slices import Slice
from capibara.planner.model.choice import Kind
from capibara.planner.model.cost import EXPOSED, Cost
from capibara.planner.model.memory import memory as predict
from capibara.planner.model.units import seconds
from capibara.planner.model.workload import Workload
from capibara.planner.search import advice, ranking
from capibara.planner.search.ranking import Goal, Ranked
from capibara.planner.search.slice_choice import Offer
from capibara.sharding import Remat

if TYPE_CHECKING:
    from rich.console import Console


def plans_json(
    walk: VerifiedRanking,
    work: Workload,
    slice_: Slice,
    *,
    top: int,
    tokens: float | None,
    usd: float | None,
    offers: Sequence[Offer] = (),
) -> dict[str, Any]:
    """The first plans and the compile results; the best plans of all slices that were considered, if any."""
    plans = []
    for item in walk.ranked[:top]:
        tried = walk.of(item)
        proof = {"verdict": verdict_json(tried.verdict)} if tried else {}
        plans.append(as_json(item, work, slice_, tokens, usd) | proof)
    compiled = [
        {"plan": entry.ranked.choice.describe(), "verdict": verdict_json(entry.verdict)} for entry in walk.tried
    ]
    scales = [{"kind": _kind(kind), "scale": scale} for kind, scale in walk.question.scales]
    weighed = [as_json(offer.best, work, offer.slice_, tokens, usd) for offer in offers]
    return {"plans": plans, "tried": compiled, "memory_scales": scales} | ({"slices": weighed} if offers else {})


def _kind(kind: Kind) -> str:
    remat, axes = kind
    retained = " ".join((str(remat.kind), *(remat.names if remat.kind in (Remat.SAVE, Remat.OFFLOAD) else ())))
    return f"remat {retained}, {' x '.join(axes) or 'data and fsdp only'}"


def as_json(ranked: Ranked, work: Workload, slice_: Slice, tokens: float | None, usd: float | None) -> dict[str, Any]:
    """One plan with all of its predictions, as plain values.

    Args:
      ranked: the plan.
      work, slice_: the workload and the slice.
      tokens: total training tokens, for days and dollars; None: neither.
      usd: price per chip-hour; None: the list price.
    """
    choice, memory, cost = ranked.choice, ranked.memory, ranked.cost
    result: dict[str, Any] = {
        "slice": slice_.name,
        "mesh": choice.mesh,
        "batch_size": choice.batch_size(work),
        "rows": choice.rows,
        "accumulation": choice.accumulation,
        "remat": str(choice.remat.kind),
        "remat_names": list(choice.remat.names) if choice.remat.kind in (Remat.SAVE, Remat.OFFLOAD) else [],
        "state_dtype": str(choice.state_dtype),
        "fits": ranked.fits,
        "predicted": {
            "peak_bytes": memory.peak,
            "uncorrected_peak_bytes": _uncorrected_peak(ranked, work),
            "peak_moment": memory.peak_moment,
            "limit_bytes": ranked.limit_bytes,
            "memory": {name: getattr(memory, name) for name in MEMORY_PARTS},
            "step_s": cost.step_s,
            "compute_s": cost.compute_s,
            "elementwise_s": cost.elementwise_s,
            "hbm_s": cost.hbm_s,
            "host_s": cost.host_s,
            "host_exposed_s": cost.host_exposed_s,
            "links_s": cost.links_s,
            "blocking_s": cost.blocking_s,
            "update_s": cost.update_s,
            "bubble": cost.bubble,
            "imbalance": cost.imbalance,
            "bound": cost.bound,
            "tokens_per_s": cost.tokens_per_s,
            "tokens_per_s_chip": cost.tokens_per_s / slice_.chips,
            "mfu": cost.mfu,
            "hfu": cost.hfu,
            "usd_per_hour": slice_.price_per_hour(usd),
        },
    }
    if tokens:
        result["predicted"] |= {"days": cost.days(tokens), "usd": cost.usd(tokens, usd)}
    return result


MEMORY_PARTS = {
    "parameters": "stored parameters",
    "optimizer": "optimizer state",
    "average": "moving average of the parameters",
    "batch": "the step's rows",
    "held": "reference and engine of a run that learns from rewards",
    "gradients": "float32 gradients of trained parameters",
    "summed": "their sum over micro-batches",
    "casts": "parameters in the compute dtype or another layout, sharded",
    "saved": "saved activations of all layers",
    "layer": "backward pass of one layer",
    "weights": "gathered weights of a layer, and gradients of the trained ones",
    "forward": "forward pass of a layer after the loop, while the head is gathered",
    "loss": "head, its gradient if it is trained, a block of logits",
    "pipeline": "rows between stages, a second sum of gradients",
    "host": "activations in the host's memory",
}


def show(
    walk: VerifiedRanking, work: Workload, slice_: Slice, *, top: int, tokens: float | None, usd: float | None
) -> None:
    """Prints the chosen plan and the runners-up."""
    from rich.table import Table

    console = _console()
    ranked, best = walk.ranked, walk.ranked[0]
    console.print(f"{slice_.title}: {best.choice.describe()}", style="bold", soft_wrap=True)
    for line in (*summary(best, work, slice_, tokens, usd), *_advice(work, tokens), *_proof(walk)):
        console.print(f"  {line}", soft_wrap=True)
    table = Table(title=f"the first {min(top, len(ranked))} of {len(ranked)} plans, all figures predicted")
    for name in ("plan", "batch", "HBM GiB", "step", "tokens/s chip", "MFU", "why not first"):
        table.add_column(name, justify="left" if name in ("plan", "why not first") else "right")
    for index, item in enumerate(ranked[:top]):
        cost = item.cost
        table.add_row(
            item.choice.describe(),
            str(item.choice.batch_size(work)),
            f"{item.memory.peak / GIB:.2f}",
            seconds(cost.step_s),
            f"{cost.tokens_per_s / slice_.chips:.0f}",
            f"{cost.mfu:.1%}",
            reason_ranked_lower(item, walk, work) if index else "",
        )
    console.print(table)


def show_offers(offers: Sequence[Offer], chosen: Offer, *, tokens: float | None, usd: float | None) -> None:
    """Prints the considered slices, each with its best plan, and which one was chosen."""
    from rich.table import Table

    table = Table(title="slices with their best plans, all figures predicted")
    table.add_column("")
    for name in OFFER_COLUMNS:
        table.add_column(name, justify="left" if name in ("slice", "plan") else "right")
    for offer in offers:
        table.add_row(">" if offer is chosen else "", *offer_cells(offer, tokens, usd))
    _console().print(table)


OFFER_COLUMNS = ("slice", "plan", "HBM GiB", "tokens/s", "MFU", "USD/hour", "USD/M tokens", "days", "USD")


def offer_cells(offer: Offer, tokens: float | None, usd: float | None) -> list[str]:
    """The cells of a slice, for the columns of OFFER_COLUMNS."""
    cost, slice_ = offer.best.cost, offer.slice_
    hourly, each = slice_.price_per_hour(usd), offer.usd_per_million_tokens(usd)
    return [
        slice_.name,
        offer.best.choice.describe(),
        f"{offer.best.memory.peak / GIB:.2f}",
        f"{cost.tokens_per_s:,.0f}",
        f"{cost.mfu:.1%}",
        "" if hourly is None else f"{hourly:,.2f}",
        "" if each is None else f"{each:.4f}",
        f"{cost.days(tokens):.1f}" if tokens else "",
        f"{cost.usd(tokens, usd):,.0f}" if tokens and hourly is not None else "",
    ]


def _console() -> Console:
    from rich.console import Console

    class Ours(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with code 1
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    return Ours(width=None if sys.stdout.isatty() else 140, highlight=False, markup=False)


def summary(best: Ranked, work: Workload, slice_: Slice, tokens: float | None, usd: float | None) -> Iterable[str]:
    """The predictions for a plan, one per line: step, memory, layout, and the training of `tokens` tokens."""
    choice, memory, cost = best.choice, best.memory, best.cost
    step = f"{seconds(cost.step_s)} a step of {choice.tokens(work):,} tokens"
    yield f"predicted: {step}, {cost.mfu:.1%} MFU, bound by {cost.bound}"
    usable = slice_.chip.device_usable_hbm_bytes
    yield f"predicted peak HBM: {memory.peak / GIB:.2f} of {usable / GIB:.2f} GiB a {slice_.chip.unit}, in the {memory.peak_moment}"
    if slice_.chip.is_tpu:
        yield "on the torus: " + "; ".join(ranking.layout_lines(best, slice_))
    hourly = slice_.price_per_hour(usd)
    if hourly is not None:
        price = slice_.chip.price
        source = f"{price.describe()}, {price.source}" if usd is None and price else "your price"
        yield f"{hourly:,.2f} USD an hour ({source})"
    if tokens:
        spent = cost.usd(tokens, usd)
        money = "" if spent is None else f" and {spent:,.0f} USD"
        yield f"predicted for {tokens:.3g} tokens: {cost.days(tokens):.1f} days{money}"


def _advice(work: Workload, tokens: float | None) -> Iterable[str]:
    """Batch and learning rate by published rules, for decoders without frozen parameters, as the rules were fitted."""
    if work.config.data_kind != "causal" or work.config.lora is not None:
        return
    weights = work.active_weights
    tokens = tokens or advice.CHINCHILLA_TOKENS * weights
    far = ", far from what they were fitted on" if weights > 1e10 or work.config.moe is not None else ""
    yield f"suggested for {tokens:.3g} tokens by published scaling rules{far}, as the start of a search:"
    for rule in advice.advice(weights, work.model_flops_per_token, tokens):
        yield f"  {rule.describe(work.length)}"


def _proof(walk: VerifiedRanking) -> Iterable[str]:
    """The compile results, one line per plan."""
    for item in walk.tried:
        plan, predicted, compiled = item.ranked.choice.describe(), item.ranked.memory.peak, item.verdict.compiled
        before = f"{predicted / GIB:.2f} GiB predicted before"
        if compiled is None:
            yield f"not compiled: {plan}: {item.verdict.message}"
        elif not compiled.fits:
            yield f"compiled: {plan}: does not fit ({before})"
        else:
            spare = "" if item.is_usable else ", less to spare than asked"
            error = predicted / compiled.fitting_bytes - 1
            yield f"compiled: {plan}: fits, peak {compiled.fitting_bytes / GIB:.2f} GiB{spare} ({before}: {error:+.1%})"
    for kind, scale in walk.question.scales:
        yield f"learned: memory of plans with {_kind(kind)}, beside their state, x {scale:.2f}"


def reason_ranked_lower(candidate: Ranked, walk: VerifiedRanking, work: Workload) -> str:
    """Why a plan ranks below the first."""
    best = walk.ranked[0]
    if not candidate.fits:
        return f"memory: {candidate.missing_bytes / GIB:.1f} GiB too much"
    if walk.question.goal is Goal.LARGEST_BATCH:
        rows, most = candidate.choice.batch_size(work), best.choice.batch_size(work)
        if rows > most:
            return f"{rows} rows are not compiled, {most} are proven"
        if rows < most:
            return f"{1 - rows / most:.1%} fewer rows"
    slower = best.cost.tokens_per_s / candidate.cost.tokens_per_s - 1
    if slower < 0.0005:
        return "equally fast within the predictions' accuracy: the first is simpler"
    ours, its = _parts(best.cost), _parts(candidate.cost)
    grown = {name: its[name] - ours[name] for name in its}
    why = max(grown, key=grown.__getitem__)
    if why == "on chip":
        again = (
            candidate.cost.flops.recompute / candidate.cost.tokens > 1.01 * best.cost.flops.recompute / best.cost.tokens
        )
        compute = "recomputes more" if again else "more compute"
        by = {
            compute: candidate.cost.compute_s + candidate.cost.elementwise_s,
            "more traffic to HBM": candidate.cost.hbm_s,
        }
        why = max(by, key=by.__getitem__)
    return f"{slower:.1%} slower: {why}"


def _parts(cost: Cost) -> dict[str, float]:
    """Seconds per token by cause; they add up to the plan's share of the step."""
    parts = {
        "on chip": max(cost.compute_s + cost.elementwise_s, cost.hbm_s),
        "more traffic over PCIe": cost.host_exposed_s,
        "more traffic over ICI": EXPOSED * cost.links_s,
        "ICI in the way of compute": cost.blocking_s,
        "a larger bubble": (cost.step_s - cost.update_s) * cost.bubble,
        "a longer update": cost.update_s,
    }
    return {name: amount / cost.tokens for name, amount in parts.items()}


def _uncorrected_peak(candidate: Ranked, work: Workload) -> float:
    """The predicted peak without corrections from compiles, which would turn it into the compiler's figure."""
    return predict(work, candidate.choice, candidate.slice_.chip, most_bytes=candidate.limit_bytes).peak


def verdict_lines(verdict: Verdict, slice_: Slice) -> Iterable[str]:
    """The compiler's report of a step, one item per line."""
    compiled = verdict.compiled
    if compiled is None:
        return
    versions = ", ".join(f"{name} {verdict.versions.get(name)}" for name in ("jax", "libtpu"))
    when = f"compiled {'earlier, ' if verdict.cached else ''}in {compiled.compile_s:.0f} s with {versions}"
    usable = slice_.chip.device_usable_hbm_bytes
    line = f"  {verdict.held_bytes / GIB:.2f} GiB of that are held beside the step: {MEMORY_PARTS['held']}"
    held = [line] if verdict.held_bytes else []
    if not compiled.fits:
        need = f"it needs {compiled.peak_bytes / GIB:.2f} GiB or more" if compiled.peak_bytes else "it needs more HBM"
        yield f"{slice_.name}: does not fit: {need}, a chip has {usable / GIB:.2f} ({when})"
        yield from held
        return
    yield f"{slice_.name}: fits ({when})"
    share = compiled.fitting_bytes / usable
    yield from held
    yield f"  peak HBM {compiled.fitting_bytes / GIB:.2f} of {usable / GIB:.2f} GiB a chip ({share:.0%})"
    parts = {"arguments": compiled.argument_bytes, "temporaries": compiled.temporary_bytes, "code": compiled.code_bytes}
    parts |= {"in the host's memory": compiled.host_bytes} if compiled.host_bytes else {}
    yield "  " + ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in parts.items())
    costs = compiled.costs
    yield f"  {compiled.flops / 1e12:.1f} TFLOP a chip and step, {costs.hbm_bytes / 1e9:.1f} GB over HBM"
    for kind, size in sorted(costs.collective_bytes.items()):
        yield f"  {kind}: {size / 1e9:.2f} GB"
    if costs.host_bytes:
        needed_s, exposed_s = costs.host_bytes / slice_.chip.device_pcie_bytes_per_s, compiled.host_exposed_s
        yield (
            f"  to and from the host's memory: {costs.host_bytes / 1e9:.2f} GB, {needed_s:.3f} s over PCIe, "
            f"{exposed_s:.3f} s of it longer than the instructions scheduled beside it"
        )
    if compiled.kernels:
        yield f"  kernels: {', '.join(compiled.kernels)}"
    if compiled.alive:
        result = compiled.alive_bytes / GIB
        yield f"  the peak's largest buffers beside state and batch (from the schedule: {result:.2f} GiB at the peak):"
        for buffer in compiled.alive[:8]:
            times = f"{buffer.count} x " if buffer.count > 1 else ""
            yield f"    {times}{buffer.bytes / buffer.count / GIB:.3f} GiB  {buffer.array}  {buffer.source}"
    if compiled.compiled_s:
        yield f"  {compiled.compiled_s:.3f} s by the compiler's cycles, without kernels and collectives"


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """The compiler's report as plain values."""
    compiled = verdict.compiled
    return {
        "outcome": str(verdict.outcome),
        "message": verdict.message,
        "date": verdict.date,
        "versions": dict(verdict.versions),
        "held_bytes": verdict.held_bytes,
        "compiled": compiled.to_json() if compiled else None,
    }


def gin(
    walk: VerifiedRanking, work: Workload, slice_: Slice, includes: Sequence[str] = (), bound: Sequence[str] = ()
) -> str:
    """The first plan as a Gin file; include it after a run file, or pass it as another --gin_file.

    Args:
      walk, work, slice_: the result, the workload and the slice.
      includes, bound: Gin files and statements to put before the plan, which makes the file self-contained.
    """
    best = walk.ranked[0]
    verdict = walk.proven.verdict if walk.proven else None
    lines = [
        f"# {slice_.title}: {best.choice.describe()}, for rows of {work.length}.",
        f"# Predicted: {_uncorrected_peak(best, work) / GIB:.2f} GiB of HBM a {slice_.chip.unit}, "
        f"{seconds(best.cost.step_s)} a step, {best.cost.mfu:.1%} MFU.",
    ]
    if verdict and verdict.compiled:
        versions = " and ".join(f"{name} {verdict.versions.get(name)}" for name in ("jax", "libtpu"))
        lines.append(f"# Compiled on {verdict.date}, {versions}: {verdict.compiled.fitting_bytes / GIB:.2f} GiB.")
    lines += [*(f'include "{file}"' for file in includes), *map(quoted, bound)]
    lengths = {"length": work.length, "encoder_length": work.encoder_length}
    lines += [f"Dataset.{name} = {length}" for name, length in lengths.items() if length is not None]
    return "\n".join([*lines, *best.choice.bindings(work, slice_.name)]) + "\n"
