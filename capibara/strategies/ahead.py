"""Draws answers ahead of training, on devices of its own and with weights that are at most so many steps old."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from capibara.core.interrupt import Interrupted
from capibara.core.types import Params
from capibara.data.pipeline.loader import Position
from capibara.objectives.batches import ReadAhead, RunParts
from capibara.strategies.drawer import Draw, Drawer, DrawOptions


class _Weights(NamedTuple):
    """The parameters after so many steps, on the devices that draw."""

    step: int
    params: Params


class _Stopwatch:
    """Measures the time within its contexts, which do not overlap."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._since_s: float | None = None

    def __enter__(self) -> None:
        self._since_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._add(None)

    def read_s(self) -> float:
        """Seconds since the last call."""
        self._add(None if self._since_s is None else time.perf_counter())
        total_s, self._total_s = self._total_s, 0.0
        return total_s

    def _add(self, next_s: float | None) -> None:
        if self._since_s is not None:
            self._total_s += time.perf_counter() - self._since_s
        self._since_s = next_s


class AheadDrawer(Drawer):
    """Draws rollouts one after the other in a thread, while the other devices train.

    All tokens of a rollout are written with the weights of one step: weights are only changed between two rollouts. A rollout
    begins when there are weights of at most `staleness_bound` steps before its first step; so the thread waits for
    training, and no answer is too old when it is trained.

    Args:
      run, grpo: as for `Drawer`.
    """

    def __init__(self, run: RunParts, grpo: DrawOptions):
        self._reporter = run.reporter
        reporter = dataclasses.replace(run.reporter, check=self._check, progress=self._show)
        devices = devices_beside(run.mesh, grpo.rollout_devices)
        super().__init__(dataclasses.replace(run, reporter=reporter), grpo, devices)
        self._changed = threading.Condition()  # guards what follows, up to the error
        self._weights: _Weights | None = None
        self._draws: dict[int, Draw] = {}  # first step of a rollout -> its answers
        self._data: dict[int, ReadAhead] = {}  # first step of a rollout -> the data before it
        self._error: BaseException | None = None
        self._engine = threading.Lock()  # an evaluation waits for the end of a rollout
        self._thread: threading.Thread | None = None
        self._closing = self._shows = False
        self._next = 1  # first step of the rollout that training has next
        self._position: Position = None
        self._training_waits, self._drawing_waits = _Stopwatch(), _Stopwatch()
        self._staleness: list[int] = []
        self._since_s = time.perf_counter()

    @property
    def read_ahead(self) -> ReadAhead | None:
        with self._changed:
            ahead = self._data.get(self._next)
        return None if ahead is None else ahead._replace(position=self._position)

    def begin(self, step: int) -> None:
        self.close()
        length = self._grpo.steps_of_rollout
        self._next, self._position = -(-step // length) * length + 1, self._run.batches.position
        self._data = {self._next: self._data_now()}

    def draw(self, step: int, params: Params) -> Draw:
        if step != self._next:  # a model was adopted that has other steps
            self.close()
            self.begin(step - 1)
        self._publish(step - 1, params)
        with self._training_waits, self._showing(), self._changed:
            self._changed.wait_for(lambda: step in self._draws or self._error is not None)
            if step not in self._draws:
                assert self._error is not None
                raise self._error
            result, self._position = self._draws.pop(step), self._data.pop(step).position
        self._next += self._grpo.steps_of_rollout
        self._staleness.append(step - 1 - result.policy_step)
        return result

    @contextlib.contextmanager
    def evaluating(self, params: Params) -> Iterator[None]:
        with self._engine, self._showing():
            self.answerer.load(params)
            yield

    def metrics(self) -> dict[str, float]:
        now_s = time.perf_counter()
        elapsed_s, self._since_s = now_s - self._since_s, now_s
        staleness, self._staleness = self._staleness, []
        ages = (
            {"staleness": sum(staleness) / len(staleness), "staleness_max": float(max(staleness))} if staleness else {}
        )
        return ages | {
            "training_idle": self._training_waits.read_s() / elapsed_s,
            "rollout_idle": self._drawing_waits.read_s() / elapsed_s,
        }

    def close(self) -> None:
        if self._thread is not None:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            self._thread.join()
            unused = self._data[self._next].state
            if self._run.batches.batches != unused["batches"]:
                self._run.batches.set_state(unused)
        self._thread, self._weights, self._error, self._closing = None, None, None, False
        self._draws, self._data = {}, {}

    def _publish(self, step: int, params: Params) -> None:
        """Copies the parameters after a step to the devices that draw; training may overwrite them then."""
        copied = jax.block_until_ready(self.answerer.copied(params))
        with self._changed:
            self._weights = _Weights(step, copied)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        length = self._grpo.steps_of_rollout
        try:
            for step in itertools.count(self._next, length):
                policy_step, params = self._fresh_weights(step)
                with self._engine:
                    self.answerer.use(params)
                    del params  # the engine has its own
                    draw, data = self._drawn(step, policy_step), self._data_now()
                with self._changed:
                    self._draws[step], self._data[step + length] = draw, data
                    self._changed.notify_all()
        except BaseException as error:  # training raises it when it needs the answers
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _fresh_weights(self, step: int) -> _Weights:
        """Weights that are new enough for the rollout that begins with a step; waits for them."""
        with self._drawing_waits, self._changed:
            while not self._closing:
                if self._weights is not None and step - 1 - self._weights.step <= self._grpo.staleness_bound:
                    return self._weights
                self._changed.wait()
        raise Interrupted

    def _data_now(self) -> ReadAhead:
        return ReadAhead(self._run.batches.get_state(), self._run.batches.position)

    def _check(self, done: int, every: int = 1) -> None:
        if self._closing:
            raise Interrupted
        self._reporter.check(done, every)

    def _show(self, text: str) -> None:
        if self._shows:
            self._reporter.progress(text)

    @contextlib.contextmanager
    def _showing(self) -> Iterator[None]:
        """A context in which training waits, and the progress of drawing is shown."""
        self._shows = True
        try:
            yield
        finally:
            self._shows = False


def devices_beside(mesh: Mesh, count: int) -> list[jax.Device]:
    """The first `count` devices of this process that are not of training's mesh."""
    training = {*mesh.devices.flat}
    return [device for device in jax.local_devices() if device not in training][:count]
