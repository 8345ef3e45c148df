"""States to save, and processes that save them and are killed: python saver.py FOLDER SCENARIO [ARGUMENT].

Imported by the tests too, for the states.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from capibara import sharding
from capibara.checkpoints import manager as module
from capibara.checkpoints import saving
from capibara.checkpoints.manager import Checkpointing, Checkpoints
from capibara.sharding import Plan
from capibara.storage import threads
from capibara.training.base.state import TrainState, with_shardings

LARGE = 1 << 20  # parameters of a state whose save takes long enough to be killed in


def state_of(step, width=64):
    """A state that no other step has."""
    kernel = jax.random.normal(jax.random.key(step), (max(8, width // 8), 8))
    params = {"layer": {"kernel": kernel, "bias": jnp.full(8, 0.5 + step)}, "embedding": kernel.T.astype(jnp.bfloat16)}
    moments = {"mu": jax.tree.map(lambda x: x * 0.1, params), "count": jnp.int32(step)}
    return TrainState(step=jnp.int32(step), params=params, opt_state=(moments,), ema=None)


def sharded(state, devices=8, **axes):
    """The state with its arrays split over a mesh along their first dimension, where that divides."""
    mesh = sharding.make_mesh(Plan(batch_size=8, **(axes or {"fsdp": devices})), jax.devices()[:devices])

    def put(x):
        spec = PartitionSpec("fsdp") if x.ndim and x.shape[0] % mesh.shape["fsdp"] == 0 else PartitionSpec()
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(put, state)


def target_of(state):
    """What to restore a state like this onto: where it lies now."""
    return with_shardings(state, jax.tree.map(lambda x: x.sharding, state))


def main(folder: str, scenario: str, argument: int = 0) -> None:
    checkpoints = Checkpoints(folder, Checkpointing(keep=1 if scenario == "retention" else 3))
    step = 1 + max(checkpoints.steps(), default=0)
    checkpoints.save(step, state_of(step, LARGE), {}, {})
    checkpoints.wait()
    if scenario in ("rename", "retention"):
        _kill_at(("replace", "rename") if scenario == "rename" else ("unlink", "rmdir", "rename"), argument)
    if scenario == "many":
        for more in range(step + 1, step + 50):
            print("saving", more, flush=True)
            checkpoints.save(more, state_of(more, LARGE), {}, {})
            checkpoints.wait()
            print("saved", more, flush=True)
    print("saving", step + 1, flush=True)
    if scenario == "exit":
        _begin_late()  # when the interpreter is about to exit, where Python 3.12 starts no threads any more
    if scenario == "fails at its end":
        module.manifest.write = _fail
    checkpoints.save(step + 1, state_of(step + 1, LARGE), {}, {})
    if scenario == "exit":
        sys.exit(0)
    if scenario in ("rename", "retention"):
        checkpoints.wait()
        print("saved", step + 1, flush=True)


def _begin_late() -> None:
    write = saving.Writer.write

    def late(*args, **kwargs):
        time.sleep(0.5)
        threads._pool.cache_clear()  # as if the first save had needed none of them
        return write(*args, **kwargs)

    saving.Writer.write = late


def _kill_at(names, count):
    """Kills this process before it calls any of these functions of os for the count-th time."""
    left = [count]

    def killing(original):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    for name in names:
        setattr(os, name, killing(getattr(os, name)))
    shutil._use_fd_functions = False  # what it removes goes through os.unlink and os.rmdir of ours


def _fail(folder, manifest):
    raise OSError(5, "Input/output error")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
