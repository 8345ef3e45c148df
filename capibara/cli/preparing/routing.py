"""Makes training sets for the hybrid expert router: `python -m capibara.prepare routing`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from capibara.cli.preparing import builders

_DESCRIPTION = """Make a training set for the hybrid expert router: texts with a domain, balanced, split and decontaminated.

IN is what `prepare executions` and `prepare playbooks` wrote, or other JSON lines with text or messages, and maybe domain and
source. The domains are python, sql, javascript, debug, ml and api, or your own.

  OUT/train.jsonl, validation.jsonl, test.jsonl   text, domain, label_source, confidence, difficulty, source, ...; also .parquet
  OUT/statistics.json      examples by domain, split, difficulty and what labels rest on
  OUT/contaminated.jsonl   what was excluded since an evaluation set has it: file, line and set
  OUT/leaks.jsonl          texts that would have been in two splits: file and line of both
  OUT/manifest.json        inputs, settings, counts, and what was skipped, with file and line

examples:
  python -m capibara.prepare routing data/executions data/playbooks --out=data/routing --num_workers=4
  python -m capibara.prepare routing docs.jsonl --out=data/two --gin.RoutingSet.domains='("python", "sql")'
  python -m capibara.prepare routing data/executions --out=data/clean --gin.Decontamination.sets='(@EvaluationSet(),)' \\
    --gin.EvaluationSet.name="'human_eval'"

then, in Gin: tasks/jsonl.gin with FILES = ("data/routing/train.jsonl",), or tasks/routing.gin (SeqIO)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the word; returns the exit code."""
    args = builders.parsed(builders.parser("routing", _DESCRIPTION), argv)

    from capibara import config
    from capibara.builders.redaction.redact import Redaction
    from capibara.builders.routing import build
    from capibara.builders.routing.balance import Balance
    from capibara.builders.routing.decontamination import Decontamination
    from capibara.builders.routing.labelling.difficulty import Difficulty
    from capibara.builders.routing.settings import RoutingSet
    from capibara.builders.routing.splits import Splits

    settings, default = config.build(RoutingSet), RoutingSet()
    if settings.difficulty == default.difficulty:  # `Splits.train = 0.8` needs no `RoutingSet.splits = @Splits()`
        settings = dataclasses.replace(settings, difficulty=config.build(Difficulty))
    if settings.splits == default.splits:
        settings = dataclasses.replace(settings, splits=config.build(Splits))
    if settings.balance == default.balance:
        settings = dataclasses.replace(settings, balance=config.build(Balance))
    if settings.decontamination == default.decontamination:
        settings = dataclasses.replace(settings, decontamination=config.build(Decontamination))
    if settings.redaction == default.redaction:
        settings = dataclasses.replace(settings, redaction=config.build(Redaction))
    return builders.run(build.build, settings, build.ENDINGS, args, "routing")
