"""Explains an out-of-memory error of the devices: what was needed, the largest buffers, and what to change."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator

import jax
import numpy as np

from capibara.core.types import PyTree, UserError
from capibara.sharding import Plan, Remat, batch_axes
from capibara.training.stability import program_buffers

_OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|CompileTimeHbmOom|CUDA_ERROR_OUT_OF_MEMORY")
_MEMORY = re.compile(
    r"memory|hbm|alloc", re.IGNORECASE
)  # RESOURCE_EXHAUSTED may also say that a service has had enough
# The largest allocations of a program, where its compiler names them: a TPU's in a list with numbers, a GPU's as buffers. Each
# has a size, mostly a shape, and the operation that makes it; a GPU's arguments have none.
_ALLOCATIONS = re.compile(r"Largest program allocations|Peak buffers:")
_NUMBERED = re.compile(r"\n\s*(?:\d+\.|Buffer \d+:)\s+")
_SIZE = re.compile(r"Size:\s*([\d.]+\s*[KMGT]?i?B?)\b")
_SHAPE = re.compile(r"[Ss]hape:\s*(\S+)")
_OPERATION = re.compile(r"op_name=\"([^\"]*)\"")
_ARGUMENT = "Entry Parameter"
_AMOUNT = re.compile(r"\d\s?(?:[KMGT]i?B?|bytes)\b")
_PROGRAM = re.compile(r"executable_name='([^']*)'")
_NOISE = re.compile(r"\s*\[tf-allocator-allocation-error=''\]")  # of a GPU's allocator, which says nothing more
_FIRST_LINE_CHARACTERS = 300
_NAMED = 3  # buffers in a message


@contextlib.contextmanager
def out_of_memory_explained(
    plan: Plan, name: str, state: PyTree = None, program: Callable[..., object] | None = None
) -> Iterator[None]:
    """Context in which an out-of-memory error of the devices becomes a UserError.

    Args:
      plan: of the run.
      name: what needs the memory, such as "the train step".
      state: abstract arrays with shardings, which are there before it; None: those that are there when it fails.
      program: a compiled one, whose largest arrays are named where it is the one that fails, and the runtime names none.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(explained(str(error), plan, name, state, program)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of a device does not suffice."""
    return _OUT_OF_MEMORY.search(str(error)) is not None and _MEMORY.search(str(error)) is not None


def explained(
    message: str, plan: Plan, name: str, state: PyTree = None, program: Callable[..., object] | None = None
) -> str:
    """One line: what failed, with the runtime's figures; the largest buffers; what to change.

    Args:
      message: the runtime's.
      plan: of the run, from which the changes follow.
      name: what needs the memory.
      state, program: as for out_of_memory_explained.
    """
    first = " ".join(_NOISE.sub("", _line_of(message)).split())[:_FIRST_LINE_CHARACTERS].rstrip(".")
    there = _allocations(message) or _of_program(message, program) or (_arrays() if state is None else _of_state(state))
    largest = ", ".join(there)
    return (
        f"{name} does not fit into the memory of a device ({first})"
        f"{f'; the largest buffers: {largest}' if largest else ''}: {_changes(plan)}"
    )


def _line_of(message: str) -> str:
    """What a message says of memory: the line with the amount, if there is one.

    A GPU's compiler that lacks memory to try kernels says so in lines after others, with or without the status.
    """
    lines = message.split("\n")
    result = [line for line in lines if _MEMORY.search(line) and _AMOUNT.search(line)]
    result += [line for line in lines if _OUT_OF_MEMORY.search(line)]
    line, status = (result or lines)[0], _OUT_OF_MEMORY.search(message)
    if status is not None and (before := line.rfind(status[0])) >= 0:
        return line[before:]
    return line if status is None else f"{status[0]}: {line}"


def _changes(plan: Plan) -> str:
    """What needs less memory, the cheapest first."""
    changes = []
    if plan.remat_policy.kind is Remat.NONE:
        changes.append('set Plan.remat = "full"')
    if (steps := _more_accumulation(plan)) is not None:
        changes.append(f"set Plan.accumulation = {steps}")
    changes.append("shard more (Plan.fsdp, Plan.tensor), or lower Dataset.length; `capibara plan` computes what fits")
    return ", ".join(changes)


def _more_accumulation(plan: Plan) -> int | None:
    """The next number of accumulation steps that divides the rows of a device; None: there is none."""
    try:
        sizes = plan.mesh_shape(jax.device_count())
    except UserError:
        return None
    rows = plan.batch_size // math.prod(sizes[axis] for axis in batch_axes(sizes, plan.rules))
    return next((steps for steps in range(plan.micro_batches + 1, rows + 1) if rows % steps == 0), None)


def _allocations(message: str) -> list[str]:
    """The largest allocations that the compiler names."""
    result = []
    if (begin := _ALLOCATIONS.search(message)) is not None:
        for part in _NUMBERED.split(message[begin.end() :])[1 : 1 + _NAMED]:
            if (size := _SIZE.search(part)) is not None:
                operation = "an argument" if _ARGUMENT in part else _group(_OPERATION, part)
                about = " of ".join(filter(None, (_group(_SHAPE, part), operation)))
                result.append(f"{size[1].strip()}{f' {about}' if about else ''}")
    return result


def _of_program(message: str, program: Callable[..., object] | None) -> list[str]:
    """The largest arrays of a program, if the message says that it is the one that fails."""
    text = program.as_text() if isinstance(program, jax.stages.Compiled) else None
    failed = _group(_PROGRAM, message)
    if text is None or failed is None or failed != program_buffers.name_of(text):
        return []
    return program_buffers.largest(text, _NAMED)


def _group(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return None if match is None else match[1]


def _of_state(state: PyTree) -> list[str]:
    """The largest arrays of a state on a device, such as "512 MiB .params/embed/table"."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    sized = [(_bytes(leaf), jax.tree_util.keystr(path, simple=True, separator="/")) for path, leaf in leaves]
    return [f"{size / 2**20:,.1f} MiB {name}" for size, name in sorted(sized, reverse=True)[:_NAMED]]


def _bytes(array: jax.Array | jax.ShapeDtypeStruct) -> int:
    """The bytes of an array on each of its devices."""
    sharding = getattr(array, "sharding", None)  # NumPy's arrays have none
    shape = array.shape if sharding is None else sharding.shard_shape(array.shape)
    return int(np.prod(shape, dtype=np.int64)) * array.dtype.itemsize


def _arrays() -> list[str]:
    """The arrays that take most of the devices' memory, those of one shape and type together."""
    sizes: dict[str, tuple[int, int]] = {}
    for array in jax.live_arrays():
        shape, bytes_of_one = tuple(array.sharding.shard_shape(array.shape)), _bytes(array)
        key = f"{array.dtype}{list(shape)}"
        count, total = sizes.get(key, (0, 0))
        sizes[key] = (count + 1, total + bytes_of_one)
    largest = sorted(sizes.items(), key=lambda item: item[1][1], reverse=True)[:_NAMED]
    return [f"{total / 2**20:,.1f} MiB in {count} of {key}" for key, (count, total) in largest]
