"""pass@k: how often one of k programs passes the tests."""

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
    """The unbiased estimate 1 - C(n - c, k) / C(n, k), of n programs of which c pass (Chen et al. 2021, arXiv:2107.03374)."""
    if not 1 <= k <= samples:
        raise UserError(f"k ({k}) must be from 1 to the samples of a problem ({samples}): raise EvalTask.num_samples")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class PassAtK:
    """The metric, for EvalTask.metrics = (@PassAtK(),): each prediction runs with its tests in a `sandbox`.

    A target has the keys of HumanEval's records that it needs: "test", and perhaps "prompt", "entry_point" and "setup".
    The program is: setup, prompt and prediction, test (a text, or a list of statements), check(entry_point). Of an answer
    that has the entry point's definition in a fence, as chat models give it, that code stands in place of prompt and
    prediction.

    Setup, prompt and prediction run in one process; setup and test in another, which gives the verdict and calls the
    first one's functions with plain data (see `dialogue`). A test that replaces what the program imports, looks at what
    it prints, or hands over objects of Python's library cannot be judged so: `separate=False` runs all in one process,
    where a program that sets out to forge its verdict can.

    Attributes:
      k: which pass@k; at most EvalTask.num_samples.
      sandbox: limits of a program.
      separate: run tests apart from the program.
    """

    judges: ClassVar[str] = "texts"
    k: tuple[int, ...] = (1,)
    sandbox: Sandbox = Sandbox()
    separate: bool = True

    def __post_init__(self) -> None:
        if not self.k or min(self.k) < 1:
            raise UserError(f"PassAtK.k is {self.k}, must be numbers from 1 up: try (1, 10)")

    def check(self, num_samples: int) -> None:
        """Raises UserError where a k is more than there will be samples."""
        if max(self.k) > num_samples:
            raise UserError(
                f"PassAtK.k has {max(self.k)}, EvalTask.num_samples is {num_samples}: k must be at most that, raise it"
            )

    def check_target(self, target: Any) -> None:
        """Raises UserError where a target is none of a program."""
        program(target, "")

    def about(self) -> dict[str, Any]:
        """What held the programs, for the results."""
        by = sandbox.holder(self.sandbox)
        return {"programs": {"holder": by.holder, "network": by.network, "separate": self.separate}}

    def __call__(self, targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, Any]:
        several = [[given] if isinstance(given, str) else list(given) for given in predictions]
        made = judged if self.separate else lambda target, text: Program(code=program(target, text))
        programs = [made(target, text) for target, texts in zip(targets, several) for text in texts]
        if not self.separate:
            logging.getLogger(__name__).warning("PassAtK.separate is off: a program can forge the verdict of its tests")
        outcomes = iter(sandbox.run_all(programs, self.sandbox))
        passed = [sum(next(outcomes).passed for _ in texts) for texts in several]
        return {f"pass@{k}": [pass_at_k(len(texts), c, k) for texts, c in zip(several, passed)] for k in self.k}


def judged(target: Any, prediction: str) -> Program:
    """A prediction and its tests, apart.

    Raises:
      UserError: the target has no test, or what is no text in it.
    """
    _check(target)
    entry, test = target.get("entry_point") or "", target["test"]
    setup, prompt = target.get("setup") or "", target.get("prompt") or ""
    code = [setup, _code(prompt, prediction, entry or None)]
    tests = [test if isinstance(test, str) else "\n".join(test), *([f"check({entry})"] if entry else [])]
    return Program(code=_joined(code), tests=_joined(tests), setup=setup, prompt=prompt, entry=entry)


def program(target: Any, prediction: str) -> str:
    """A prediction and its tests as one text.

    Raises:
      UserError: the target has no test, or what is no text in it.
    """
    parts = judged(target, prediction)
    return parts.code + parts.tests


def _joined(parts: Sequence[str]) -> str:
    return "".join(part + "\n" for part in parts if part)


def _check(target: Any) -> None:
    if not isinstance(target, Mapping) or "test" not in target:
        raise UserError(
            "PassAtK needs the key 'test' in its targets: EvalTask.target = ('prompt', 'test', 'entry_point') takes it "
            "from each line"
        )
    for key in ("setup", "prompt", "entry_point", "test"):
        value = target.get(key)
        parts = value if key == "test" and isinstance(value, list) else [value]
        if not all(isinstance(part, str) or (part is None and key != "test") for part in parts):
            raise UserError(f"PassAtK takes a text for the target's {key!r}, not {str(value)[:60]}")


def _code(prompt: str, prediction: str, entry: str | None) -> str:
    """The prompt with what goes on from it, or what an answer has in a fence."""
    blocks = _FENCED.findall(prediction)
    defines = re.compile(r"" if entry is None else rf"^(?:async )?def\s+{re.escape(entry)}\b", re.MULTILINE)
    if whole := next((block for block in blocks if defines.search(block)), None):
        return whole
    if blocks and prediction.lstrip().startswith("```"):
        return prompt + blocks[0]
    return prompt + prediction.partition("```")[0]  # a lone fence ends the code that was asked for
