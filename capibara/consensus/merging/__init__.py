"""Merges of models tensor by tensor: a configurable dataclass for each method, found by its name."""

from __future__ import annotations

from capibara.consensus.merging.assemblies import Mixture, Passthrough
from capibara.consensus.merging.averages import Linear, ModelStock
from capibara.consensus.merging.method import Method
from capibara.consensus.merging.spheres import Karcher, MultiSlerp, NuSlerp, Slerp
from capibara.consensus.merging.task_vectors import (
    Breadcrumbs,
    BreadcrumbsTies,
    DareLinear,
    DareTies,
    Della,
    DellaLinear,
    Sce,
    TaskArithmetic,
    Ties,
)

_SPHERES = (Slerp, NuSlerp, MultiSlerp, Karcher)
_TASK_VECTORS = (TaskArithmetic, Ties, DareLinear, DareTies, Breadcrumbs, BreadcrumbsTies, Della, DellaLinear, Sce)
METHODS: dict[str, type[Method]] = {
    cls.name: cls for cls in (Linear, *_SPHERES, *_TASK_VECTORS, ModelStock, Passthrough, Mixture)
}
