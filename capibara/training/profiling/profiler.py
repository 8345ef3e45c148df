"""Traces some steps of a run with JAX's profiler, for `xprof`, TensorBoard and the summary of monitoring."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator

import jax
from etils import epath

from capibara.core.types import PyTree, TryAgain, UserError
from capibara.storage import stores
from capibara.training.profiling.profile import Profile

FOLDER = "profile"


def folder_of(model_dir: str, first: int, last: int) -> str:
    """The folder of a trace; the log directory for TensorBoard."""
    return os.path.join(model_dir, FOLDER, f"steps-{first}-{last}")


class Profiler:
    """Traces the steps of a profile; a context manager that ends a trace whose run ends early.

    Args:
      profile: which steps; None: none.
      model_dir: the run folder.
      last_step: of the run, which ends a trace that is to be longer; None: unknown.
    """

    def __init__(self, profile: Profile | None, model_dir: str, last_step: int | None = None):
        self._profile, self._model_dir, self._last_step = profile, model_dir, last_step
        self._first: int | None = None
        self._local: str = ""
        self._done = profile is None

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *error: object) -> None:
        if self._first is not None:
            with contextlib.suppress(Exception):  # what ends the run is reported, not this
                jax.profiler.stop_trace()
            shutil.rmtree(self._local, ignore_errors=True)

    def announce(self, first_step: int, say: Callable[[str], None]) -> None:
        """Says so if no step will be traced; `first_step`: that the run trains first."""
        if self._profile is None:
            return
        steps = f"steps {self._profile.start} to {self._profile.stop}"
        if self._profile.stop < first_step:
            say(f"nothing is profiled: {steps} are over, the run starts with step {first_step}")
        elif self._last_step is not None and self._profile.start > self._last_step:
            say(f"nothing is profiled: {steps} come after the last step, {self._last_step}")

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """The context of a step, which the trace names.

        Raises:
          UserError: another program already traces this process.
        """
        if self._done or self._profile is None or step < self._profile.start:
            yield
            return
        if self._first is None:
            if step > self._profile.stop:
                self._done = True
                yield
                return
            self._begin(step)
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield

    def ends(self, step: int) -> bool:
        """Whether a trace is to end after this step."""
        if self._first is None or self._profile is None:
            return False
        return step >= self._profile.stop or step == self._last_step

    def end(self, step: int, result: PyTree) -> tuple[int, str] | None:
        """Ends the trace; its first step and its folder. None: it cannot be written, which ends no run.

        Args:
          step: the step that was dispatched last.
          result: what it returned, on the devices: the trace waits for it.
        """
        assert self._first is not None, "a trace has begun"
        jax.block_until_ready(result)
        first, self._first, self._done = self._first, None, True
        folder = folder_of(self._model_dir, first, step)
        try:
            jax.profiler.stop_trace()
            _stored(self._local, folder)
        except (OSError, RuntimeError, UserError, TryAgain) as error:
            logging.getLogger(__name__).warning(
                "the profile of steps %d to %d cannot be written to %s (%s); what there is of it stays in %s",
                first, step, folder, error, self._local,
            )  # fmt: skip
            return None
        return first, folder

    def _begin(self, step: int) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every Python call would be an event, and slow the steps
        self._local = tempfile.mkdtemp(prefix="capibara-profile-")
        try:
            jax.profiler.start_trace(self._local, profiler_options=options)
        except RuntimeError as error:
            shutil.rmtree(self._local, ignore_errors=True)
            raise UserError(f"Profile.start: step {step} cannot be traced ({error}): end the other trace") from None
        self._first = step


def _stored(local: str, folder: str) -> None:
    """Moves the files of a trace into the run folder, which may be in a bucket."""
    store = stores.of(folder)
    target = epath.Path(folder)
    for path in sorted(glob.glob(os.path.join(local, "**", "*"), recursive=True)):
        if os.path.isfile(path):
            written = target / os.path.relpath(path, local)
            store.make_folder(written.parent)
            with open(path, "rb") as file:
                store.write_atomic(written, file.read())
    shutil.rmtree(local, ignore_errors=True)
