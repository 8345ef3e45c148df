"""The vote of a group: which models become agreed, and what nodes cast."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import sys
import time

import numpy as np
import pytest

from capibara.consensus.aggregation import Aggregation, TrimmedMean
from capibara.consensus.privacy import Privacy
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
    """Like Play; each node also answers each proposal once: name -> its score, a Ballot, bytes or what makes these of the
    proposal; None: it is silent."""

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
            if callable(ballot):
                ballot = ballot(proposal)
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
        (
            lambda proposal: b'{"digest": "%s", "score": 1%s}' % (proposal.digest.encode(), b"0" * 380),
            "it did not vote",
        ),
    ],
    ids=["low", "nan", "silent", "other", "cut", "type", "large", "number"],
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


def test_a_vote_has_what_is_left_of_the_round_and_the_others_have_the_grace(tmp_path):
    for name, ballots, most_s in (
        ("left", {"a": 1.0, "b": None}, 2.0),
        ("grace", {"a": 1.0, "b": 0.0, "c": 1.0}, 60.0),
    ):
        begin_s = time.monotonic()
        lines = run(tmp_path / name, ballots, rounds=1, consensus_timeout_s=most_s, grace_s=0.2)
        assert "no agreement" in lines[-1] and "d: it did not vote" in lines[-1]
        assert (most_s if name == "left" else 0.2) <= time.monotonic() - begin_s < most_s + 2


def test_what_cannot_be_agreed_is_not_voted_on(tmp_path):
    def broken(exchange, round_, name, model):
        bad = None if model is None else moved(model, 1) | {"head": np.full((3, 5), np.nan, np.float32)}
        return honest(exchange, round_, name, model) if model is None else send(exchange, round_, name, bad)

    for fields in ({"consensus_threshold": 1.0}, {"quorum": 4}):
        folder = tmp_path / next(iter(fields))
        lines = run(folder, {}, NODES | {"d": broken}, rounds=1, consensus_timeout_s=600.0, **fields)
        (report,) = reports(folder)
        assert "no agreement" in lines[-1] and "vote" not in report
        assert Exchange(str(folder)).record(path_of(1, "proposal")) is None


def test_a_refused_model_is_removed_and_an_approved_one_is_told_with_the_votes(tmp_path):
    lines = run(tmp_path, {"a": 1.0, "b": 1.0, "c": 0.1, "d": 0.1}, rounds=1)
    assert lines[1] == "a round withstands 0 faulty of 4 nodes"  # the plain mean withstands none
    assert not (tmp_path / "rounds/000001/model.safetensors").exists()
    assert not (tmp_path / "rounds/000001/outer.safetensors").exists()
    rule = Aggregation(rule=TrimmedMean(), faults=1)
    lines = run(tmp_path / "rule", dict.fromkeys("abc", 1.0) | {"d": None}, rounds=1, aggregation=rule)
    (report,) = reports(tmp_path / "rule")
    assert lines[1] == "a round withstands 1 faulty of 4 nodes" and report["tolerance"] == 1
    assert report["vote"] == {"quorum": 3, "approve": ["a", "b", "c"], "without": {"d": "its vote was not needed"}}


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
        ({"quorum": 9, "num_nodes": 7}, "Coordinator.quorum is 9, must be from 1 to num_nodes .7.: try 5"),
        (
            {"privacy": Privacy(clip_norm=1.0, noise_multiplier=1.0)},
            "the nodes' scores reveal what Coordinator.privacy",
        ),
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
            return losses[scored[-1]]

        def read(agreed):
            data = exchange.read_model(agreed)
            return arrays.from_bytes(data)

        reporter = Reporter(lambda *_: None, lambda _: None, lines.append, lambda *_: None)
        voter = Voter(exchange, "a", read, lambda model: model, reporter)
        return exchange, voter, score, scored, lines

    def model(self, exchange, round_, value):
        return exchange.write_model(round_, arrays.to_bytes({"x": np.array([value], np.float32)}))

    def ballot(self, folder, round_=1):
        path = pathlib.Path(folder) / path_of(round_, "ballots/a")
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
        exchange, voter, score, scored, lines = self.make(tmp_path, {1.0: old, 2.0: new, 3.0: 1.0})
        agreed, proposal = self.model(exchange, 0, 1.0), self.model(exchange, 1, 2.0)
        exchange.write(path_of(1, "proposal"), as_json(proposal))
        voter.vote(1, agreed, score)
        found = self.ballot(tmp_path)
        assert found["digest"] == proposal.digest and scored == [1.0, 2.0]
        proposal = self.model(exchange, 2, 3.0)  # the loss of the agreed model is known
        exchange.write(path_of(2, "proposal"), as_json(proposal))
        voter.vote(2, self.model(exchange, 1, 2.0), score)
        assert scored == [1.0, 2.0, 3.0] and len(lines) == 2
        assert found["score"] == pytest.approx(wanted, nan_ok=True)
        assert lines[0] == f"round 1: the proposed model has the score {found['score']:.3f}"

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
        exchange.write(path_of(2, "proposal"), as_json(dataclasses.replace(other, round_=2)))
        voter.vote(2, agreed, score)  # the same model again, in another round
        assert self.ballot(tmp_path, 2)["digest"] == other.digest

    def test_a_ballot_that_cannot_be_written_is_cast_again(self, tmp_path, monkeypatch):
        exchange, voter, score, scored, lines = self.make(tmp_path, {1.0: 1.0, 2.0: 1.0})
        agreed, proposal = self.model(exchange, 0, 1.0), self.model(exchange, 1, 2.0)
        exchange.write(path_of(1, "proposal"), as_json(proposal))

        def fails(self, name, data):
            raise OSError("no route to host")

        with monkeypatch.context() as patched:
            patched.setattr(Exchange, "write", fails)
            voter.vote(1, agreed, score)
        assert self.ballot(tmp_path) is None and not lines
        voter.vote(1, agreed, score)
        assert self.ballot(tmp_path)["score"] == 1.0 and scored == [1.0, 2.0]

    def test_without_validation_data_it_abstains_at_once(self, tmp_path):
        exchange, voter, _, _, lines = self.make(tmp_path, {})
        agreed, proposal = self.model(exchange, 0, 1.0), self.model(exchange, 1, 2.0)
        exchange.write(path_of(1, "proposal"), as_json(proposal))
        voter.vote(1, agreed, None)
        assert math.isnan(self.ballot(tmp_path)["score"]) and "abstains" in lines[0]

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
