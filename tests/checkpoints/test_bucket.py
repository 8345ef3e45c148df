"""Run folders in Google Cloud Storage and S3, with emulators."""

from __future__ import annotations

import json
import os
import pathlib
import secrets
import shutil
import signal
import subprocess
import sys
import time

import jax
import pytest
from etils import epath

from capibara.checkpoints import manifest, run_manifest, step_folders
from capibara.checkpoints.manager import Checkpointing, Checkpoints
from capibara.cli import convert
from capibara.core import bucket_faults
from capibara.core.types import UserError
from capibara.multihost import exits
from capibara.sharding import Plan

HERE = pathlib.Path(__file__).parent


HEAVY_ON_S3 = ["gs", pytest.param("s3", marks=pytest.mark.heavy)]


@pytest.fixture
def bucket(bucket_server, s3_server):
    """The environment of a program for which gs://bucket and s3://bucket are the emulators'."""
    s3_server.faults[:], s3_server.refuses = [], None
    servers = {**bucket_server.environment, **s3_server.environment}
    return {**os.environ, **servers, "PYTHONPATH": str(HERE.parents[1])}


def run(bucket, *command):
    return subprocess.run([sys.executable, *command], env=bucket, capture_output=True, text=True, timeout=300)


def part(bucket, name, folder):
    done = run(bucket, str(HERE / "bucket.py"), folder, name)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("scheme", HEAVY_ON_S3)
def test_what_is_saved_in_a_bucket_comes_back(bucket, scheme):
    part(bucket, "save", f"{scheme}://bucket/saved")


@pytest.mark.parametrize("scheme", [pytest.param("gs", marks=pytest.mark.heavy), "s3"])
def test_an_interrupted_run_resumes_with_the_bits_of_a_disk(make_trainer, train, request, scheme, tmp_path):
    request.getfixturevalue(scheme)
    found, devices, plan = [], jax.devices()[:2], Plan(batch_size=8, fsdp=2)
    for folder in (str(tmp_path / "disk"), f"{scheme}://bucket/{secrets.token_hex(4)}"):
        trainer = make_trainer(model_dir=folder, steps=4, checkpointing=Checkpointing(every=2, keep=1), plan=plan)
        at_3 = lambda step: step == 3 and os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
        stopped, resumed = train(trainer, devices, after_step=at_3), train(trainer, devices)
        assert (stopped.outcome.step, stopped.outcome.reason, resumed.start_step) == (3, "interrupted", 3)
        last = manifest.verify(step_folders.folder_of(folder) / "4")
        losses = [*stopped.losses.items(), *resumed.losses.items()]
        found.append((losses, {file.path: file.xxh128 for file in last.files if file.path != manifest.RUN}))
        assert step_folders.steps(step_folders.folder_of(folder)) == [4]
    assert found[0] == found[1] and len(found[0][0]) == 4


@pytest.mark.fault(66)
def test_what_s3_refuses_is_one_line(s3, capfd, monkeypatch):
    """A bucket without permission, and a missing bucket, which is not created."""

    def told(ask):
        code = exits.run_verb(lambda argv: ask() and None, [])
        return code, [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]

    monkeypatch.setattr(bucket_faults, "_named", set())
    folder = f"s3://bucket/{secrets.token_hex(4)}"
    with Checkpoints(folder, Checkpointing()):
        pass
    s3.refuses = "AccessDenied"
    for ask in (lambda: convert.main(["list", folder]), lambda: Checkpoints(folder, Checkpointing())):
        code, lines = told(ask)
        assert code == 2 and len(lines) == 1 and "error: permission denied in s3://bucket (" in lines[0], lines
    s3.refuses = None
    bucket_faults._named.clear()
    for _ in range(2):
        code, lines = told(lambda: Checkpoints("s3://none/run", Checkpointing()))
        assert code == 2 and lines == [
            "error: s3://none does not exist (The specified bucket does not exist): create it, or name another path"
        ]


@pytest.mark.parametrize("scheme, library, extra", [("gs", "gcsfs", "gcs"), ("s3", "s3fs", "s3")])
def test_without_what_reads_a_bucket_it_is_said_what_to_install(monkeypatch, scheme, library, extra):
    monkeypatch.setitem(sys.modules, library, None)
    why = rf'^{library} is not installed \(needed for {scheme}://bucket/run\): pip install -e "[^"]+\[{extra}\]"$'
    with pytest.raises(UserError, match=why):
        Checkpoints(f"{scheme}://bucket/run", Checkpointing())


@pytest.mark.heavy
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_bucket_is_as_good_as_a_disk(bucket, scheme):
    for name in ("save", "damage", "two writers", "taken over", "options"):
        part(bucket, name, f"{scheme}://bucket/another")


@pytest.mark.fault(1)
@pytest.mark.heavy
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_save_that_is_killed_leaves_its_step_whole_in_the_bucket_or_none(bucket, tmp_path, scheme):
    part(bucket, "save", folder := f"{scheme}://bucket/run")
    for step, delay_s in enumerate((0.0, 0.1, 0.3), 6):
        child = subprocess.Popen(
            [sys.executable, str(HERE / "bucket.py"), folder, "killed", str(step)],
            env=bucket, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert child.stdout.readline() == "saving\n"
        time.sleep(delay_s)
        child.kill()
        saved = "saved" in child.communicate()[0]
        table = tmp_path / "verdict.json"
        done = run(bucket, "-m", "capibara", "convert", "verify", folder, f"--json={table}")
        listed = step in [row["step"] for row in json.loads(table.read_text())]
        # A kill may come after the commit and before its log line, but every step that was logged as saved exists.
        assert done.returncode == 0 and saved <= listed, done.stdout + done.stderr


@pytest.mark.heavy
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_run_lives_in_a_bucket(bucket, tmp_path, scheme):
    """Trained, stopped, resumed, listed, pruned, queried; other folders are read without the bucket's library."""
    folder = f"{scheme}://bucket/tiny"
    train = ("-m", "capibara", "train", "--gin_file=quickstart.gin", "--emulate=2", f"--gin.MODEL_DIR='{folder}'")
    small = ("--gin.Trainer.log_every=1", "--gin.DecoderConfig.num_layers=1", "--gin.DecoderConfig.embed_dim=64")
    for steps in (2, 4):
        done = run(bucket, *train, *small, f"--gin.TRAIN_STEPS={steps}", "--gin.Checkpointing.every=1")
        assert done.returncode == 0, done.stderr[-3000:]
    assert "resuming from step 2" in done.stdout
    done = run(bucket, "-m", "capibara", "convert", "list", folder, f"--json={tmp_path / 'list.json'}")
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in json.loads((tmp_path / "list.json").read_text())] == [2, 3, 4]
    done = run(bucket, "-m", "capibara", "convert", "prune", folder, "--keep=1")
    assert done.returncode == 0, done.stderr
    done = run(bucket, "-m", "capibara", "convert", "verify", folder)
    assert done.returncode == 0 and done.stdout.split()[0] == "4", done.stdout + done.stderr
    done = run(bucket, "-m", "capibara", "infer", f"--model_dir={folder}", "--prompt=def ")
    assert done.returncode == 0 and done.stdout.startswith("def "), done.stdout + done.stderr


@pytest.mark.fault(66)
@pytest.mark.parametrize("ask", [run_manifest.read, run_manifest.check, run_manifest.seal, run_manifest.seal_logs])
@pytest.mark.parametrize("part", ["alt=media", "/o?", "/b/bucket"])
def test_a_bucket_that_refuses_has_not_corrupted_the_manifest_of_a_run(gs, ask, part, capfd):
    """Restoring it from a copy, or sealing it again, would be wrong."""
    folder = epath.Path(f"gs://bucket/{secrets.token_hex(4)}")
    run_manifest.begin(folder, {})
    run_manifest.replace(folder, {"config.gin": b"A = 1\n"})
    with gs.failing(lambda method, path: 403 if part in path else None):
        code = exits.run_verb(lambda argv: ask(folder) and None, [])
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    if code == 0:  # it had no need to ask that
        assert part != "/b/bucket" and not told
    else:
        assert code == 2 and len(told) == 1 and told[0].startswith("error: permission denied in gs://bucket ")
    assert run_manifest.read(folder).steps == frozenset()


TOKENIZER = """
import shutil, sys
from capibara.data.chat.conversations import ChatJsonlSource
from capibara.data.chat.formats import Conversation
from capibara.data.chat.template import ChatTemplate
from capibara.data.dataset import Dataset
from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary
from capibara.models.api import DecoderConfig
from capibara.optim import Optimizer
from capibara.sharding import Plan
from capibara.training.run_folder import own_tokenizer
from capibara.training.trainer import Trainer
from capibara.core.types import UserError

path, run = sys.argv[1], "gs://bucket/chats"
source = ChatJsonlSource(files=("a.jsonl",), template=ChatTemplate(tokenizer=path))
dataset = Dataset(source=source, vocabulary=TokenizerJsonVocabulary(path=path), length=64)
prints = dataset.vocabulary.fingerprint(), source.template.fingerprint()
own_tokenizer.keep(dataset, run)
own_tokenizer.keep(dataset, run)
with open(f"{path}/chat_template.jinja", "a") as file:
    file.write("more")
try:
    own_tokenizer.keep(Dataset(source=source, vocabulary=dataset.vocabulary, length=64), run)
except UserError as error:
    assert "(chat_template.jinja differs" in str(error), error
else:
    raise AssertionError("a changed template was not refused")
shutil.rmtree(path)
small = DecoderConfig(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64)
trainer = Trainer(model_dir=run, steps=1, model=small, plan=Plan(batch_size=8), optimizer=Optimizer(), dataset=dataset)
own = own_tokenizer.of_run(trainer).dataset
assert (own.vocabulary.fingerprint(), own.source.template.fingerprint()) == prints
"""


@pytest.mark.heavy  # test_own_tokenizer has disks in the short suite
def test_a_tokenizer_is_carried_in_a_bucket_too(bucket, toy_tokenizer, tmp_path):
    done = run(bucket, "-c", TOKENIZER, shutil.copytree(toy_tokenizer, tmp_path / "tokenizer"))
    assert done.returncode == 0, done.stderr[-3000:]
