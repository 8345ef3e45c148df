"""One of several processes that save and read a state together: python peers.py FOLDER SCENARIO, joined as JAX_* say."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time

import jax
import numpy as np

DEVICES = 4  # of all processes


def main(folder: str, scenario: str) -> None:
    count = int(os.environ["JAX_NUM_PROCESSES"])
    jax.config.update("jax_num_cpu_devices", DEVICES // count)
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        index = int(os.environ["JAX_PROCESS_ID"])
        jax.distributed.initialize(heartbeat_timeout_seconds=10, num_processes=count, process_id=index)
    import saver

    from capibara.checkpoints import arrays
    from capibara.checkpoints.manager import Checkpointing, Checkpoints
    from capibara.multihost import peers

    def state(step):
        return saver.sharded(saver.state_of(step), DEVICES)

    with Checkpoints(folder, Checkpointing()) as checkpoints:
        if scenario == "read":
            step = checkpoints.verified_step()
            found = checkpoints.restore_state(checkpoints.restore_progress(step), saver.target_of(state(0)))
            jax.tree.map(assert_equal, found, state(step))
            print("read", step, flush=True)
            return
        step = 1 + max(checkpoints.steps(), default=0)
        checkpoints.save(step, state(step), {}, {})
        checkpoints.wait()
        print("saved", step, flush=True)
        if scenario == "killed":
            if jax.process_index() == 1:
                arrays.write = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)
            checkpoints.save(step + 1, state(step + 1), {}, {})
        if scenario == "lost":
            if jax.process_index() == 1:
                peers.together = functools.partial(lose_answer, peers.together)
            checkpoints.save(step + 1, state(step + 1), {}, {})
            try:
                checkpoints.wait()
            finally:
                os._exit(1)


def lose_answer(together, point):
    """All have written, and process 0 commits the step meanwhile; of that this process hears nothing but an error."""
    together(point)
    if point == "files read":
        time.sleep(2)
        raise RuntimeError("the connection is lost")


def assert_equal(one, other):
    """Bit for bit, as far as this process has them."""
    assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
    for mine, its in zip(one.addressable_shards, other.addressable_shards, strict=True):
        assert mine.index == its.index
        np.testing.assert_array_equal(np.asarray(mine.data), np.asarray(its.data))


if __name__ == "__main__":
    main(*sys.argv[1:])
