"""Builds an index: documents, chunks, embeddings, then the smallest index that reaches the goal.

  OUT/chunks.jsonl    the chunks, with the file, the document and the characters where each is
  OUT/index.faiss     their vectors, compressed
  OUT/center.f32      the mean that was subtracted from the embeddings, float32 [D]
  OUT/index.json      the model, the settings, and what they cost and find
  OUT/trials.json     every setting that was tried; trials.png shows them
  OUT/manifest.json   inputs, settings, counts and hashes, written last

Embeddings are written by blocks of chunks, which a build that was killed does not compute again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from capibara.builders.files.manifest import Manifest
from capibara.builders.files.problems import Problems
from capibara.builders.preparation import documents
from capibara.builders.writing import Output
from capibara.core import limits
from capibara.core.types import UserError
from capibara.retrieval import picture, quantizers
from capibara.retrieval.chunking import chunks_of, spans
from capibara.retrieval.embedding import TextEmbedder
from capibara.retrieval.settings import IndexPreparation
from capibara.retrieval.tuning import Progress, Tuned, Tuner

CHUNKS, INDEX, CENTER, RECORD, TRIALS, PICTURE = (
    "chunks.jsonl", "index.faiss", "center.f32", "index.json", "trials.json", "trials.png"
)  # fmt: skip
KIND = "index"
# Neither chunks nor embeddings depend on these: where no index reaches the goal, another goal is tried without embedding again.
_ADJUSTABLE = ("center", "recall", "k", "ms", "queries", "train_vectors", "seed")
BLOCK = 4096  # chunks that are embedded between two writes
_PART_BYTES = 32 << 20


def prepare(
    patterns: Sequence[str], out: str, settings: IndexPreparation, embedder: TextEmbedder, progress: Progress
) -> Manifest:
    """Builds an index, or finishes what an earlier run has begun.

    Args:
      patterns: files, folders, globs and addresses of documents.
      out: the output folder.
      settings: what to do.
      embedder: of the model.
      progress: is called with a topic and a detail.

    Raises:
      UserError: there is no chunk, no settings reach the goal, faiss is missing, or the folder holds another build.
    """
    quantizers.library()
    around = len(embedder.vocabulary.begin_ids) + len(embedder.vocabulary.closing_ids)
    if settings.chunk_tokens + around > embedder.length:
        raise UserError(
            f"IndexPreparation.chunk_tokens is {settings.chunk_tokens}, must be at most {embedder.length - around}, the row of "
            f"{embedder.path}: lower it"
        )
    problems = Problems()
    files = documents.files_of(patterns, problems)
    parts = documents.parts_of(files, settings.fields, _PART_BYTES, problems)
    model = {"path": embedder.path} | embedder.identity
    config = settings.as_json() | {"model": embedder.identity}
    with Output(out, KIND, config, documents.inputs_of(files), _ADJUSTABLE) as output:
        if (manifest := output.done()) is not None:
            return manifest
        _write_chunks(output, parts, settings, embedder, progress)
        texts = [chunk["text"] for chunk in read_chunks(output.parts.path(CHUNKS))]
        if not texts:
            raise limits_of_documents(out)
        vectors_ND = _embedded(output, texts, embedder, progress)
        queries_QD = embedder(spans(texts, settings.queries, settings.seed))
        center_D = vectors_ND.mean(0) if settings.center else np.zeros(vectors_ND.shape[1], np.float32)
        tuned = Tuner(centered(vectors_ND, center_D), centered(queries_QD, center_D), settings.goal, progress).run()
        _write_index(output, tuned, center_D)
        _write_record(output, tuned, settings, model, vectors_ND.shape)
        return output.finish({"chunks": len(texts)}, problems)


def limits_of_documents(out: str) -> UserError:
    """The error of documents without a chunk."""
    return UserError(
        f"IN has no document with a text, so {out} would be empty: name files with texts, or set IndexPreparation.field"
    )


def centered(vectors_ND: np.ndarray, center_D: np.ndarray) -> np.ndarray:
    """Vectors less a mean, each of length 1: float32 [N, D]."""
    moved_ND = vectors_ND - center_D
    return moved_ND / np.maximum(np.linalg.norm(moved_ND, axis=1, keepdims=True), 1e-12)


def read_chunks(path: str) -> Iterator[dict[str, Any]]:
    """The lines of a file of chunks."""
    with open(path, "rb") as file:
        for line in file:
            yield json.loads(line)


def _write_chunks(
    output: Output,
    parts: Sequence[documents.CorpusPart],
    settings: IndexPreparation,
    embedder: TextEmbedder,
    progress: Progress,
) -> None:
    if output.parts.done(CHUNKS) is not None:
        return
    with output.part(CHUNKS) as file:
        for chunk in chunks_of(parts, settings.fields, settings.chunking, embedder.vocabulary, file.problems):
            file.write_record(dataclasses.asdict(chunk))
            if file.records % BLOCK == 0:
                progress("cutting documents", f"{file.records:,} chunks")


def _embedded(output: Output, texts: Sequence[str], embedder: TextEmbedder, progress: Progress) -> np.ndarray:
    """The embeddings of all chunks: float32 [N, D]."""
    blocks = []
    for first in range(0, len(texts), BLOCK):
        name = f"vectors-{first:012d}.f32"
        block = texts[first : first + BLOCK]
        if output.scratch.done(name) is None:
            show = lambda count: progress("embedding", f"{first + count:,} of {len(texts):,} chunks")  # noqa: E731
            vectors_BD = embedder(block, show)
            with output.scratch.write(name) as file:
                file.write(vectors_BD.astype("<f4").tobytes())
                file.records = len(block)
        content = limits.read(output.scratch.path(name), most=1 << 40)
        blocks.append(np.frombuffer(content, "<f4").reshape(len(block), -1))
    return np.concatenate(blocks)


def _write_index(output: Output, tuned: Tuned, center_D: np.ndarray) -> None:
    with output.part(INDEX) as file:
        quantizers.library().write_index(tuned.index, file.path)
        file.records = tuned.index.ntotal
    with output.part(CENTER) as file:
        file.write(center_D.astype("<f4").tobytes())
    trials = [trial.as_json() for trial in tuned.trials]
    with output.part(TRIALS) as file:
        file.write((json.dumps(trials, indent=1) + "\n").encode())
    with output.part(PICTURE) as file:
        file.write(picture.draw(tuned.trials, tuned.chosen, tuned.index.ntotal))


def _write_record(
    output: Output, tuned: Tuned, settings: IndexPreparation, model: dict[str, Any], shape: tuple[int, ...]
) -> None:
    count, dims = shape
    record = {
        "model": model,
        "settings": settings.as_json(),
        "chosen": tuned.chosen.as_json(),
        "chunks": count,
        "dims": dims,
        "float32_bytes": 4 * count * dims,
    }
    with output.part(RECORD) as file:
        file.write((json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
