"""The vote of a group: before a round counts, the nodes score the model that it proposes on their validation data.

The proposal and the ballots are files of the exchange, beside the updates of the round.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from capibara.consensus.voting import Ballot, Verdict, Vote
from capibara.core import limits
from capibara.core.types import Params, TryAgain, UserError
from capibara.multihost import hosts
from capibara.objectives.batches import Reporter
from capibara.strategies.group.arrays import Arrays
from capibara.strategies.group.exchange import Agreed, Exchange, as_json, fields_of, round_folder
from capibara.training.base.group import Score


def check(nodes: int, quorum: int | None, faults: int) -> None:
    """Raises UserError if a group cannot vote.

    Args:
      nodes: of the group.
      quorum: the fewest nodes whose models make the next one; None: as many as must approve it.
      faults: nodes that may lie, Aggregation.faults; 0: as many as `nodes` allows.
    """
    least = max(4, 3 * faults + 1)
    if nodes < least:
        raise UserError(
            f"Coordinator.num_nodes is {nodes}, must be at least {least} for a vote with Aggregation.faults = {faults} "
            f"(n >= 3f + 1, and at least one may lie): set {least}"
        )
    votes = Vote(num_nodes=nodes, faulty=faults or None).quorum
    if quorum is not None and quorum < votes:
        raise UserError(
            f"Coordinator.quorum is {quorum}, must be at least the {votes} votes that a model needs: try {votes}"
        )


@dataclasses.dataclass(frozen=True)
class Election:
    """The votes on the models that one coordinator proposes.

    Attributes:
      exchange: where proposals and ballots are.
      rule: of the vote.
      grace_s: seconds for the others once as many nodes as must approve have voted; a vote always has so many.
      wait: called with (topic, detail) between two looks at the ballots.
    """

    exchange: Exchange
    rule: Vote
    grace_s: float
    wait: Callable[[str, str], None]

    def refusal(self, proposal: Agreed, nodes: Sequence[str], left_s: float, report: dict[str, Any]) -> str | None:
        """Lets nodes vote on a model that has been written; why they refuse it, or None.

        Args:
          proposal: the model.
          nodes: those that may vote.
          left_s: seconds that are left of the round.
          report: of the round, to which the vote is added.
        """
        self.exchange.write(_proposal(proposal.round_), as_json(proposal))
        verdict, approve = self._verdict(proposal, nodes, max(left_s, self.grace_s))
        silent = "its vote was not needed" if len(approve) >= verdict.quorum else "it did not vote"
        without = {name: str(verdict.dissent.get(name, silent)) for name in nodes if name not in approve}
        report["vote"] = {"quorum": verdict.quorum, "approve": approve, "without": without}
        if len(approve) >= verdict.quorum:
            return None
        reasons = "; ".join(f"{name}: {why}" for name, why in sorted(without.items()))
        return f"{len(approve)} votes, must be at least {verdict.quorum} ({reasons})"

    def _verdict(self, proposal: Agreed, nodes: Collection[str], most_s: float) -> tuple[Verdict, list[str]]:
        """Waits until enough nodes have approved, or too few can; also returns those that approve, sorted."""
        begin_s, quorum_s = time.monotonic(), math.inf
        while True:
            answers = {name: self._ballot(proposal, name) for name in nodes}
            ballots = {name: ballot for name, ballot in answers.items() if ballot is not None}
            verdict = self.rule.decide([ballots])
            approve = sorted(verdict.votes.get(proposal.digest, ()))
            now_s = time.monotonic()
            if len(ballots) >= verdict.quorum:
                quorum_s = min(quorum_s, now_s)
            is_decided = len(approve) >= verdict.quorum or len(approve) + len(nodes) - len(ballots) < verdict.quorum
            if is_decided or now_s - begin_s >= most_s or now_s - quorum_s >= self.grace_s:
                return verdict, approve
            progress = f"{len(approve)} of {verdict.quorum} votes after {now_s - begin_s:.0f} s"
            self.wait(f"round {proposal.round_}", progress)

    def _ballot(self, proposal: Agreed, node: str) -> Ballot | None:
        """A node's vote on this proposal; None: it has none that can be read."""
        with contextlib.suppress(ValueError, OverflowError, OSError, TryAgain, limits.Refused):
            if data := self.exchange.small(_ballot(proposal.round_, node)):
                ballot = Ballot(**fields_of(data, Ballot))
                ballot = dataclasses.replace(ballot, score=float(ballot.score))  # JSON has whole numbers of any size
                return ballot if ballot.digest == proposal.digest else None
        return None


class Voter:
    """A node's part in the votes of its group.

    Args:
      exchange: where proposals and ballots are.
      name: the node's.
      read: an agreed or proposed model's arrays, or UserError.
      on_mesh: places a model on the devices.
      reporter: of the loop.
    """

    def __init__(
        self,
        exchange: Exchange,
        name: str,
        read: Callable[[Agreed], Arrays],
        on_mesh: Callable[[Arrays], Params],
        reporter: Reporter,
    ):
        self._exchange, self._name, self._read, self._on_mesh, self._reporter = exchange, name, read, on_mesh, reporter
        self._voted: tuple[int, str] | None = None  # the round, and the hash of the model on which the node has voted
        self._losses: dict[str, float] = {}  # of the models of the last vote, by hash

    def vote(self, round_: int, agreed: Agreed, score: Score | None) -> None:
        """Votes on the model that a round proposes, once; called on every process.

        A node that cannot read the model, or cannot write its ballot, tries again when it is called again.

        Args:
          round_: the round that has not ended.
          agreed: the model of the last round.
          score: the loss of a model; None: the run has no validation data, and abstains, so that nobody waits for its vote.

        Raises:
          Interrupted: the run must stop.
        """
        fields = hosts.of_first(lambda: self._look(round_))
        proposal = None if fields is None else Agreed(**fields)
        if proposal is None or (round_, proposal.digest) == self._voted:
            return
        quality = math.nan
        if score is not None:
            models: list[Arrays] = []
            try:
                hosts.each(lambda: models.extend(self._read(model) for model in (agreed, proposal)))
            except UserError:
                return
            for agreement, model in zip((agreed, proposal), models, strict=True):
                if agreement.digest not in self._losses:
                    self._losses[agreement.digest] = score(self._on_mesh(model))
            old, new = self._losses[agreed.digest], self._losses[proposal.digest]
            self._losses = {agreed.digest: old, proposal.digest: new}
            gain = (old if math.isfinite(old) else math.inf) - new
            quality = math.exp(min(gain, 0.0)) if math.isfinite(new) else math.nan
        if not hosts.of_first(lambda: self._cast(round_, Ballot(digest=proposal.digest, score=quality))):
            return
        self._voted = (round_, proposal.digest)
        status = f"the proposed model has the score {quality:.3f}"
        if score is None:
            status = "this node abstains from the vote: it has no validation data (Evaluation.every is 0)"
        self._reporter.status(f"round {round_}: {status}")

    def _look(self, round_: int) -> dict[str, Any] | None:
        with contextlib.suppress(TryAgain, OSError, UserError):
            record = self._exchange.record(_proposal(round_))
            return None if record is None else dataclasses.asdict(record)
        return None

    def _cast(self, round_: int, ballot: Ballot) -> bool:
        """Writes a ballot; False: the store does not answer."""
        with contextlib.suppress(TryAgain, OSError):
            self._exchange.write(_ballot(round_, self._name), as_json(ballot))
            return True
        return False


def _proposal(round_: int) -> str:
    return f"{round_folder(round_)}/proposal.json"


def _ballot(round_: int, node: str) -> str:
    return f"{round_folder(round_)}/ballots/{node}.json"
