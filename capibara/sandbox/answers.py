"""The program of a model's answer, and the tests of the record that it answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from capibara.core.types import UserError
from capibara.sandbox.sandbox import Program

_FENCED = re.compile(r"```[ \t]*\w*[ \t]*\n(.*?)```", re.DOTALL)


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
            raise UserError(f"the target's {key!r} must be a text, not {str(value)[:60]}")


def _code(prompt: str, prediction: str, entry: str | None) -> str:
    """The prompt with its continuation, or the code in an answer's fenced block."""
    blocks = _FENCED.findall(prediction)
    defines = re.compile(r"" if entry is None else rf"^(?:async )?def\s+{re.escape(entry)}\b", re.MULTILINE)
    if whole := next((block for block in blocks if defines.search(block)), None):
        return whole
    if blocks and prediction.lstrip().startswith("```"):
        return prompt + blocks[0]
    return prompt + prediction.partition("```")[0]  # a single fence ends the code
