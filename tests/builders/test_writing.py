"""An output folder is built whole, or resumed to the same bytes, or refused."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import pickle
import subprocess
import sys
import textwrap

import pytest

from capibara.builders.files import fingerprints
from capibara.builders.files.manifest import read_manifest
from capibara.builders.files.problems import Kind
from capibara.builders.writing import Output
from capibara.core.types import UserError

OF_INPUTS = {"files": 2, "file_bytes": 14, "files_left_out": 0}  # see `inputs`
NAMES = ("train/0.jsonl", "train/1.jsonl", "stats.json")


@pytest.fixture
def inputs(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(name)
    return fingerprints.inputs_of([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])


def fill(output, written=None):
    """A small build; `written` gets the names of the parts that it wrote."""
    for i, name in enumerate(NAMES):
        if output.parts.done(name) is None:
            with output.part(name) as part:
                for row in range(3):
                    part.write_record({"row": row, "part": i})
                part.counts["kept"] += 3
                part.problems.add("a.jsonl", i + 1, Kind.MALFORMED, "is bad")
            if written is not None:
                written.append(name)
    return output.finish({"read": 12})


def tree(folder):
    """Every file and folder below, with the contents; without the lineage, which has times."""
    paths = sorted(path for path in pathlib.Path(folder).rglob("*") if path.name != "lineage.jsonl")
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def test_a_build_leaves_its_files_and_a_manifest(tmp_path, inputs):
    with Output(str(tmp_path / "out"), "sets", {"b": 1, "a": (2, 3)}, inputs) as output:
        assert output.done() is None
        manifest = fill(output)
    assert {*tree(tmp_path / "out")} == {"manifest.json", "train", *NAMES}
    assert manifest.counts == {"kept": 9, "read": 12, **OF_INPUTS, "skipped": 3} and manifest.problems.counts == {
        "malformed": 3
    }
    assert [(file.name, file.records) for file in manifest.files] == [(name, 3) for name in sorted(NAMES)]
    assert manifest.config == {"a": [2, 3], "b": 1} and manifest.inputs == inputs
    hashes = {file.name: file.sha256 for file in manifest.files}
    assert manifest.fingerprint == fingerprints.of_files(hashes)
    assert read_manifest(str(tmp_path / "out")) == manifest
    assert (tmp_path / "out" / NAMES[0]).read_text().splitlines()[1] == '{"part":0,"row":1}'


def test_a_finished_build_is_not_built_again(tmp_path, inputs):
    with Output(str(tmp_path / "out"), "sets", {}, inputs) as output:
        manifest = fill(output)
    before = tree(tmp_path / "out")
    with Output(str(tmp_path / "out"), "sets", {}, reversed(inputs)) as output:
        assert output.done() == manifest
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize("how", ["changed", "removed", "same size", "pipe"])
def test_a_finished_build_whose_file_has_changed_is_built_again(tmp_path, inputs, how):
    with Output(str(tmp_path / "out"), "sets", {}, inputs) as output:
        fill(output)
    before, path = tree(tmp_path / "out"), tmp_path / "out" / NAMES[1]
    if how in ("removed", "pipe"):
        path.unlink()
    if how == "pipe":
        os.mkfifo(path)
    elif how != "removed":
        path.write_bytes(b"x" * (len(before[NAMES[1]]) + (how == "changed")))
    with Output(str(tmp_path / "out"), "sets", {}, inputs) as output:
        assert output.done() is None
        assert not (tmp_path / "out/manifest.json").exists()
        fill(output)
    assert tree(tmp_path / "out") == before


def test_a_part_that_fails_leaves_nothing_and_whole_ones_are_kept(tmp_path, inputs):
    folder = tmp_path / "out"
    with Output(str(folder), "sets", {}, inputs) as output:
        with output.part("first") as part:
            part.write(b"1")
            part.counts["kept"] += 1
        with pytest.raises(ZeroDivisionError), output.part("second") as part:
            part.write(b"2" * 5_000_000)
            raise ZeroDivisionError
    assert {"first", ".building", "lineage.jsonl"} == {*os.listdir(folder)}
    with Output(str(folder), "sets", {}, inputs) as output:
        assert output.done() is None and output.parts.done("second") is None
        assert output.parts.done("first").counts == {"kept": 1}
        assert output.finish().counts == {"kept": 1, **OF_INPUTS, "skipped": 0}


def test_a_mistake_that_leaves_no_whole_part_binds_the_folder_to_nothing(tmp_path, inputs):
    folder = str(tmp_path / "out")
    for settings in ({"field": "a"}, {"field": "b"}):
        with pytest.raises(UserError, match="no line"), Output(folder, "sets", settings, inputs) as output:
            with output.part("first"):
                raise UserError("no line has the field")
        assert {*os.listdir(folder)} == {"lineage.jsonl"}
    with pytest.raises(UserError, match="later"), Output(folder, "sets", {"field": "c"}, inputs) as output:
        with output.part("first") as part:
            part.write(b"1")
        raise UserError("later")
    with pytest.raises(UserError, match="built with other settings"):
        Output(folder, "sets", {"field": "d"}, inputs)


def test_an_interrupt_keeps_whole_parts_of_any_kind_and_binds_the_folder_to_nothing_else(tmp_path, inputs):
    folder = str(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt), Output(folder, "sets", {"field": "a"}, inputs):
        raise KeyboardInterrupt
    for error in (KeyboardInterrupt, UserError):
        with pytest.raises(error), Output(folder, "sets", {"field": "b"}, inputs) as output:
            if output.scratch.done("signatures/0") is None:
                with output.scratch.write("signatures/0") as part:
                    part.write(b"1")
            raise error("no line")
    with Output(folder, "sets", {"field": "b"}, inputs) as output:
        assert output.scratch.done("signatures/0") is not None


def test_a_part_that_is_written_again_is_not_recorded_until_it_is_whole(tmp_path, inputs):
    with Output(str(tmp_path / "out"), "sets", {}, inputs) as output:
        with output.part("a.jsonl") as part:
            part.write(b"1")
        with output.part("a.jsonl") as part:
            assert output.parts.all() == []
            part.write(b"2")
        assert [one.file.name for one in output.parts.all()] == ["a.jsonl"]


def test_a_part_that_was_changed_by_hand_is_written_again(tmp_path, inputs):
    with Output(str(tmp_path / "out"), "sets", {}, inputs) as output:
        with output.part("first") as part:
            part.write(b"1")
        (tmp_path / "out/first").write_bytes(b"2")
        assert output.parts.done("first") is None
        (tmp_path / "out/first").write_bytes(b"1")
        assert output.parts.done("first") is not None
        record = tmp_path / "out/.building/done/first.json"
        record.write_text(record.read_text()[:20])
        assert output.parts.done("first") is None


def test_scratch_parts_are_resumed_and_are_gone_in_the_end(tmp_path, inputs):
    with Output(str(tmp_path / "out"), "sets", {}, inputs) as output:
        with output.scratch.write("signatures/0") as part:
            part.write(b"1")
    with Output(str(tmp_path / "out"), "sets", {}, inputs) as output:
        assert output.scratch.done("signatures/0") is not None
        assert pathlib.Path(output.scratch.path("signatures/0")).read_bytes() == b"1"
        assert output.finish().files == ()
    assert {*tree(tmp_path / "out")} == {"manifest.json"}


def test_a_library_may_write_a_part_by_its_path(tmp_path, inputs):
    with Output(str(tmp_path / "out"), "sets", {}, inputs) as output:
        with output.part("a.bin") as part:
            pathlib.Path(part.path).write_bytes(b"12345")
            part.records = 2
        with output.part("empty"):
            pass
        found = {file.name: (file.bytes, file.records) for file in output.finish().files}
    assert found == {"a.bin": (5, 2), "empty": (0, 0)}


_WORKER = """
import pickle, sys
parts, number = pickle.load(open(sys.argv[1], "rb")), int(sys.argv[2])
with parts.write(f"{number}.jsonl") as part:
    part.write_record({"number": number})
    part.counts["kept"] += number
"""


def test_worker_processes_write_parts(tmp_path, inputs):
    with Output(str(tmp_path / "out"), "sets", {}, inputs) as output:
        (tmp_path / "parts").write_bytes(pickle.dumps(output.parts))
        argv = [sys.executable, "-c", _WORKER, str(tmp_path / "parts")]
        workers = [subprocess.Popen([*argv, number]) for number in ("1", "2")]
        assert [worker.wait(60) for worker in workers] == [0, 0]
        assert output.finish().counts == {"kept": 3, **OF_INPUTS, "skipped": 0}


def test_an_input_that_grows_during_the_build_is_the_users_mistake(tmp_path, inputs):
    with pytest.raises(UserError, match="b.jsonl has changed during the build .*: "):
        with Output(str(tmp_path / "out"), "sets", {}, inputs) as output:
            with open(tmp_path / "b.jsonl", "a") as file:
                file.write("more")
            fill(output)
    assert not (tmp_path / "out/manifest.json").exists()


OTHERS = {
    "kind": ("kind 'sets', not 'others'", dict(kind="others")),
    "setting": (r"other settings \(filter.least was 1, is 2\)", dict(config={"filter": {"least": 2}})),
    "new setting": (r"other settings \(filter.most was None, is 3\)", dict(config={"filter": {"least": 1, "most": 3}})),
    "type": (r"other settings \(filter.least was 1, is True\)", dict(config={"filter": {"least": True}})),
}


@pytest.mark.parametrize("is_finished", [True, False], ids=["finished", "unfinished"])
@pytest.mark.parametrize("other", [*OTHERS, "input", "fewer inputs", "version"])
def test_the_folder_of_another_build_is_refused(tmp_path, inputs, other, is_finished, monkeypatch):
    given = dict(folder=str(tmp_path / "out"), kind="sets", config={"filter": {"least": 1}}, inputs=inputs)
    with Output(**given) as output:
        if is_finished:
            fill(output)
    message, changed = OTHERS.get(other, ("", {}))
    if other == "input":
        (tmp_path / "b.jsonl").write_text("other")
        changed = dict(inputs=fingerprints.inputs_of([one.path for one in inputs]))
        message = r"other inputs \(.*b.jsonl was"
    elif other == "fewer inputs":
        message, changed = r"other inputs \(.*b.jsonl was", dict(inputs=inputs[:1])
    elif other == "version":
        message = "version '0.0.1', not"
        path = tmp_path / "out" / ("manifest.json" if is_finished else ".building/plan.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), "version": "0.0.1"}))
    before = tree(tmp_path / "out")
    with pytest.raises(UserError, match=f"{message}.*: name another folder, or remove this one"):
        Output(**{**given, **changed})
    assert tree(tmp_path / "out") == before


def test_a_folder_with_other_files_is_refused_and_not_changed(tmp_path, inputs):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="has files of no build .*thesis.tex.*: name a new folder"):
        Output(str(tmp_path / "out"), "sets", {}, inputs)
    assert {*tree(tmp_path / "out")} == {"thesis.tex"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 9}'])
def test_a_corrupted_manifest_is_refused(tmp_path, inputs, text):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/manifest.json").write_text(text)
    with pytest.raises(UserError):
        Output(str(tmp_path / "out"), "sets", {}, inputs)
    with pytest.raises(UserError):
        read_manifest(str(tmp_path / "out"))


def test_names_that_lead_out_of_the_folder_are_refused(tmp_path, inputs):
    with Output(str(tmp_path / "out"), "sets", {}, inputs) as output:
        for name in ("../a", "/a", "a/../../b"):
            with pytest.raises(UserError), output.part(name):
                pass


def test_the_folder_belongs_to_one_process_at_a_time(tmp_path, inputs):
    with Output(str(tmp_path / "out"), "sets", {}, inputs):
        with pytest.raises(UserError, match="is being built by another process"):
            Output(str(tmp_path / "out"), "sets", {}, inputs)
    Output(str(tmp_path / "out"), "sets", {}, inputs).close()


@pytest.mark.parametrize(("name", "cause"), [("file", "is a file"), ("file/out", "cannot be written")])
def test_a_folder_that_cannot_be_made_is_the_users_mistake(tmp_path, inputs, name, cause):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=cause):
        Output(str(tmp_path / name), "sets", {}, inputs)


def test_a_bucket_is_refused(inputs):
    with pytest.raises(UserError, match="must be a local folder"):
        Output("gs://bucket/out", "sets", {}, inputs)


def test_a_full_disk_is_explained_and_the_build_resumes(small_disk, inputs):
    with Output(str(small_disk / "out"), "sets", {}, inputs) as output:
        with output.part("small") as part:
            part.write(b"1" * 100)
        with pytest.raises(UserError, match="disk full while writing .*/large: free some space, then run the same"):
            with output.part("large") as part:
                for _ in range(50):
                    part.write(b"2" * 200_000)
    assert not list((small_disk / "out").glob("large*"))
    with Output(str(small_disk / "out"), "sets", {}, inputs) as output:
        assert output.parts.done("small") is not None
        with output.part("large") as part:
            part.write(b"2" * 200_000)
        assert [file.name for file in output.finish().files] == ["large", "small"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_is_full_at_the_last_moment_is_explained(tmp_path, inputs, monkeypatch, call):
    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    with Output(str(tmp_path / "out"), "sets", {}, inputs) as output:
        with monkeypatch.context() as patch, pytest.raises(UserError, match="disk full while writing"):
            with output.part("first") as part:
                part.write(b"1")
                patch.setattr(os, call, full)
        assert output.parts.done("first") is None
        with monkeypatch.context() as patch, pytest.raises(UserError, match="disk full while writing"):
            patch.setattr(os, call, full)
            output.finish()
        fill(output)


# Runs the build in child processes, each killed at one of its calls of the system, then once to its end.
_KILLS = """
    import os, pathlib, signal, sys
    sys.path.insert(0, {folder!r})
    import test_writing as build
    import openlineage.client.event_v2, openlineage.client.facet_v2, openlineage.client.serde, openlineage.client.uuid
    from etils import epath
    from capibara.builders.files import fingerprints
    from capibara.builders.lineage import history
    from capibara.builders.files.manifest import read_manifest
    from capibara.builders.writing import Output, Part

    root = pathlib.Path({root!r})
    inputs = fingerprints.inputs_of([root / "a.jsonl", root / "b.jsonl"])
    EVENTS = {{"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}}

    def run(folder, kill_at):
        child = os.fork()
        if child:
            return os.waitpid(child, 0)[1]
        left = kill_at

        def count(event, given):
            nonlocal left
            if event in EVENTS:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        write = Part.write

        def write_and_count(part, data):
            write(part, data)
            part._file.flush()
            count("open", ())

        Part.write = write_and_count
        sys.addaudithook(count)
        with Output(str(folder), "sets", {{"a": 1}}, inputs) as output:
            if output.done() is None:
                build.fill(output)
        os._exit(0)

    assert run(root / "whole", -1) == 0
    expected = build.tree(root / "whole")
    at = 1
    while True:  # kills once, at a call, then resumes
        folder = root / f"killed{{at}}"
        code = run(folder, at)
        if code == 0:
            break
        assert code == signal.SIGKILL, code
        assert run(folder, -1) == 0
        assert build.tree(folder) == expected, (at, set(build.tree(folder)) ^ set(expected))
        assert not history.unfinished(str(folder)), at
        assert history.maker(str(folder), read_manifest(str(folder)).fingerprint), at
        at += {stride}
    calls = at
    folder, at = root / "often", 13
    while run(folder, at) != 0:  # kills again and again, a little later each time
        at += 2
    assert build.tree(folder) == expected
    print(calls)
"""


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.heavy)])
def test_a_build_that_is_killed_anywhere_is_resumed_to_the_same_bytes(tmp_path, inputs, stride):
    folder = str(pathlib.Path(__file__).parent)
    code = textwrap.dedent(_KILLS).format(folder=folder, root=str(tmp_path), stride=stride)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40  # calls that the last run made
