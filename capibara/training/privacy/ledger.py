"""What the steps of a run with differential privacy cost, and where its budget ends."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

from capibara.consensus.privacy import Privacy

PASS = "pass over the data"


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What a run's steps cost.

    Attributes:
      privacy: of the run.
      pass_steps: steps of a pass over the documents.
    """

    privacy: Privacy
    pass_steps: int

    @functools.cached_property
    def last_step(self) -> int:
        """The step at which the budget is spent.

        Raises:
          UserError: the first pass exceeds it.
        """
        return self.privacy.releases_within(noun=PASS) * self.pass_steps

    def passes(self, step: int) -> int:
        """The passes that have begun after so many steps."""
        return math.ceil(step / self.pass_steps)

    def metrics(self, step: int) -> dict[str, float]:
        """The epsilon of the models after so many steps."""
        return {"epsilon": self._epsilon(self.passes(step))}

    @functools.cache  # noqa: B019, a run has one ledger
    def _epsilon(self, passes: int) -> float:
        return self.privacy.epsilon(passes)

    def remarks(self, steps: int, rows: int, params: int) -> Iterator[str]:
        """What a user should know before a run.

        Args:
          steps: of the run.
          rows: of a batch.
          params: parameters that are trained.
        """
        if (line := self.privacy.warning(rows, params, ("step", "document", "documents in a batch"))) is not None:
            yield f"warning: {line}"
        if self.last_step < steps:
            yield f"Privacy.budget {self.privacy.budget:g} allows {self.last_step} of Trainer.steps ({steps})"

    def line(self, step: int) -> str:
        """What has been spent, in words."""
        count, budget = self.passes(step), self.privacy.budget
        spent = f"epsilon {self._epsilon(count):.3g} at delta {self.privacy.delta:g} after {count} passes over the data"
        return spent if budget is None else f"{spent}, of Privacy.budget {budget:g}"
