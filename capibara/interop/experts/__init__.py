"""Rewires mixtures of experts: what each expert is used for, and models with fewer, more, smaller or other experts."""

from __future__ import annotations

from capibara.interop.experts.merging import MergeExperts
from capibara.interop.experts.operation import ExpertOperation
from capibara.interop.experts.pruning import PruneExperts
from capibara.interop.experts.splitting import DuplicateExperts, SplitExperts
from capibara.interop.experts.upcycling import UpcycleExperts

OPERATIONS: dict[str, type[ExpertOperation]] = {
    cls.name: cls for cls in (PruneExperts, MergeExperts, SplitExperts, DuplicateExperts, UpcycleExperts)
}
