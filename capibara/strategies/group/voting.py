"""The vote of a group: before a round counts, the nodes score the model that it proposes on rows of their own.

The proposal and the ballots are files of the exchange, beside the updates of the round.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.consensus.voting import Ballot, Verdict, Vote
from capibara.core import limits
from capibara.core.multihost import hosts
from capibara.core.types import Params, TryAgain, UserError
from capibara.objectives.batches import Reporter
from capibara.strategies.consensus import agreement
from capibara.strategies.group import arrays
from capibara.strategies.group.arrays import Arrays
from capibara.strategies.group.exchange import Agreed, Exchange, as_json, fields_of, round_folder
from capibara.training.group import Score


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
      timeout_s: seconds after which missing votes are not waited for.
      wait: called with (topic, detail) between two looks at the ballots.
    """

    exchange: Exchange
    rule: Vote
    timeout_s: float
    wait: Callable[[str, str], None]

    def vote(self, number: int, nodes: Sequence[str], report: dict[str, Any]) -> agreement.Vote:
        """How nodes vote in a round.

        Args:
          number: of the round.
          nodes: those that may vote.
          report: of the round, to which the vote is added.
        """
        return agreement.Vote(lambda proposed, _: self._approvals(number, nodes, report, proposed), self.rule.quorum)

    def _approvals(self, number: int, nodes: Sequence[str], report: dict[str, Any], proposed: Params) -> jax.Array:
        """The nodes that approve a model, bool [nodes]."""
        model = {key: np.asarray(value, np.float32) for key, value in proposed.items()}
        proposal = self.exchange.write_model(number, arrays.to_bytes(model))
        self.exchange.write(_proposal(number), as_json(proposal))
        verdict = self._verdict(proposal, nodes)
        approve = verdict.votes.get(proposal.digest, ())
        without = {name: str(verdict.dissent.get(name, "it did not vote")) for name in nodes if name not in approve}
        report["vote"] = {"quorum": verdict.quorum, "approve": sorted(approve), "without": without}
        return jnp.array([name in approve for name in nodes])

    def _verdict(self, proposal: Agreed, nodes: Collection[str]) -> Verdict:
        """Waits until enough nodes have approved, or too few can."""
        begin_s = time.monotonic()
        while True:
            found = {name: self._ballot(proposal, name) for name in nodes}
            ballots = {name: ballot for name, ballot in found.items() if ballot is not None}
            verdict = self.rule.decide([ballots])
            approvals = len(verdict.votes.get(proposal.digest, ()))
            spent_s = time.monotonic() - begin_s
            if approvals >= verdict.quorum or approvals + len(nodes) - len(ballots) < verdict.quorum:
                return verdict
            if spent_s >= self.timeout_s:
                return verdict
            self.wait(f"round {proposal.round_}", f"{approvals} of {verdict.quorum} votes after {spent_s:.0f} s")

    def _ballot(self, proposal: Agreed, node: str) -> Ballot | None:
        """A node's vote on this proposal; None: it has none that can be read."""
        with contextlib.suppress(ValueError, OverflowError, OSError, TryAgain, limits.Refused):
            if data := self.exchange.small(_ballot(proposal.round_, node)):
                found = Ballot(**fields_of(data, Ballot))
                return found if found.digest == proposal.digest else None
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
        self._voted = ""  # the hash of the model on which the node has voted last

    def vote(self, round_: int, agreed: Agreed, score: Score) -> None:
        """Votes on the model that a round proposes, once; called on every process.

        A node that cannot read the model does not vote; it looks again.

        Args:
          round_: the round that has not ended.
          agreed: the model of the last round.
          score: of a model on this node's rows.
        """
        found = hosts.of_first(lambda: self._look(round_))
        proposal = None if found is None else Agreed(**found)
        if proposal is None or proposal.digest == self._voted:
            return
        models: list[Arrays] = []
        try:
            hosts.each(lambda: models.extend(self._read(one) for one in (agreed, proposal)))
        except UserError:
            return
        old, new = (_loss(score(self._on_mesh(model))) for model in models)
        gain = (old if math.isfinite(old) else math.inf) - new
        quality = math.exp(min(gain, 0.0)) if math.isfinite(new) else math.nan
        ballot = as_json(Ballot(digest=proposal.digest, score=quality))
        hosts.of_first(lambda: self._exchange.write(_ballot(round_, self._name), ballot))
        self._voted = proposal.digest
        self._reporter.status(f"round {round_}: the proposed model has the score {quality:.3f}")

    def _look(self, round_: int) -> dict[str, Any] | None:
        with contextlib.suppress(TryAgain, OSError, UserError):
            found = self._exchange.record(_proposal(round_))
            return None if found is None else dataclasses.asdict(found)
        return None


def _loss(sums: jax.Array) -> float:
    """The mean of a loss over rows, of its sum and weight [2]."""
    loss, weight = np.asarray(jax.device_get(sums), np.float64)
    return float(loss / max(weight, 1.0))


def _proposal(round_: int) -> str:
    return f"{round_folder(round_)}/proposal.json"


def _ballot(round_: int, node: str) -> str:
    return f"{round_folder(round_)}/ballots/{node}.json"
