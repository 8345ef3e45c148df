"""A group of four jobs of which one is killed, one is stopped and one sends garbage, and a coordinator that is killed."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from capibara.monitoring.metrics_file.loggers import read_metrics
from capibara.strategies.group.exchange import Exchange

HERE = pathlib.Path(__file__).parent
CHECKOUT = HERE.parents[1]
STEPS, ROUND, ROUNDS = 60, 5, 12
NODE = (
    "train", "--gin_file=tiny.gin", "--gin_file=node.gin", "--emulate=1", f"--gin.TRAIN_STEPS={STEPS}",
    f"--gin.ROUND={ROUND}", f"--gin.Evaluation.every={STEPS}", "--gin.Evaluation.max_batches=4",
)  # fmt: skip
COORDINATE = (
    "coordinate", "--gin_file=runs/coordinate.gin", "--gin.NODES=4", f"--gin.ROUNDS={ROUNDS}",
    "--gin.Coordinator.quorum=1", "--gin.Coordinator.grace_s=12.0", "--gin.Coordinator.poll_s=0.1",
    "--gin.Coordinator.consensus_threshold=0.2", "--gin.OuterSgd.learning_rate=1.0", "--gin.OuterSgd.momentum=0.0",
)  # fmt: skip


def seen_round(folder, number, within_s=240.0):
    """Waits until a round has ended."""
    end_s = time.monotonic() + within_s
    while not (folder / f"rounds/{number:06d}/report.json").exists():
        assert time.monotonic() < end_s, f"round {number} did not end"
        time.sleep(0.05)


@contextlib.contextmanager
def group(shell, name, nodes, *flags):
    """(the exchange's folder, the processes by name) of a group whose nodes each have data of their own.

    Args:
      flags: of the coordinator.
    """
    folder = shell.folder / name
    (shell.folder / "node.gin").write_text(
        "Trainer.group = @GroupNode()\nGroupNode.poll_s = 0.1\nGroupNode.every = %ROUND\nROUND = 5\n"
    )
    processes = {"coordinator": shell.start(*COORDINATE, f"--gin.EXCHANGE='{folder}'", *flags)}
    for seed, node in enumerate(nodes):
        own = (
            f"--gin.MODEL_DIR={name}-{node}",
            f"--gin.GroupNode.name='{node}'",
            f"--gin.GroupNode.exchange='{folder}'",
        )
        processes[node] = shell.start(*NODE, *own, f"--gin.Dataset.seed={seed}")
    try:
        yield folder, processes
    finally:
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.communicate()


def loss(shell, run):
    """Of the evaluation of the last agreed model."""
    (found,) = [r["loss"] for r in read_metrics(str(shell.folder / run)) if r["kind"] == "eval"]
    return found


def ended(process):
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


@pytest.mark.heavy  # two minutes; strategies/group/test_coordinator and training/test_group are in the short suite
def test_one_killed_one_stopped_and_one_sending_garbage_do_not_end_training(shell):
    with group(shell, "healthy", "abcd") as (_, processes):
        assert [ended(process)[0] for process in processes.values()] == [0] * 5
    with group(shell, "broken", "abc") as (folder, processes):
        liar = [sys.executable, str(HERE / "liar.py"), str(folder), "d", "a"]
        processes["d"] = subprocess.Popen(liar, env={**os.environ, "PYTHONPATH": str(CHECKOUT)})
        seen_round(folder, 2)
        processes["b"].kill()
        seen_round(folder, 4)
        processes["c"].send_signal(signal.SIGSTOP)
        seen_round(folder, 6)
        processes["coordinator"].kill()  # and started again, as any job is
        processes["coordinator"].communicate()
        processes["coordinator"] = shell.start(*COORDINATE, f"--gin.EXCHANGE='{folder}'")
        code, out, err = ended(processes["coordinator"])
        assert code == 0 and "resuming after round" in out and f"finished after {ROUNDS} rounds" in out, (out, err)
        code, out, err = ended(processes["a"])
        assert code == 0 and "Traceback" not in err, err
        reports = {report["round"]: report for report in Exchange(str(folder)).reports()}
        assert sorted(reports) == list(range(1, ROUNDS + 1)) and all(one["succeeded"] for one in reports.values())
        assert all("a" in report["accepted"] and "d" in report["without"] for report in reports.values())
        assert "b" in reports[2]["accepted"] and "it sent nothing within" in reports[5]["without"]["b"]
        assert "it sent nothing within" in reports[8]["without"]["c"] and "c" in reports[3]["accepted"]
        reasons = [reports[number]["without"]["d"] for number in (6, 7, 8, 9, 10)]
        for reason, words in zip(
            reasons, ("not finite", "norm", "missing", "norm", "no safetensors file"), strict=True
        ):
            assert words in reason, reasons
        # The stopped one goes on, and comes to the end with the others' model.
        processes["c"].send_signal(signal.SIGCONT)
        code, out, err = ended(processes["c"])
        assert code == 0 and f"step {STEPS}: " in out and "this node was at step" in out, (out, err)
    losses = {run: loss(shell, run) for run in ("healthy-a", "broken-a", "broken-c")}
    print(json.dumps(losses))
    assert losses["broken-a"] == pytest.approx(losses["healthy-a"], rel=0.03)
    assert losses["broken-c"] == pytest.approx(losses["broken-a"], rel=0.03)


@pytest.mark.heavy  # 40 s; strategies/group/test_voting is in the short suite
def test_four_nodes_vote_on_each_model(shell):
    vote = ("voting_strategy=byzantine", "quality_threshold=0.5", "quorum=3")
    flags = [f"--gin.Coordinator.{one}" for one in vote]
    with group(shell, "voting", "abcd", *flags) as (folder, processes):
        code, out, err = ended(processes["coordinator"])
        assert code == 0 and f"finished after {ROUNDS} rounds" in out, (out, err)
        for node in "abcd":
            code, out, err = ended(processes[node])
            assert code == 0 and "the proposed model has the score" in out, (out, err)
        for report in Exchange(str(folder)).reports():
            assert report["succeeded"] and len(report["vote"]["approve"]) >= 3, report
