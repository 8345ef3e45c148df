"""Makes training sets out of logs of executed code: `python -m capibara.prepare executions`."""

from __future__ import annotations

from collections.abc import Sequence

from capibara.cli.preparing import builders

_DESCRIPTION = """Make training sets out of logs of executed code.

IN is a log of E2B's code interpreter or of its commands (.jsonl or .json, plain, .gz or .zst), a folder of them, or a text
with interactive sessions of Python (>>>). Secrets and personal data are replaced before anything is written.

  OUT/executions/   the executions, with language, patterns, scores and an explanation
  OUT/fixes/        pairs of a failing run and the passing one that mends it
  OUT/chats/        conversations for fine-tuning (ChatJsonlSource)
  OUT/manifest.json inputs, settings, counts, and what was skipped, with file and line

examples:
  python -m capibara.prepare executions 'logs/*.jsonl' --out=data/executions --num_workers=4
  python -m capibara.prepare executions logs --out=data/sql --gin.ExecutionFilter.languages='("sql",)'
  python -m capibara.prepare executions logs --out=data/may --gin.ExecutionFilter.start="'2026-05-01'" \\
    --gin.ExecutionFilter.end="'2026-06-01'" --gin.ExecutionFilter.min_quality=0.6"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the word; returns the exit code."""
    args = builders.parsed(builders.parser("executions", _DESCRIPTION), argv)

    from capibara import config
    from capibara.builders.executions import build
    from capibara.builders.executions.chats import ExecutionChats
    from capibara.builders.executions.filters import ExecutionFilter
    from capibara.builders.executions.fixes import FixPairs
    from capibara.builders.executions.reading import ENDINGS
    from capibara.builders.redaction.redact import Redaction

    settings = build.ExecutionLogs(
        filter=config.build(ExecutionFilter),
        fixes=config.build(FixPairs),
        chats=config.build(ExecutionChats),
        redaction=config.build(Redaction),
    )
    return builders.run(build.build, settings, ENDINGS, args, "executions")
