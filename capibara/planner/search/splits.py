"""Splits a slice between training and an engine that draws answers beside it: the meshes of both, and which waits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TypeVar

from capibara.core.types import UserError
from capibara.data.dataset import Dataset
from capibara.objectives.loss import Loss, ResidentArrays, Rollout
from capibara.planner.hardware import slices
from capibara.planner.hardware.chips import GIB
from capibara.planner.hardware.slices import Slice
from capibara.planner.model import workload
from capibara.planner.model.units import seconds
from capibara.planner.model.workload import Run, Workload
from capibara.planner.search import ranking, serving
from capibara.planner.search.ranking import FLAGS, Question, Ranked

R = TypeVar("R", bound=Run)


@dataclasses.dataclass(frozen=True)
class Engine:
    """The engine on the devices that draw, predicted.

    Attributes:
      devices: number of devices that draw; those beyond tensor x data are idle.
      tensor, data: sizes of ServingMesh.
      arrays: on each of its devices.
      limit_bytes: of a device's HBM, what it may use.
      step_s: time of a decode step with full rows.
      prompt_token_s: time to read a token of a prompt.
    """

    devices: int
    tensor: int
    data: int
    arrays: tuple[ResidentArrays, ...]
    limit_bytes: float
    step_s: float
    prompt_token_s: float

    @property
    def bytes(self) -> int:
        """Total bytes on a device."""
        return sum(item.bytes for item in self.arrays)

    @property
    def fits(self) -> bool:
        return self.bytes <= self.limit_bytes


@dataclasses.dataclass(frozen=True)
class Split:
    """One division of a slice, predicted. Times are of a rollout and the train steps on its answers.

    Attributes:
      part: the devices that train.
      ranked: their plans, the best first.
      engine: the engine on the others.
      loss: of the run, with the engine's mesh.
      work, dataset: of the run.
    """

    part: Slice
    ranked: list[Ranked]
    engine: Engine
    loss: Loss
    work: Workload
    dataset: Dataset

    @property
    def rollout(self) -> Rollout:
        return _rollout(self.loss, self.dataset, self.ranked[0].choice.batch_size(self.work))

    @property
    def decode_steps(self) -> int:
        """Steps in which all answers are written, if none ends early."""
        return math.ceil(self.rollout.answers / self.rollout.slots) * self.rollout.answer_tokens

    @property
    def prompts_s(self) -> float:
        """Seconds to read the prompts, each once for an answer: those of a group are drawn beside each other."""
        return self.rollout.answers * self.rollout.prompt_tokens * self.engine.prompt_token_s

    @property
    def draw_s(self) -> float:
        """Seconds to draw the answers."""
        return self.decode_steps * self.engine.step_s + self.prompts_s

    @property
    def train_s(self) -> float:
        """Seconds to train on them."""
        return self.rollout.steps * self.ranked[0].cost.step_s

    @property
    def period_s(self) -> float:
        """Seconds from one rollout to the next."""
        return self.draw_s + self.train_s if self.rollout.in_turn else max(self.draw_s, self.train_s)

    def describe(self) -> str:
        """One line: how the engine is laid out, and how long both halves take."""
        mesh = f"tensor={self.engine.tensor} x data={self.engine.data}"
        times = f"predicted {seconds(self.draw_s)} a rollout beside {seconds(self.train_s)} of training"
        return f"{self.engine.devices} of the devices draw, {mesh}: {times}"

    def bindings(self) -> list[str]:
        """Gin statements that split a run so."""
        name = type(self.loss).__name__
        return [
            f"{name}.rollout_devices = {self.engine.devices}",
            f"{name}.mesh = @rollout/ServingMesh()",
            f"rollout/ServingMesh.tensor = {self.engine.tensor}",
            f"rollout/ServingMesh.data = {self.engine.data}",
        ]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a run uses a slice.

    Attributes:
      part: the devices that train.
      ranked: their plans, the best first.
      splits: divisions of the slice that fit, by seconds for an answer, the first one with `part` and `ranked`; empty: all
        devices train.
      refused: number of devices that draw -> why not so many.
    """

    part: Slice
    ranked: list[Ranked]
    splits: tuple[Split, ...] = ()
    refused: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def bindings(self) -> list[str]:
        """Gin statements of the split."""
        return self.splits[0].bindings() if self.splits else []

    def ranked_again(self, ranked: list[Ranked]) -> Layout:
        """The same division with plans in another order."""
        first = (dataclasses.replace(self.splits[0], ranked=ranked),) if self.splits else ()
        return dataclasses.replace(self, ranked=ranked, splits=(*first, *self.splits[1:]))

    def divided(self, run: R) -> R:
        """The run with the split; its plan stays."""
        return dataclasses.replace(run, loss=self.splits[0].loss) if self.splits else run


def search(run: Run, slice_: Slice, work: Workload, question: Question, words: Mapping[str, str] = FLAGS) -> Layout:
    """The best plans of a run on a slice, both halves of it; of each division if `rollout_devices` is -1.

    Args:
      run: the run; its mesh is ignored, and its batch if `question` has one or is to find one.
      slice_, work, question: as for `ranking.search`.
      words: as for `ranking.no_plan`.

    Raises:
      UserError: nothing fits, the slice cannot be divided so, or the batch has a part of a prompt's answers.
    """
    loss = run.loss
    if loss is not None:
        _check_batch(loss, question.batch_size)
    if loss is None or not loss.rollout_devices:
        return Layout(slice_, ranking.fitting(work, slice_, question, words))
    if loss.rollout_devices > 0:
        split = _split(run, loss, slice_, work, question, words)
        return Layout(split.part, split.ranked, (split,))
    _check_one_host(loss, slice_)
    splits, refused = list[Split](), dict[int, str]()
    for devices in divisions(slice_):
        try:
            candidate = loss.with_rollouts(devices, *_mesh_of(loss, run.dataset))
            splits.append(_split(run, candidate, slice_, work, question, words))
        except UserError as error:
            refused[devices] = str(error)
    if not splits:
        raise _all_refused(loss, slice_, refused) if refused else _no_division(loss, slice_)
    splits.sort(key=lambda item: item.period_s / item.rollout.answers)
    return Layout(splits[0].part, splits[0].ranked, tuple(splits), refused)


def divisions(slice_: Slice) -> list[int]:
    """Numbers of devices that can draw while the others train: both form boxes."""
    counts = range(1, slice_.devices)
    return [n for n in counts if None not in (_training(slice_, n), _drawing(slice_, n))]


def training_part(run: Run, slice_: Slice) -> Slice:
    """The part of a slice that trains: all of it without `rollout_devices`.

    Raises:
      UserError: the slice cannot be divided so.
    """
    loss = run.loss
    if loss is None or not loss.rollout_devices:
        return slice_
    _check_one_host(loss, slice_)
    workload.training_devices(run, slice_.devices)  # raises if none is left
    part = _training(slice_, loss.rollout_devices)
    if part is None or _drawing(slice_, loss.rollout_devices) is None:
        raise _no_division(loss, slice_)
    return part


def _training(slice_: Slice, drawing: int) -> Slice | None:
    return slices.part(slice_, 0, slice_.devices - drawing)


def _drawing(slice_: Slice, drawing: int, used: int | None = None) -> Slice | None:
    return slices.part(slice_, slice_.devices - drawing, drawing if used is None else used)


def _rollout(loss: Loss, dataset: Dataset, batch_size: int) -> Rollout:
    result = loss.rollout(dataset, batch_size)
    assert result is not None, "the loss has rollout_devices"
    return result


def _mesh_of(loss: Loss, dataset: Dataset) -> tuple[int | None, int | None]:
    """The engine's mesh as far as the run sets it."""
    rollout = _rollout(loss, dataset, 1)
    return rollout.tensor, rollout.data


def _split(run: Run, loss: Loss, slice_: Slice, work: Workload, question: Question, words: Mapping[str, str]) -> Split:
    part = training_part(dataclasses.replace(run, loss=loss), slice_)
    engine = _engine(run, loss, slice_, work, question)
    if engine is None or not engine.fits:
        raise _no_engine(run, loss, slice_, work, question)
    ranked = ranking.fitting(work, part, question, words)
    return Split(
        part, ranked, engine, loss.with_rollouts(engine.devices, engine.tensor, engine.data), work, run.dataset
    )


def _engine(run: Run, loss: Loss, slice_: Slice, work: Workload, question: Question) -> Engine | None:
    """The engine with the smallest tensor axis that fits, or else the largest one; None: the devices have no legal mesh."""
    devices, rollout = loss.rollout_devices, _rollout(loss, run.dataset, 1)
    half, engine = _drawing(slice_, devices), None
    if half is None:
        return None
    limit = half.chip.device_usable_hbm_bytes * min(1 - question.headroom, rollout.memory_share)
    for tensor in serving.tensors(work.model, half):
        mesh = _mesh(slice_, devices, tensor, rollout)
        if mesh is None:
            continue
        data, used = mesh
        arrays = loss.with_rollouts(devices, tensor, data).rollout_arrays(work.model, run.dataset)
        engine = Engine(devices, tensor, data, arrays, limit, *_seconds(work, used, tensor, rollout))
        if engine.fits:
            break
    return engine


def _mesh(slice_: Slice, devices: int, tensor: int, rollout: Rollout) -> tuple[int, Slice] | None:
    """The data axis of an engine with this tensor axis, and the devices that it uses: as many as share its slots."""
    if rollout.tensor not in (None, tensor):
        return None
    for data in range(devices // tensor, 0, -1):
        used = _drawing(slice_, devices, tensor * data)
        shares = rollout.slots % data == 0 if rollout.data is None else data == rollout.data
        if devices % (tensor * data) == 0 and shares and used is not None:
            return data, used
    return None


def _seconds(work: Workload, used: Slice, tensor: int, rollout: Rollout) -> tuple[float, float]:
    """Time of a decode step, and of a token of a prompt."""
    dtype = str(work.config.dtype) if rollout.cache_dtype == "compute" else rollout.cache_dtype
    engine = serving.Engine(
        length=rollout.prompt_tokens + rollout.answer_tokens,
        cache_dtype=dtype,
        slots=rollout.slots,
        prefill_tokens=rollout.prefill_tokens,
    )
    step_s = serving.predict(work.model, used, tensor, engine, headroom=0.0).step_s
    together = serving.prefill_s(work.model, used, tensor, rollout.prefill_tokens)
    return step_s, together / rollout.prefill_tokens / (used.devices // tensor)


def _check_batch(loss: Loss, batch_size: int | None) -> None:
    rows = loss.rows_of_a_prompt
    if batch_size is not None and batch_size % rows:
        raise UserError(
            f"batch_size ({batch_size}) must be a multiple of the {rows} rows that @{type(loss).__name__}() has of a prompt: try "
            f"{max(1, round(batch_size / rows)) * rows}"
        )


def _check_one_host(loss: Loss, slice_: Slice) -> None:
    if slice_.hosts > 1:
        single = [item.name for item in slices.sizes(slice_.chip) if item.hosts == 1]
        raise UserError(
            f"{type(loss).__name__}.rollout_devices is {loss.rollout_devices}, and {slice_.name} has {slice_.hosts} hosts with a "
            f"process each: drawing beside training is for one process, try {single[-1]}"
        )


def _no_division(loss: Loss, slice_: Slice) -> UserError:
    name, drawing = f"{type(loss).__name__}.rollout_devices", loss.rollout_devices
    counts = divisions(slice_)
    if not counts:
        return UserError(f"{name} is {drawing}, and {slice_.name} has no two parts: set {name} = 0")
    near = min(counts, key=lambda count: abs(count - drawing))
    shape = "x".join(map(str, slice_.shape))
    return UserError(
        f"{name} is {drawing}, and {slice_.name} ({shape}) has no box of {slice_.devices - drawing} devices that train beside one "
        f"of {drawing} that draw, as meshes need: try {name} = {near}"
    )


def _all_refused(loss: Loss, slice_: Slice, refused: Mapping[int, str]) -> UserError:
    reasons = "; ".join(f"with {devices} that draw: {why}" for devices, why in refused.items())
    return UserError(
        f"{type(loss).__name__}.rollout_devices is {loss.rollout_devices}, and no division of {slice_.name} works: {reasons}"
    )


def _no_engine(run: Run, loss: Loss, slice_: Slice, work: Workload, question: Question) -> UserError:
    """An error that says what the engine lacks, and where it would fit."""
    name, devices = f"{type(loss).__name__}.rollout_devices", loss.rollout_devices
    engine = _engine(run, loss, slice_, work, question)
    rollout = _rollout(loss, run.dataset, 1)
    if engine is None:
        legal = ", ".join(map(str, serving.tensors(work.model, _drawing(slice_, devices) or slice_)))
        asked = {"tensor": rollout.tensor, "data": rollout.data}
        shown = " x ".join(f"ServingMesh.{axis} ({size})" for axis, size in asked.items() if size is not None)
        return UserError(
            f"{shown} is no mesh of the {devices} devices that draw, on which the model's tensor axis may be {legal}: leave it out"
        )

    def fits(count: int, tensor: int | None, data: int | None) -> bool:
        other = _engine(run, loss.with_rollouts(count, tensor, data), slice_, work, question)
        return other is not None and other.fits

    more = (count for count in divisions(slice_) if count > devices)
    ways = [f"{name} = {count}" for count in more if fits(count, rollout.tensor, rollout.data)][:1]
    if (rollout.tensor, rollout.data) != (None, None) and fits(devices, None, None):
        ways.append("ServingMesh without tensor and data")
    if engine.bytes - engine.arrays[-1].bytes < engine.limit_bytes:
        ways.append("fewer EngineConfig.slots")
    parts = ", ".join(f"{item.name} {item.bytes / GIB:.2f}" for item in engine.arrays)
    return UserError(
        f"{name} is {devices}, and with tensor={engine.tensor} each of these devices needs {engine.bytes / GIB:.2f} GiB ({parts}), "
        f"of which {engine.limit_bytes / GIB:.2f} may be used on {slice_.chip.name}: try "
        f"{', or '.join(ways) or 'chips with more HBM'}"
    )
