"""A corpus is prepared, and a model is trained on its packed rows."""

from __future__ import annotations

import json
import re

from capibara.monitoring.metrics_file.loggers import read_metrics

RUN = """
include "tiny.gin"
include "tasks/shards.gin"
MODEL_DIR = "packed"
FILES = ("prepared/*.array_record",)
ShardedSource.validation_fraction = 0.2
ShardedSource.block_bytes = 4096
Evaluation.every = 20
TRAIN_STEPS = 20
"""


def test_a_model_learns_from_prepared_shards(shell, here):
    done = here(
        "prepare", "corpus", "corpus.jsonl", "--out=prepared", "--gin.CorpusPreparation.length=64", "--num_workers=0"
    )
    assert (done.code, done.err) == (0, "") and re.search(r"\bdocuments +99$", done.out, re.MULTILINE)
    (shell.folder / "packed.gin").write_text(RUN)
    done = here("train", "--gin_file=packed.gin", "--emulate=8")
    assert done.code == 0, done.err
    losses = [row["loss"] for row in read_metrics(str(shell.folder / "packed")) if row["kind"] == "train"]
    assert len(losses) == 20 and losses[-1] < 0.8 * losses[0]
    more = here("train", "--gin_file=packed.gin", "--emulate=8", "--gin.TRAIN_STEPS=22")
    assert more.code == 0 and "resuming from step 20" in more.out


def test_rows_of_another_length_are_refused(shell, here):
    done = here("train", "--gin_file=packed.gin", "--emulate=8", "--gin.LENGTH=32", "--gin.MODEL_DIR='other'")
    assert done.code == 2 and "Dataset.length (32) must be 64, for which the rows were packed: set it" in done.err


def test_the_manifest_names_what_was_written(shell):
    manifest = json.loads((shell.folder / "prepared" / "manifest.json").read_text())
    assert [file["name"] for file in manifest["files"]] == ["corpus-00000-of-00001.array_record", "index.json"]
