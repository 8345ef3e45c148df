"""Robust aggregation: one tree of arrays from those of n nodes, of which at most f may hold anything at all.

robust = Aggregation(rule=Krum(), before=(Nnm(),), faults=2)
tree, report = robust(stack(trees))                     # leaves [n, ...] -> leaves [...]
combine = robust.sharded(mesh, specs)                   # the same where each device has its node's shard alone
"""

from capibara.consensus.aggregation.aggregation import Aggregation
from capibara.consensus.aggregation.coordinates import CoordinateMedian, Meamed, TrimmedMean
from capibara.consensus.aggregation.iterative import CenteredClipping, GeometricMedian
from capibara.consensus.aggregation.krum import Bulyan, Krum, Monna, MultiKrum, Neighbours
from capibara.consensus.aggregation.mixing import Arc, Bucketing, Clipping, Nnm, PreAggregation
from capibara.consensus.aggregation.report import Report
from capibara.consensus.aggregation.rules import Mean, Rule
from capibara.consensus.aggregation.spectral import Caf, Mda, Smea
from capibara.consensus.aggregation.trees import stack

__all__ = [
    "Aggregation", "Arc", "Bucketing", "Bulyan", "Caf", "CenteredClipping",
    "Clipping", "CoordinateMedian", "GeometricMedian", "Krum", "Mda", "Meamed",
    "Mean", "Monna", "MultiKrum", "Neighbours", "Nnm", "PreAggregation",
    "Report", "Rule", "Smea", "TrimmedMean", "stack",
]  # fmt: skip
