"""Run folders that somebody has made, whose hashes all fit: refused in a line, and before much of them is read."""

from __future__ import annotations

import json
import os
import shutil

import jax
import jax.numpy as jnp
import pytest
from etils import epath

from capibara.checkpoints import encryption, inspection, manifest, run_manifest
from capibara.checkpoints.manager import Checkpointing, CheckpointReader, Checkpoints
from capibara.checkpoints.manifest import Corrupted
from capibara.core import limits
from capibara.core.types import UserError
from capibara.storage import hashing, outputs
from capibara.training.base.state import TrainState

pytestmark = pytest.mark.fault(63)
PARAMS = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(4)}
LAYOUT, CHUNK = "state/params.a/.zarray", "state/params.a/0.0"
LARGE = 200 << 20  # a sparse file's bytes


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run folder with step 1 and sealed files."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.gin").write_text("A = 1\n")
    (folder / "metrics.jsonl").write_text('{"event": "checkpoint", "step": 1}\n')
    with Checkpoints(str(folder), Checkpointing()) as checkpoints:
        checkpoints.save(1, TrainState(jnp.int32(1), PARAMS, (), None), {"x": 1}, {})
    run_manifest.seal(epath.Path(folder))
    return folder


@pytest.fixture
def run(saved, tmp_path):
    """A copy that may be changed."""
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def signed(path, change):
    """A manifest with a change and the hash that fits."""
    values = json.loads(path.read_text())
    del values["xxh128"]
    change(values)
    digest = hashing.hash_of(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())
    path.write_text(json.dumps(values | {"xxh128": digest}))


def written(run, name, content):
    """A file of the step with another content (an int: so many bytes of nothing), and the hash that fits."""
    path = run / "checkpoints" / "1" / name
    os.truncate(path, content) if isinstance(content, int) else path.write_text(content)
    digest = "0" if isinstance(content, int) else hashing.hash_of(content.encode())

    def change(values):
        next(file for file in values["files"] if file["path"] == name).update(size=path.stat().st_size, xxh128=digest)

    signed(run / "checkpoints" / "1" / "manifest.json", change)


def step_changed(**changes):
    return lambda run: signed(run / "checkpoints" / "1" / "manifest.json", lambda values: values.update(changes))


def file_changed(**changes):
    def change(values):
        next(file for file in values["files"] if file["path"] == CHUNK).update(changes)

    return lambda run: signed(run / "checkpoints" / "1" / "manifest.json", change)


def layout_changed(**changes):
    def make(run):
        text = (run / "checkpoints" / "1" / LAYOUT).read_text()
        written(run, LAYOUT, json.dumps(json.loads(text) | changes))

    return make


def manifest_is(text):
    return lambda run: (run / "checkpoints" / "1" / "manifest.json").write_text(text)


STEPS = {
    "deep": manifest_is("[" * 100_000),
    "large": lambda run: os.truncate(run / "checkpoints" / "1" / "manifest.json", LARGE),
    "many": step_changed(files=[[]] * 100_000),
    "files of another kind": step_changed(files={"a": 1}),
    "about of another kind": step_changed(about=[1]),
    "a score of another kind": step_changed(about={"score": "x"}),
    "a commit of another kind": step_changed(about={"commit": 7}),
    "a key of another kind": step_changed(encryption=[1], mac=5),
    "a path out of the folder": file_changed(path="../../../secret"),
    "an absolute path": file_changed(path="/etc/hostname"),
    "a path with a NUL": file_changed(path="a\0"),
    "half a character": file_changed(path="a\ud800"),
    "a number for a path": file_changed(path=7),
    "a text for a chunk": file_changed(chunk=["a", 0]),
    "a step out of the folder": file_changed(step="../../x"),
    "a negative size": file_changed(size=-1),
    "a large chunk": lambda run: written(run, CHUNK, LARGE),
    "a large layout": lambda run: written(run, LAYOUT, LARGE),
    "a deep layout": lambda run: written(run, LAYOUT, "[" * 100_000),
    "no chunks": layout_changed(chunks=[0, 3]),
    "chunks of text": layout_changed(chunks=["a", "b"]),
    "large chunks": layout_changed(chunks=[10**15, 3]),
    "another shape": layout_changed(shape=[2, 5]),
    "nested shape": layout_changed(shape=[[2], 3]),
    "more dimensions": layout_changed(shape=[2] * 40, chunks=[2] * 40),
    "another compressor": layout_changed(compressor={"id": "blosc"}),
    "no compressor": layout_changed(compressor=5),
    "objects": layout_changed(dtype="|O"),
    "a deep run.json": lambda run: written(run, "run.json", "[" * 100_000),
    "a run.json of another kind": lambda run: written(run, "run.json", '{"data": {}, "progress": {}, "shapes": [1]}'),
    "shapes of another kind": lambda run: written(
        run, "run.json", '{"data": {}, "progress": {}, "shapes": {"a": [1]}}'
    ),
    "a large run.json": lambda run: written(run, "run.json", 300 << 20),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_hostile_step_is_corrupted(run, name, monkeypatch):
    read, most = hashing.read_hashed, 1 << 20
    monkeypatch.setattr(
        hashing, "read_hashed", lambda path, size: read(path, size) if size < most else pytest.fail(path)
    )
    STEPS[name](run)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), PARAMS)
    with CheckpointReader(str(run), Checkpointing()) as checkpoints, pytest.raises(Corrupted) as found:
        checkpoints.restore_progress(1)
        checkpoints.restore_params(1, target)
    assert len(str(found.value)) < 400 and "\n" not in str(found.value)
    for action in ("list", "verify") if name != "a large run.json" else ("list",):
        list(inspection.lines(inspection.Inspection(str(run)).done(action, lambda step: None), action))


def run_changed(**changes):
    return lambda run: signed(run / "manifest.json", lambda values: values.update(changes))


def named(path, size=1, role="config"):
    file = {"path": path, "size": size, "xxh128": "0", "role": role}
    return lambda run: signed(run / "manifest.json", lambda values: values["files"].append(file))


def pipe(name):
    def make(run):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return make


def device(name):
    def make(run):
        (run / name).unlink()
        (run / name).symlink_to("/dev/zero")

    return make


def large_tokenizer(run):
    (run / "tokenizer").mkdir()
    (run / "tokenizer" / "tokenizer.json").touch()
    os.truncate(run / "tokenizer" / "tokenizer.json", LARGE)
    named("tokenizer/tokenizer.json", LARGE)(run)


def many_folders(run):
    here = os.open(run, os.O_RDONLY)
    for _ in range(100):
        os.mkdir("x", dir_fd=here)
        inner = os.open("x", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)


RUNS = {
    "a pipe": pipe("manifest.json"),
    "a device": device("manifest.json"),
    "large": lambda run: os.truncate(run / "manifest.json", LARGE),
    "deep": lambda run: (run / "manifest.json").write_text("[" * 100_000),
    "endless steps": run_changed(steps=[float("inf")]),
    "a million steps": run_changed(steps=[*range(10**6)]),
    "out of the folder": named("../../secret"),
    "a NUL": named("a\0b"),
    "half a character": named("a\ud800"),
    "a number": named(7),
    "a size of text": named("a", "x", "log"),
    "a size of part of a byte": named("a", 1.5, "log"),
    "a large tokenizer": large_tokenizer,
    "a tokenizer elsewhere": lambda run: (run / "tokenizer").symlink_to("/etc"),
    "folders in each other": many_folders,
}


@pytest.mark.parametrize("name", RUNS)
def test_a_hostile_run_folder_is_refused(run, name, monkeypatch):
    read = hashing.read_hashed
    monkeypatch.setattr(
        hashing, "read_hashed", lambda path, size: read(path, size) if size < 1e6 else pytest.fail(path)
    )
    RUNS[name](run)
    with pytest.raises(UserError) as found:
        run_manifest.check(epath.Path(run))
    assert "\n" not in str(found.value)
    shutil.rmtree(run / "x", ignore_errors=True)
    inspection.Inspection(str(run)).done("list", lambda step: None)


def test_what_links_lead_to_is_not_the_runs(run, tmp_path):
    """A run folder may have links, also to what is gone and to a folder above it; they are not walked."""
    (run / "above").symlink_to("/")
    (run / "gone").symlink_to("/nowhere")
    (run / "checkpoints" / "1" / "gone").symlink_to("/nowhere")
    folder = epath.Path(run)
    run_manifest.check(folder)
    assert run_manifest.unknown(folder, run_manifest.read(folder)) == ["above"]
    assert "above" not in run_manifest.seal(folder)
    rows = inspection.Inspection(str(run)).done("verify", lambda step: None)
    assert [row["faults"] for row in rows] == [[], []]


def test_metrics_and_configurations_are_read_only_so_far(run):
    (run / "manifest.json").unlink()
    os.truncate(run / "metrics.jsonl", LARGE)
    with pytest.raises(UserError, match="longer than"):
        run_manifest.recorded_steps(epath.Path(run))
    pipe("metrics.jsonl")(run)
    with pytest.raises(UserError, match="is a pipe"):
        run_manifest.recorded_steps(epath.Path(run))
    os.truncate(run / "config.gin", LARGE)
    with pytest.raises(UserError, match="must have at most"):
        outputs.read(str(run / "config.gin"))
    with pytest.raises(UserError, match="Encryption.key_file"):
        encryption.Encryption(key_file="/dev/zero").keys()


def test_a_file_in_place_of_the_checkpoints(run):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").touch()
    for action in (
        lambda: inspection.Inspection(str(run)),
        lambda: CheckpointReader(str(run), Checkpointing()).newest_params(PARAMS),
    ):
        with pytest.raises(UserError):
            action()


def test_a_step_of_more_files_than_can_be_read_is_not_written(tmp_path):
    files = tuple(manifest.File(f"{i}", 0, "") for i in range(3))
    (tmp_path / "1").mkdir()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="at most 2"):
        patch.setattr(manifest, "MOST_FILES", 2)
        manifest.write(epath.Path(tmp_path / "1"), manifest.Manifest(1, files))
    assert not (tmp_path / "1" / "manifest.json").exists()


@pytest.mark.parametrize(
    ["text", "deep"],
    [
        ("[" * 128 + "]" * 128, False), ("[" * 129 + "]" * 129, True), ('{"a":[' * 64 + "]}" * 64, False),
        ('{"a":[' * 65 + "]}" * 65, True), ("[]," * 10**6, False), ("[" * 10**6, True), ('"' + "[" * 999 + '"', False),
        ("[{]}" * 500, False), ("[[]" * 200, True),
    ],
)  # fmt: skip
def test_depth_is_counted_in_little_time(text, deep):
    assert (limits._depth(text.encode()) > limits.DEPTH) == deep
