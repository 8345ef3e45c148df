"""Consensus training: nodes train apart for some steps, then agree on a model, from which all go on.

With an outer optimizer with momentum this is DiLoCo (Douillard et al. 2023, arXiv:2311.08105); with a robust aggregation
some nodes may send anything at all. docs/consensus.md says what each field does.
"""

from capibara.strategies.consensus.consensus import ConsensusConfig
from capibara.strategies.consensus.settings import MergeStrategy, StrategyName, VotingStrategy

__all__ = [
    "ConsensusConfig", "MergeStrategy", "StrategyName", "VotingStrategy",
]  # fmt: skip
