"""A plan as one HTML page without outside files: memory of a chip, the step's time, the roofline and the ranking."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence

from capibara.planner.compiler.verify import VerifiedRanking
from capibara.planner.hardware.chips import GIB
from capibara.planner.hardware.slices import Slice
from capibara.planner.model.workload import Workload
from capibara.planner.report import report
from capibara.planner.search.ranking import Ranked
from capibara.planner.search.slice_choice import Offer

_COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0",
           "#7a8b2e", "#c44e52")  # fmt: skip
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .25rem .6rem; border-bottom: 1px solid #ddd; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } th { text-align: left; }
.note, tr.out { color: #666; } tr.chosen { font-weight: bold; }
svg text { font: 12px system-ui, sans-serif; fill: #222; } svg .grid { stroke: #ddd; }
.box { overflow-x: auto; } .box svg { display: block; min-width: 44rem; } .box table { min-width: 28rem; } pre { overflow-x: auto; }
@media (prefers-color-scheme: dark) {
  body { background: #181818; color: #ddd; } svg text { fill: #ddd; } svg .grid, td, th { stroke: #444; border-color: #444; }
  .note, tr.out { color: #a5a5a5; }
}
"""
_PHONE = '<meta name="viewport" content="width=device-width, initial-scale=1">'


_NUMBER, _CHOSEN = ' class="n"', ' class="chosen"'
_NOTE_PREDICTED = "Predictions of the cost model. Nothing was compiled or measured."
_NOTE = "Predictions of the cost model, except results marked as the TPU compiler's. Nothing was measured."


def page(
    walk: VerifiedRanking,
    work: Workload,
    slice_: Slice,
    *,
    top: int = 20,
    tokens: float | None = None,
    usd: float | None = None,
    offers: Sequence[Offer] = (),
    halves: Sequence[str] = (),
) -> str:
    """The page's HTML.

    Args:
      walk: plans, the chosen one first, and the compile results.
      work, slice_: the workload and the slice.
      top: number of plans to list.
      tokens: total training tokens, for days and dollars; None: neither.
      usd: price per chip-hour; None: the list price.
      offers: slices that were considered, if any.
      halves: lines about the devices that draw answers beside training, if any.
    """
    ranked, best = walk.ranked, walk.ranked[0]
    title = f"{slice_.title}: {best.choice.describe()}"
    cost = best.cost
    facts = [
        f"{work.model.param_count:,} parameters, rows of {work.length:,} tokens: {cost.tokens_per_s:,.0f} tokens/s, "
        f"{cost.hfu:.1%} of the peak FLOP/s with recomputation",
        *report.summary(best, work, slice_, tokens, usd),
    ]
    sections = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="note">{_NOTE if walk.tried else _NOTE_PREDICTED}</p>',
        *(f"<p>{html.escape(fact[:1].upper() + fact[1:])}.</p>" for fact in facts),
        *([_pre(halves)] if halves else []),
        *_offers(offers, slice_, tokens, usd),
        *_proof(walk, slice_),
        "<h2>HBM of a chip at the peak, predicted</h2>",
        _memory_bar(best, slice_),
        "<h2>Seconds of a step</h2>",
        _time_bars(best),
        "<h2>Roofline</h2>",
        _roofline(ranked[:top], slice_),
        f"<h2>The first {min(top, len(ranked))} of {len(ranked)} plans</h2>",
        _table(walk, work, slice_, top),
    ]
    head = f'<meta charset="utf-8">{_PHONE}<title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body><main>{"".join(sections)}</main></body></html>\n'


def _box(content: str, label: str) -> str:
    """What is wider than a phone scrolls by itself; by the keyboard, too."""
    return f'<div class="box" tabindex="0" role="region" aria-label="{label}">{content}</div>'


def _pre(lines: Iterable[str]) -> str:
    return f'<pre tabindex="0">{html.escape(chr(10).join(lines))}</pre>'


def _offers(offers: Sequence[Offer], chosen: Slice, tokens: float | None, usd: float | None) -> Iterator[str]:
    """The slices that were considered."""
    if not offers:
        return
    yield "<h2>Slices with their best plans, predicted</h2>"
    left = ("slice", "plan")
    head = "".join(f"<th{'' if name in left else _NUMBER}>{name}</th>" for name in report.OFFER_COLUMNS)
    rows = []
    for offer in offers:
        cells = zip(report.OFFER_COLUMNS, report.offer_cells(offer, tokens, usd))
        row = "".join(f"<td{'' if name in left else _NUMBER}>{html.escape(cell)}</td>" for name, cell in cells)
        rows.append(f"<tr{_CHOSEN if offer.slice_ == chosen else ''}>{row}</tr>")
    yield _box(f"<table><tr>{head}</tr>{''.join(rows)}</table>", "slices")


def _proof(walk: VerifiedRanking, slice_: Slice) -> Iterator[str]:
    """The compile results: a table, and the proven plan's figures."""
    if not walk.tried:
        return
    yield "<h2>Compiled</h2>"
    rows = []
    for item in walk.tried:
        compiled, words = item.verdict.compiled, str(item.verdict.outcome)
        peak = f"{compiled.peak_bytes / GIB:.2f}" if compiled and compiled.peak_bytes else ""
        cells = f'<td class="n">{peak}</td><td class="n">{item.ranked.memory.peak / GIB:.2f}</td><td>{words}</td>'
        rows.append(f"<tr><td>{html.escape(item.ranked.choice.describe())}</td>{cells}</tr>")
    head = '<th>plan</th><th class="n">compiled, GiB</th><th class="n">predicted before, GiB</th><th>result</th>'
    yield _box(f"<table><tr>{head}</tr>{''.join(rows)}</table>", "compiled plans")
    if walk.proven:
        lines = report.verdict_lines(walk.proven.verdict, slice_)
        yield _pre(lines)


def _memory_bar(best: Ranked, slice_: Slice) -> str:
    memory, usable = best.memory, slice_.chip.device_usable_hbm_bytes
    held = ("saved", "casts", "summed")
    at_peak = {"forward": (*held, "forward"), "loss": (*held, "loss"), "update": ("gradients",)}.get(
        memory.peak_moment, (*held, "gradients", "layer", "weights", "pipeline")
    )
    scaled = {name: getattr(memory, name) * memory.scale for name in at_peak}
    parts = {name: getattr(memory, name) for name in ("parameters", "optimizer", "average", "batch", "held")} | scaled
    parts = {name: amount for name, amount in parts.items() if amount}
    full = max(usable, memory.peak)
    shapes, legend, x = [], [], 0.0
    for color, (name, amount) in zip(_COLORS, parts.items()):
        width = 860 * amount / full
        text = f"{name}: {amount / GIB:.2f} GiB"
        shapes.append(
            f'<rect x="{x:.1f}" y="0" width="{width:.1f}" height="40" fill="{color}"><title>{text}</title></rect>'
        )
        meaning = html.escape(report.MEMORY_PARTS[name])
        legend.append(
            f'<tr><td><span style="color:{color}">&#9632;</span> {meaning}</td><td class="n">{amount / GIB:.3f}</td></tr>'
        )
        x += width
    for amount, label in ((usable, "usable"), (best.limit_bytes, "limit")):
        x_at = 860 * amount / full
        shapes.append(
            f'<line x1="{x_at:.1f}" x2="{x_at:.1f}" y1="-4" y2="46" stroke="currentColor" stroke-dasharray="4 3"/>'
            f'<text x="{x_at:.1f}" y="{-8 if label == "usable" else 60}" text-anchor="end">'
            f"{label} {amount / GIB:.2f} GiB</text>"
        )
    total = f'<tr><td>peak, in the {memory.peak_moment}</td><td class="n">{memory.peak / GIB:.3f}</td></tr>'
    svg = f'<svg viewBox="0 -24 880 92" role="img" aria-label="HBM of a chip">{"".join(shapes)}</svg>'
    return (
        _box(svg, "HBM of a chip")
        + f'<table><tr><th>part</th><th class="n">GiB</th></tr>{"".join(legend)}{total}</table>'
    )


def _time_bars(best: Ranked) -> str:
    cost = best.cost
    rows = {
        "compute": cost.compute_s,
        "between products": cost.elementwise_s,
        "HBM": cost.hbm_s,
        "offloading": cost.host_s,
        "links, could overlap": cost.links_s,
        "links, blocking": cost.blocking_s,
        "update": cost.update_s,
        "step": cost.step_s,
    }
    longest = max(rows.values())
    bars = "".join(
        f'<text x="150" y="{26 * i + 17}" text-anchor="end">{name}</text>'
        f'<rect x="160" y="{26 * i + 4}" width="{600 * value / longest:.1f}" height="18" fill="{_COLORS[i]}"/>'
        f'<text x="{168 + 600 * value / longest:.1f}" y="{26 * i + 17}">{value:.4f}</text>'
        for i, (name, value) in enumerate(rows.items())
    )
    svg = f'<svg viewBox="0 0 880 {26 * len(rows) + 6}" role="img" aria-label="seconds of a step">{bars}</svg>'
    return _box(svg, "seconds of a step")


def _roofline(ranked: Sequence[Ranked], slice_: Slice) -> str:
    """FLOP/s over FLOP per byte of HBM, both logarithmic: the chip's roofline and the plans below it."""
    chip = slice_.chip
    peak, bandwidth = chip.device_flops(), chip.device_hbm_bytes_per_s
    points = [
        (item.cost.flops.hardware / item.cost.hbm_bytes, item.cost.flops.hardware / item.cost.step_s, item)
        for item in ranked
    ]
    low = math.log10(min([peak / bandwidth, *(p[0] for p in points)])) - 0.4
    high = math.log10(max([peak / bandwidth, *(p[0] for p in points)])) + 0.4
    bottom = math.log10(min([peak / 10, *(p[1] for p in points)])) - 0.1
    top = math.log10(peak) + 0.15

    def at(intensity: float, speed: float) -> tuple[float, float]:
        x = 60 + 780 * (math.log10(intensity) - low) / (high - low)
        return x, 240 - 220 * (math.log10(speed) - bottom) / (top - bottom)

    left = max(10**low, 10**bottom / bandwidth)
    roof = [at(left, left * bandwidth), at(peak / bandwidth, peak), at(10**high, peak)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in roof)
    dots = []
    for index, (intensity, speed, entry) in reversed(list(enumerate(points))):
        x, y = at(intensity, speed)
        color = _COLORS[0] if index == 0 else "#aaa"
        label = html.escape(f"{entry.choice.describe()}: {speed / 1e12:.0f} TFLOP/s")
        dots.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{color}"><title>{label}</title></circle>')
    ticks = "".join(
        f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="20" y2="240"/>'
        f'<text x="{x:.1f}" y="256" text-anchor="middle">{value:g}</text>'
        for value in _ticks(low, high)
        for x, _ in (at(value, peak),)
    ) + "".join(
        f'<line class="grid" x1="60" x2="840" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="54" y="{y + 4:.1f}" text-anchor="end">{value / 1e12:g}</text>'
        for value in _ticks(bottom, top)
        for _, y in (at(1.0, value),)
    )
    svg = (
        f'<svg viewBox="0 0 880 280" role="img" aria-label="roofline">{ticks}<polyline points="{line}" fill="none" '
        f'stroke="currentColor" stroke-width="2"/>{"".join(dots)}'
        f'<text x="{roof[1][0]:.0f}" y="{roof[1][1] - 6:.0f}">{peak / 1e12:.0f} TFLOP/s</text>'
        '<text x="840" y="274" text-anchor="end">FLOP per byte of HBM</text>'
        '<text x="14" y="130" text-anchor="middle" transform="rotate(-90 14 130)">TFLOP/s of a device</text></svg>'
    )
    return _box(svg, "roofline")


def _ticks(low: float, high: float) -> list[float]:
    """The values 1, 2 and 5 of each decade between two logarithms to base ten."""
    values = [step * 10.0**decade for decade in range(math.floor(low), math.ceil(high) + 1) for step in (1, 2, 5)]
    return [value for value in values if low <= math.log10(value) <= high]


def _table(walk: VerifiedRanking, work: Workload, slice_: Slice, top: int) -> str:
    rows = []
    for index, item in enumerate(walk.ranked[:top]):
        cost = item.cost
        cells = [
            item.choice.batch_size(work), f"{item.memory.peak / GIB:.2f}", f"{cost.step_s:.3f}",
            f"{cost.tokens_per_s / slice_.chips:,.0f}", f"{cost.mfu:.1%}",
        ]  # fmt: skip
        numbers = "".join(f'<td class="n">{cell}</td>' for cell in cells)
        why = html.escape(report.reason_ranked_lower(item, walk, work)) if index else "the choice"
        style = "" if item.fits else ' class="out"'
        rows.append(f"<tr{style}><td>{html.escape(item.choice.describe())}</td>{numbers}<td>{why}</td></tr>")
    names = ("batch", "HBM GiB", "step s", "tokens/s chip", "MFU")
    head = "<th>plan</th>" + "".join(f'<th class="n">{name}</th>' for name in names) + "<th>why not first</th>"
    return _box(f"<table><tr>{head}</tr>{''.join(rows)}</table>", "ranking")
