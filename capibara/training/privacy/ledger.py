"""What the steps of a run with differential privacy cost, and where its budget ends."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

from capibara.consensus.privacy import Privacy
from capibara.core.types import UserError
from capibara.data.dataset import Dataset
from capibara.data.sources.sources import Blocks


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What a run's steps cost.

    Attributes:
      privacy: of the run.
      documents: in a pass over the data.
      rows: of a batch.
    """

    privacy: Privacy
    documents: int
    rows: int

    @classmethod
    def of(cls, privacy: Privacy, dataset: Dataset, rows: int) -> Ledger:
        """The ledger of a run.

        Raises:
          UserError: the budget does not allow the first pass, or the documents do not suit the promise.
        """
        result = dataset.documents("train")
        if isinstance(result, Blocks):
            raise UserError(
                "Trainer.privacy needs documents with random access, and Dataset.source reads its shards block by block: take "
                "another source, such as @JsonlSource()"
            )
        if len(result) < rows:
            raise UserError(
                f"Dataset.source has {len(result)} documents, must have at least one for each of the {rows} rows of a batch "
                f"(Plan.batch_size) with Trainer.privacy: lower Plan.batch_size"
            )
        ledger = cls(privacy, len(result), rows)
        ledger.check_resumed(0)  # the budget allows the first pass
        return ledger

    @property
    def pass_steps(self) -> int:
        """Steps of a pass; the last one is padded."""
        return math.ceil(self.documents / self.rows)

    @functools.cached_property
    def last_step(self) -> int:
        """The step at which the budget is spent.

        Raises:
          UserError: the first pass exceeds it.
        """
        return self.privacy.releases_within(noun="pass over the data") * self.pass_steps

    def check_resumed(self, step: int) -> None:
        """Raises UserError if a run that resumes at a step has spent more than the budget."""
        if step > self.last_step:
            raise UserError(
                f"Privacy.budget is {self.privacy.budget:g}, and this run has spent epsilon {self._epsilon(self.passes(step)):.3g} "
                f"by step {step}: raise it, or set another MODEL_DIR for a new run"
            )

    def passes(self, step: int) -> int:
        """The passes that have begun after so many steps."""
        return math.ceil(step / self.pass_steps)

    def metrics(self, step: int) -> dict[str, float]:
        """The epsilon of the models after so many steps."""
        return {"epsilon": self._epsilon(self.passes(step))}

    @functools.cache  # noqa: B019, a run has one ledger
    def _epsilon(self, passes: int) -> float:
        return self.privacy.epsilon(passes)

    def remarks(self, steps: int, params: int) -> Iterator[str]:
        """What a user should know before a run.

        Args:
          steps: of the run.
          params: parameters that are trained.
        """
        if (line := self.privacy.warning(self.rows, params, ("step", "document", "documents in a batch"))) is not None:
            yield f"warning: {line}"
        if self.privacy.delta * self.documents >= 1:
            yield (
                f"warning: Privacy.delta is {self.privacy.delta:g}, and one over the number of documents "
                f"({self.documents:,}) is not more: a promise that may fail so often says little: try "
                f"{0.1 / self.documents:.0e}"
            )
        if self.last_step < steps:
            yield (
                f"Privacy.budget {self.privacy.budget:g} allows {self.last_step} of Trainer.steps ({steps}), for which the learning "
                f"rate is planned: TRAIN_STEPS={self.last_step} plans it for these"
            )

    def line(self, step: int) -> str:
        """What has been spent, in words."""
        count, budget = self.passes(step), self.privacy.budget
        spent = f"epsilon {self._epsilon(count):.3g} at delta {self.privacy.delta:g} after step {step}, in pass {count} over the data"
        return spent if budget is None else f"{spent}, of Privacy.budget {budget:g}"
