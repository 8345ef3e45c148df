"""The chain leads from a checkpoint to its source files, and says what has changed since."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from capibara.builders.files import fingerprints
from capibara.builders.lineage import nodes
from capibara.builders.lineage.chain import Chain
from capibara.builders.lineage.nodes import Check, Kind, State
from capibara.builders.writing import Output
from capibara.core.types import UserError

pytest.importorskip("openlineage.client")


def build(folder, *inputs, text="x"):
    with Output(str(folder), "sets", {"text": text}, fingerprints.inputs_of(inputs)) as output:
        with output.part("train/0.jsonl") as part:
            part.write_record({"text": text})
        with output.part("index.json") as part:
            part.write(b"{}")
        return output.finish()


def checkpoint(run, step=5, **about):
    """The documents of a run folder with one checkpoint, as capibara.checkpoints writes them."""
    folder = run / "checkpoints" / str(step)
    folder.mkdir(parents=True)
    (folder / "state").write_bytes(b"12345")
    files = [{"path": "state", "size": 5, "xxh128": "0"}]
    about = {"date": "2026-01-02T03:04:05", "capibara": "0.1.0", "commit": "abc", "data": "d" * 32, **about}
    (folder / "manifest.json").write_text(json.dumps({"format": 2, "step": step, "about": about, "files": files}))
    path = run / "manifest.json"
    steps = json.loads(path.read_text())["steps"] if path.exists() else []
    path.write_text(json.dumps({"format": 1, "steps": [*steps, step], "files": []}))
    return folder


def seen(folder, manifest):
    return {"path": str(folder), "kind": "sets", "fingerprint": manifest.fingerprint, "files": 1}


@pytest.fixture
def house(tmp_path, monkeypatch):
    """Two sources, a data set of each, one of both, and a run on it; inputs are named relative to the house."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    build("one", "a.txt", text="1")
    build("two", "b.txt", text="2")
    manifest = build("both", "one/train/0.jsonl", "two/train/0.jsonl", "a.txt", text="3")
    checkpoint(tmp_path / "run", 5, datasets=[seen(tmp_path / "both", manifest)])
    monkeypatch.chdir("/")
    return tmp_path


def outline(node):
    """The kinds, names and states of a chain, nested."""
    name = os.path.basename(node.path)
    return (f"{node.kind} {name}", str(node.state), [outline(parent) for parent in node.parents])


def test_the_chain_leads_from_a_run_to_its_sources(house):
    a, b = ("file a.txt", "unchanged", []), ("file b.txt", "unchanged", [])
    both = ("data set both", "unchanged", [("data set one", "unchanged", [a]), ("data set two", "unchanged", [b]), a])
    chain = Chain().of(str(house / "run"))
    assert outline(chain) == ("run run", "unchanged", [("checkpoint 5", "unchanged", [both])])
    assert chain.is_unchanged
    assert outline(Chain().of(str(house / "run/checkpoints/5"))) == ("checkpoint 5", "unchanged", [both])
    assert outline(Chain().of(str(house / "both"))) == both
    [dataset] = chain.parents[0].parents
    assert dataset.digest == json.loads((house / "both/manifest.json").read_text())["fingerprint"]
    assert dataset.parents[-1].digest == fingerprints.hash_file(house / "a.txt").sha256
    assert dataset.facts["built by"] == "prepare sets" and dataset.facts["records"] == 1
    event = json.loads((house / "both/lineage.jsonl").read_text().splitlines()[-1])
    assert (dataset.facts["run"], dataset.facts["at"]) == (event["run"]["runId"], event["eventTime"])
    facts = chain.parents[0].facts
    assert (facts["saved"], facts["by capibara"], facts["commit"]) == ("2026-01-02T03:04:05", "0.1.0", "abc")


def test_json_and_text_have_the_whole_chain(house):
    chain = Chain().of(str(house / "run"))
    assert json.loads(json.dumps(chain.as_json())) == chain.as_json()
    lines = chain.text().splitlines()
    assert [line[: len(line) - len(line.lstrip())].count("  ") for line in lines] == [0, 1, 2, 3, 4, 3, 4, 3]
    sha256 = fingerprints.hash_file(house / "a.txt").sha256
    assert lines[-1] == f"      file {house}/a.txt {sha256[:12]}: unchanged"


def test_a_file_leads_to_the_data_set_that_it_belongs_to(house):
    kind, state, parents = outline(Chain().of(str(house / "one/train/0.jsonl")))
    assert (kind, state) == ("file 0.jsonl", "unchanged")
    assert parents == [("data set one", "unchanged", [("file a.txt", "unchanged", [])])]
    assert outline(Chain().of(str(house / "a.txt"))) == ("file a.txt", "unchanged", [])


def states_of(node, kind):
    return {os.path.basename(one.path): one.state for one in node.all() if one.kind is kind}


def test_a_source_that_has_changed_or_is_missing_is_named(house):
    (house / "a.txt").write_text("A.txt")
    (house / "b.txt").unlink()
    chain = Chain().of(str(house / "run"))
    assert states_of(chain, Kind.FILE) == {"a.txt": State.CHANGED, "b.txt": State.MISSING}
    assert set(states_of(chain, Kind.DATASET).values()) == {State.WHOLE} and not chain.is_unchanged
    sizes = Chain(Check.SIZES).of(str(house / "run"))
    assert states_of(sizes, Kind.FILE) == {"a.txt": State.UNKNOWN, "b.txt": State.MISSING}


def test_a_file_of_a_data_set_that_has_changed_is_named(house):
    (house / "both/train/0.jsonl").write_text('{"by": "hand"}\n')
    (house / "both/index.json").unlink()
    [dataset] = Chain().of(str(house / "run/checkpoints/5")).parents
    assert dataset.state is State.CHANGED
    assert dataset.notes == ("index.json is missing", "train/0.jsonl has changed")
    assert "! train/0.jsonl has changed" in dataset.text()


def test_a_data_set_that_was_built_again_is_named(house, monkeypatch):
    before = json.loads((house / "both/manifest.json").read_text())["fingerprint"]
    shutil.rmtree(house / "both")
    monkeypatch.chdir(house)
    build("both", "a.txt", text="another")
    [dataset] = Chain().of(str(house / "run/checkpoints/5")).parents
    assert dataset.state is State.CHANGED
    assert dataset.notes == (f"it was used with the fingerprint {before[:12]}, and was built again since",)


def test_an_input_that_was_built_again_is_named(house, monkeypatch):
    shutil.rmtree(house / "one")
    monkeypatch.chdir(house)
    build("one", "a.txt", text="another")
    changed = [node for node in Chain().of(str(house / "both")).all() if node.state is State.CHANGED]
    assert [node.path for node in changed] == [str(house / "one/train/0.jsonl")]


@pytest.mark.parametrize("how", ["gone", "no manifest", "no JSON", "another fingerprint"])
def test_a_data_set_that_is_not_there_is_named(house, how):
    manifest = house / "both/manifest.json"
    if how == "gone":
        shutil.rmtree(house / "both")
    elif how == "no manifest":
        manifest.unlink()
    elif how == "no JSON":
        manifest.write_text("{")
    else:
        found = json.loads(manifest.read_text())
        found["files"][0]["sha256"] = "0" * 64
        manifest.write_text(json.dumps(found))
    [dataset] = Chain().of(str(house / "run/checkpoints/5")).parents
    assert dataset.state is (State.MISSING if how == "gone" else State.CHANGED) and dataset.notes


def test_without_events_relative_inputs_are_of_the_working_directory(house, monkeypatch):
    (house / "one/lineage.jsonl").unlink()
    assert states_of(Chain().of(str(house / "one")), Kind.FILE) == {"a.txt": State.MISSING}
    monkeypatch.chdir(house)
    assert states_of(Chain().of("one"), Kind.FILE) == {"a.txt": State.WHOLE}


def test_data_sets_in_a_circle_end(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    build(tmp_path / "one", tmp_path / "a.txt")
    build(tmp_path / "two", tmp_path / "one/train/0.jsonl")
    manifest = json.loads((tmp_path / "one/manifest.json").read_text())
    two = fingerprints.hash_file(tmp_path / "two/train/0.jsonl")
    manifest["inputs"] = [{"path": two.path, "bytes": two.bytes, "sha256": two.sha256}]
    (tmp_path / "one/manifest.json").write_text(json.dumps(manifest))
    assert outline(Chain().of(str(tmp_path / "one"))) == (
        "data set one",
        "unchanged",
        [("data set two", "unchanged", [("data set one", "unchanged", [])])],
    )


def test_what_several_need_is_hashed_once(house):
    hashed = []
    Chain(progress=hashed.append).of(str(house / "both"))
    assert len(hashed) == len({*hashed}) == 8


def test_files_of_no_data_set_are_compared_as_the_checkpoint_saw_them(tmp_path):
    for name in ("same", "changed", "gone", "large"):
        (tmp_path / name).write_text(name)
    recorded = [
        {"path": one.path, "bytes": one.bytes, "sha256": one.sha256}
        for one in fingerprints.inputs_of(tmp_path / name for name in ("same", "changed", "gone"))
    ]
    recorded += [{"path": str(tmp_path / "large"), "bytes": 5}]
    recorded += [{"path": str(tmp_path), "files": 300, "bytes": 9, "fingerprint": "f" * 64}]
    step = checkpoint(tmp_path / "run", datasets=recorded)
    (tmp_path / "changed").write_text("CHANGED")
    (tmp_path / "gone").unlink()
    found = Chain().of(str(step))
    expected = {"same": State.WHOLE, "changed": State.CHANGED, "gone": State.MISSING, "large": State.UNKNOWN}
    assert states_of(found, Kind.FILE) == expected
    [many] = [one for one in found.parents if one.kind is Kind.DATASET]
    assert (many.facts["files"], many.state) == (300, State.UNKNOWN)


def test_an_encrypted_run_names_its_fingerprints_only(tmp_path):
    [dataset] = Chain().of(str(checkpoint(tmp_path / "run", datasets=[{"fingerprint": "f" * 64}]))).parents
    assert (dataset.digest, dataset.state) == ("f" * 64, State.UNKNOWN)


def test_a_checkpoint_of_an_older_version_says_that_it_records_no_data(tmp_path):
    found = Chain().of(str(checkpoint(tmp_path / "run")))
    assert found.notes == ("its version of capibara recorded no data sets",) and found.is_unchanged


def test_a_checkpoint_whose_files_are_cut_or_gone_is_named(tmp_path):
    step = checkpoint(tmp_path / "run", datasets=[])
    (step / "state").write_bytes(b"123")
    assert Chain().of(str(step)).notes == ("state has another size",)
    (step / "state").unlink()
    found = Chain().of(str(step))
    assert found.notes == ("state is missing",) and found.state is State.CHANGED


def test_a_run_whose_newest_step_is_gone_leads_through_the_one_before(tmp_path):
    checkpoint(tmp_path / "run", 5, datasets=[])
    shutil.rmtree(checkpoint(tmp_path / "run", 10, datasets=[]))
    found = Chain().of(str(tmp_path / "run"))
    assert found.notes == ("step 10 is missing",) and found.state is State.MISSING
    assert found.parents[0].path == str(tmp_path / "run/checkpoints/5")


@pytest.mark.parametrize("quoted", ["'{}'", '"{}"', "\\\n    '{}'"])
def test_initial_weights_lead_to_the_run_that_trained_them(house, quoted):
    config = f"Trainer.init_from = {quoted.format(house / 'run')}\nTrainer.steps = 5\n"
    step = checkpoint(house / "second", datasets=[], config=config)
    [pretrained] = Chain().of(str(step)).parents
    assert (pretrained.kind, pretrained.path) == (Kind.RUN, str(house / "run"))
    assert pretrained.facts == {"role": "initial weights"}
    assert "a.txt" in states_of(pretrained, Kind.FILE)


def test_initial_weights_of_another_program_or_none_end_the_chain(tmp_path):
    (tmp_path / "llama").mkdir()
    for name, kind, state in (("llama", Kind.FILE, State.UNKNOWN), ("gone", Kind.RUN, State.MISSING)):
        config = f"Trainer.init_from = '{tmp_path / name}'"
        [found] = Chain().of(str(checkpoint(tmp_path / f"of {name}", datasets=[], config=config))).parents
        assert (found.kind, found.state) == (kind, state)


def test_runs_in_a_circle_end(tmp_path):
    for one, other in (("a", "b"), ("b", "a")):
        checkpoint(tmp_path / one, datasets=[], config=f"Trainer.init_from = '{tmp_path / other}'")
    names = [os.path.basename(node.path) for node in Chain().of(str(tmp_path / "a")).all() if node.kind is Kind.RUN]
    assert names[:2] == ["a", "b"] and len(names) < 5


def test_of_many_files_the_text_names_the_first_and_those_that_changed(tmp_path):
    paths = [tmp_path / f"in{i:03}" for i in range(60)]
    for path in paths:
        path.write_text(path.name)
    build(tmp_path / "out", *paths)
    paths[50].write_text("changed")
    chain = Chain().of(str(tmp_path / "out"))
    lines = chain.text().splitlines()
    assert len(lines) == 1 + nodes.SHOWN + 1 + 1 and lines[-1] == "  and 39 more files, all unchanged"
    assert any("in050" in line and line.endswith(": changed") for line in lines)
    assert len(chain.as_json()["parents"]) == 60


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1}', None])
def test_what_has_no_lineage_is_the_users_mistake(tmp_path, text):
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match="has no lineage: name a run folder, a step"):
        Chain().of(str(tmp_path))
    with pytest.raises(UserError, match="has no lineage"):
        Chain().of(str(tmp_path / "none"))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="has no checkpoint yet"):
        Chain().of(str(tmp_path))


MANGLED = [
    {"step": 1},
    {"step": 1, "about": 3, "files": 3},
    {"step": 1, "about": {"datasets": [3, {}, {"path": 3}, {"path": "/none"}], "config": 3}, "files": [3, {}]},
    {"step": 1, "about": {"datasets": [{"path": "/none", "kind": 3}, {"path": "/none", "bytes": "x", "sha256": 3}]}},
    {"step": 1, "about": {"datasets": [{"path": "/none", "files": 3}], "config": "Trainer.init_from = 'a\\'"}},
]


@pytest.mark.parametrize("document", MANGLED, ids=range(len(MANGLED)))
def test_documents_of_another_form_end_in_no_traceback(tmp_path, document):
    (tmp_path / "manifest.json").write_text(json.dumps(document))
    assert Chain().of(str(tmp_path)).text()


def test_a_name_that_breaks_lines_is_shown_on_one(tmp_path):
    path = tmp_path / "a\n\x1b[31m.txt"
    path.write_text("x")
    assert len(Chain().of(str(path)).text().splitlines()) == 1 and "\x1b" not in Chain().of(str(path)).text()
