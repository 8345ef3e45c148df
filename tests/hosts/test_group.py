"""A node of a group that is a slice of two hosts: it sends, waits and goes on as one process does."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

from capibara.consensus.voting import Ballot
from capibara.monitoring.metrics_file.loggers import read_metrics
from capibara.strategies.group import arrays
from capibara.strategies.group.coordinator import Coordinator
from capibara.strategies.group.exchange import Exchange, as_json

NODE = """
Trainer.group = @GroupNode()
GroupNode.name = "a"
GroupNode.every = 3
GroupNode.poll_s = 0.1
"""


class Ended(Exception):
    pass


@contextlib.contextmanager
def coordinated(folder, others=lambda: None, **fields):
    """A coordinator for two rounds, of one node unless fields say more, in a thread that also plays the other nodes."""
    ended = threading.Event()

    def check():
        if ended.is_set():
            raise Ended
        others()

    def run():
        with contextlib.suppress(Ended):
            Coordinator(exchange=str(folder), **{"num_nodes": 1, "rounds": 2, "poll_s": 0.05} | fields).run(check=check)

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


def test_a_node_of_two_hosts_votes(cluster, shell):
    """Two of the other three approve, so that the third vote is this node's."""
    folder, seen = shell.folder / "voting_exchange", set()
    exchange = Exchange(str(folder))

    def others():
        number = 0 if (agreed := exchange.agreed()) is None else agreed.round_ + 1
        if number not in seen and exchange.has_sent(number, "a"):
            seen.add(number)
            note = exchange.note(number, "a")
            for name in "bcd":
                exchange.send(number, name, exchange.update(number, "a", note, 10**9), note)
        proposal = exchange.record(f"rounds/{number:06d}/proposal.json")
        for name in "bc" if proposal is not None and proposal.digest not in seen else "":
            ballot = as_json(Ballot(digest=proposal.digest, score=1.0))
            exchange.write(f"rounds/{number:06d}/ballots/{name}.json", ballot)

    (shell.folder / "node.gin").write_text(NODE)
    flags = (
        "--gin_file=tiny.gin",
        "--gin_file=node.gin",
        "--gin.MODEL_DIR=voting",
        f"--gin.GroupNode.exchange={folder}",
    )
    flags = (*flags, "--gin.Evaluation.every=6", "--gin.Evaluation.max_batches=2")
    with coordinated(folder, others, num_nodes=4, voting_strategy="byzantine", quality_threshold=0.5):
        ends = cluster("flags", 2).run("train", *flags)
    assert [one.code for one in ends] == [0, 0], [(one.out[-500:], one.err[-2000:]) for one in ends]
    assert [report["vote"]["approve"] for report in exchange.reports()] == 2 * [["a", "b", "c"]]
    assert "round 2: the proposed model has the score" in ends[0].out
