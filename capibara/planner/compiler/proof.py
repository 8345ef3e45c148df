"""Proves that a plan fits: compiles the train step exactly as `train` would, in a child process."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from capibara.planner.compiler import compile as compiler
from capibara.planner.compiler import compile_cache
from capibara.planner.compiler.compile_cache import Verdict
from capibara.planner.hardware import xla_flags
from capibara.planner.hardware.slices import Slice
from capibara.planner.model import workload
from capibara.planner.model.workload import Run, Workload
from capibara.planner.search.ranking import Ranked


@dataclasses.dataclass(frozen=True)
class Configuration:
    """The user's configuration, for a child process to read again.

    Attributes:
      gin_files, gin_bindings, gin_search_paths: as in config.parse.
      length, encoder_length: tokens of a row, overriding the run's.
    """

    gin_files: Sequence[str]
    gin_bindings: Sequence[str] = ()
    gin_search_paths: Sequence[str] = ()
    length: int | None = None
    encoder_length: int | None = None

    def bound(self, lines: Sequence[str]) -> Configuration:
        """The configuration with further bindings."""
        return dataclasses.replace(self, gin_bindings=[*self.gin_bindings, *lines])

    def command(self, slice_: Slice) -> list[str]:
        """The command line of `prove` that compiles this configuration in a child."""
        command = [sys.executable, "-m", "capibara.prove", "--child", f"--slice={slice_.name}"]
        command += [f"--gin_file={file}" for file in self.gin_files]
        command += [f"--gin_bindings={binding}" for binding in self.gin_bindings]
        command += [f"--gin_search_paths={path}" for path in self.gin_search_paths]
        lengths = {"length": self.length, "encoder_length": self.encoder_length}
        return command + [f"--{name}={length}" for name, length in lengths.items() if length is not None]


def flags(run: Run, slice_: Slice) -> dict[str, str]:
    """The XLA options that `train` uses for this run's step on this slice."""
    return xla_flags.of_plan(slice_.chip.name, run.plan)


def key(run: Run, slice_: Slice) -> dict[str, Any]:
    """All of a run that affects its compiled step: the cache key of its result."""
    batch = run.batch_spec
    return {
        "slice": slice_.name,
        "model": repr(run.model),
        "plan": repr(run.plan),
        "optimizer": repr(run.optimizer),
        "batch": {name: [shape, str(dtype)] for name, (shape, dtype) in batch.items()},
        "steps": run.steps,
        "z_loss": run.z_loss,
        **({"label_smoothing": run.label_smoothing} if run.label_smoothing else {}),
        **({"loss_normalization": str(normalization)} if (normalization := run.loss_normalization) != "tokens" else {}),
        "ema_decay": run.ema_decay,
        "loss_scaling": repr(run.loss_scaling),
        "flags": flags(run, slice_),
        **({} if run.loss is None else {"loss": repr(run.loss)}),
        **run.training_method.program,
        **({"modules": code} if (code := compile_cache.users_digest(run)) else {}),
    }


@contextlib.contextmanager
def without_locations() -> Iterator[None]:
    """Lowers programs without source locations.

    Pallas kernels contain theirs: the same program would differ between checkouts.
    """
    before = jax.config.values["jax_traceback_in_locations_limit"]
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", before)


def answer(lowered: jax.stages.Lowered, slice_: Slice, mesh: jax.sharding.Mesh, flags: Mapping[str, str]) -> None:
    """Compiles a step, in the child, and reports its fingerprint and the result to the parent."""
    compile_cache.announce_program(compiler.fingerprint(lowered, slice_.name, mesh, flags))
    compile_cache.announce("compiling")
    compile_cache.report(compiler.compile_train_step(lowered, flags))


def prove(
    run: Run,
    configuration: Configuration,
    slice_: Slice,
    *,
    deadline_s: float,
    status: Callable[[float, str], None] = lambda elapsed_s, phase: None,
    fresh: bool = False,
) -> Verdict:
    """The compile result of a run's step, from the cache or a child process, plus what the run holds beside the step.

    Args:
      run: the run that `configuration` describes.
      configuration: for the child.
      slice_: the target slice.
      deadline_s, status, fresh: as in compile_cache.verdict.
    """
    command = configuration.command(slice_)
    result = compile_cache.verdict(command, key(run, slice_), deadline_s=deadline_s, status=status, fresh=fresh)
    if run.loss is None:
        return result
    held = workload.of_run(run).held
    devices = workload.training_devices(run, slice_.devices)
    return result.with_held(round(held.on_device(run.plan.mesh_shape(devices, slice_.name))))


def prover(
    run: Run,
    configuration: Configuration,
    work: Workload,
    slice_: Slice,
    *,
    deadline_s: float,
    status: Callable[[str, str], None] = lambda topic, detail: None,
) -> Callable[[Ranked], Verdict]:
    """The function with which verify.walk compiles plans, each as `train` would with the plan's Gin file.

    Args:
      run, configuration, slice_, deadline_s: as in `prove`; the run's own plan is ignored.
      work: its workload.
      status: shows what is compiled, and its phase.
    """

    def prove_plan(ranked: Ranked) -> Verdict:
        choice, topic = ranked.choice, f"proving {ranked.choice.describe()}"
        optimizer = run.optimizer.with_state_dtype(choice.state_dtype)
        planned = dataclasses.replace(run, plan=choice.plan(work, slice_.name, run.plan), optimizer=optimizer)
        child = configuration.bound(choice.bindings(work, slice_.name))
        return prove(
            planned, child, slice_, deadline_s=deadline_s,
            status=lambda elapsed_s, phase: status(topic, f"{phase}, {elapsed_s:.0f} s"),
        )  # fmt: skip

    return prove_plan
