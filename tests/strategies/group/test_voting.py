"""The vote of a group: which models become agreed, and what nodes cast."""

from __future__ import annotations

import json
import math
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from capibara.consensus.aggregation import Aggregation, TrimmedMean
from capibara.consensus.voting import Ballot
from capibara.core.types import UserError
from capibara.objectives.batches import Reporter
from capibara.storage import hashing
from capibara.strategies.group import arrays
from capibara.strategies.group.exchange import Agreed, Exchange, as_json
from capibara.strategies.group.voting import Voter

sys.path.append(str(pathlib.Path(__file__).resolve().parent))
from test_coordinator import Play, coordinator, honest, model_of, moved, reports, send, start  # noqa: E402

NODES = dict.fromkeys("abcd", honest)


def path_of(round_, name):
    return f"rounds/{round_:06d}/{name}.json"


class Voting(Play):
    """Like Play; each node also answers each proposal once, by name -> its score, a Ballot, or bytes; None: it is silent."""

    def __init__(self, folder, ballots, nodes=NODES):
        super().__init__(folder, nodes)
        self.ballots, self.seen = ballots, []

    def __call__(self):
        super().__call__()
        round_ = 0 if (agreed := self.exchange.agreed()) is None else agreed.round_ + 1
        proposal = self.exchange.record(path_of(round_, "proposal"))
        if proposal is None or proposal.digest in self.seen:
            return
        self.seen.append(proposal.digest)
        for name, ballot in self.ballots.items():
            if isinstance(ballot, float):
                ballot = Ballot(digest=proposal.digest, score=ballot)
            if ballot is not None:
                data = ballot if isinstance(ballot, bytes) else as_json(ballot)
                self.exchange.write(path_of(round_, f"ballots/{name}"), data)


def voting(folder, **fields):
    own = {"num_nodes": 4, "rounds": 2, "voting_strategy": "byzantine", "quality_threshold": 0.85, "max_retries": 9}
    return coordinator(folder, **own | fields)


def run(folder, ballots, nodes=NODES, **fields):
    lines = []
    voting(folder, **fields).run(lines.append, Voting(folder, ballots, nodes))
    return lines


def test_a_model_that_enough_nodes_approve_is_agreed(tmp_path):
    lines = run(tmp_path / "vote", dict.fromkeys("abcd", 1.0))
    coordinator(tmp_path / "plain", num_nodes=4, rounds=2).run(lambda line: None, Play(tmp_path / "plain", NODES))
    assert "agreed by 4 nodes" in lines[-1]
    for name, found in model_of(tmp_path / "vote").items():
        np.testing.assert_array_equal(found, model_of(tmp_path / "plain")[name])
    for report in reports(tmp_path / "vote"):
        assert report["vote"]["quorum"] == 3 and len(report["vote"]["approve"]) >= 3


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (0.84, "its score is below the threshold"),
        (math.nan, "its score is not finite"),
        (None, "it did not vote"),
        (Ballot(digest="0" * 32, score=1.0), "it did not vote"),
        (b"{", "it did not vote"),
        (b'{"digest": 5, "score": 1.0}', "it did not vote"),
        (b"\x00" * (3 << 20), "it did not vote"),
    ],
    ids=["low", "nan", "silent", "other", "cut", "type", "large"],
)
def test_one_of_four_may_vote_as_it_likes_and_two_may_not(tmp_path, other, why):
    lines = run(tmp_path / "one", {"a": 1.0, "b": 1.0, "c": 0.85, "d": other}, rounds=1)
    assert "agreed by 4 nodes" in lines[-1]
    lines = run(tmp_path / "two", {"a": 1.0, "b": 1.0, "c": other, "d": other}, rounds=1)
    assert f"no agreement (2 votes, must be at least 3 (c: {why}; d: {why}))" in lines[-1]
    for name, found in model_of(tmp_path / "two").items():
        np.testing.assert_array_equal(found, start()[name])
    (report,) = reports(tmp_path / "two")
    assert not report["succeeded"] and report["vote"]["approve"] == ["a", "b"]


def test_strangers_and_nodes_without_an_update_do_not_vote(tmp_path):
    """Of five nodes one sends garbage: its vote would be the fourth of the four that a model needs."""

    def broken(exchange, round_, name, model):
        if model is None:
            return honest(exchange, round_, name, model)
        return send(exchange, round_, name, moved(model, 1), data=b"garbage")

    nodes = NODES | {"e": broken}
    ballots = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.1, "e": 1.0, "x": 1.0, "y": 1.0}
    lines = run(tmp_path, ballots, nodes, num_nodes=5, rounds=1, quorum=4)
    assert "no agreement (3 votes, must be at least 4 (d: its score is below" in lines[-1]


def test_a_score_that_is_too_low_needs_no_waiting(tmp_path):
    """Neither does the fourth vote once three approve: the time limit is far off."""
    run(tmp_path / "low", {"a": 0.1, "b": 0.1, "c": None, "d": None}, rounds=1, consensus_timeout_s=600.0)
    run(tmp_path / "high", {"a": 1.0, "b": 1.0, "c": 1.0, "d": None}, rounds=1, consensus_timeout_s=600.0)


def test_the_number_of_votes_grows_with_the_nodes_that_may_lie(tmp_path):
    rule = Aggregation(rule=TrimmedMean(), faults=2)
    nodes = dict.fromkeys("abcdefg", honest)
    config = {"num_nodes": 7, "aggregation": rule, "rounds": 1}
    lines = run(tmp_path / "five", dict.fromkeys("abcde", 1.0), nodes, **config)
    assert "agreed by 7 nodes" in lines[-1]
    lines = run(tmp_path / "four", dict.fromkeys("abcd", 1.0) | dict.fromkeys("efg", 0.0), nodes, **config)
    assert "no agreement (4 votes, must be at least 5" in lines[-1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_nodes": 3}, "Coordinator.num_nodes is 3, must be at least 4 for a vote"),
        ({"num_nodes": 6, "aggregation": Aggregation(rule=TrimmedMean(), faults=2)}, "must be at least 7 for a vote"),
        ({"quorum": 2}, "Coordinator.quorum is 2, must be at least the 3 votes"),
        ({"quality_threshold": None}, "Coordinator.quality_threshold is None, and with voting_strategy = 'byzantine'"),
        ({"voting_strategy": "raft"}, "Coordinator.voting_strategy"),
    ],
)
def test_what_cannot_vote_is_refused(tmp_path, fields, words):
    with pytest.raises(UserError, match=words):
        voting(tmp_path, **fields)


def test_the_quorum_is_that_of_the_vote(tmp_path):
    assert (voting(tmp_path).needed, voting(tmp_path, voting_strategy="none").needed) == (3, 3)
    assert (voting(tmp_path, num_nodes=10).needed, voting(tmp_path, num_nodes=10, voting_strategy="none").needed) == (
        7,
        6,
    )


class TestVoter:
    """A node's side: losses of the agreed and the proposed model -> the ballot."""

    def make(self, folder, losses):
        exchange, scored, lines = Exchange(str(folder)), [], []

        def score(model):
            scored.append(float(model["x"][0]))
            return jnp.array([losses[scored[-1]] * 8.0, 8.0])

        def read(agreed):
            data = exchange.read_model(agreed)
            return arrays.from_bytes(data)

        reporter = Reporter(lambda *_: None, lambda _: None, lines.append, lambda *_: None)
        voter = Voter(exchange, "a", read, lambda model: model, reporter)
        return exchange, voter, score, scored, lines

    def model(self, exchange, round_, value):
        return exchange.write_model(round_, arrays.to_bytes({"x": np.array([value], np.float32)}))

    def ballot(self, folder):
        path = pathlib.Path(folder) / path_of(1, "ballots/a")
        return json.loads(path.read_text()) if path.exists() else None

    @pytest.mark.parametrize(
        ("old", "new", "wanted"),
        [
            (2.0, 1.0, 1.0),
            (1.0, 1.5, math.exp(-0.5)),
            (math.inf, 3.0, 1.0),
            (math.nan, 3.0, 1.0),
            (1.0, math.nan, math.nan),
            (1.0, math.inf, math.nan),
        ],
    )
    def test_the_score_compares_the_losses(self, tmp_path, old, new, wanted):
        exchange, voter, score, scored, lines = self.make(tmp_path, {1.0: old, 2.0: new})
        agreed, proposal = self.model(exchange, 0, 1.0), self.model(exchange, 1, 2.0)
        exchange.write(path_of(1, "proposal"), as_json(proposal))
        voter.vote(1, agreed, score)
        found = self.ballot(tmp_path)
        assert found["digest"] == proposal.digest and scored == [1.0, 2.0]
        assert found["score"] == pytest.approx(wanted, nan_ok=True)
        assert lines == [f"round 1: the proposed model has the score {found['score']:.3f}"]

    def test_it_votes_once_on_each_proposal(self, tmp_path):
        exchange, voter, score, scored, _ = self.make(tmp_path, {1.0: 1.0, 2.0: 1.0, 3.0: 2.0})
        agreed = self.model(exchange, 0, 1.0)
        voter.vote(1, agreed, score)
        assert not scored and self.ballot(tmp_path) is None
        exchange.write(path_of(1, "proposal"), as_json(self.model(exchange, 1, 2.0)))
        for _ in range(3):
            voter.vote(1, agreed, score)
        assert scored == [1.0, 2.0] and self.ballot(tmp_path)["score"] == 1.0
        other = self.model(exchange, 1, 3.0)
        exchange.write(path_of(1, "proposal"), as_json(other))
        voter.vote(1, agreed, score)
        assert self.ballot(tmp_path) == {"digest": other.digest, "score": pytest.approx(math.exp(-1))}

    @pytest.mark.parametrize("how", ["record", "model", "hash"])
    def test_it_does_not_vote_on_what_it_cannot_read(self, tmp_path, how):
        exchange, voter, score, scored, _ = self.make(tmp_path, {1.0: 1.0, 2.0: 1.0})
        agreed, proposal = self.model(exchange, 0, 1.0), self.model(exchange, 1, 2.0)
        data = b"{" if how == "record" else as_json(proposal)
        exchange.write(path_of(1, "proposal"), data)
        if how != "record":
            bad = b"" if how == "model" else b"\x01" * proposal.size
            exchange.write("rounds/000001/model.safetensors", bad)
        voter.vote(1, agreed, score)
        assert not scored and self.ballot(tmp_path) is None
        assert isinstance(agreed, Agreed) and hashing.hash_of(b"") != agreed.digest
