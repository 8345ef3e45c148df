"""A tiny run as a user has it: a Gin file, a corpus, and the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]

TINY = """
include "runs/pretrain.gin"
include "tasks/jsonl.gin"
MODEL_DIR = "run"
FILES = ("corpus.jsonl",)
TRAIN_STEPS = 6
BATCH_SIZE = 8
LENGTH = 64
LEARNING_RATE = 1e-2
DecoderConfig.vocab_size = 384
DecoderConfig.embed_dim = 32
DecoderConfig.num_layers = 2
DecoderConfig.num_heads = 2
DecoderConfig.mlp_dim = 64
DecoderConfig.dtype = "float32"
Schedule.kind = "rsqrt"
Schedule.warmup_fraction = 0.0
Evaluation.every = 0
Checkpointing.every = 0
Trainer.log_every = 1
"""


@dataclasses.dataclass
class Done:
    code: int
    out: str
    err: str


class Shell:
    """Runs verbs in a folder that holds tiny.gin and corpus.jsonl, as processes of their own or in this one."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        (folder / "tiny.gin").write_text(TINY)
        rng = np.random.default_rng(0)
        texts = [" ".join(rng.choice(["river", "grass", "swims", "eats"], int(rng.integers(3, 40)))) for _ in range(99)]
        (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def start(self, verb: str, *args: str, **environment: str) -> subprocess.Popen:
        """A process of its own, of which stdout can be read."""
        environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "PYTHONUNBUFFERED": "1", **environment}
        return subprocess.Popen(
            [sys.executable, "-m", f"capibara.{verb}", *args],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, verb: str, *args: str, **environment: str) -> Done:
        process = self.start(verb, *args, **environment)
        out, err = process.communicate(timeout=300)
        return Done(process.returncode, out, err)


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    return Shell(tmp_path_factory.mktemp("work"))


def run_here(folder: pathlib.Path, verb: str, *args: str) -> int:
    """Runs a verb in this process and its 8 devices -> its exit code: nothing is imported or compiled again."""
    import importlib

    from capibara.core import devices
    from capibara.multihost import exits

    emulate = devices.emulate

    def emulate_as_before(count):
        with contextlib.suppress(RuntimeError):  # JAX has computed in this process: its devices stay as they are
            emulate(count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "emulate", emulate_as_before)
        patch.chdir(folder)
        return exits.run_verb(importlib.import_module(f"capibara.{verb}").main, list(args))


@pytest.fixture
def here(shell, capfd):
    """(verb, arguments) -> Done, in this process."""

    def run(verb, *args):
        capfd.readouterr()
        code = run_here(shell.folder, verb, *args)
        return Done(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def made_here(shell):
    """(verb, arguments): runs it in this process, and it ends well; for what the tests of a file share."""

    def run(verb, *args):
        assert run_here(shell.folder, verb, *args) == 0

    return run
