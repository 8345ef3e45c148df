"""Suggests batch size and learning rate by published scaling rules. These are other people's fits, not predictions.

Both were fitted on dense language models of up to a few billion parameters, trained by AdamW with warm-up and decay;
beyond that they are extrapolated.
"""

from __future__ import annotations

import dataclasses

CHINCHILLA_TOKENS = 20.0  # per parameter: compute-optimal by Hoffmann et al. 2022, arXiv:2203.15556


@dataclasses.dataclass(frozen=True)
class Advice:
    """A rule's suggestion.

    Attributes:
      rule: its name and source.
      batch_tokens: tokens per step.
      learning_rate: peak of the schedule.
    """

    rule: str
    batch_tokens: float
    learning_rate: float

    def describe(self, length: int) -> str:
        """One line; a row has `length` tokens."""
        rows = max(1, round(self.batch_tokens / length))
        return f"{self.rule}: learning rate {self.learning_rate:.1e}, {self.batch_tokens:,.0f} tokens a step ({rows:,} rows)"


def advice(weights: float, flops_per_token: float, tokens: float) -> tuple[Advice, ...]:
    """The suggestions of all rules.

    Args:
      weights: parameters without the embedding; of experts only those that a token uses.
      flops_per_token: model FLOPs, forward and backward.
      tokens: total training tokens.
    """
    compute = flops_per_token * tokens
    return (
        Advice(
            "Step Law (Li et al. 2025, arXiv:2503.04715)", 0.58 * tokens**0.571, 1.79 * weights**-0.713 * tokens**0.307
        ),
        Advice("DeepSeek LLM (Bi et al. 2024, arXiv:2401.02954)", 0.2920 * compute**0.3271, 0.3118 * compute**-0.1250),
    )
