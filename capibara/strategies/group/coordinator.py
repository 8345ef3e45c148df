"""The coordinator of a group: makes one model of those that nodes send, round by round, and survives any of them.

It trains nothing and needs no accelerator. All that it knows is in the exchange: started again, it resumes.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from capibara.checkpoints.lease import Lease
from capibara.config import configurable
from capibara.consensus.aggregation import Mean, Monna, Report
from capibara.consensus.outer import OuterOptimizer
from capibara.consensus.privacy import Privacy
from capibara.consensus.voting import Vote as VoteRule
from capibara.consensus.voting import tolerance
from capibara.core import limits
from capibara.core.fields import FilePath
from capibara.core.types import Params, PyTree, UserError
from capibara.storage import hashing
from capibara.strategies.consensus.agreement import Agreement, Combine, quality_of
from capibara.strategies.consensus.settings import VotingStrategy
from capibara.strategies.group import arrays, voting
from capibara.strategies.group.arrays import Arrays
from capibara.strategies.group.exchange import AGREED, Agreed, Exchange, check_node, is_node
from capibara.strategies.group.inbox import Inbox, Update
from capibara.strategies.group.voting import Election


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Coordinator(Agreement):
    """The coordinator of a group of runs; each has Trainer.group = @GroupNode().

    A round ends when all nodes that are waited for have sent an update; or `grace_s` after a quorum has; or
    `consensus_timeout_s` after its begin. Nodes are waited for that had a part in the last round, or have gone on from its
    model. The consensus score is the share of accepted nodes among those that had a part in the last round or have sent an
    update that counts. `Agreement` has the other attributes.

    Attributes:
      exchange: the folder in which nodes and coordinator meet, in any store.
      num_nodes: the nodes of the group.
      rounds: their number.
      nodes: their names; None: the first `num_nodes` names that appear.
      quorum: the fewest nodes whose models make the next one; None: more than half of `num_nodes`, or with a vote as many as
        must approve it.
      voting_strategy: "byzantine": before a round counts, the nodes that sent an update score the model that it proposes on rows of
        their own: exp(loss of the agreed model - loss of the proposed one), at most 1. A vote counts if the score reaches
        `quality_threshold`, and more than (n + f) / 2 of the n = `num_nodes` must count. f is Aggregation.faults, or as many as n
        allows.
      consensus_timeout_s: seconds from the begin of a round to its end, whoever has sent something.
      grace_s: seconds for the others once a quorum has sent its updates.
      norm_limit: an update is rejected if its norm is above so many times the median of those accepted so far; None: any.
      privacy: clips updates and adds noise to their mean, until its budget is spent; None: it does not.
      poll_s: seconds between two looks at the exchange.
    """

    exchange: FilePath
    num_nodes: int
    rounds: int
    nodes: tuple[str, ...] | None = None
    quorum: int | None = None
    voting_strategy: VotingStrategy = VotingStrategy.NONE
    consensus_timeout_s: float = 3600.0
    grace_s: float = 60.0
    norm_limit: float | None = 10.0
    privacy: Privacy | None = None
    poll_s: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.exchange.strip():
            raise UserError("Coordinator.exchange is empty: name a folder that all nodes reach, e.g. gs://bucket/group")
        for name in ("num_nodes", "rounds"):
            if not 1 <= getattr(self, name) < 10**6:
                raise UserError(f"Coordinator.{name} is {getattr(self, name)}, must be from 1 to 999999: try 4")
        for node in self.nodes or ():
            check_node(node, "a name in Coordinator.nodes")
        if self.nodes is not None and len(set(self.nodes)) != self.num_nodes:
            raise UserError(
                f"Coordinator.nodes has {len(set(self.nodes))} names, must be num_nodes ({self.num_nodes}): add or remove some"
            )
        if self.votes:
            self._check_vote()
        if not 1 <= self.needed <= self.num_nodes:
            raise UserError(
                f"Coordinator.quorum is {self.quorum}, must be from 1 to num_nodes ({self.num_nodes}): try {self._usual_quorum}"
            )
        for name in ("consensus_timeout_s", "grace_s", "poll_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"Coordinator.{name} is {getattr(self, name)}, must be above 0 and finite")
        if self.norm_limit is not None and not self.norm_limit > 1:
            raise UserError(f"Coordinator.norm_limit is {self.norm_limit}, must be above 1, or None: try 10")
        if self.privacy is not None:
            if not isinstance(self.aggregation.rule, Mean) or self.aggregation.before:
                raise UserError(
                    "Coordinator.privacy needs a mean, whose sensitivity is known: set Aggregation.rule = @Mean()"
                )
            if self.quality_threshold is not None:
                raise UserError("Coordinator.quality_threshold reveals what Coordinator.privacy hides: leave it out")
        if isinstance(self.aggregation.rule, Monna):
            raise UserError(
                "Aggregation.rule is Monna, whose pivot may be missing in a round: set another, such as @GeometricMedian()"
            )
        self.aggregation.check(self.num_nodes)
        most = self.aggregation.largest_faults(self.needed)
        if self.aggregation.faults > most:
            raise UserError(
                f"Aggregation.faults is {self.aggregation.faults}, must be at most {most} of the {self.needed} nodes of the "
                "quorum: raise Coordinator.quorum, or lower it"
            )
        self.aggregation.check(self.needed)  # fewer nodes are never aggregated

    def _check_vote(self) -> None:
        if self.privacy is not None:
            raise UserError(
                "Coordinator.voting_strategy is 'byzantine', and the nodes' scores reveal what Coordinator.privacy hides: leave "
                "one of them out"
            )
        if self.quality_threshold is None:
            raise UserError(
                "Coordinator.quality_threshold is None, and with voting_strategy = 'byzantine' any finite model would be approved: "
                "try 0.85"
            )
        voting.check(self.num_nodes, self.quorum, self.aggregation.faults)

    @property
    def votes(self) -> bool:
        """Whether nodes vote."""
        return self.voting_strategy is not VotingStrategy.NONE

    @property
    def vote_rule(self) -> VoteRule:
        """The rule of the vote."""
        faults = self.aggregation.faults or None
        return VoteRule(num_nodes=self.num_nodes, faulty=faults, quality_threshold=self.quality_threshold)

    @property
    def tolerance(self) -> int:
        """The nodes that may be faulty in a round: the least of what the vote and the aggregation withstand."""
        return tolerance(self.vote_rule, self.aggregation.faults) if self.votes else self.aggregation.faults

    def election(self, exchange: Exchange, pause: Callable[[str, str], None]) -> Election | None:
        """The votes on proposed models; None: there are none. `pause` is called between two looks at the ballots."""
        return Election(exchange, self.vote_rule, self.grace_s, pause) if self.votes else None

    @property
    def needed(self) -> int:
        """The quorum."""
        return self._usual_quorum if self.quorum is None else self.quorum

    @property
    def _usual_quorum(self) -> int:
        return self.vote_rule.quorum if self.votes else self.num_nodes // 2 + 1

    def run(
        self,
        show: Callable[[str], None] = lambda line: None,
        check: Callable[[], None] = lambda: None,
        progress: Callable[[str, str], None] = lambda topic, detail: None,
    ) -> str:
        """Coordinates until the last round has ended; returns a line on how it ended.

        Args:
          show: is given a line for each round.
          progress: is given a topic and a detail for a status line.
          check: called between two looks at the exchange; what it raises ends this run, which resumes when it is called again.

        Raises:
          UserError: too many rounds failed in a row, or another coordinator has the exchange.
        """
        Exchange(self.exchange).check()
        try:
            lease = Lease(epath.Path(self.exchange))
        except UserError as error:
            raise UserError(f"another coordinator has {self.exchange}, or had it a minute ago ({error})") from error
        try:
            return _Coordination(self, show, check, progress, lease).run()
        finally:
            lease.release()


@dataclasses.dataclass
class _Standing:
    """What a round begins with.

    Attributes:
      agreed: the newest agreed model, and its arrays.
      outer: the leaves of the outer optimizer's state.
      waited: the nodes that are waited for.
      norms: of the updates accepted so far.
      failures: failed rounds in a row.
    """

    agreed: Agreed
    model: Arrays
    outer: list[np.ndarray]
    waited: set[str]
    norms: list[float]
    failures: int


class _Coordination:
    """See Coordinator.run."""

    def __init__(
        self,
        config: Coordinator,
        show: Callable[[str], None],
        check: Callable[[], None],
        progress: Callable[[str, str], None],
        lease: Lease,
    ) -> None:
        self._config, self._show, self._check, self._progress, self._lease = config, show, check, progress, lease
        self._exchange = Exchange(config.exchange)
        self._names, self._every = set(config.nodes or ()), 0
        self._election = config.election(self._exchange, self._pause)
        self._combines: dict[int, Combine] = {}  # compiled aggregations, by the number of nodes

    def run(self) -> str:
        config, agreed = self._config, self._exchange.agreed()
        privacy = config.privacy
        most = config.rounds if privacy is None else min(config.rounds, privacy.releases_within())
        standing = self._standing() if agreed is None else self._resumed(agreed)
        if config.votes:
            self._show(f"a round withstands {config.tolerance} faulty of {config.num_nodes} nodes")
        if privacy is not None and (
            line := privacy.warning(config.num_nodes, sum(x.size for x in standing.model.values()))
        ):
            self._show(f"warning: {line}")
        while standing.agreed.round_ < most:
            self._round(standing)
            self._lease.check()
            self._exchange.tidy(standing.agreed)
        if privacy is not None and most < config.rounds:
            spent = f"epsilon {privacy.epsilon(most):.3g} after {most} rounds, of Privacy.budget {privacy.budget:g}"
            self._exchange.publish(dataclasses.replace(standing.agreed, status=f"its privacy budget is spent: {spent}"))
            return f"the privacy budget is spent: {spent}: {self._exchange}/{standing.agreed.model}"
        self._exchange.publish(dataclasses.replace(standing.agreed, status="finished"))
        return f"finished after {standing.agreed.round_} rounds: {self._exchange}/{standing.agreed.model}"

    # --- the first model, and the state after a restart ---

    def _standing(self) -> _Standing:
        """Takes the weights with which a quorum of nodes begins as the first agreed model."""
        config = self._config
        if self._exchange.reports():
            raise UserError(
                f"{self._exchange} has reports of rounds and no {AGREED}: restore it, or name an empty folder"
            )
        most = limits.host_bytes() // (2 * config.num_nodes)
        inbox = self._collected(Inbox(self._exchange, 0, self._may_join, None, most), set())
        names, line = _beginners(inbox, config.needed)
        model, self._every = inbox.updates[names[0]].arrays, inbox.updates[names[0]].every
        outer = _leaves(config.outer.init(dict(model)))
        agreed = _written(self._exchange, 0, self._every, model, outer, sorted(names))
        agreed = dataclasses.replace(agreed, line=line)
        self._exchange.publish(agreed)
        self._show(line)
        return _Standing(agreed, model, outer, set(names), [], 0)

    def _resumed(self, agreed: Agreed) -> _Standing:
        config = self._config
        model = arrays.from_bytes(self._exchange.read_model(agreed))
        outer = _stored_outer(self._exchange, agreed, config.outer, model)
        reports = [item for item in self._exchange.reports() if 0 < item["round"] <= agreed.round_]
        norms = [float(about.get("norm", 0.0)) for report in reports for about in report["accepted"].values()]
        if config.nodes is None:
            accepted = {*agreed.accepted.split(","), *(name for report in reports for name in report["accepted"])}
            self._names |= {name for name in accepted if is_node(name)}
        waited = set(agreed.accepted.split(",")) - {""}
        self._every = agreed.every
        self._show(f"resuming after round {agreed.round_} of {self._config.rounds}")
        agreed = dataclasses.replace(agreed, status="running")
        if agreed.round_ < config.rounds:
            self._exchange.publish(agreed)  # nodes of a group that has ended may go on
        return _Standing(agreed, model, outer, waited, norms, 0)

    def _may_join(self, name: str) -> str | None:
        """Why a node may not send anything; None: it may, and is one of the group's from now on."""
        if name not in self._names:
            if len(self._names) >= self._config.num_nodes:
                return f"it is none of the group's nodes ({', '.join(sorted(self._names))})"
            self._names.add(name)
        return None

    # --- a round ---

    def _collected(self, inbox: Inbox, waited: set[str]) -> Inbox:
        """Waits for the updates of a round."""
        config, begin_s = self._config, time.monotonic()
        quorum_s: float | None = None
        while True:
            inbox.look()
            now_s, heard = time.monotonic(), inbox.updates.keys() | inbox.rejected.keys()
            if len(inbox.updates) >= config.needed:
                quorum_s = quorum_s or now_s
                if now_s - quorum_s >= config.grace_s:
                    return inbox
                if (
                    waited
                    and waited <= heard
                    and not _is_awaited(self._exchange, self._names - heard, inbox.round_ - 1)
                ):
                    return inbox
            known = self._names & heard
            if len(known) >= config.num_nodes or now_s - begin_s >= config.consensus_timeout_s:
                return inbox
            text = f"{len(inbox.updates)} of {config.num_nodes} updates after {now_s - begin_s:.0f} s"
            self._pause(f"round {inbox.round_}", text)

    def _pause(self, topic: str, detail: str) -> None:
        """Waits for the next look at the exchange."""
        self._progress(topic, detail)
        self._check()
        time.sleep(self._config.poll_s)

    def _round(self, standing: _Standing) -> None:
        """Ends the next round, and changes the standing."""
        number, begin_s = standing.agreed.round_ + 1, time.monotonic()
        shapes = arrays.shapes_of(standing.model)
        most = arrays.most_bytes(shapes)
        inbox = Inbox(self._exchange, number, self._may_join, standing.model, most, self._every)
        inbox = self._collected(inbox, standing.waited)
        limit = None if self._config.privacy is not None else self._config.norm_limit  # with privacy they are clipped
        updates, without = _within_norm(inbox, standing.norms, limit)
        late = (standing.waited | self._names) - updates.keys() - without.keys()
        silent = f"it sent nothing within {time.monotonic() - begin_s:.1f} s"
        without |= {name: inbox.doubts.get(name, silent) for name in late}
        report = {"round": number, "succeeded": False, "score": 0.0, "accepted": {}, "without": without}
        if self._config.votes:
            report["tolerance"] = self._config.tolerance
        report["bytes_received"] = sum(update.size for update in updates.values())
        if len(updates) < self._config.needed:
            words = f"{len(updates)} nodes have sent an update that counts, must be at least the quorum ({self._config.needed})"
            self._failed(standing, number, report, words)
        else:
            self._settled(standing, number, updates, report, begin_s)
        report["seconds"] = round(time.monotonic() - begin_s, 3)
        standing.agreed = dataclasses.replace(standing.agreed, line=_line(report, self._config.rounds))
        self._exchange.write_report(number, report)
        if standing.failures > self._config.max_retries:
            why = (
                f"{standing.failures} rounds in a row failed, more than Coordinator.max_retries ({self._config.max_retries}): "
                f"{standing.agreed.line}"
            )
            self._exchange.publish(dataclasses.replace(standing.agreed, status=why))
            raise UserError(why)
        self._exchange.publish(standing.agreed)
        self._show(standing.agreed.line)

    def _settled(
        self, standing: _Standing, number: int, updates: dict[str, Update], report: dict[str, Any], begin_s: float
    ) -> None:
        """Makes the next model of the updates of a round that has begun at `begin_s`."""
        config, names, without = self._config, sorted(updates), report["without"]
        sent = {key: np.stack([updates[name].arrays.pop(key) for name in names]) for key in standing.model}
        quality = _quality([updates[name] for name in names])
        expected = len(standing.waited | set(names))
        outer = _unflattened(config.outer, standing)
        combine = self._combines.setdefault(len(names), jax.jit(config.aggregation))
        if config.privacy is not None:
            combine = _private(combine, config.privacy, config.num_nodes)
            report["epsilon"] = config.privacy.epsilon(number)
        result = config.settle(combine, standing.model, sent, outer, quality, number, expected)
        accepted = [name for name, has_part in zip(names, np.asarray(result.accepted), strict=True) if has_part]
        report["score"] = float(result.score)
        for at, name in enumerate(names):
            if name not in accepted:
                without[name] = _reason(updates[name], float(quality[at]), config.quality_threshold)
        if not bool(result.succeeds):
            words = f"consensus score {report['score']:.2f}, must be at least {config.consensus_threshold:g}"
            return self._failed(standing, number, report, words)
        if len(accepted) < config.needed:
            words = f"{len(accepted)} nodes have a part, must be at least the quorum ({config.needed})"
            return self._failed(standing, number, report, words)
        model, outer = (
            {key: np.asarray(value, np.float32) for key, value in result.params.items()},
            _leaves(result.outer),
        )
        agreed = _written(self._exchange, number, self._every, model, outer, accepted)
        if self._election is not None:
            left_s = config.consensus_timeout_s - (time.monotonic() - begin_s)
            if (refusal := self._election.refusal(agreed, names, left_s, report)) is not None:
                self._exchange.discard(agreed)
                return self._failed(standing, number, report, refusal)
        report["accepted"] = {
            name: _about(updates[name], result.distances[at], quality[at])
            for at, name in enumerate(names)
            if name in accepted
        }
        report["succeeded"], report["spare_faults"] = True, int(result.spare_faults)
        standing.norms += [updates[name].norm for name in accepted]
        standing.waited, standing.failures = set(accepted), 0
        standing.agreed, standing.model, standing.outer = agreed, model, outer

    def _failed(self, standing: _Standing, number: int, report: dict[str, Any], words: str) -> None:
        """A round without an agreement: the nodes go on from the last agreed model."""
        report["failed"] = words
        standing.failures += 1
        standing.agreed = dataclasses.replace(standing.agreed, round_=number, accepted="")
        standing.waited -= report["without"].keys()


def _beginners(inbox: Inbox, quorum: int) -> tuple[list[str], str]:
    """The nodes that begin with the same weights, and a line about them; raises UserError if they are less than a quorum."""
    names, why_not = _alike(inbox.updates), "it begins with other weights, or has another GroupNode.every"
    reasons = inbox.rejected | {name: why_not for name in inbox.updates if name not in names}
    if len(names) < quorum:
        text = "; ".join(f"{name}: {why}" for name, why in sorted(reasons.items()))
        raise UserError(
            f"{len(names)} nodes begin with the same weights, must be at least the quorum ({quorum}): start more, "
            f"with the same Trainer.seed and init_from{f' ({text})' if text else ''}"
        )
    line = f"{len(names)} nodes begin: {', '.join(sorted(names))}"
    return names, "; ".join([line, *(f"{name} has no part: {why}" for name, why in sorted(reasons.items()))])


def _written(
    exchange: Exchange, number: int, every: int, model: Arrays, outer: Sequence[np.ndarray], accepted: Sequence[str]
) -> Agreed:
    """Writes an agreed model and the outer optimizer's state after it."""
    stored = {f"{at:06d}": leaf for at, leaf in enumerate(outer)}
    outer_hash = exchange.write_outer(number, arrays.to_bytes(stored))
    agreed = exchange.write_model(number, arrays.to_bytes(model))
    return dataclasses.replace(agreed, outer=outer_hash, every=every, accepted=",".join(accepted))


def _is_awaited(exchange: Exchange, names: set[str], round_: int) -> bool:
    """Whether one of these nodes has gone on from a round's model, though it may have had no part in that round."""
    return any((result := exchange.presence(name)) and result.round_ == round_ for name in names)


def _alike(updates: Mapping[str, Update]) -> list[str]:
    """The largest group of nodes with the same weights and steps of a round."""
    result: dict[tuple[str, int], list[str]] = {}
    for name, update in updates.items():
        digest = hashing.hash_of(arrays.to_bytes(update.arrays))
        result.setdefault((digest, update.every), []).append(name)
    return max(result.values(), key=len, default=[])


def _quality(updates: Sequence[Update]) -> jax.Array:
    """The quality of each node [nodes]; 1 of a node whose loss is not known."""
    known = np.array([math.isfinite(update.loss) or not update.tokens for update in updates])
    losses = [[u.loss * u.tokens if u.tokens and math.isfinite(u.loss) else 0.0, u.tokens] for u in updates]
    return jnp.where(known, quality_of(jnp.where(known[:, None], jnp.array(losses), 0.0)), 1.0)


def _about(update: Update, distance: jax.Array, quality: jax.Array) -> dict[str, float | None]:
    """What a report says of an accepted update."""
    return {
        "distance": float(distance),
        "quality": float(quality),
        "loss": update.loss if math.isfinite(update.loss) else None,
        "tokens": update.tokens,
        "norm": update.norm,
        "bytes": update.size,
    }


def _within_norm(inbox: Inbox, norms: list[float], limit: float | None) -> tuple[dict[str, Update], dict[str, str]]:
    """The updates whose norm is within the limit, and why others have no part."""
    updates, without = inbox.updates, dict(inbox.rejected)
    usual = float(np.median([*norms, *(u.norm for u in updates.values() if math.isfinite(u.norm))] or [0.0]))
    for name, update in updates.items():
        if limit is not None and usual and math.isfinite(update.norm) and update.norm > limit * usual:
            without[name] = (
                f"the norm of its update, {update.norm:.3g}, is above {limit:g} times the median {usual:.3g}"
            )
    return {name: update for name, update in updates.items() if name not in without}, without


def _private(combine: Combine, privacy: Privacy, nodes: int) -> Combine:
    """The aggregation with the mean that the privacy allows; its noise is drawn from the operating system's randomness."""
    secret = jax.random.wrap_key_data(
        jnp.array([secrets.randbits(32) for _ in range(2)], jnp.uint32), impl="threefry2x32"
    )

    def private(sent: Params, agreed: Params, key: jax.Array | None) -> tuple[Params, Report]:
        _, report = combine(sent, agreed, key)
        return privacy.noisy_mean(agreed, sent, nodes, secret), report

    return private


def _stored_outer(exchange: Exchange, agreed: Agreed, outer: OuterOptimizer, model: Arrays) -> list[np.ndarray]:
    """The leaves of the outer optimizer's state in the exchange; raises UserError if it is another one's."""
    stored = exchange.read_outer(agreed, 3 * arrays.most_bytes(arrays.shapes_of(model)))
    result = [array for _, array in sorted(arrays.from_bytes(stored).items())]
    shapes = [x.shape for x in jax.tree.leaves(jax.eval_shape(outer.init, dict(model)))]
    if [x.shape for x in result] != shapes:
        raise UserError(
            f"the state in {exchange} is that of another Coordinator.outer than {type(outer).__name__} with these options: "
            "restore it, or name another exchange"
        )
    return result


def _unflattened(outer: OuterOptimizer, standing: _Standing) -> PyTree:
    """The outer optimizer's state of its leaves."""
    structure = jax.tree.structure(jax.eval_shape(outer.init, dict(standing.model)))
    return jax.tree.unflatten(structure, standing.outer)


def _leaves(outer: object) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(outer)]


def _reason(update: Update, quality: float, threshold: float | None) -> str:
    """Why a node has no part in the aggregate."""
    if not math.isfinite(update.norm):
        return "its parameters are not finite"
    if quality < 0:
        return "it made no update: its loss or gradients were never finite"
    if threshold is not None and quality < threshold:
        return f"its quality {quality:.2f} is below {threshold:g}"
    return "its parameters are too far from all others"


def _line(report: Mapping[str, Any], rounds: int) -> str:
    """A round in a line."""
    number, accepted = report["round"], report["accepted"]
    if report["succeeded"]:
        words = f"agreed by {len(accepted)} nodes ({', '.join(accepted)}), consensus score {report['score']:.2f}"
    else:
        words = f"no agreement ({report['failed']}), the nodes go on from the last agreed model"
    line = f"round {number} of {rounds}: {words}, {report['bytes_received'] / 1e6:.1f} MB received"
    if "epsilon" in report:
        line = f"{line}, epsilon {report['epsilon']:.3g} so far"
    return "; ".join([line, *(f"{name} has no part: {why}" for name, why in sorted(report["without"].items()))])
