"""What `capibara compare` is told: its file of prompts, how answers are scored, and when to stop."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from capibara.core.types import UserError

if TYPE_CHECKING:
    from capibara.evaluation.statistics.stopping import SequentialStopping

SCORES = ("exact_match", "token_f1")


def read(path: str, needs_answers: bool) -> tuple[list[str], list[str]]:
    """The prompts of a file, each once, and their answers, empty where it has none."""
    from capibara.core import limits

    try:
        text = limits.read_text(path, limits.TEXT_BYTES)
    except FileNotFoundError:
        raise UserError(f"--prompts={path} does not exist: name a file of prompts") from None
    prompts: dict[str, str] = {}
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):  # splitlines would split at U+2028, too
        if not line.strip():
            continue
        record: Any = {"prompt": line}
        if path.endswith(".jsonl"):
            try:
                record = limits.parse_json(line)
            except (ValueError, limits.Refused) as error:
                raise UserError(f"{path}:{number} cannot be read ({error}): write a JSON object a line") from None
        prompt = record.get("prompt", record.get("question")) if isinstance(record, dict) else None
        answer = record.get("answer", "") if isinstance(record, dict) else ""
        if not isinstance(prompt, str) or not prompt or not isinstance(answer, str) or (needs_answers and not answer):
            needs = "prompt and answer" if needs_answers else "prompt"
            raise UserError(f"{path}:{number} must be an object with {needs}, texts that are not empty")
        prompts[prompt] = answer
    if not prompts:
        raise UserError(f"{path} has no prompt: write one a line")
    return list(prompts), list(prompts.values())


def scorer(name: str, answers: dict[str, str]) -> Callable[[str, str], float]:
    """(prompt, a model's answer) -> the metric of that name."""
    from capibara.evaluation import metrics

    def score(prompt: str, answer: str) -> float:
        ((value,),) = getattr(metrics, name)([answers[prompt]], [answer]).values()
        return value

    return score


def stopping(args: argparse.Namespace) -> SequentialStopping | None:
    """How --stop_early stops; None: all prompts are asked."""
    from capibara.evaluation.statistics.stopping import SequentialStopping

    options = {name: value for name in ("alpha", "negligible") if (value := getattr(args, name)) is not None}
    if not args.stop_early:
        for name, value in options.items():
            raise UserError(f"--{name}={value:g} is for --stop_early: add that, or leave it out")
        return None
    if args.score is None:
        raise UserError("--stop_early needs --score: add --score=exact_match, or leave it out")
    return SequentialStopping(**options)
