"""Makes an index of documents: `python -m capibara.prepare index`."""

from __future__ import annotations

from collections.abc import Sequence

from capibara.cli.preparing import builders
from capibara.core.types import UserError

_DESCRIPTION = """Make an index of documents: chunks, their embeddings by a model, and the smallest faiss index that finds them.

IN is a file, a folder, a glob or an address (gs://, s3://): JSON lines, Parquet or text. The settings of the index (bytes of
product quantization, rotation, lists, what is searched of them) are searched for IndexPreparation.recall and .ms.

  OUT/index.faiss, chunks.jsonl, index.json   the vectors, the texts, and how they were made
  OUT/trials.json, trials.png                 recall, bytes and time of all settings that were tried
  OUT/manifest.json                           inputs, settings, counts, and what was skipped, with file and line

examples:
  python -m capibara.prepare index docs --model=Qwen3-0.6B --out=data/docs
  python -m capibara.prepare index 'pages/*.jsonl' --model=runs/encoder --out=data/pages \\
    --gin.IndexPreparation.chunk_tokens=256 --gin.IndexPreparation.recall=0.98

then, in Python: cb.index("data/docs").search("how are files locked?", k=4); in Gin: EvalTask.retrieval = @Retrieval() and
Grpo.environment = @Search(), see docs/retrieval.md."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the word; returns the exit code."""
    created = builders.parser("index", _DESCRIPTION, workers=False)
    created.add_argument(
        "--model", metavar="PATH", help="embeds the chunks: a run folder, Hugging Face folder or .gguf"
    )
    args = builders.parsed(created, argv)
    if not args.model:
        raise UserError("--model is missing: name the model that embeds the chunks, such as --model=Qwen3-0.6B")

    from capibara import config
    from capibara.cli.composition import retrieving
    from capibara.core import devices
    from capibara.monitoring.status import StatusLine
    from capibara.retrieval import build, quantizers
    from capibara.retrieval.settings import IndexPreparation

    quantizers.library()
    devices.start(None)
    settings = config.build(IndexPreparation)
    config.check_used()
    with StatusLine() as status:
        embedder = retrieving.embedder(args.model, settings.pooling)
        manifest = build.prepare(args.inputs, args.out, settings, embedder, status.show)
    return builders.report(manifest, args)
