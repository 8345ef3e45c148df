"""Counts of a routing set: by domain, split, difficulty and what labels rest on; what was excluded, and why."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from capibara.builders.redaction.redact import Json
from capibara.builders.routing.labelling.difficulty import Level
from capibara.builders.routing.labelling.labels import LabelSource
from capibara.builders.routing.rows import State
from capibara.builders.routing.selection import Selection
from capibara.builders.routing.splits import NAMES
from capibara.core.types import UserError

_REASONS = {
    State.NO_DOMAIN: "no domain",
    State.AMBIGUOUS: "ambiguous",
    State.OTHER_DOMAIN: "other domain",
    State.TOO_SHORT: "too short",
    State.TOO_LONG: "too long",
    State.CONTAMINATED: "contaminated",
}


def of(selection: Selection, domains: Sequence[str]) -> dict[str, Json]:
    """The statistics, as JSON."""
    before, after, rows = selection.before, selection.after(), selection.rows
    retained = rows["state"] == State.KEPT
    of_domains: dict[str, Json] = {}
    for number, domain in enumerate(domains):
        here = rows[retained & (rows["domain"] == number)]
        of_domains[domain] = {
            "examples": len(here),
            "before_balancing": _by_name(NAMES, before[:, number]),
            "written": _by_name(NAMES, after[:, number]),
            "difficulty": _by_name(tuple(Level), np.bincount(here["level"], minlength=len(Level))),
            "label_source": _by_name(tuple(LabelSource), np.bincount(here["label"], minlength=len(LabelSource))),
        }
    splits: dict[str, Json] = {
        name: {"sources": int(selection.sources[number]), "examples": int(after[number].sum())}
        for number, name in enumerate(NAMES)
    }
    return {"domains": of_domains, "splits": splits}


def _by_name(names: Sequence[str], counts: np.ndarray) -> dict[str, Json]:
    return {str(name): count for name, count in zip(names, counts.tolist())}


def counts(selection: Selection, domains: Sequence[str]) -> dict[str, int]:
    """The counts of the manifest; zeros are omitted."""
    after, rows = selection.after(), selection.rows
    result = {f"{name} {domain}": int(after[i, j]) for i, name in enumerate(NAMES) for j, domain in enumerate(domains)}
    result |= {name: int(after[number].sum()) for number, name in enumerate(NAMES)}
    result |= {f"sources of {name}": int(selection.sources[number]) for number, name in enumerate(NAMES)}
    result |= {f"excluded as {reason}": int((rows["state"] == state).sum()) for state, reason in _REASONS.items()}
    balanced = selection.before.sum() - sum(len(np.unique(order)) for order, _ in selection.orders)
    result |= {
        "labelled": int(((rows["state"] == State.KEPT) | (rows["state"] == State.DUPLICATE)).sum()),
        "repeated texts of a source": selection.repeated,
        "repeated texts of other sources": selection.repeated_elsewhere,
        "repeated texts with another domain": selection.contradicted,
        "sources linked by shared texts": selection.linked,
        "examples of the largest source": selection.largest,
        "leaks prevented": len(selection.leaks),
        "excluded by balancing": int(balanced),
    }
    return {name: count for name, count in result.items() if count}


def check(selection: Selection, domains: Sequence[str], min_examples: int) -> None:
    """Raises UserError if a domain has too few examples to train on."""
    for number, domain in enumerate(domains):
        have, everywhere = int(selection.before[0, number]), int(selection.before[:, number].sum())
        if have < min_examples:
            fix = "add sources of it, or try another Splits.seed" if everywhere else "add input of it"
            raise UserError(
                f"domain {domain!r} has {have} examples in train ({everywhere} in all splits), must have at least "
                f"{min_examples} (RoutingSet.min_examples): {fix}, or remove it from RoutingSet.domains"
            )
