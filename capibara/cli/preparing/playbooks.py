"""Makes training sets out of agents' playbooks: `python -m capibara.prepare playbooks`."""

from __future__ import annotations

from collections.abc import Sequence

from capibara.cli.preparing import builders

_DESCRIPTION = """Make training sets out of ACE playbooks: merge, filter and rank their bullets.

IN is a playbook as text ('## SECTION', '[id] helpful=N harmful=M :: text') or as JSON (.json, .jsonl), or agents as JSON, with
graduation_score, interactions, success_rate and domain_expertise. Secrets and personal data are replaced before anything is
written.

  OUT/playbooks/       a playbook of each domain, the best bullets first
  OUT/bullets/         its bullets, with quality and sources
  OUT/chats/           conversations for fine-tuning (ChatJsonlSource)
  OUT/statistics.json  by domain
  OUT/manifest.json    inputs, settings, counts, and what was skipped, with file and line

examples:
  python -m capibara.prepare playbooks 'runs/*/final_playbook.txt' agents.json --out=data/playbooks
  python -m capibara.prepare playbooks books --out=data/best --gin.AgentFilter.min_graduation_score=0.8 \\
    --gin.BulletFilter.min_quality=0.3 --gin.BulletRanking.per_domain=7000"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the word; returns the exit code."""
    args = builders.parsed(builders.parser("playbooks", _DESCRIPTION), argv)

    from capibara import config
    from capibara.builders.playbooks import build
    from capibara.builders.playbooks.chats import PlaybookChats
    from capibara.builders.playbooks.filters import AgentFilter, BulletFilter
    from capibara.builders.playbooks.merging import BulletMerging
    from capibara.builders.playbooks.ranking import BulletRanking
    from capibara.builders.playbooks.reading import ENDINGS
    from capibara.builders.redaction.redact import Redaction

    settings = build.Playbooks(
        agents=config.build(AgentFilter),
        merging=config.build(BulletMerging),
        bullets=config.build(BulletFilter),
        ranking=config.build(BulletRanking),
        chats=config.build(PlaybookChats),
        redaction=config.build(Redaction),
    )
    return builders.run(build.build, settings, ENDINGS, args, "playbooks")
