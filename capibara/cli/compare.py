"""Compares two models on the same prompts: `python -m capibara.compare runs/one runs/two --prompts=questions.jsonl`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from capibara.cli.arguments import comparing, flags

_DESCRIPTION = """Compare two models: their answers to the same prompts side by side, and whether one is better.

A model is a run folder, a Hugging Face folder, a .gguf file, a PEFT folder or OWNER/NAME of the Hugging Face Hub. The file
of prompts has one a line, or JSON lines with "prompt" (or "question") and, for --score, "answer". The difference of the
scores comes with its 95% interval (bootstrap over prompts) and the p-value of a paired test by random signs. With
--stop_early prompts are asked in a random order until it is known which model is better, by a bound that holds at every look.

examples:
  python -m capibara.compare runs/base runs/mine --prompts=questions.txt
  python -m capibara.compare SmolLM2-135M-Instruct.gguf runs/finetune/adapted --prompts=questions.jsonl --score=exact_match"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, lets both models answer, and writes the page; returns the exit code."""
    parser = flags.ArgumentParser("capibara compare", _DESCRIPTION)
    parser.add_argument("models", nargs=2, metavar="MODEL", help="the two models")
    parser.add_argument("--prompts", required=True, metavar="FILE", help="prompts: lines of text, or JSON lines")
    parser.add_argument("--score", choices=comparing.SCORES, help="compares answers with those of the file")
    parser.add_argument("--out", default="compare.html", metavar="FILE", help="the page (default: compare.html)")
    parser.add_argument("--max_new_tokens", type=int, default=128, metavar="N", help="longest answer (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default: the likeliest tokens")
    parser.add_argument("--seed", type=int, default=0, help="for a temperature above 0")
    parser.add_argument(
        "--stop_early", action="store_true", help="ask no more than --score needs to tell the models apart"
    )
    parser.add_argument(
        "--alpha", type=float, metavar="P", help="of --stop_early: the chance of an error (default: 0.05)"
    )
    parser.add_argument(
        "--negligible", type=float, metavar="D", help="of --stop_early: a difference that does not matter"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--emulate", type=int, metavar="N", help="run on N emulated CPU devices (1 to 64)")
    args = flags.parse_arguments(parser, argv)
    stopping = comparing.stopping(args)
    prompts, answers = comparing.read(args.prompts, needs_answers=args.score is not None)
    from capibara.core import devices

    devices.start(args.emulate)
    from capibara.api.comparison import compare
    from capibara.api.opening import load

    first, second = (load(path) for path in args.models)
    options = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "seed": args.seed}
    score = None if args.score is None else comparing.scorer(args.score, dict(zip(prompts, answers)))
    result = compare(first, second, prompts, score=score, out=args.out, stopping=stopping, **options)
    if not args.json:
        print(f"{result}\n{args.out}: the answers side by side")
        return 0
    figures: dict[str, Any] = {"models": result.names, "prompts": len(result.prompts), "out": args.out}
    if result.scores is not None:
        means = [sum(item) / len(item) for item in result.scores]
        figures |= {"score": args.score, "means": means, "difference": means[1] - means[0]}
        if (stopped := result.stopped) is not None:
            figures |= dataclasses.asdict(stopped) | {"answers_saved": stopped.saved}
        else:
            figures |= {"interval_95": [*result.interval()], "p_value": result.p_value()}
    print(json.dumps(figures, indent=1))
    return 0
