"""pass@k: the probability that at least one of k programs passes the tests."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.sandbox import sandbox
from capibara.sandbox.answers import judged, program
from capibara.sandbox.sandbox import Program, Sandbox


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The unbiased estimate 1 - C(n - c, k) / C(n, k) if c of n programs pass (Chen et al. 2021, arXiv:2107.03374)."""
    if not 1 <= k <= samples:
        raise UserError(f"k ({k}) must be from 1 to the samples of a problem ({samples}): raise EvalTask.num_samples")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class PassAtK:
    """The metric pass@k, for EvalTask.metrics = (@PassAtK(),): runs each prediction with its tests in a `sandbox`.

    A target has keys of HumanEval's records: "test", and optionally "prompt", "entry_point" and "setup". The program is:
    setup, prompt and prediction, test (a text, or a list of statements), check(entry_point). If an answer has the entry
    point's definition in a fenced code block, as chat models write it, this code replaces prompt and prediction.

    Setup, prompt and prediction run in one process; setup and test in another, which decides the verdict and calls the
    first one's functions with plain data (see `dialogue`). This is not possible for a test that patches the program's
    imports, reads its output, or passes objects of Python's library: `separate=False` runs everything in one process,
    where a malicious program can forge its verdict.

    Attributes:
      k: the values of k, at most EvalTask.num_samples.
      sandbox: limits of a program.
      separate: run tests in a separate process.
    """

    judges: ClassVar[str] = "texts"
    k: tuple[int, ...] = (1,)
    sandbox: Sandbox = Sandbox()
    separate: bool = True

    def __post_init__(self) -> None:
        if not self.k or min(self.k) < 1:
            raise UserError(f"PassAtK.k is {self.k}, must be numbers of at least 1: try (1, 10)")

    def check(self, num_samples: int) -> None:
        """Raises UserError if a k exceeds the number of samples."""
        if max(self.k) > num_samples:
            raise UserError(
                f"PassAtK.k has {max(self.k)}, must be at most EvalTask.num_samples ({num_samples}): raise that"
            )

    def check_target(self, target: object) -> None:
        """Raises UserError if a target has no test."""
        program(target, "")

    def about(self) -> dict[str, Any]:
        """How the programs were isolated, for the results."""
        by = sandbox.holder(self.sandbox)
        return {"programs": {"holder": by.holder, "network": by.network, "separate": self.separate}}

    def __call__(self, targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, Any]:
        several = [[prediction] if isinstance(prediction, str) else list(prediction) for prediction in predictions]
        created = judged if self.separate else lambda target, text: Program(code=program(target, text))
        programs = [created(target, text) for target, texts in zip(targets, several) for text in texts]
        if not self.separate:
            logging.getLogger(__name__).warning("PassAtK.separate is off: a program can forge the verdict of its tests")
        outcomes = iter(sandbox.run_all(programs, self.sandbox))
        passed = [sum(next(outcomes).passed for _ in texts) for texts in several]
        return {f"pass@{k}": [pass_at_k(len(texts), c, k) for texts, c in zip(several, passed)] for k in self.k}
