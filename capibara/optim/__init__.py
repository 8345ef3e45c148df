"""Optimizers and learning-rate schedules by name, and the logical axes of an optimizer's state.

In this package `axes` is a tree like the parameters whose leaves are tuples of logical axis names, one name (or None) per
dimension: ("layers", "embed", "mlp"), ("vocab", "embed"), ("layers", "embed").
"""

from capibara.optim.adafactor import Adafactor, FactoredState, Factoring, Parts
from capibara.optim.base import OptimizerConfig, StandardOptimizer, check_updates, decay_mask, updates_made
from capibara.optim.optimizer import Optimizer, OptimizerName, hidden_matrix, state_axes
from capibara.optim.schedules import FactorSchedule, Schedule, ScheduleConfig, ScheduleKind
from capibara.optim.state_dtypes import StateDtype

__all__ = [
    "Adafactor", "FactorSchedule", "FactoredState", "Factoring", "Optimizer", "OptimizerConfig",
    "OptimizerName", "Parts", "Schedule", "ScheduleConfig", "ScheduleKind", "StandardOptimizer",
    "StateDtype", "check_updates", "decay_mask", "hidden_matrix", "state_axes", "updates_made",
]  # fmt: skip
