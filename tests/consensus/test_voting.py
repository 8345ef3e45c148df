"""The Byzantine vote: what f nodes can and cannot do, whatever they say."""

from __future__ import annotations

import itertools
import math

import pytest

from capibara.consensus.voting import Ballot, Dissent, Vote, most_faulty, tolerance
from capibara.core.types import UserError


def ballots(digests, score=0.9):
    return {f"n{i}": Ballot(digest=digest, score=score) for i, digest in enumerate(digests) if digest}


@pytest.mark.parametrize("nodes, most", [(1, 0), (3, 0), (4, 1), (6, 1), (7, 2), (10, 3)])
def test_the_faulty_nodes_that_a_vote_withstands(nodes, most):
    assert most_faulty(nodes) == most == Vote(num_nodes=nodes).tolerance
    with pytest.raises(
        UserError, match=rf"faulty is {most + 1}, must be from 0 to {most} .*: use {3 * most + 4} nodes"
    ):
        Vote(num_nodes=nodes, faulty=most + 1)
    assert tolerance(Vote(num_nodes=nodes), 1) == min(1, most)


@pytest.mark.parametrize("nodes", [4, 5, 6, 7])
def test_liars_neither_prevent_an_agreement_nor_make_one(nodes):
    """All that f nodes can vote: the honest nodes' state wins; and two groups of honest nodes are never both served."""
    vote, f = Vote(num_nodes=nodes), most_faulty(nodes)
    for lies in itertools.product(["good", "bad", ""], repeat=f):
        assert vote.decide([ballots([*["good"] * (nodes - f), *lies])]).digest == "good"
    for split, lies in itertools.product(range(nodes - f + 1), itertools.product(["a", "b"], repeat=f)):
        said = [["a"] * split + ["b"] * (nodes - f - split) + list(lies) for lies in (lies, lies[::-1])]
        assert len({vote.decide([ballots(one)]).digest for one in said} - {None}) <= 1


def test_whose_vote_does_not_count_and_why():
    first = ballots(["s", "s", "s", "s", "s", "s", "s", "x", "s", "s"])
    second = dict(first) | {"n8": Ballot(digest="t", score=0.9)}
    del second["n9"]
    first["n5"] = second["n5"] = Ballot(digest="s", score=math.nan)
    second["n6"] = Ballot(digest="s", score=0.4)
    vote = Vote(num_nodes=10, faulty=3, verification_rounds=2, quality_threshold=0.5)
    verdict = vote.decide([first, second])
    assert verdict.digest is None and verdict.votes["s"] == ("n0", "n1", "n2", "n3", "n4") and math.isnan(verdict.score)
    assert verdict.dissent == {
        "n5": Dissent.NO_SCORE,
        "n6": Dissent.LOW_SCORE,
        "n8": Dissent.EQUIVOCATED,
        "n9": Dissent.SILENT,
    }
    assert verdict.describe().startswith("no state has 7 votes, the most has 5; n5: its score is not finite; n6: ")
    for name in ("n5", "n6"):
        first[name] = second[name] = Ballot(digest="s", score=0.6)
    verdict = vote.decide([first, second])
    assert verdict.digest == "s" and verdict.dissent["n7"] is Dissent.OTHER_STATE and verdict.score == 0.9
    assert verdict.describe().startswith("s agreed with 7 votes of 7 that it needs; n7: it voted for another state")


def test_the_score_is_between_those_of_honest_nodes():
    for lies in itertools.product([-1e9, 1e9, 0.5], repeat=2):
        said = {f"n{i}": Ballot(digest="s", score=score) for i, score in enumerate([0.5, 0.6, 0.6, 0.7, 0.8, *lies])}
        assert 0.5 <= Vote(num_nodes=7).decide([said]).score <= 0.8


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"num_nodes": 0}, "num_nodes is 0, must be at least 1"),
        ({"num_nodes": 4, "faulty": -1}, "faulty is -1, must be from 0 to 1"),
        ({"num_nodes": 4, "verification_rounds": 0}, "verification_rounds is 0"),
    ],
)
def test_bad_fields(fields, said):
    with pytest.raises(UserError, match=said):
        Vote(**fields)


def test_bad_ballots():
    vote = Vote(num_nodes=4, verification_rounds=2)
    with pytest.raises(UserError, match="1 rounds of votes, must be verification_rounds"):
        vote.decide([ballots("ssss")])
    with pytest.raises(UserError, match="5 nodes voted, must be at most num_nodes"):
        vote.decide([ballots("sssss")] * 2)
