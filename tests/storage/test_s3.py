"""Data and models in S3, with an emulator."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import subprocess
import sys

import fsspec
import numpy as np
import pytest

from capibara.core.types import TryAgain, UserError
from capibara.storage import copies, remote

HERE = pathlib.Path(__file__).parent


@pytest.fixture
def put(s3, monkeypatch, tmp_path):
    """(name in the bucket, content) -> writes it, and returns its address; retries do not wait."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.0)
    remote._filesystem.cache_clear()
    files = fsspec.filesystem("s3")

    def put(name: str, content: bytes) -> str:
        files.pipe_file(f"bucket/{name}", content)
        return f"s3://bucket/{name}"

    yield put
    remote._filesystem.cache_clear()


def write_corpus(folder: pathlib.Path, put, name: str) -> tuple[str, str]:
    """The globs of the same shards on the disk and in S3."""
    folder.mkdir()
    for shard in range(3):
        lines = [json.dumps({"text": f"<{shard} {i}>" + "x" * 200}) for i in range(100)]
        (folder / f"part-{shard}.jsonl").write_text("\n".join(lines) + "\n")
        put(f"{name}/part-{shard}.jsonl", (folder / f"part-{shard}.jsonl").read_bytes())
    return f"{folder}/*.jsonl", f"s3://bucket/{name}/*.jsonl"


def test_shards_give_the_rows_of_a_disk_whatever_fails_in_between(s3, put, tmp_path):
    from capibara.data.dataset import Dataset
    from capibara.data.pipeline.loader import make_loader
    from capibara.data.shards.source import ShardedSource
    from capibara.data.tokenizers.vocabulary import ByteVocabulary

    def batches(files: str) -> list[dict[str, np.ndarray]]:
        source = ShardedSource(files=(files,), block_bytes=4096)
        dataset = Dataset(source=source, vocabulary=ByteVocabulary(), length=256, window_rows=8, window_documents=8)
        loader = make_loader(dataset, batch_size=4)
        found = list(itertools.islice(loader, 12))
        loader.close()
        return found

    disk, there = write_corpus(tmp_path / "corpus", put, "rows")
    wanted = batches(disk)
    s3.faults[:], before = ["SlowDown", "cut", "InternalError", None, "cut"], s3.reads
    found = batches(there)
    assert not s3.faults and s3.reads - before > 10
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            np.testing.assert_array_equal(one[key], other[key])


def test_a_model_is_copied_whole_and_again_when_it_has_changed(s3, put, tmp_path):
    from safetensors.numpy import save

    from capibara.interop import open_model

    weights = np.arange(6, dtype=np.float32).reshape(2, 3)
    put("model/config.json", b'{"model_type": "llama"}')
    put("model/model.safetensors", save({"w": weights}))
    for factor in (1, 2):
        open_model.local_model.cache_clear()
        put("model/model.safetensors", save({"w": factor * weights}))
        s3.faults[:] = ["cut"]
        foreign = open_model.open_model("s3://bucket/model")
        assert foreign.config == {"model_type": "llama"}
        np.testing.assert_array_equal(foreign.read("w"), factor * weights)
    before = s3.reads
    open_model.local_model.cache_clear()
    open_model.open_model("s3://bucket/model")
    assert s3.reads == before


def test_the_copy_of_a_file_is_read_in_pieces(s3, put, monkeypatch):
    monkeypatch.setattr(copies, "PIECE_BYTES", 1000)
    content, before = np.random.default_rng(0).bytes(10_500), s3.reads
    with open(copies.local_file(put("large", content)), "rb") as file:
        assert file.read() == content
    assert s3.reads - before == 11


def test_no_permission_is_one_line_at_once(s3, put):
    url = put("private", b"0123")
    s3.refuses, before = "AccessDenied", s3.requests
    for ask in (lambda: remote.read(url, 0, 4), lambda: remote.listed(url), lambda: remote.below("s3://bucket")):
        with pytest.raises(UserError, match="s3://bucket.* may not be read with this machine's credentials") as raised:
            ask()
        assert "\n" not in str(raised.value)
    assert s3.requests - before < 10
    s3.refuses, before = "ExpiredToken", s3.requests
    with pytest.raises(UserError, match="s3://bucket.* may not be read with this machine's credentials"):
        remote.read(url, 0, 4)
    assert s3.requests == before + 1


def test_no_credentials_are_one_line_at_once(s3, put, monkeypatch, tmp_path):
    import s3fs

    url = put("private", b"0123")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    s3fs.S3FileSystem.clear_instance_cache()
    remote._filesystem.cache_clear()
    before = s3.requests
    with pytest.raises(UserError, match="s3://bucket/private may not be read with this machine's credentials"):
        remote.read(url, 0, 4)
    assert s3.requests == before


def test_what_will_not_pass_is_told_at_once(s3, put):
    url = put("a", b"0123")
    s3.faults[:], before = ["InvalidRequest"] * 20, s3.reads
    with pytest.raises(UserError, match="s3://bucket/a cannot be read .OSError: .*as told"):
        remote.read(url, 0, 4)
    assert s3.reads == before + 1
    s3.refuses = "InvalidRequest"
    with pytest.raises(UserError, match="s3://bucket/a cannot be read .OSError: .*Bad Request"):
        remote.listed(url)
    s3.refuses = None
    s3.faults[:] = []
    for what in ("s3://bucket/none", "s3://none/a"):
        with pytest.raises(UserError, match=f"{what} does not exist, or its bucket does not"):
            remote.read(what, 0, 4)
        assert remote.listed(what) == remote.listed(f"{what}/*") == remote.below(what) == []


@pytest.mark.parametrize("start", [2, 4, 9])
def test_a_file_that_has_fewer_bytes_is_called_cut_short(put, start):
    with pytest.raises(UserError, match="s3://bucket/short is cut short"):
        remote.read(put("short", b"0123"), start, 12)


def test_a_store_that_never_answers_is_given_up(s3, put):
    url = put("a", b"0123")
    s3.faults[:] = ["InternalError"] * 100
    with pytest.raises(TryAgain, match="s3://bucket/a cannot be read: 6 attempts failed"):
        remote.read(url, 0, 4)
    s3.faults[:] = []


@pytest.mark.heavy
def test_a_run_trains_from_s3_and_resumes(s3, put, tmp_path):
    """`train` with failing reads, stopped and resumed, has the losses of the run on the disk."""
    losses = {}
    for name, files in zip(("disk", "s3"), write_corpus(tmp_path / "corpus", put, "corpus"), strict=True):
        for steps in (2, 4):
            s3.faults[:] = ["SlowDown", "cut"] if name == "s3" else []
            gin = {
                "FILES": f"('{files}',)",
                "MODEL_DIR": f"'{tmp_path / name}'",
                "TRAIN_STEPS": steps,
                "Trainer.log_every": 1,
                "ShardedSource.block_bytes": 1024,
                "DecoderConfig.num_layers": 1,
                "DecoderConfig.embed_dim": 64,
            }
            command = [sys.executable, "-m", "capibara.train", "--emulate=2"]
            command += [f"--gin_file={part}.gin" for part in ("models/tiny", "tasks/shards", "runs/pretrain")]
            done = subprocess.run(
                [*command, *(f"--gin.{key}={value}" for key, value in gin.items())],
                env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0 and not s3.faults, done.stderr[-2000:]
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [record["loss"] for record in map(json.loads, lines) if record["kind"] == "train"]
    assert len(losses["disk"]) == 4 and losses["s3"] == losses["disk"]
