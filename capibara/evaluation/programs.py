"""pass@k: the probability that at least one of k programs passes the tests."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.evaluation.sandbox import sandbox
from capibara.evaluation.sandbox.sandbox import Program, Sandbox

_FENCED = re.compile(r"```[ \t]*\w*[ \t]*\n(.*?)```", re.DOTALL)


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


def judged(target: Any, prediction: str) -> Program:
    """The program of a prediction and the tests of a target, separately.

    Raises:
      UserError: the target has no test, or a value that is not a text.
    """
    _check(target)
    entry, test = target.get("entry_point") or "", target["test"]
    setup, prompt = target.get("setup") or "", target.get("prompt") or ""
    code = [setup, _code(prompt, prediction, entry or None)]
    tests = [test if isinstance(test, str) else "\n".join(test), *([f"check({entry})"] if entry else [])]
    return Program(code=_joined(code), tests=_joined(tests), setup=setup, prompt=prompt, entry=entry)


def program(target: object, prediction: str) -> str:
    """The program of a prediction and the tests of a target as one text.

    Raises:
      UserError: the target has no test, or a value that is not a text.
    """
    parts = judged(target, prediction)
    return parts.code + parts.tests


def _joined(parts: Sequence[str]) -> str:
    return "".join(part + "\n" for part in parts if part)


def _check(target: object) -> None:
    if not isinstance(target, Mapping) or "test" not in target:
        raise UserError(
            "PassAtK needs the key 'test' in its targets: EvalTask.target = ('prompt', 'test', 'entry_point') takes it "
            "from each line"
        )
    for key in ("setup", "prompt", "entry_point", "test"):
        value = target.get(key)
        parts = value if key == "test" and isinstance(value, list) else [value]
        if not all(isinstance(part, str) or (part is None and key != "test") for part in parts):
            raise UserError(f"the target's {key!r} must be a text for PassAtK, not {str(value)[:60]}")


def _code(prompt: str, prediction: str, entry: str | None) -> str:
    """The prompt with its continuation, or the code in an answer's fenced block."""
    blocks = _FENCED.findall(prediction)
    defines = re.compile(r"" if entry is None else rf"^(?:async )?def\s+{re.escape(entry)}\b", re.MULTILINE)
    if whole := next((block for block in blocks if defines.search(block)), None):
        return whole
    if blocks and prediction.lstrip().startswith("```"):
        return prompt + blocks[0]
    return prompt + prediction.partition("```")[0]  # a single fence ends the code
