"""Writes the results of `plan`: JSON, an HTML page, a Gin file for train."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from capibara.planner.compiler.verify import VerifiedRanking
from capibara.planner.hardware.slices import Slice
from capibara.planner.model.workload import Workload
from capibara.planner.report import page, report
from capibara.planner.search import questions
from capibara.planner.search.slice_choice import Offer
from capibara.storage import outputs


def save(
    args: argparse.Namespace,
    walk: VerifiedRanking,
    work: Workload,
    slice_: Slice,
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
      slice_: the chosen slice.
      offers: the best plan on each slice, if the goal chooses a slice.
      tokens: total training tokens, for the price.
      usd: price of a chip-hour; None: list price.

    Raises:
      UserError: a file cannot be written.
    """
    if args.json:
        shown = report.plans_json(walk, work, slice_, top=args.top, offers=offers, tokens=tokens, usd=usd)
        outputs.save(args.json, json.dumps(shown, indent=1))
    if args.html:
        outputs.save(args.html, page.page(walk, work, slice_, offers=offers, tokens=tokens, usd=usd))
    if args.output:
        before = (questions.included(args), args.gin_bindings) if args.include else ((), ())
        outputs.save(args.output, report.gin(walk, work, slice_, *before))
