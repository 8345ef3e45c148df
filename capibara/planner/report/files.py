"""Writes the results of `plan`: JSON, an HTML page, a Gin file for train."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from capibara.planner.compiler.verify import VerifiedRanking
from capibara.planner.model.workload import Workload
from capibara.planner.report import halves, page, report
from capibara.planner.search import questions
from capibara.planner.search.slice_choice import Offer
from capibara.planner.search.splits import Layout
from capibara.storage import outputs


def save(
    args: argparse.Namespace,
    walk: VerifiedRanking,
    work: Workload,
    layout: Layout,
    offers: Sequence[Offer],
    *,
    tokens: float | None,
    usd: float | None,
) -> None:
    """Writes the files that the command line requests.

    Args:
      args: of the verb (see `questions`): json, html, output, include, top.
      walk: the ranking and the compile results.
      work: the workload.
      layout: how the chosen slice is used.
      offers: the best plan on each slice, if the goal chooses a slice.
      tokens: total training tokens, for the price.
      usd: price of a chip-hour; None: list price.

    Raises:
      UserError: a file cannot be written.
    """
    part = layout.part
    if args.json:
        shown = report.plans_json(walk, work, part, top=args.top, offers=offers, tokens=tokens, usd=usd)
        outputs.save(args.json, json.dumps(shown | halves.as_json(layout), indent=1))
    if args.html:
        facts = tuple(halves.lines(layout))
        outputs.save(args.html, page.page(walk, work, part, offers=offers, tokens=tokens, usd=usd, halves=facts))
    if args.output:
        before, bound = (questions.included(args), args.gin_bindings) if args.include else ((), ())
        text = report.gin(walk, work, part, before, bound)
        outputs.save(args.output, text + "".join(f"{line}\n" for line in layout.bindings))
