"""A node of a group: a run that sends its model at the end of each round and goes on from the agreed one."""

from __future__ import annotations

import dataclasses
import math
import time

import jax
import jax.numpy as jnp
import numpy as np

from capibara.config import configurable
from capibara.consensus.compression import Compression
from capibara.core import tree
from capibara.core.multihost import hosts
from capibara.core.types import Params, PyTree, UserError
from capibara.objectives.base import Metrics
from capibara.objectives.batches import Reporter
from capibara.storage import hashing
from capibara.strategies.group import arrays
from capibara.strategies.group.arrays import Packed
from capibara.strategies.group.exchange import Agreed, Exchange, Note, check_node
from capibara.training.group import Adopted, Group, Member
from capibara.training.strategy import weight_of


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

    exchange: str
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

    def join(self, params: PyTree, reporter: Reporter) -> GroupMember:
        return GroupMember(self, params, reporter)


class GroupMember(Member):
    """See GroupNode."""

    def __init__(self, node: GroupNode, params: PyTree, reporter: Reporter):
        self._node, self._like, self._reporter = node, params, reporter
        self._exchange = Exchange(node.exchange)
        names = tree.path_names(params)
        self._shapes = {name: leaf.shape for name, leaf in zip(names, jax.tree.leaves(params), strict=True)}
        self._gather = jax.jit(lambda x: x, out_shardings=_everywhere(params)) if jax.process_count() > 1 else None
        self._losses: list[jax.Array] = []  # [2] each: the sum of the loss over a step's tokens, and their number
        self._base: tuple[int, dict[str, np.ndarray]] | None = None  # process 0: a round, and its agreed model
        self._lost: dict[str, np.ndarray] | None = None  # process 0: what compression has lost

    def watch(self, metrics: Metrics) -> None:
        self._losses.append(_sums(metrics))

    def meet(self, step: int, params: Params) -> Adopted | None:
        round_, within = divmod(step, self._node.every)
        agreed = self._newest()
        if agreed is None or agreed.round_ <= round_:
            if within:
                return None
            if agreed is None or agreed.round_ < round_:
                self._send(round_, agreed, params)
                agreed = self._wait(round_)
        self._losses.clear()
        if self._node.name not in agreed.accepted.split(","):
            self._lost = None  # of an update that had no effect
        model = self._read(agreed)
        line = agreed.line
        if agreed.round_ > round_:
            line = f"{line}; this node was at step {step}" if line else f"this node was at step {step}"
        return Adopted(agreed.round_ * self._node.every, self._on_mesh(model), line)

    def _newest(self) -> Agreed | None:
        """The newest agreed model, the same on all processes."""
        found = hosts.of_first(lambda: None if (one := self._exchange.agreed()) is None else dataclasses.asdict(one))
        agreed = None if found is None else Agreed(**found)
        if agreed is not None and agreed.status not in ("running", "finished"):
            raise UserError(f"the group in {self._exchange} has ended: {agreed.status}")
        return agreed

    def _send(self, round_: int, agreed: Agreed | None, params: Params) -> None:
        """Writes this node's update; process 0 has all arrays for it."""
        whole = params if self._gather is None else self._gather(params)

        def send() -> int:
            own = arrays.named(whole)
            packed = Packed(own)
            if self._node.compression is not None and agreed is not None:
                start = self._agreed_arrays(agreed)
                lost = self._lost or {name: np.zeros_like(x) for name, x in own.items()}
                gradient = {name: start[name] - own[name] for name in own}
                packed, self._lost = arrays.compressed(self._node.compression, gradient, lost)
            data = arrays.to_bytes(packed.arrays)
            loss, tokens = np.sum(jax.device_get(self._losses), axis=0) if self._losses else (0.0, 0.0)
            note = Note(
                digest=hashing.hash_of(data),
                size=len(data),
                loss=float(loss / tokens) if tokens else math.nan,
                tokens=float(tokens),
                bits=packed.bits,
                block=packed.block,
            )
            self._exchange.send(round_, self._node.name, data, note)
            return len(data)

        size = hosts.of_first(send)
        self._reporter.status(f"round {round_}: sent {size / 1e6:.1f} MB to {self._exchange}, waiting for the others")

    def _wait(self, round_: int) -> Agreed:
        """Waits until a round has ended."""
        begin_s, looks = time.monotonic(), 0
        while True:
            agreed = self._newest()
            if agreed is not None and agreed.round_ >= round_:
                return agreed
            if agreed is not None and agreed.status == "finished":
                raise UserError(
                    f"the group in {self._exchange} has finished after {agreed.round_} rounds, and this run has more steps: set "
                    f"Trainer.steps = {agreed.round_ * self._node.every}"
                )
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

    def _read(self, agreed: Agreed) -> dict[str, np.ndarray]:
        """The agreed model, on every process."""
        models: list[dict[str, np.ndarray]] = []
        hosts.each(lambda: models.append(self._agreed_arrays(agreed)))
        self._base = (agreed.round_, models[0])
        return models[0]

    def _agreed_arrays(self, agreed: Agreed) -> dict[str, np.ndarray]:
        if self._base is not None and self._base[0] == agreed.round_:
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

    def _on_mesh(self, model: dict[str, np.ndarray]) -> Params:
        def place(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
            values = model[name].astype(like.dtype)
            return jax.make_array_from_callback(like.shape, like.sharding, lambda index: values[index])

        return tree.map_with_names(place, self._like)


@jax.jit
def _sums(metrics: Metrics) -> jax.Array:
    """Of a step [2]: the sum of the loss over its tokens, and their number; zeros if it made no update."""
    used = jnp.isfinite(metrics["loss"]) & (metrics.get("skipped", 0.0) == 0)
    weight = jnp.where(used, weight_of(metrics), 0.0)
    return jnp.stack([jnp.nan_to_num(metrics["loss"]) * weight, weight])


def _everywhere(params: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.sharding.NamedSharding(x.sharding.mesh, jax.sharding.PartitionSpec()), params)
