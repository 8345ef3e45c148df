"""The coordinator of a group: makes one model of those that nodes send, round by round, and survives any of them.

It trains nothing and needs no accelerator. All that it knows is in the exchange: started again, it resumes.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from capibara.checkpoints.lease import Lease
from capibara.config import configurable
from capibara.consensus.aggregation import Aggregation, Mean, Report
from capibara.consensus.privacy import Privacy
from capibara.core import limits
from capibara.core.types import Params, UserError
from capibara.storage import hashing, stores
from capibara.strategies.agreement import Agreement, Combine, quality_of
from capibara.strategies.group import arrays
from capibara.strategies.group.arrays import Arrays
from capibara.strategies.group.exchange import Agreed, Exchange, check_node
from capibara.strategies.group.inbox import Inbox, Update


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Coordinator(Agreement):
    """The coordinator of a group of runs; each has Trainer.group = @GroupNode().

    A round ends when all nodes have sent an update that had a part in the last round; or `grace_s` after a quorum has; or
    `consensus_timeout_s` after its begin. A node that is late, or whose update is rejected, has no part in the round and is
    not waited for, until an update of its own is accepted again. The consensus score is the share of accepted nodes among
    those that were waited for or have sent one. `Agreement` has the other attributes.

    Attributes:
      exchange: the folder in which nodes and coordinator meet, in any store.
      num_nodes: the nodes of the group.
      rounds: their number.
      nodes: their names; None: the first `num_nodes` names that appear.
      quorum: the fewest nodes whose models make the next one; None: more than half of `num_nodes`.
      consensus_timeout_s: seconds from the begin of a round to its end, whoever has sent something.
      grace_s: seconds for the others once a quorum has sent its updates.
      norm_limit: an update is rejected if its norm is above so many times the median of those accepted so far; None: any.
      privacy: clips updates and adds noise to their mean, until its budget is spent; None: it does not.
      poll_s: seconds between two looks at the exchange.
    """

    exchange: str
    num_nodes: int
    rounds: int
    nodes: tuple[str, ...] | None = None
    quorum: int | None = None
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
        if not 1 <= self.needed <= self.num_nodes:
            raise UserError(
                f"Coordinator.quorum is {self.quorum}, must be from 1 to num_nodes ({self.num_nodes}): try {self.num_nodes // 2 + 1}"
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
        self.aggregation.check(self.num_nodes)
        self.of_nodes(self.needed)  # fewer nodes than that are never aggregated

    @property
    def needed(self) -> int:
        """The quorum."""
        return self.num_nodes // 2 + 1 if self.quorum is None else self.quorum

    def of_nodes(self, nodes: int) -> Aggregation:
        """The aggregation of so many nodes, which may withstand fewer faults than that of all.

        Raises:
          UserError: it cannot work on so few.
        """
        faults = min(self.aggregation.faults, self.aggregation.largest_faults(nodes))
        own = dataclasses.replace(self.aggregation, faults=faults)
        own.check(nodes)
        return own

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
        folder = epath.Path(self.exchange)
        stores.of(folder).make_folder(folder)
        lease = Lease(folder)
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
        self._names = set(config.nodes or ())

    def run(self) -> str:
        config, agreed = self._config, self._exchange.agreed()
        privacy = config.privacy
        most = config.rounds if privacy is None else min(config.rounds, privacy.releases_within())
        standing = self._begun() if agreed is None else self._resumed(agreed)
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

    def _begun(self) -> _Standing:
        """Takes the weights with which a quorum of nodes begins as the first agreed model."""
        config = self._config
        most = limits.host_bytes() // (2 * config.num_nodes)
        inbox = self._collected(Inbox(self._exchange, 0, self._may_join, None, most), set())
        by_digest: dict[str, list[str]] = {}
        for name, update in inbox.updates.items():
            by_digest.setdefault(hashing.hash_of(arrays.to_bytes(update.arrays)), []).append(name)
        digest, names = max(by_digest.items(), key=lambda item: len(item[1]), default=("", []))
        reasons = inbox.rejected | {name: "it begins with other weights" for name in inbox.updates if name not in names}
        if len(names) < config.needed:
            said = "; ".join(f"{name}: {why}" for name, why in sorted(reasons.items()))
            raise UserError(
                f"{len(names)} nodes begin with the same weights, must be at least the quorum ({config.needed}): start more, "
                f"with the same Trainer.seed and init_from{f' ({said})' if said else ''}"
            )
        model = inbox.updates[names[0]].arrays
        line = f"{len(names)} nodes begin: {', '.join(sorted(names))}"
        line = "; ".join([line, *(f"{name} has no part: {why}" for name, why in sorted(reasons.items()))])
        outer = _leaves(config.outer.init(dict(model)))
        agreed = self._written(0, model, outer, sorted(names), line)
        self._exchange.publish(agreed)
        self._show(line)
        return _Standing(agreed, model, outer, set(names), [], 0)

    def _resumed(self, agreed: Agreed) -> _Standing:
        model = arrays.from_bytes(self._exchange.read_model(agreed))
        stored = self._exchange.read_outer(agreed, 3 * arrays.most_bytes(arrays.shapes_of(model)))
        outer = [array for _, array in sorted(arrays.from_bytes(stored).items())]
        reports = [one for one in self._exchange.reports() if 0 < one["round"] <= agreed.round_]
        norms = [about["norm"] for one in reports for about in one["accepted"].values()]
        self._names |= set(agreed.accepted.split(",")) - {""}
        self._names |= {name for one in reports for name in (*one["accepted"], *one["without"])}
        waited = set(agreed.accepted.split(",")) - {""}
        self._show(f"resuming after round {agreed.round_} of {self._config.rounds}")
        return _Standing(dataclasses.replace(agreed, status="running"), model, outer, waited, norms, 0)

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
                if waited and waited <= heard or now_s - quorum_s >= config.grace_s:
                    return inbox
            known = self._names & heard
            if len(known) >= config.num_nodes or now_s - begin_s >= config.consensus_timeout_s:
                return inbox
            detail = f"{len(inbox.updates)} of {config.num_nodes} updates after {now_s - begin_s:.0f} s"
            self._progress(f"round {inbox.round_}", detail)
            self._check()
            time.sleep(config.poll_s)

    def _round(self, standing: _Standing) -> None:
        """Ends the next round, and changes the standing."""
        number, begin_s = standing.agreed.round_ + 1, time.monotonic()
        shapes = arrays.shapes_of(standing.model)
        inbox = Inbox(self._exchange, number, self._may_join, standing.model, arrays.most_bytes(shapes))
        inbox = self._collected(inbox, standing.waited)
        limit = None if self._config.privacy is not None else self._config.norm_limit  # with privacy they are clipped
        updates, without = _within_norm(inbox, standing.norms, limit)
        late = (standing.waited | self._names) - updates.keys() - without.keys()
        without |= {name: f"it sent nothing within {time.monotonic() - begin_s:.0f} s" for name in late}
        report = {"round": number, "succeeded": False, "score": 0.0, "accepted": {}, "without": without}
        report["bytes_received"] = sum(update.size for update in updates.values())
        if len(updates) < self._config.needed:
            words = f"{len(updates)} nodes have sent an update that counts, must be {self._config.needed}"
            self._failed(standing, number, report, words)
        else:
            self._settled(standing, number, updates, report)
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

    def _settled(self, standing: _Standing, number: int, updates: dict[str, Update], report: dict[str, Any]) -> None:
        """Makes the next model of the updates."""
        config, names, without = self._config, sorted(updates), report["without"]
        sent = {key: np.stack([updates[name].arrays[key] for name in names]) for key in standing.model}
        losses = jnp.array(
            [[updates[n].loss * updates[n].tokens if updates[n].tokens else 0.0, updates[n].tokens] for n in names]
        )
        losses = jnp.where(jnp.isfinite(losses).all(axis=1, keepdims=True), losses, 0.0)
        quality = quality_of(losses)
        aggregation = config.of_nodes(len(names))
        expected = len(standing.waited | set(names))
        outer = jax.tree.unflatten(jax.tree.structure(config.outer.init(dict(standing.model))), standing.outer)
        combine: Combine = jax.jit(aggregation)
        if config.privacy is not None:
            combine = _private(combine, config.privacy, config.num_nodes)
            report["epsilon"] = config.privacy.epsilon(number)
        found = config.settle(combine, dict(standing.model), sent, outer, quality, number, expected)
        accepted = [name for name, has_part in zip(names, np.asarray(found.accepted), strict=True) if has_part]
        report["score"] = float(found.score)
        for at, name in enumerate(names):
            if name not in accepted:
                without[name] = _reason(updates[name], float(quality[at]), config.quality_threshold)
        if not bool(found.succeeds):
            words = f"consensus score {float(found.score):.2f}, must be at least {config.consensus_threshold:g}"
            return self._failed(standing, number, report, words)
        for at, name in enumerate(names):
            if name in accepted:
                update = updates[name]
                report["accepted"][name] = {
                    "distance": float(found.distances[at]),
                    "quality": float(quality[at]),
                    "loss": update.loss,
                    "tokens": update.tokens,
                    "norm": update.norm,
                    "bytes": update.size,
                }
        report["succeeded"], report["faults_withstood"] = True, int(aggregation.faults)
        standing.norms += [updates[name].norm for name in accepted]
        standing.waited, standing.failures = set(accepted), 0
        standing.model = {key: np.asarray(value, np.float32) for key, value in found.params.items()}
        standing.outer = _leaves(found.outer)
        standing.agreed = self._written(number, standing.model, standing.outer, accepted, "")

    def _failed(self, standing: _Standing, number: int, report: dict[str, Any], words: str) -> None:
        """A round without an agreement: the nodes go on from the last agreed model."""
        report["failed"] = words
        standing.failures += 1
        standing.agreed = dataclasses.replace(standing.agreed, round_=number, accepted="")
        standing.waited -= report["without"].keys()

    def _written(self, number: int, model: Arrays, outer: list[np.ndarray], accepted: list[str], line: str) -> Agreed:
        stored = {f"{at:06d}": leaf for at, leaf in enumerate(outer)}
        self._exchange.write_outer(number, arrays.to_bytes(stored))
        agreed = self._exchange.write_model(number, arrays.to_bytes(model))
        return dataclasses.replace(agreed, accepted=",".join(accepted), line=line)


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
    secret = jax.random.key(secrets.randbits(32))

    def private(sent: Params, agreed: Params, key: jax.Array | None) -> tuple[Params, Report]:
        _, report = combine(sent, agreed, key)
        return privacy.noisy_mean(agreed, sent, nodes, secret), report

    return private


def _leaves(outer: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(outer)]


def _reason(update: Update, quality: float, threshold: float | None) -> str:
    """Why a node has no part in the aggregate."""
    if not math.isfinite(update.norm):
        return "its parameters are not finite"
    if quality < 0:
        return "it made no update: its loss was never finite"
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
