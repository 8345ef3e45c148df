"""Compares two models on the same prompts: `python -m capibara.compare runs/one runs/two --prompts=questions.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from capibara.cli.arguments import flags
from capibara.core import devices
from capibara.core.types import UserError

_SCORES = ("exact_match", "token_f1")
_DESCRIPTION = """Compare two models: their answers to the same prompts side by side, and whether one is better.

A model is a run folder, a Hugging Face folder, a .gguf file, a PEFT folder or OWNER/NAME of the Hugging Face Hub. The file
of prompts has one a line, or JSON lines with "prompt" (or "question") and, for --score, "answer". The difference of the
scores comes with its 95% interval (bootstrap over prompts) and the p-value of a paired test by random signs.

examples:
  python -m capibara.compare runs/base runs/mine --prompts=questions.txt
  python -m capibara.compare SmolLM2-135M-Instruct.gguf runs/finetune/adapted --prompts=questions.jsonl --score=exact_match"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, lets both models answer, and writes the page; returns the exit code."""
    parser = flags.ArgumentParser("capibara compare", _DESCRIPTION)
    parser.add_argument("models", nargs=2, metavar="MODEL", help="the two models")
    parser.add_argument("--prompts", required=True, metavar="FILE", help="prompts: lines of text, or JSON lines")
    parser.add_argument("--score", choices=_SCORES, help="compares answers with those of the file")
    parser.add_argument("--out", default="compare.html", metavar="FILE", help="the page (default: compare.html)")
    parser.add_argument("--max_new_tokens", type=int, default=128, metavar="N", help="longest answer (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default: the likeliest tokens")
    parser.add_argument("--seed", type=int, default=0, help="for a temperature above 0")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--emulate", type=int, metavar="N", help="run on N emulated CPU devices (1 to 64)")
    args = flags.parse_arguments(parser, argv)
    prompts, answers = _read(args.prompts, needs_answers=args.score is not None)
    devices.start(args.emulate)
    from capibara.api.comparison import compare
    from capibara.api.opening import load

    first, second = (load(path) for path in args.models)
    options = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "seed": args.seed}
    score = None if args.score is None else _scorer(args.score, dict(zip(prompts, answers)))
    result = compare(first, second, prompts, score=score, out=args.out, **options)
    if not args.json:
        print(f"{result}\n{args.out}: the answers side by side")
        return 0
    figures: dict[str, Any] = {"models": result.names, "prompts": len(result.prompts), "out": args.out}
    if result.scores is not None:
        means = [sum(item) / len(item) for item in result.scores]
        low, high = result.interval()
        figures |= {"score": args.score, "means": means, "difference": means[1] - means[0]}
        figures |= {"interval_95": [low, high], "p_value": result.p_value()}
    print(json.dumps(figures, indent=1))
    return 0


def _read(path: str, needs_answers: bool) -> tuple[list[str], list[str]]:
    """The prompts of a file, each once, and their answers, empty where it has none."""
    from capibara.core import limits

    prompts: dict[str, str] = {}
    for number, line in enumerate(limits.read_text(path, limits.TEXT_BYTES).splitlines(), 1):
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


def _scorer(name: str, answers: dict[str, str]) -> Callable[[str, str], float]:
    """(prompt, a model's answer) -> the metric of that name."""
    from capibara.evaluation import metrics

    def score(prompt: str, answer: str) -> float:
        ((value,),) = getattr(metrics, name)([answers[prompt]], [answer]).values()
        return value

    return score
