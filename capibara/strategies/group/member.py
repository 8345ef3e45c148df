"""A node of a group: a run that sends its model at the end of each round and goes on from the agreed one."""

from __future__ import annotations

import dataclasses
import functools
import math
import secrets
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara.config import configurable
from capibara.consensus.compression import Compression
from capibara.core import tree
from capibara.core.fields import FilePath
from capibara.core.types import Params, PyTree, TryAgain, UserError
from capibara.multihost import hosts
from capibara.objectives.base import Metrics
from capibara.objectives.batches import Reporter
from capibara.storage import hashing
from capibara.strategies.group import arrays
from capibara.strategies.group.arrays import Arrays, Packed
from capibara.strategies.group.exchange import Agreed, Exchange, Note, Presence, check_node
from capibara.strategies.group.voting import Voter
from capibara.training.base.group import Adopted, Group, Member, Score
from capibara.training.base.strategy import weight_of


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupNode(Group):
    """A run's part in a group whose coordinator is `capibara coordinate`.

    Attributes:
      exchange: the folder in which nodes and coordinator meet, in any store.
      name: of this node, unique in its group.
      every: steps between two rounds, H; the same for all nodes.
      compression: sends the outer gradient in 8 or 4 bits; None: the model in float32.
      timeout_s: the run ends if the coordinator does not end a round within so many seconds after this node's update.
      poll_s: seconds between two looks at the exchange.
    """

    exchange: FilePath
    name: str
    every: int = 50
    compression: Compression | None = None
    timeout_s: float = 7200.0
    poll_s: float = 2.0

    def __post_init__(self) -> None:
        if not self.exchange.strip():
            raise UserError("GroupNode.exchange is empty: name a folder that all nodes reach, e.g. gs://bucket/group")
        check_node(self.name, "GroupNode.name")
        if self.every < 1:
            raise UserError(f"GroupNode.every is {self.every}, must be at least 1: try 50")
        for name in ("timeout_s", "poll_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"GroupNode.{name} is {getattr(self, name)}, must be above 0 and finite")

    @property
    def round_steps(self) -> int:
        return self.every

    def check(self) -> None:
        hosts.of_first(lambda: Exchange(self.exchange).check())

    def join(self, params: PyTree, reporter: Reporter) -> GroupMember:
        return GroupMember(self, params, reporter)


class GroupMember(Member):
    """See GroupNode."""

    def __init__(self, node: GroupNode, params: PyTree, reporter: Reporter):
        self._node, self._like, self._reporter = node, params, reporter
        self._exchange = Exchange(node.exchange)
        self._mesh = jax.tree.leaves(params)[0].sharding.mesh
        names = tree.path_names(params)
        self._shapes = {name: leaf.shape for name, leaf in zip(names, jax.tree.leaves(params), strict=True)}
        self._losses: list[jax.Array] = []  # [2] each: the sum of the loss over a step's tokens, and their number
        self._base: tuple[str, dict[str, np.ndarray]] | None = None  # an agreed model's hash, and the model
        # Process 0: what compression has lost of accepted updates, and would with the last one.
        self._lost: dict[str, np.ndarray] | None = None
        self._next_lost: dict[str, np.ndarray] | None = None
        self._seen: Agreed | None = None  # process 0: the newest agreed model
        self._voter = Voter(self._exchange, node.name, self._stored, self._on_mesh, reporter)
        self._run, self._has_arrived = secrets.token_hex(8), False

    def watch(self, metrics: Metrics) -> None:
        self._losses.append(sums(metrics))

    def meet(self, step: int, params: Params, score: Score | None = None) -> Adopted | None:
        every = self._node.every
        round_, within = divmod(step, every)
        agreed = self._newest()
        self._check(agreed, round_)
        if agreed is None or agreed.round_ <= round_:
            if within:
                return None
            if agreed is None or agreed.round_ < round_:
                self._send(round_, agreed, params)
                agreed = self._wait(round_, score)
        agreed, model = self._read(agreed)
        self._losses.clear()
        if self._node.name in agreed.accepted.split(","):
            self._lost = self._next_lost
        hosts.of_first(lambda: self._arrive(agreed.round_))
        line = agreed.line
        if agreed.round_ > round_:
            line = f"{line}; this node was at step {step}" if line else f"this node was at step {step}"
        return Adopted(agreed.round_ * every, self._on_mesh(model), line)

    def _check(self, agreed: Agreed | None, round_: int) -> None:
        """Raises UserError if this run cannot be a node of this group."""
        newest = -1 if agreed is None else agreed.round_
        if newest < round_ - 1:
            raise UserError(
                f"this run is at the end of round {round_}, and the group in {self._exchange} at round {max(newest, 0)}: name "
                "the exchange that this run began with, or another MODEL_DIR"
            )
        if agreed is not None and agreed.every not in (0, self._node.every):
            raise UserError(
                f"GroupNode.every is {self._node.every}, must be that of the group in {self._exchange}: set {agreed.every}"
            )
        if agreed is not None and agreed.status == "finished" and newest < round_:
            raise UserError(
                f"the group in {self._exchange} has finished after {newest} rounds, and this run has more steps: set "
                f"Trainer.steps = {newest * self._node.every}"
            )

    def _arrive(self, round_: int) -> None:
        """Writes from which round's model this node goes on; raises UserError if another run has its name."""
        result = self._exchange.presence(self._node.name)
        if self._has_arrived and result is not None and result.run != self._run:
            raise UserError(f"GroupNode.name is {self._node.name!r}, and another run has that name: give each its own")
        self._exchange.arrive(self._node.name, Presence(round_, self._run))
        self._has_arrived = True

    def _newest(self, patient: bool = False) -> Agreed | None:
        """The newest agreed model, the same on all processes.

        Args:
          patient: take the last one that was seen if the store does not answer.
        """

        def look() -> dict[str, Any] | None:
            try:
                self._seen = self._exchange.agreed()
            except (TryAgain, OSError):
                if not patient:
                    raise
            return None if self._seen is None else dataclasses.asdict(self._seen)

        result = hosts.of_first(look)
        agreed = None if result is None else Agreed(**result)
        if agreed is not None and agreed.status not in ("running", "finished"):
            raise UserError(f"the group in {self._exchange} has ended: {agreed.status}")
        return agreed

    def _send(self, round_: int, agreed: Agreed | None, params: Params) -> None:
        """Writes this node's update, unless it has been sent before an interruption."""
        if hosts.of_first(lambda: self._exchange.has_sent(round_, self._node.name)):
            self._reporter.status(f"round {round_}: sent before, waiting for the others")
            return
        local_params = self._whole(params)

        def send() -> int:
            packed, self._next_lost = self._packed(local_params, agreed)
            data = arrays.to_bytes(packed.arrays)
            loss, tokens = np.sum(jax.device_get(self._losses), axis=0) if self._losses else (math.nan, 1.0)
            note = Note(
                digest=hashing.hash_of(data),
                size=len(data),
                loss=float(loss / tokens) if tokens else math.nan,
                tokens=float(tokens),
                every=self._node.every,
                bits=packed.bits,
                block=packed.block,
            )
            self._exchange.send(round_, self._node.name, data, note)
            return len(data)

        size = hosts.of_first(send)
        self._reporter.status(f"round {round_}: sent {size / 1e6:.1f} MB to {self._exchange}, waiting for the others")

    def _whole(self, params: Params) -> dict[str, np.ndarray]:
        """The parameters on process 0 by name, float32; on others nothing. No device ever holds more than one whole."""
        result = {}
        for name, leaf in zip(tree.path_names(params), jax.tree.leaves(params), strict=True):
            if jax.process_count() > 1:
                leaf = replicating(self._mesh)(leaf)
            if jax.process_index() == 0:
                result[name] = np.asarray(leaf, np.float32)
        return result

    def _packed(
        self, local_params: dict[str, np.ndarray], agreed: Agreed | None
    ) -> tuple[Packed, dict[str, np.ndarray] | None]:
        """What is sent, and what that loses."""
        if self._node.compression is None or agreed is None:
            return Packed(local_params), None
        start = self._stored(agreed)
        lost = self._lost or {name: np.zeros_like(x) for name, x in local_params.items()}
        return arrays.compressed(
            self._node.compression, {name: start[name] - local_params[name] for name in local_params}, lost
        )

    def _wait(self, round_: int, score: Score | None) -> Agreed:
        """Waits until a round has ended, and votes on the model that it proposes."""
        begin_s, looks = time.monotonic(), 0
        while True:
            agreed = self._newest(patient=True)
            if agreed is not None and agreed.round_ >= round_:
                return agreed
            self._check(agreed, round_)
            if agreed is not None:
                self._voter.vote(round_, agreed, score)
            self._reporter.check(looks)
            waited_s = hosts.of_first(lambda: time.monotonic() - begin_s)
            if waited_s > self._node.timeout_s:
                raise UserError(
                    f"round {round_} did not end within GroupNode.timeout_s ({self._node.timeout_s:g}): is the coordinator of "
                    f"{self._exchange} running? Run this command again to resume"
                )
            self._reporter.progress(f"round {round_}: waiting for the others, {waited_s:.0f} s")
            time.sleep(self._node.poll_s)
            looks += 1

    def _read(self, agreed: Agreed) -> tuple[Agreed, dict[str, np.ndarray]]:
        """The newest agreed model, on every process: a group that goes on meanwhile removes earlier ones."""
        while True:
            models: list[dict[str, np.ndarray]] = []
            try:
                hosts.each(lambda: models.append(self._stored(agreed)))
            except UserError:
                newest = self._newest()
                if newest is None or newest.model == agreed.model:
                    raise
                agreed = newest
                continue
            self._base = (agreed.digest, models[0])
            return agreed, models[0]

    def _stored(self, agreed: Agreed) -> dict[str, np.ndarray]:
        if self._base is not None and self._base[0] == agreed.digest:
            return self._base[1]
        most = arrays.most_bytes(self._shapes)
        if agreed.size > most:
            raise UserError(
                f"the model in {self._exchange} has {agreed.size} bytes, must be at most {most} for this run"
            )
        try:
            return arrays.model_of(arrays.from_bytes(self._exchange.read_model(agreed)), self._shapes)
        except UserError as error:
            raise UserError(f"the model of round {agreed.round_} in {self._exchange}: {error}") from error

    def _on_mesh(self, model: Arrays) -> Params:
        def place(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
            values = model[name].astype(like.dtype)
            return jax.make_array_from_callback(like.shape, like.sharding, lambda index: values[index])

        return tree.map_with_names(place, self._like)


@jax.jit
def sums(metrics: Metrics) -> jax.Array:
    """Of a step [2]: the sum of the loss over its tokens, and their number; zeros if it made no update."""
    used = jnp.isfinite(metrics["loss"]) & (metrics.get("skipped", 0.0) == 0)
    weight = jnp.where(used, weight_of(metrics), 0.0)
    return jnp.stack([jnp.nan_to_num(metrics["loss"]) * weight, weight])


@functools.cache
def replicating(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """A program that puts all of an array on each device of a mesh."""
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
