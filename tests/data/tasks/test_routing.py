"""The SeqIO task of a routing set: the same documents and domains as its JSON lines, and the hints of a run."""

from __future__ import annotations

import collections
import json
import math

import pytest

from capibara import config
from capibara.core.types import UserError
from capibara.data.dataset import Dataset
from capibara.data.pipeline.loader import make_loader
from capibara.data.sources.sources import JsonlSource
from capibara.data.tasks.routing import MODULE, SCHEMA, RoutingTask, routing_task
from capibara.data.tokenizers.vocabulary import ByteVocabulary, TokenizerJsonVocabulary
from capibara.training import loop
from capibara.training.base.callbacks import Callback
from capibara.training.trainer import Trainer
from tests.builders.routing import data

DOMAINS = ("python", "sql")


def write_set(folder, *, shards: int = 1, count: int = 40, tag: str = "", **about) -> str:
    """A routing set, as `capibara prepare routing` writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for split, size in (("train", count), ("validation", count // 4), ("test", 0)):
        pieces = shards if split == "train" else 1
        for number in range(pieces):
            name = f"{split}-{number:05d}-of-{pieces:05d}.jsonl" if pieces > 1 else f"{split}.jsonl"
            records = [
                {"text": f"{tag}{DOMAINS[i % 2]} {split} {i}\n" * 3, "domain": DOMAINS[i % 2]}
                for i in range(number, size, pieces)
            ]
            data.write(folder / name, records)
            files += [{"name": name, "records": len(records)}, {"name": name.replace("jsonl", "parquet"), "records": 1}]
    manifest = {"kind": "routing", "fingerprint": "f", "config": {"schema": SCHEMA}, "files": files, **about}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return str(folder)


def documents(dataset: Dataset, split: str = "train", **options) -> collections.Counter[tuple[str, int]]:
    """Texts with the number of their domain, of one epoch."""
    found: collections.Counter[tuple[str, int]] = collections.Counter()
    for batch in make_loader(dataset, split=split, batch_size=4, epochs=1, **options):
        for row, segments, domains in zip(batch["targets"], batch["segment_ids"], batch["domains"], strict=True):
            for segment in range(1, segments.max(initial=0) + 1):
                (domain,) = {*domains[segments == segment].tolist()}
                found[ByteVocabulary().decode(row[segments == segment]), domain] += 1
    return found


def task_of(folder: str, **changes) -> Dataset:
    name = routing_task(folder)
    return Dataset(mixture_or_task_name=name, task_module=MODULE, length=128, domains=DOMAINS, **changes)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_task_has_the_documents_and_domains_of_the_json_lines(tmp_path, split):
    pytest.importorskip("seqio")
    folder = write_set(tmp_path / "set")
    source = JsonlSource(files=(f"{folder}/train.jsonl",), validation_files=(f"{folder}/validation.jsonl",))
    lines = Dataset(source=source, vocabulary=ByteVocabulary(), length=128, domains=DOMAINS)
    expected = documents(lines, split)
    assert documents(task_of(folder), split) == expected
    assert {domain for _, domain in expected} == {1, 2} and len(expected) == (40 if split == "train" else 10)


def test_hosts_share_the_shards_of_a_set(tmp_path):
    """Two hosts with a stream each read different files."""
    pytest.importorskip("seqio")
    dataset = task_of(write_set(tmp_path / "set", shards=4), task_shards=2, shuffle=False, window_rows=1)
    seen = []
    for host in range(2):
        loader = make_loader(dataset, batch_size=4, shard_index=host, shard_count=2)
        texts = [ByteVocabulary().decode(row) for _ in range(4) for row in next(loader)["targets"]]
        seen.append({int(word) for text in texts for word in text.split() if word.isdigit()})
    assert all(seen) and not seen[0] & seen[1]
    assert {number % 4 for number in seen[0]} == {0, 2}, "shards 0 and 2"


def test_another_set_takes_the_name(tmp_path):
    pytest.importorskip("seqio")
    first, second = (write_set(tmp_path / name, tag=f"{name} ") for name in ("first", "second"))
    for folder, name in ((first, "first"), (second, "second")):
        assert all(text.startswith(f"{name} ") for text, _ in documents(task_of(folder)))


def test_a_splits_without_examples_is_none_of_the_task(tmp_path):
    files = RoutingTask(folder=write_set(tmp_path / "set", shards=2)).files
    assert {split: [*found.values()] for split, found in files.items()} == {"train": [20, 20], "validation": [10]}


@pytest.mark.parametrize("kind", ["seqio", "jsonl"])
def test_a_run_logs_how_many_tokens_go_to_the_experts_of_their_domain(tmp_path, kind):
    """A domain that no text has, has no accuracy either: NaN would be noise in every log."""
    folder, known = write_set(tmp_path / "set"), (*DOMAINS, "api")
    files = ["models/moe_tiny.gin", f"tasks/{'routing' if kind == 'seqio' else 'jsonl'}.gin", "runs/pretrain.gin"]
    if kind == "seqio":
        pytest.importorskip("seqio")
        bindings = [f"FOLDER = '{folder}'", f"DOMAINS = {known}"]
    else:
        bindings = [f"FILES = ('{folder}/train.jsonl',)", f"VALIDATION_FILES = ('{folder}/validation.jsonl',)"]
        bindings += [f"Dataset.domains = {known}"]
    bindings += [f"MODEL_DIR = '{tmp_path / 'run'}'", "TRAIN_STEPS = 2", "Dataset.length = 64", "Plan.batch_size = 8"]
    bindings += ["Moe.hints = @Hints()", f"Hints.domains = {known}", "Hints.decay_steps = 10", "Moe.num_experts = 4"]
    bindings += ["DecoderConfig.num_layers = 1", "DecoderConfig.embed_dim = 32", "Trainer.log_every = 1"]
    bindings += ["Evaluation.every = 0", "Checkpointing.every = 0", "DecoderConfig.mlp_dim = 32"]
    config.parse(files, bindings)
    logged = []

    class Seen(Callback):
        def on_step(self, step, metrics):
            logged.append(dict(metrics))

    loop.train(config.build(Trainer), Seen())
    assert len(logged) == 2
    for metrics in logged:
        assert 0 <= metrics["hint_accuracy"] <= 1 and metrics["hint_weight"] > 0.8
        assert "hint_accuracy/python" in metrics and "hint_accuracy/api" not in metrics
        assert not any(math.isnan(value) for value in metrics.values())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: routing_task(f"{folder}/none"), "manifest.json cannot be read"),
        (lambda folder: routing_task(write_set(folder / "a", kind="playbooks")), "is not that of a routing set"),
        (lambda folder: routing_task(write_set(folder / "b", config={"schema": 9})), "has schema 9, must be 1"),
        (lambda folder: routing_task(write_set(folder / "c", files=[])), "has no examples"),
        (lambda folder: routing_task(write_set(folder / "e", files=[{"name": 3}])), "is corrupted"),
        (
            lambda folder: routing_task(write_set(folder / "d"), vocabulary=TokenizerJsonVocabulary(path="x.json")),
            "(TokenizerJsonVocabulary) is none of SeqIO's",
        ),
    ],
)
def test_mistakes_are_named(tmp_path, make, words):
    with pytest.raises(UserError) as error:
        make(tmp_path)
    assert words in str(error.value) and "\n" not in str(error.value)
