"""The parts of a run in a bucket, each as a user's program would do it: python bucket.py FOLDER PART [STEP]."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import fsspec
import jax
import numpy as np

from capibara.checkpoints.encryption import Encryption
from capibara.checkpoints.manager import Checkpointing, Checkpoints
from capibara.core.types import UserError

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "faults"))
import saver  # noqa: E402


def save(folder, steps, **options):
    with Checkpoints(folder, Checkpointing(keep=2, **options)) as checkpoints:
        for step in steps:
            checkpoints.save(step, saver.sharded(saver.state_of(step)), {}, {})
            checkpoints.wait()
        return checkpoints.steps()


def newest(folder, **options):
    target = saver.target_of(saver.sharded(saver.state_of(0), 2))
    with Checkpoints(folder, Checkpointing(keep=2, **options)) as checkpoints:
        restored, state = checkpoints.restore(target)
        jax.tree.map(np.testing.assert_array_equal, state, saver.state_of(restored.step))
        return restored.step, dict(checkpoints.corrupted), checkpoints.steps()


def main(folder: str, part: str, step: str = "") -> None:
    files = fsspec.filesystem(folder.partition(":")[0])
    match part:
        case "save":
            assert save(folder, (1, 2, 3)) == [2, 3]
            assert newest(folder) == (3, {}, [2, 3])
            names = {path.rpartition("/")[2] for path in files.ls(f"{folder}/checkpoints")}
            assert names == {"2", "3"}, names  # the lease is given back
        case "damage":
            path = f"{folder}/checkpoints/3/state/params.layer.kernel/0.0"
            content = files.cat_file(path)
            files.pipe_file(path, content[:-1] + bytes([content[-1] ^ 1]))
            restored, corrupted, steps = newest(folder)
            assert (restored, list(corrupted), steps) == (2, [3], [2]), (restored, corrupted, steps)
            assert "state/params.layer.kernel/0.0 (array params/layer/kernel) has changed" in corrupted[3]
            assert save(folder, (3,)) == [2, 3]
        case "two writers":
            with Checkpoints(folder, Checkpointing()):
                try:
                    Checkpoints(folder, Checkpointing())
                except UserError as error:
                    assert f"is being written by process {os.getpid()} on " in str(error)
                else:
                    raise AssertionError("two writers")
        case "taken over":
            path = f"{folder}/checkpoints/lease.json"
            with Checkpoints(folder, Checkpointing()) as checkpoints:
                checkpoints.steps()  # gcsfs remembers the size of what it lists
                record = '{"pid": 1, "host": "elsewhere", "nonce": "another"}'.ljust(1000)
                code = "import sys, fsspec; fsspec.core.url_to_fs(sys.argv[1])[0].pipe_file(sys.argv[1], sys.argv[2].encode())"
                subprocess.run([sys.executable, "-c", code, path, record], check=True)
                checkpoints.save(9, saver.state_of(9), {}, {})
                try:
                    checkpoints.wait()
                except UserError as error:
                    assert "was taken over by process 1 on elsewhere" in str(error), error
                else:
                    raise AssertionError("two writers")
            assert 9 not in checkpoints.steps()
            files.rm(path)
        case "options":
            os.environ["CAPIBARA_CHECKPOINT_KEY"] = "01" * 32
            options = {"encryption": Encryption(), "incremental": True, "compression": "zstd"}
            assert save(folder, (4, 5), **options) == [4, 5]
            assert newest(folder, **options) == (5, {}, [4, 5])
        case "killed":
            checkpoints = Checkpoints(folder, Checkpointing())
            checkpoints.save(int(step), saver.state_of(int(step), saver.LARGE), {}, {})
            print("saving", flush=True)
            checkpoints.wait()
            print("saved", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
