"""Makes data sets and vocabularies for training, and shows where they come from: `python -m capibara.prepare WORD`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from capibara.core.fields import did_you_mean
from capibara.core.types import UserError

_DESCRIPTION = """usage: capibara prepare WORD ...

Make data sets and vocabularies for training.

  vocabulary     train a SentencePiece vocabulary on a corpus
  instructions   conversations or preference pairs out of JSON files, or archives of them
  playbooks      chat examples out of agents' playbooks
  executions     chat examples out of logs of executed code
  routing        texts with a domain for the hybrid expert router: balanced, split, decontaminated
  ruler          long documents with questions about them, after RULER
  teacher        a teacher's log-probabilities of the next tokens, for a distillation without the teacher
  streaming_heads  a pattern of heads that keep a window alone, out of trained gates
  rope           a longer context of a model with rotary positions, without training: LongRoPE's search
  corpus         documents without duplicates, filtered, as packed tokens in shards
  index          an index of documents for retrieval: chunks, embeddings, product quantization
  raft           chats with retrieved chunks out of questions
  lineage        where a checkpoint or a data set comes from, and what has changed since

examples:
  python -m capibara.prepare vocabulary --size=8192 --output=python.model
  python -m capibara.prepare playbooks 'agents/*.md' --out=data/playbooks
  python -m capibara.prepare lineage runs/chats

`capibara prepare WORD --help` lists the flags of each."""

MODULES = {
    **dict.fromkeys(("vocabulary", "instructions"), "texts"),
    **{
        word: word
        for word in "playbooks executions routing ruler teacher streaming_heads rope corpus index raft lineage".split()
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `prepare WORD`; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    first = argv[0] if argv else "--help"
    if first in ("-h", "--help"):
        print(_DESCRIPTION)
        return 0
    if first in MODULES:
        module = importlib.import_module(f"capibara.cli.preparing.{MODULES[first]}")
        # The words of texts.py share their flags, and are one of its arguments.
        return module.main(argv if MODULES[first] == "texts" else argv[1:])
    if first.startswith("-") and {"vocabulary", "instructions"} & {*argv}:  # the word may follow its flags
        from capibara.cli.preparing import texts

        return texts.main(argv)
    raise UserError(f"unknown word {first!r}{did_you_mean(first, MODULES, 'words')} (see --help)")
