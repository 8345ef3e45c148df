"""Makes chats with retrieved chunks out of questions: `python -m capibara.prepare raft`."""

from __future__ import annotations

from collections.abc import Sequence

from capibara.cli.preparing import builders
from capibara.core.types import UserError

_DESCRIPTION = """Make a training set of questions with retrieved chunks (RAFT): the chunk with the answer among others, and cited.

IN is JSON lines with a question, its answer and maybe the evidence, a passage of the documents: {"question": "...", "answer":
"...", "evidence": "..."}.

  OUT/train.jsonl     chats for ChatJsonlSource, each with the places of its chunks and which of them has the answer
  OUT/manifest.json   inputs, settings, counts, and what was skipped, with file and line

examples:
  python -m capibara.prepare raft questions.jsonl --index=data/docs --out=data/raft
  python -m capibara.prepare raft questions.jsonl --index=data/docs --out=data/raft \\
    --gin.RaftPreparation.k=6 --gin.RaftPreparation.without_gold=0.3"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the word; returns the exit code."""
    created = builders.parser("raft", _DESCRIPTION, workers=False)
    created.add_argument("--index", metavar="DIR", help="a folder of `capibara prepare index`")
    created.add_argument("--model", metavar="PATH", help="the model that has embedded it; default: where it was then")
    args = builders.parsed(created, argv)
    if not args.index:
        raise UserError("--index is missing: name a folder of `capibara prepare index`, such as --index=data/docs")

    from capibara import config
    from capibara.cli.composition import retrieving
    from capibara.core import devices
    from capibara.monitoring.status import StatusLine
    from capibara.retrieval import raft

    devices.start(None)
    settings = config.build(raft.RaftPreparation)
    config.check_used()
    with StatusLine() as status:
        index = retrieving.index(args.index, args.model)
        manifest = raft.prepare(args.inputs, args.out, settings, index, status.show)
    return builders.report(manifest, args)
