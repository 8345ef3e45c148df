"""The Byzantine vote: nodes agree on one state although some of them lie, crash or say different things to others.

With n nodes of which at most f are faulty, n >= 3f + 1, a state is agreed if a quorum votes for it, 2f + 1 of n = 3f + 1
(Castro & Liskov 1999, section 4): two states cannot both have so many votes, and the f faulty nodes cannot prevent the
others' agreement.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence

from capibara.core.types import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ballot:
    """What one node says of the state that it has computed.

    Attributes:
      digest: of the state, equal for equal bits.
      score: its metric on the node's validation data; higher is better.
    """

    digest: str
    score: float


class Dissent(enum.StrEnum):
    """Why a node's vote does not count for the agreed state."""

    SILENT = "it did not vote in every round"
    EQUIVOCATED = "its votes differ between rounds"
    NO_SCORE = "its score is not finite"
    LOW_SCORE = "its score is below the threshold"
    OTHER_STATE = "it voted for another state"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The outcome of a vote.

    Attributes:
      digest: of the agreed state; None: no state has enough votes.
      votes: digest -> the nodes whose votes count for it.
      dissent: node -> why its vote does not count for the agreed state.
      score: median of the scores of the nodes that agree, NaN if none do: f liars cannot move it past the honest ones.
      quorum: votes that a state needs.
    """

    digest: str | None
    votes: dict[str, tuple[str, ...]]
    dissent: dict[str, Dissent]
    score: float
    quorum: int

    def describe(self) -> str:
        """One line: what was agreed by how many, and who dissented why."""
        most = max((len(names) for names in self.votes.values()), default=0)
        if self.digest is None:
            result = f"no state has {self.quorum} votes, the most has {most}"
        else:
            result = f"{self.digest} agreed with {len(self.votes[self.digest])} votes of {self.quorum} that it needs"
        return "; ".join([result, *(f"{name}: {why}" for name, why in sorted(self.dissent.items()))])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vote:
    """The rule of the vote.

    Attributes:
      num_nodes: all nodes, n.
      faulty: how many of them may be faulty, f; None: as many as n allows.
      verification_rounds: every node votes so often, and counts only if its votes are the same.
      quality_threshold: the least score of a vote that counts; None: any finite one.
    """

    num_nodes: int
    faulty: int | None = None
    verification_rounds: int = 1
    quality_threshold: float | None = None

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise UserError(f"num_nodes is {self.num_nodes}, must be at least 1: try 4")
        if self.verification_rounds < 1:
            raise UserError(f"verification_rounds is {self.verification_rounds}, must be at least 1: try 2")
        if self.faulty is not None and not 0 <= self.faulty <= most_faulty(self.num_nodes):
            raise UserError(
                f"faulty is {self.faulty}, must be from 0 to {most_faulty(self.num_nodes)} with {self.num_nodes} nodes "
                f"(n >= 3f + 1): use {3 * max(self.faulty, 0) + 1} nodes"
            )

    @property
    def tolerance(self) -> int:
        """f, the faulty nodes that the vote withstands."""
        return most_faulty(self.num_nodes) if self.faulty is None else self.faulty

    @property
    def quorum(self) -> int:
        """The votes that a state needs, so that any two quorums share an honest node: 2f + 1 if n = 3f + 1."""
        return (self.num_nodes + self.tolerance) // 2 + 1

    def decide(self, rounds: Sequence[Mapping[str, Ballot]]) -> Verdict:
        """Counts the votes.

        Args:
          rounds: `verification_rounds` times the ballots by node; a node that is missing did not vote.

        Raises:
          UserError: not so many rounds, or more nodes than `num_nodes`.
        """
        if len(rounds) != self.verification_rounds:
            raise UserError(f"{len(rounds)} rounds of votes, must be verification_rounds ({self.verification_rounds})")
        names = {name for ballots in rounds for name in ballots}
        if len(names) > self.num_nodes:
            raise UserError(f"{len(names)} nodes voted, must be at most num_nodes ({self.num_nodes}): raise it")
        dissent: dict[str, Dissent] = {}
        votes: dict[str, list[str]] = collections.defaultdict(list)
        for name in sorted(names):
            if (why := self._reason([ballots.get(name) for ballots in rounds])) is not None:
                dissent[name] = why
            else:
                votes[rounds[0][name].digest].append(name)
        agreed = next((digest for digest, result in votes.items() if len(result) >= self.quorum), None)
        if agreed is not None:
            dissent |= {
                name: Dissent.OTHER_STATE for digest, result in votes.items() if digest != agreed for name in result
            }
        scores = sorted(rounds[-1][name].score for name in votes[agreed]) if agreed is not None else []
        counted = {digest: tuple(result) for digest, result in votes.items()}
        return Verdict(agreed, counted, dissent, scores[len(scores) // 2] if scores else math.nan, self.quorum)

    def _reason(self, ballots: Sequence[Ballot | None]) -> Dissent | None:
        cast = [ballot for ballot in ballots if ballot is not None]
        if len(cast) < len(ballots):
            return Dissent.SILENT
        if len({ballot.digest for ballot in cast}) > 1:
            return Dissent.EQUIVOCATED
        if not all(math.isfinite(ballot.score) for ballot in cast):
            return Dissent.NO_SCORE
        if self.quality_threshold is not None and any(ballot.score < self.quality_threshold for ballot in cast):
            return Dissent.LOW_SCORE
        return None


def most_faulty(num_nodes: int) -> int:
    """The largest f with n >= 3f + 1."""
    return max(0, (num_nodes - 1) // 3)


def tolerance(vote: Vote, of_rule: int) -> int:
    """The faulty nodes that a round withstands: the least of the vote's and the aggregation rule's."""
    return min(vote.tolerance, of_rule)
