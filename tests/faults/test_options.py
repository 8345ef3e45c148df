"""Encrypted, compressed and incremental checkpoints: what comes back, who can read it, what goes and what stays."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import re
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from capibara.checkpoints import arrays, encryption, manifest, retention, saving, step_folders
from capibara.checkpoints.encryption import Encryption
from capibara.checkpoints.manager import Checkpointing, CheckpointReader, Checkpoints
from capibara.cli import convert
from capibara.core.types import UserError
from capibara.multihost import exits
from capibara.storage import stores

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import saver  # noqa: E402

NAME = "CAPIBARA_CHECKPOINT_KEY"


@pytest.fixture
def key(monkeypatch):
    """The environment has a key."""
    monkeypatch.setenv(NAME, "0123456789abcdef" * 4)


def frozen(step, width=64):
    """A state of which only the bias, its moment and the counters change."""
    new, old = saver.state_of(step, width), saver.state_of(1, width)
    params = {**old.params, "layer": {**old.params["layer"], "bias": new.params["layer"]["bias"]}}
    moments = {**old.opt_state[0], "count": jnp.int32(step)}
    return dataclasses.replace(new, params=params, opt_state=(moments,))


def save(folder, options, steps=(1, 2), state=saver.state_of, place=saver.sharded):
    with Checkpoints(str(folder), options, about={"config": "SECRET = 'the configuration'"}) as checkpoints:
        for step in steps:
            checkpoints.save(step, place(state(step)), {"rows": ["the data"]}, {})


def newest(folder, options, state=saver.state_of, devices=2):
    target = saver.target_of(saver.sharded(state(0), devices))
    with CheckpointReader(str(folder), options) as reader:
        restored, back = reader.restore(target)
        assert restored.data == {"rows": ["the data"]}
        jax.tree.map(np.testing.assert_array_equal, back, state(restored.step))
        return restored.step, dict(reader.corrupted)


def files_of(folder, step):
    return {
        path.relative_to(folder / "checkpoints" / str(step)).as_posix(): path
        for path in sorted((folder / "checkpoints" / str(step)).rglob("*"))
        if path.is_file()
    }


OPTIONS = {
    "encrypted": Checkpointing(encryption=Encryption()),
    "compressed": Checkpointing(compression="zstd"),
    "encrypted and compressed": Checkpointing(compression="zstd", encryption=Encryption()),
    "incremental": Checkpointing(incremental=True),
    "all": Checkpointing(compression="zstd", encryption=Encryption(), incremental=True),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("state", [saver.state_of, frozen])
def test_what_was_saved_comes_back_on_another_mesh(tmp_path, key, options, state):
    save(tmp_path, options, steps=(1, 2, 3), state=state)
    assert newest(tmp_path, options, state) == (3, {})
    assert exits.run_verb(convert.main, ["verify", str(tmp_path)]) == 0  # without the key, too


@pytest.mark.fault(44)
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_nothing_on_the_disk_can_be_read_without_the_key(tmp_path, key, compression):
    """Neither parameters nor the configuration nor the data's state, in no file that Python opens at any time."""
    state = saver.state_of(1, 4096)
    plain = np.asarray(state.params["layer"]["kernel"]).tobytes()
    written, watching = set(), [True]

    def watch(event, args):
        if (
            watching
            and event == "open"
            and isinstance(args[0], (str, pathlib.Path))
            and args[2] & (os.O_WRONLY | os.O_RDWR)
        ):
            written.add(os.fspath(args[0]))

    sys.addaudithook(watch)  # cannot be taken back
    save(tmp_path, Checkpointing(encryption=Encryption(), compression=compression), (1,), lambda step: state)
    watching.clear()
    files = files_of(tmp_path, 1)
    ours = {path for path in written if path.startswith(str(tmp_path)) and "/lease.json" not in path}
    ours = {path for path in ours if pathlib.Path(path).parent != tmp_path}  # the run's manifest has names and hashes
    assert {re.sub(r"(\.[0-9a-f]{8})?\.partial$", "", path) for path in ours} == set(
        map(str, files.values())
    )  # each became one of these
    content = b"".join(path.read_bytes() for path in files.values())
    assert len(content) > len(plain) / 2
    assert not any(plain[at : at + 16] in content for at in range(0, len(plain), 1024))
    assert b"SECRET" not in content and b"the data" not in content
    about = json.loads((tmp_path / "checkpoints" / "1" / "manifest.json").read_text())
    assert about["encryption"] == {"cipher": "AES-256-GCM", "key": Encryption().key().id}


@pytest.mark.fault(44)
def test_the_wrong_key_is_told_from_the_right_one(tmp_path, key, monkeypatch):
    options = Checkpointing(encryption=Encryption())
    save(tmp_path, options)
    right = Encryption().key().id
    with pytest.raises(UserError, match=f"checkpoints/2 is encrypted with the key {right}, no key is given: set Check"):
        newest(tmp_path, Checkpointing())
    monkeypatch.setenv(NAME, "f" * 64)
    with pytest.raises(UserError, match=f"encrypted with the key {right}, [0-9a-f]{{16}} given: give that key, as"):
        newest(tmp_path, options)
    bads = ("abc", "", "a password of 32 characters, ha!", "0123456789abcdef" * 2)
    for bad, message in ((None, f"variable {NAME} is not set"), *((bad, "must hold 32 bytes") for bad in bads)):
        monkeypatch.setenv(NAME, bad) if bad is not None else monkeypatch.delenv(NAME)
        with pytest.raises(UserError, match=message):
            Checkpoints(str(tmp_path), options)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "2"]


@pytest.mark.fault(44)
@pytest.mark.parametrize("how", ["a bit", "cut", "of another place", "of another step"])
def test_ciphertexts_that_were_changed_are_found_out(tmp_path, key, how, monkeypatch):
    """By the manifest's hashes; and where these were made to fit, by the cipher."""
    options = Checkpointing(encryption=Encryption())
    save(tmp_path, options, place=lambda state: saver.sharded(state, 2))
    changed = "state/params.layer.kernel/0.0"
    path = files_of(tmp_path, 2)[changed]
    content = path.read_bytes()
    match how:
        case "a bit":
            path.write_bytes(content[:-5] + bytes([content[-5] ^ 4]) + content[-4:])
        case "cut":
            path.write_bytes(content[:-40])
        case "of another place":
            path.write_bytes(files_of(tmp_path, 2)["state/params.layer.kernel/1.0"].read_bytes())
        case "of another step":
            path.write_bytes(files_of(tmp_path, 1)[changed].read_bytes())
    step, corrupted = newest(tmp_path, options)
    assert step == 1 and changed in corrupted[2] and ("has changed" in corrupted[2] or "bytes, not" in corrupted[2])
    folder = epath.Path(tmp_path / "checkpoints" / "2")
    old = manifest.read(folder)
    now = manifest.of_disk(folder, [changed])[0]
    forged = [
        dataclasses.replace(f, size=now.size, xxh128=now.xxh128) if f.path == changed else f for f in old.files
    ]  # fmt: skip
    forged = dataclasses.replace(old, files=tuple(forged))
    manifest.write(folder, forged)
    assert step_folders.is_whole(folder)
    unsigned = {2: "its manifest is not authentic: it was not signed with this key"}
    assert newest(tmp_path, options) == (1, unsigned)
    manifest.write(folder, dataclasses.replace(forged, mac=Encryption().key().mac(forged.signed())))
    assert newest(tmp_path, options) == (
        1, {2: f"{changed} of step 2 is not authentic: it has changed since it was encrypted"}
    )  # fmt: skip


def test_long_contents_are_encrypted_piece_by_piece_in_their_order(key, monkeypatch):
    monkeypatch.setattr(encryption, "SEGMENT", 100)
    found = Encryption().key()
    for size in (0, 1, 100, 101, 1000):
        content = np.random.default_rng(size).bytes(size)
        sealed = found.seal(content, "it")
        assert found.open(sealed, "it") == content
        assert found.seal(content, "it") != sealed  # a nonce of its own
        with pytest.raises(manifest.Corrupted, match="other is not authentic"):
            found.open(sealed, "other")
    with pytest.raises(manifest.Corrupted):
        found.open(sealed[:8] + bytes(4), "it")  # of no pieces
    head, piece = len(sealed) - 10 * 128, 128
    pieces = [sealed[head + i * piece : head + (i + 1) * piece] for i in range(10)]
    for order in ((1, 0, *range(2, 10)), range(9)):
        with pytest.raises(manifest.Corrupted):
            found.open(sealed[:head] + b"".join(pieces[i] for i in order), "it")


@pytest.mark.parametrize("form", ["hex", "base64", "bytes", "with a newline"])
def test_forms_of_a_key(tmp_path, form, monkeypatch):
    import base64

    secret = bytes(range(32))
    monkeypatch.setenv(NAME, secret.hex())
    forms = {"hex": secret.hex().encode(), "base64": base64.b64encode(secret), "bytes": secret}
    (tmp_path / "key").write_bytes(forms.get(form, secret.hex().encode() + b"\n"))
    assert Encryption(key_file=str(tmp_path / "key")).key().id == Encryption().key().id


@pytest.mark.parametrize("options", [OPTIONS["incremental"], OPTIONS["all"]], ids=["plain", "encrypted"])
def test_what_has_not_changed_is_not_written_again(tmp_path, key, options):
    save(tmp_path, options, steps=(1, 2, 3), state=lambda step: frozen(step, 4096))
    written = {step: {path.split("/")[1] for path in files_of(tmp_path, step) if path[:5] == "state" and "/." not in path}
               for step in (1, 2, 3)}  # fmt: skip
    assert "params.layer.kernel" in written[1] and "params.embedding" in written[1]
    changing = {name for name in written[2] if not name.startswith("_")} - {"array_metadatas", "commit_success.txt"}
    assert changing <= {"step", "params.layer.bias", "opt_state.0.count"} and written[3] == written[2]
    found = manifest.read(epath.Path(tmp_path / "checkpoints" / "3"))
    assert {file.step for file in found.files} == {None, 1}  # the file's own step, however long the chain
    size = lambda step: sum(path.stat().st_size for path in files_of(tmp_path, step).values())
    assert size(3) < size(1) / 2


@pytest.mark.fault(46)
@pytest.mark.parametrize("how", ["gone", "a bit", "cut"])
def test_a_step_whose_base_is_corrupted_is_refused(tmp_path, how):
    save(tmp_path, OPTIONS["incremental"], steps=(1, 2, 3), state=frozen)
    path = files_of(tmp_path, 1)["state/params.layer.kernel/0.0"]
    content = path.read_bytes()
    match how:
        case "gone":
            shutil.rmtree(tmp_path / "checkpoints" / "1")
        case "a bit":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "cut":
            path.write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"holds no step that is what was saved: 3: state/\S* of step 1"):
        newest(tmp_path, OPTIONS["incremental"], frozen)
    assert exits.run_verb(convert.main, ["verify", str(tmp_path)]) == 1


@pytest.mark.fault(46)
def test_a_base_that_is_in_use_is_not_removed(tmp_path):
    """Neither by retention nor by prune; and it goes with the last step that needs it."""
    options = Checkpointing(incremental=True, keep=1)
    save(tmp_path, options, steps=(1, 2, 3), state=frozen)
    steps = lambda: step_folders.steps(step_folders.folder_of(str(tmp_path)))
    assert steps() == [1, 3]
    assert exits.run_verb(convert.main, ["prune", str(tmp_path), "--keep=1"]) == 0
    assert steps() == [1, 3] and newest(tmp_path, options, frozen) == (3, {})
    with Checkpoints(str(tmp_path), options) as checkpoints:
        checkpoints.restore(saver.target_of(saver.sharded(frozen(0))))
        checkpoints.save(4, saver.sharded(saver.state_of(4)), {"rows": ["the data"]}, {})
    assert steps() == [4] and newest(tmp_path, options) == (4, {})


@pytest.mark.fault(46)
def test_a_base_that_vanished_is_not_referred_to(tmp_path):
    """What is no longer there in its size is written anew."""
    save(tmp_path, OPTIONS["incremental"], steps=(1,), state=frozen)
    with Checkpoints(str(tmp_path), OPTIONS["incremental"]) as checkpoints:
        checkpoints.restore(saver.target_of(saver.sharded(frozen(0))))
        files_of(tmp_path, 1)["state/params.embedding/0.0"].unlink()
        checkpoints.save(2, saver.sharded(frozen(2)), {"rows": ["the data"]}, {})
    assert "state/params.embedding/0.0" in files_of(tmp_path, 2)
    assert newest(tmp_path, OPTIONS["incremental"], frozen) == (2, {})


@pytest.mark.fault(46)
def test_removal_that_is_stopped_leaves_no_step_without_its_base(tmp_path, monkeypatch):
    """Before each removal of a step in turn."""
    save(tmp_path / "whole", OPTIONS["incremental"], steps=(1, 2), state=frozen)
    save(tmp_path / "whole", OPTIONS["incremental"], steps=(3,))
    remove, ended = step_folders.remove, False
    for most in itertools.count():
        run = tmp_path / str(most)
        shutil.copytree(tmp_path / "whole", run)
        left = [most]

        def counted(folder):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            remove(folder)

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(step_folders, "remove", counted)
            ended = retention.prune(step_folders.folder_of(str(run)), [3], [1, 2])
        folder = step_folders.folder_of(str(run))
        assert all(step_folders.is_whole(folder / str(step)) for step in step_folders.steps(folder))
        if ended:
            break
    assert most == 2 and step_folders.steps(folder) == [3]


def test_an_old_step_of_another_form_is_read_and_not_referred_to(tmp_path, key):
    """Encryption that is switched on in the middle of a run, with incremental steps."""
    save(tmp_path, OPTIONS["incremental"], steps=(1,), state=frozen)
    with pytest.raises(UserError, match="1 is not encrypted, and .*: where it is your own, set Encryption.plain_steps"):
        newest(tmp_path, OPTIONS["all"], frozen)
    once = dataclasses.replace(OPTIONS["all"], encryption=Encryption(plain_steps=True))
    with Checkpoints(str(tmp_path), once) as checkpoints:
        checkpoints.restore(saver.target_of(saver.sharded(frozen(0))))
        checkpoints.save(2, saver.sharded(frozen(2)), {"rows": ["the data"]}, {})
    assert {file.step for file in manifest.read(epath.Path(tmp_path / "checkpoints" / "2")).files} == {None}
    assert newest(tmp_path, OPTIONS["all"], frozen) == (2, {})
    folder = epath.Path(tmp_path / "checkpoints" / "2")
    assert stores.of(folder).list(folder)


def test_keys_are_replaced_and_encryption_ends(tmp_path, key, monkeypatch):
    """From one start of a run to the next."""
    save(tmp_path, Checkpointing(encryption=Encryption()), steps=(1,))
    (tmp_path / "old").write_text("0123456789abcdef" * 4)
    monkeypatch.setenv(NAME, "ab" * 32)
    rotated = Checkpointing(encryption=Encryption(old_key_file=str(tmp_path / "old")))
    plain = Checkpointing(encryption=Encryption(encrypt=False))
    for step, options in ((2, rotated), (3, plain)):
        with Checkpoints(str(tmp_path), options) as checkpoints:
            restored, _ = checkpoints.restore(saver.target_of(saver.sharded(saver.state_of(0))))
            assert restored.step == step - 1
            checkpoints.save(step, saver.sharded(saver.state_of(step)), {"rows": ["the data"]}, {})
    assert newest(tmp_path, Checkpointing()) == (3, {})


def test_a_base_that_rots_is_written_anew(tmp_path):
    """While good bytes are in memory no step refers to bad ones."""
    options = OPTIONS["incremental"]
    save(tmp_path, options, steps=(1, 2), state=frozen)
    with Checkpoints(str(tmp_path), options) as checkpoints:
        checkpoints.restore(saver.target_of(saver.sharded(frozen(0))))
        path = files_of(tmp_path, 1)["state/params.layer.kernel/0.0"]
        path.write_bytes(path.read_bytes()[::-1])
        checkpoints.save(3, saver.sharded(frozen(3)), {"rows": ["the data"]}, {})
    assert "state/params.layer.kernel/0.0" in files_of(tmp_path, 3)
    assert newest(tmp_path, options, frozen) == (3, {})


def test_a_chunk_that_was_compressed_wrong_is_written_again(tmp_path, monkeypatch):
    """Whole, by its own measure, but of other numbers."""
    encode, left = arrays.encode, [1]

    def wrong(chunk, cut):
        if left[0] and chunk.any():
            left[0] -= 1
            chunk = np.zeros_like(chunk)
        return encode(chunk, cut)

    monkeypatch.setattr(arrays, "encode", wrong)
    monkeypatch.setattr(saving, "_PAUSE_S", 0.0)
    save(tmp_path, OPTIONS["compressed"], steps=(1,))
    assert not left[0] and newest(tmp_path, OPTIONS["compressed"]) == (1, {})
