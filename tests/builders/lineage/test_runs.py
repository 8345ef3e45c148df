"""A run's checkpoints name the data set that they saw, and the chain leads from them to its sources."""

from __future__ import annotations

import json

import pytest

import capibara as cb
from capibara.builders.files import fingerprints
from capibara.builders.lineage import history
from capibara.builders.lineage.chain import Chain
from capibara.builders.lineage.nodes import Kind, State
from capibara.builders.writing import Output

pytest.importorskip("openlineage.client")


MODEL = cb.DecoderConfig(vocab_size=384, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=16, dtype="float32")


def train(folder, corpus, steps, monitoring, **fields):
    data = cb.Dataset(source=cb.JsonlSource(files=(str(corpus),)), vocabulary=cb.ByteVocabulary(), length=32, workers=0)
    optimizer = cb.Optimizer(schedule=cb.Schedule(kind="constant", learning_rate=1e-3))
    fields |= {"model": MODEL, "dataset": data, "optimizer": optimizer, "plan": cb.Plan(batch_size=8, data=8)}
    run = cb.Trainer(model_dir=str(folder), steps=steps, evaluation=cb.Evaluation(every=0), **fields)
    assert cb.train(run, monitoring).step == steps


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A source, a data set of it, a run on that, resumed once, and another run from its weights."""
    root = tmp_path_factory.mktemp("runs")
    (root / "source.txt").write_text("a source")
    with Output(str(root / "set"), "sets", {}, fingerprints.inputs_of([root / "source.txt"])) as output:
        with output.part("train.jsonl") as part:
            for i in range(40):
                part.write_record({"text": f"the river number {i} swims"})
        output.finish()
    corpus, recorded = root / "set/train.jsonl", cb.Monitoring(callbacks=(), more=(cb.LineageFile(),))
    for steps in (1, 2):
        train(root / "first", corpus, steps, recorded)
    train(root / "second", corpus, 1, cb.Monitoring(callbacks=()), init_from=str(root / "first"))
    return root


def manifest_of(step):
    return json.loads((step / "manifest.json").read_text())


def test_a_checkpoint_names_the_fingerprint_that_it_saw(house):
    fingerprint = manifest_of(house / "set")["fingerprint"]
    for step in (1, 2):
        [dataset] = manifest_of(house / f"first/checkpoints/{step}")["about"]["datasets"]
        assert dataset == {"path": str(house / "set"), "kind": "sets", "fingerprint": fingerprint, "files": 1}


def test_the_chain_leads_from_a_run_to_the_source_and_through_its_initial_weights(house):
    chain = Chain().of(str(house / "second"))
    nodes = [(one.kind, one.path.removeprefix(f"{house}/")) for one in chain.all()]
    of_set = [(Kind.DATASET, "set"), (Kind.FILE, "source.txt")]
    assert nodes == [
        (Kind.RUN, "second"),
        (Kind.CHECKPOINT, "second/checkpoints/1"),
        *of_set,
        (Kind.RUN, "first"),
        (Kind.CHECKPOINT, "first/checkpoints/2"),
        *of_set,
    ]
    assert chain.is_unchanged


def test_the_events_of_a_run_name_its_data_and_its_checkpoint(house):
    events = history.read(str(house / "first"))
    assert [event["eventType"] for event in events] == ["START", "COMPLETE"] * 2
    end = events[-1]
    versions = [(one["name"], one["facets"]["version"]["datasetVersion"]) for one in (*end["inputs"], *end["outputs"])]
    assert versions == [
        (str(house / "set"), manifest_of(house / "set")["fingerprint"]),
        (str(house / "first/checkpoints/2"), manifest_of(house / "first/checkpoints/2")["xxh128"]),
    ]
    assert events[0]["inputs"] == [] and events[2]["inputs"] == end["inputs"]
    assert Chain().of(str(house / "first")).facts["run"] == end["run"]["runId"]


def test_a_source_that_changes_after_training_is_named(house):
    source = house / "source.txt"
    before = source.read_text()
    source.write_text("another")
    try:
        changed = [one.path for one in Chain().of(str(house / "first")).all() if one.state is State.CHANGED]
    finally:
        source.write_text(before)
    assert changed == [str(source)]
