"""A node of a group that is a slice of two hosts: it sends, waits and goes on as one process does."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

from capibara.monitoring.trackers.loggers import read_metrics
from capibara.strategies.group import arrays
from capibara.strategies.group.coordinator import Coordinator
from capibara.strategies.group.exchange import Exchange

NODE = """
Trainer.group = @GroupNode()
GroupNode.name = "a"
GroupNode.every = 3
GroupNode.poll_s = 0.1
"""


class Ended(Exception):
    pass


@contextlib.contextmanager
def coordinated(folder):
    """A coordinator of one node for two rounds, in a thread."""
    ended = threading.Event()

    def check():
        if ended.is_set():
            raise Ended

    def run():
        with contextlib.suppress(Ended):
            Coordinator(exchange=str(folder), num_nodes=1, rounds=2, poll_s=0.05).run(check=check)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield Exchange(str(folder))
    finally:
        ended.set()
        thread.join(60)


def test_a_node_of_two_hosts_trains_as_one_of_one(cluster, shell):
    (shell.folder / "node.gin").write_text(NODE)
    losses, models = {}, {}
    for name, count in (("one", 1), ("two", 2)):
        flags = ("--gin_file=tiny.gin", "--gin_file=node.gin", f"--gin.MODEL_DIR={name}", "--gin.Checkpointing.every=3")
        with coordinated(shell.folder / f"exchange_{name}") as exchange:
            flags = (*flags, f"--gin.GroupNode.exchange={shell.folder / f'exchange_{name}'}")
            ends = cluster("flags", count).run("train", *flags)
        assert [one.code for one in ends] == [0] * count, [(one.out[-500:], one.err[-2000:]) for one in ends]
        assert "step 6: round 2 of 2: agreed by 1 nodes (a)" in ends[0].out
        losses[name] = [r["loss"] for r in read_metrics(str(shell.folder / name)) if r["kind"] == "train"]
        models[name] = arrays.from_bytes(exchange.read_model(exchange.agreed()))
    np.testing.assert_allclose(losses["two"], losses["one"], rtol=1e-4)
    assert len(losses["one"]) == 6
    for name, found in models["two"].items():
        np.testing.assert_allclose(found, models["one"][name], atol=2e-3)


@pytest.mark.heavy
@pytest.mark.parametrize("fields", ["--gin.GroupNode.every=4", "--gin.GroupNode.exchange=/dev/null"])
def test_what_is_wrong_is_one_line_on_each_host(cluster, shell, fields):
    (shell.folder / "node.gin").write_text(NODE)
    flags = ("--gin_file=tiny.gin", "--gin_file=node.gin", "--gin.MODEL_DIR=wrong", "--gin.GroupNode.exchange=there")
    ends = cluster("flags", 2).run("train", *flags, fields)
    assert [one.code for one in ends] == [2, 2], [(one.out[-500:], one.err[-2000:]) for one in ends]
    for one in ends:
        lines = [line for line in one.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "Traceback" not in one.err, one.err
        assert ("must be a multiple of the 4 steps" if "every" in fields else "cannot be used") in lines[0]
