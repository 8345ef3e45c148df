"""Reads steps onto the devices, whole or in part; falls back to the newest intact one."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self, TypeVar

import jax
from etils import epath
from jax.sharding import SingleDeviceSharding

from capibara.checkpoints import arrays, manifest, run_manifest, step_folders, verification
from capibara.checkpoints.encryption import Key
from capibara.checkpoints.manifest import Corrupted, Manifest
from capibara.checkpoints.policy import Checkpointing, Verify
from capibara.core import limits, tree
from capibara.core.background import Task
from capibara.core.types import PyTree, UserError
from capibara.multihost import hosts
from capibara.storage import stores

_RUN_BYTES, _RUN_VALUES = 256 << 20, 8_000_000  # limits of a run.json
TASK_LIMIT_S = 3600.0  # for a save or a verification; hosts wait that long for each other's
_LOGGED = 20  # most lost steps to name in the log
T = TypeVar("T")


class State(Protocol):
    """A state to save: named trees of arrays; its constructor takes them back."""

    def parts(self) -> dict[str, Any]:
        """The trees of arrays, by name."""
        ...


S = TypeVar("S", bound=State)


@dataclasses.dataclass(frozen=True)
class Restored:
    """The JSON parts of a checkpoint, as passed to `save`, the shapes of its arrays, and its score."""

    step: int
    data: dict[str, Any]
    progress: dict[str, Any]
    shapes: dict[str, str]
    score: float | None = None


class StepReader:
    """Reads the steps of a folder with the run's keys.

    Args:
      folder: of the steps.
      config: how steps are verified and converted, and the keys.

    Raises:
      UserError: a configured key is missing.
    """

    def __init__(self, folder: epath.Path, config: Checkpointing):
        self._folder, self._config = folder, config
        self._keys = {} if config.encryption is None else config.encryption.keys()

    def manifest(self, step: int) -> Manifest:
        """The manifest of a step for which we have the key.

        Raises:
          UserError: we do not have the key, or the step is not encrypted although it must be.
          Corrupted: the manifest is corrupted.
        """
        result = manifest.read(self._folder / str(step))
        key, encryption = self.key_of(result), self._config.encryption
        if key is not None:
            key.check_mac(result.signed(), result.mac)
        elif result.encryption is not None:
            key_id = result.encryption.get("key")
            raise UserError(
                f"checkpoint {self._folder}/{step} is encrypted with the key {key_id}, "
                + (
                    f"{' and '.join(self._keys)} given: give that key, as Encryption.old_key_file where it was replaced"
                    if self._keys
                    else "no key is given: set Checkpointing.encryption = @Encryption(), and what holds that key"
                )
            )
        elif encryption is not None and encryption.encrypt and not encryption.plain_steps:
            raise UserError(
                f"checkpoint {self._folder}/{step} is not encrypted, and Checkpointing.encryption is set: where it is your "
                "own, set Encryption.plain_steps = True to resume from it"
            )
        return result

    def key_of(self, manifest: Manifest) -> Key | None:
        """The key of an encrypted step, if we have it."""
        return None if manifest.encryption is None else self._keys.get(manifest.encryption.get("key", ""))

    def progress(self, step: int) -> Restored:
        """The JSON parts of a committed step.

        Raises:
          Corrupted: they are corrupted.
        """
        result = self.manifest(step)
        file = result.by_path.get(manifest.RUN)
        if file is None:
            raise Corrupted(f"{manifest.RUN} is gone")
        if file.size > _RUN_BYTES:
            raise Corrupted(f"{manifest.RUN} has {file.size:,} bytes, must have at most {_RUN_BYTES:,}")
        content = manifest.contents(self._folder / str(step), file)
        try:
            text = arrays.opened(content, result, file, self.key_of(result)).tobytes()
            values = limits.parse_json(text, values=_RUN_VALUES, finite=False)
            parts = {name: values[name] for name in ("data", "progress", "shapes")}
            if not all(isinstance(part, dict) for part in parts.values()):
                raise ValueError("its parts are not JSON objects")
            if not all(isinstance(shape, str) for shape in parts["shapes"].values()):
                raise ValueError("its shapes are not texts")
            return Restored(step=step, **parts, score=result.about.get("score"))
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupted(f"{manifest.RUN} cannot be read ({manifest.one_line(error)})") from error

    def state(self, restored: Restored, target: S) -> S:
        """The arrays of a step; see `CheckpointReader.restore_state`."""
        return type(target)(**self._read(restored.step, self.check_state(restored, target)))

    def check_state(self, restored: Restored, target: State) -> dict[str, Any]:
        """The trees of arrays to read for a state; raises UserError if the step holds others."""
        saved, targets = restored.shapes, target.parts()
        if _window(saved) != _window(shapes_of(targets)):
            saved = {path: shape for path, shape in saved.items() if path not in _window(saved)}
            targets.pop("losses", None)
        self._check(restored.step, saved, targets)
        return targets

    def params(self, restored: Restored, target: PyTree, *, average: bool) -> PyTree:
        """The parameters of a step; see `CheckpointReader.restore_params`."""
        targets, averaged = self.check_params(restored, target, average=average)
        arrays = self._read(restored.step, targets)
        return tree.joined(arrays["ema"], arrays["params"]) if averaged else arrays["params"]

    def check_params(self, restored: Restored, target: PyTree, *, average: bool) -> tuple[dict[str, PyTree], set[str]]:
        """The trees of arrays to read for parameters, and the names of those with an average.

        Raises:
          UserError: the step holds other parameters.
        """
        saved = restored.shapes
        averaged = {path.partition("/")[2] for path in saved if average and path.startswith("ema/")}
        targets = {
            "ema": tree.part(target, lambda name: name in averaged),
            "params": tree.part(target, lambda name: name not in averaged),
        }
        saved = {
            path: shape
            for path, shape in saved.items()
            if path.startswith("params/") != (path.partition("/")[2] in averaged)
            and path.startswith(("ema/", "params/"))
        }
        self._check(restored.step, saved, targets)
        return targets, averaged

    def part(self, restored: Restored, keep: Callable[[str], bool]) -> PyTree:
        """Parameters selected by name; see `CheckpointReader.newest_part`."""
        here = SingleDeviceSharding(jax.local_devices()[0])
        saved = restored.shapes
        targets: dict[str, jax.ShapeDtypeStruct] = {}
        for path, shape in saved.items():
            part, _, name = path.partition("/")
            has_average = part == "params" and f"ema/{name}" in saved
            if part in ("ema", "params") and not has_average and keep(name):
                leaf = parsed_shape(shape)
                targets |= {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)}
        result = self._read(restored.step, tree.nested(targets))
        return tree.joined(result.get("ema", {}), result.get("params", {}))

    def optimizer(self, restored: Restored, target: PyTree) -> tuple[int, PyTree] | None:
        """The step and its optimizer state; see `CheckpointReader.newest_optimizer`."""
        step, saved = restored.step, restored.shapes
        if any(path.startswith("ema/") for path in saved):
            return None
        saved = {path: shape for path, shape in saved.items() if path.startswith("opt_state/")}
        if not saved:
            return None
        targets = {"opt_state": target}
        self._check(step, saved, targets)
        return step, self._read(step, targets)["opt_state"]

    def _check(self, step: int, saved: Mapping[str, str], targets: PyTree) -> None:
        check_shapes(self._folder / str(step), saved, shapes_of(targets), cast=self._config.cast)

    def _read(self, step: int, target: PyTree) -> PyTree:
        result, check = self.manifest(step), self._config.verify is Verify.BEFORE
        return arrays.read(self._folder / str(step), result, target, check=check, key=self.key_of(result))


class CheckpointReader:
    """Reads the steps of a run folder without changing it: another process may be saving there.

    Args:
      model_dir: the run folder.
      config: how steps are read.
    """

    _is_read_only, _in_flight = True, "the verification in flight"

    def __init__(self, model_dir: str, config: Checkpointing):
        self._folder, self._config = step_folders.folder_of(model_dir), config
        stores.assign(self._folder, config.store)
        self._reader = StepReader(self._folder, config)
        self._verifying: Task | None = None
        self.corrupted: dict[int, str] = {}  # step -> why it was skipped

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"{self._in_flight} failed too: {failed}")

    def steps(self) -> list[int]:
        """All committed steps, oldest first; their files are not checked."""
        return step_folders.steps(self._folder) if self._folder.is_dir() else []

    def latest_step(self) -> int | None:
        """The newest committed step, None in a new run folder."""
        return max(self.steps(), default=None)

    def restore(self, target: S) -> tuple[Restored, S] | None:
        """Restores the newest intact step onto the devices; None in a new run folder.

        Newer corrupted steps are listed in `corrupted`, and quarantined by a run. Every process must call it.

        Args:
          target: as in `restore_state`.

        Raises:
          UserError: there are steps, but none is intact, or they hold another model.
        """

        def attempt(step: int) -> tuple[Restored, S]:
            verification.check_rest(self._folder / str(step), self._config.verify)
            restored = self.restore_progress(step)
            return restored, self.restore_state(restored, target)

        return self._newest(attempt)

    def newest_progress(self) -> Restored | None:
        """The JSON parts of the newest step whose manifest and JSON are intact; no array is read, nothing is quarantined.

        None: there is no such step.

        Raises:
          UserError: as `restore`, where the folder has lost its steps or another program's.
        """
        step_folders.lost(self._folder)
        step_folders.check_foreign(self._folder)
        for step in reversed(self.steps()):
            with contextlib.suppress(Corrupted):
                return self._reader.progress(step)
        return None

    def check_state(self, restored: Restored, target: State) -> None:
        """Raises UserError if a step holds another state than `restore_state` would read; no array is read."""
        self._reader.check_state(restored, target)

    def check_params(self, restored: Restored, target: PyTree) -> None:
        """Raises UserError if a step holds other parameters than `newest_params` would read; no array is read."""
        self._reader.check_params(restored, target, average=True)

    def verified_step(self) -> int | None:
        """The newest intact step; like `restore`, without reading it."""

        def attempt(step: int) -> int:
            verification.check_rest(self._folder / str(step), self._config.verify)
            if self._config.verify is Verify.BEFORE:
                verification.check_all(self._folder / str(step))
            return step

        return self._newest(attempt)

    def newest_params(self, target: PyTree, *, average: bool = True) -> tuple[int, PyTree] | None:
        """The newest intact step and its parameters, as from `restore_params`; None: there is none."""
        return self._newest(lambda step: (step, self.restore_params(step, target, average=average)))

    def newest_part(self, keep: Callable[[str], bool]) -> PyTree | None:
        """Selected parameters of the newest intact step, moving averages if it has them.

        They are placed on this process's first device, for any model; None: there is no step.
        """
        return self._newest(lambda step: self._reader.part(self.restore_progress(step), keep))

    def newest_optimizer(self, target: PyTree) -> tuple[int, PyTree] | None:
        """The newest intact step and its optimizer state; None: it has none, or it has moving averages.

        Args:
          target: of the state, ShapeDtypeStructs with the wanted shardings.

        Raises:
          UserError: it is the state of another optimizer.
        """
        return self._newest(lambda step: self._reader.optimizer(self.restore_progress(step), target))

    def restore_progress(self, step: int) -> Restored:
        """Reads the JSON parts of a committed step; `restore_state` reads the arrays.

        Raises:
          Corrupted: they are corrupted.
        """
        return self._reader.progress(step)

    def restore_state(self, restored: Restored, target: S) -> S:
        """Reads the arrays of a step onto the devices.

        Args:
          restored: from `restore_progress`.
          target: ShapeDtypeStructs with the wanted shardings (they may differ from those of the save).

        Returns:
          The state; without `losses` if the save had none, or others: they may be turned on and off between starts.

        Raises:
          UserError: the checkpoint holds another model; names the first array that differs.
          Corrupted: an array is corrupted.
        """
        return self._reader.state(restored, target)

    def restore_params(self, step: int, target: PyTree, *, average: bool = True) -> PyTree:
        """Reads only the parameters of a step, moving averages if it has them: for inference and export.

        Args:
          step: a committed one.
          target: ShapeDtypeStructs with the wanted shardings.
          average: False: the parameters themselves instead of their averages.

        Raises:
          UserError: the checkpoint holds another model; names the first array that differs.
          Corrupted: an array is corrupted.
        """
        return self._reader.params(self.restore_progress(step), target, average=average)

    def check(self) -> None:
        """Raises what a finished background verification found; does not wait."""
        if self._verifying is not None and self._verifying.done:
            verifying, self._verifying = self._verifying, None
            verifying.wait(0.0)

    def close(self) -> None:
        """Waits for the background verification, and raises what it found."""
        if self._verifying is not None:
            self._verifying.join(TASK_LIMIT_S)
        self.check()

    def _newest(self, attempt: Callable[[int], T]) -> T | None:
        """The result of `attempt` for the newest step that is intact on all processes; None: there is no step."""
        result = newest_whole(self._folder, attempt, self.corrupted, read_only=self._is_read_only)
        if result is None:
            return None
        if self._config.verify is Verify.BACKGROUND:
            folder = self._folder / str(result[0])
            self._verifying = verification.beside_training(folder, self.corrupted, read_only=self._is_read_only)
        return result[1]


def newest_whole(
    folder: epath.Path, attempt: Callable[[int], T], corrupted: dict[int, str], *, read_only: bool
) -> tuple[int, T] | None:
    """The newest step that `attempt` finds intact on all processes, and its result; None: there is no step.

    Args:
      folder: of the steps.
      attempt: reads a step; raises Corrupted if it is corrupted.
      corrupted: receives the skipped steps, and why.
      read_only: do not quarantine them.

    Raises:
      UserError: there are steps, but none is intact.
    """
    lost = step_folders.lost(folder)
    step_folders.check_foreign(folder)
    there = step_folders.steps(folder) if folder.is_dir() else []
    steps, lost = hosts.gathered([there[::-1], lost])[0]
    passed: list[int] = [*lost]  # quarantined only if there is a step to resume from

    def pass_over(step: int, fault: str) -> None:
        corrupted[step] = fault
        logging.getLogger(__name__).warning("%s/%d is corrupted: %s", folder, step, fault)

    for step in lost[-_LOGGED:]:
        pass_over(step, step_folders.why_lost(folder, step))
    for step in steps:
        result: list[T] = []
        fault = None
        try:
            result = [attempt(step)]
        except Corrupted as error:
            fault = str(error)
        fault = next(filter(None, hosts.gathered(fault)), None)
        if fault is None:
            for other in passed if not read_only and jax.process_index() == 0 else ():
                _quarantine(folder, other)
            return step, result[0]
        passed.append(step)
        pass_over(step, fault)
    if corrupted:
        last = max(corrupted)
        raise UserError(
            f"{folder} holds no step that is what was saved: {last}: {corrupted[last]}: restore the folder "
            "from a copy, or set another MODEL_DIR to start anew"
        )
    return None


def _quarantine(folder: epath.Path, step: int) -> None:
    if (folder / str(step)).exists():
        step_folders.quarantine(folder / str(step), step_folders.CORRUPTED)
    else:
        run_manifest.forget_step(folder.parent, step)


def shapes_of(arrays: PyTree) -> dict[str, str]:
    """Name -> "float32[2,3]" for every array, so that models can be compared before anything is read."""
    described = (f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for leaf in jax.tree.leaves(arrays))
    return dict(zip(tree.path_names(arrays), described, strict=True))


def parsed_shape(text: str) -> jax.ShapeDtypeStruct:
    """The inverse of `shapes_of` for one array."""
    dtype, _, sizes = text.removesuffix("]").partition("[")
    return jax.ShapeDtypeStruct(tuple(map(int, filter(None, sizes.split(",")))), jax.numpy.dtype(dtype))


def check_shapes(folder: epath.Path, saved: Mapping[str, str], expected: Mapping[str, str], *, cast: bool) -> None:
    """Compares a step's arrays with the wanted ones.

    Args:
      folder: of the step.
      saved, expected: from `shapes_of`.
      cast: ignore differences between floating-point dtypes.

    Raises:
      UserError: they differ; names the first array that does.
    """
    # Parameters first: the optimizer's moments differ only because parameters do.
    for path in sorted(saved.keys() | expected.keys(), key=lambda p: (not p.startswith("params/"), p)):
        old, new = saved.get(path, "nothing"), expected.get(path, "nothing")
        if old == new or (cast and _differ_in_precision(old, new)):
            continue
        part, absent = path.partition("/")[0], "nothing" in (old, new)
        other = {"opt_state": "another optimizer's state"}
        other |= {"ema": "another ema_decay's state"} if absent else {}
        other |= {"loss_scale": "another dtype's state"}
        hint = ", set Checkpointing.cast = True" if _differ_in_precision(old, new) else ""
        if not absent and any(f"/{moment}/" in path for moment in ("v", "v_row", "v_col")):
            hint = ", which for runs of an earlier version is Adafactor.factoring = 'dimensions'"
        raise UserError(
            f"checkpoint {folder} holds {other.get(part, 'another model')}: {path} is {old} there, {new} in this "
            f"configuration: restore the configuration of the run{hint}, or set another MODEL_DIR"
        )


def _window(shapes: Mapping[str, str]) -> dict[str, str]:
    """The arrays of the window of losses, from `shapes_of`."""
    return {path: shape for path, shape in shapes.items() if path.startswith("losses/")}


def _differ_in_precision(old: str, new: str) -> bool:
    (old_dtype, old_shape), (new_dtype, new_shape) = (text.partition("[")[::2] for text in (old, new))
    return old_shape == new_shape and all("float" in dtype for dtype in (old_dtype, new_dtype))
