"""Explains an out-of-memory error of the devices: what was needed, the largest buffers, and what to change."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import jax
import numpy as np

from capibara.core.types import PyTree, UserError
from capibara.sharding import Plan, Remat

_OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|CompileTimeHbmOom|CUDA_ERROR_OUT_OF_MEMORY")
_MEMORY = re.compile(
    r"memory|hbm|alloc", re.IGNORECASE
)  # RESOURCE_EXHAUSTED may also say that a service has had enough
# The compiler names the largest allocations of a program: their size, operation and shape.
_ALLOCATION = re.compile(
    r"Size:\s*(?P<size>[\d.]+\s*[KMGT]?i?B?)\b(?:.*?op_name=\"(?P<op>[^\"]*)\")?(?:.*?Shape:\s*(?P<shape>\S+))?",
    re.DOTALL,
)
_FIRST_LINE_CHARACTERS = 300
_NAMED = 3  # buffers in a message


@contextlib.contextmanager
def out_of_memory_explained(plan: Plan, name: str, state: PyTree = None) -> Iterator[None]:
    """Context in which an out-of-memory error of the devices becomes a UserError.

    Args:
      plan: of the run.
      name: what needs the memory, such as "the train step".
      state: abstract arrays with shardings, which are there before it; None: those that are there when it fails.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(explained(str(error), plan, name, state)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of a device does not suffice."""
    return _OUT_OF_MEMORY.search(str(error)) is not None and _MEMORY.search(str(error)) is not None


def explained(message: str, plan: Plan, name: str, state: PyTree = None) -> str:
    """One line: what failed, with the runtime's figures; the largest buffers; what to change.

    Args:
      message: the runtime's.
      plan: of the run, from which the changes follow.
      name: what needs the memory.
      state: as for out_of_memory_explained.
    """
    first = " ".join(message.split("\n")[0].split())[:_FIRST_LINE_CHARACTERS].rstrip(".")
    largest = ", ".join(_allocations(message) or (_arrays() if state is None else _of_state(state)))
    return (
        f"{name} does not fit into the memory of a device ({first})"
        f"{f'; the largest buffers: {largest}' if largest else ''}: {_changes(plan)}"
    )


def _changes(plan: Plan) -> str:
    """What needs less memory, the cheapest first."""
    changes = []
    rows = plan.batch_size // plan.accumulation
    if plan.remat is Remat.NONE:
        changes.append('set Plan.remat = "full"')
    if rows > 1:
        changes.append(f"set Plan.accumulation = {2 * plan.accumulation}")
    changes.append("shard more (Plan.fsdp, Plan.tensor), or lower Dataset.length; `capibara plan` computes what fits")
    return ", ".join(changes)


def _allocations(message: str) -> list[str]:
    """The largest allocations that the compiler names."""
    _, _, listed = message.partition("Largest program allocations")
    found = []
    for part in re.split(r"\n\s*\d+\.\s+", listed)[1 : 1 + _NAMED]:
        if (match := _ALLOCATION.search(part)) is not None:
            about = " of ".join(filter(None, (match["shape"], match["op"])))
            found.append(f"{match['size'].strip()}{f' {about}' if about else ''}")
    return found


def _of_state(state: PyTree) -> list[str]:
    """The largest arrays of a state on a device, such as "512 MiB .params/embed/table"."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    sized = [(_bytes(leaf), jax.tree_util.keystr(path, simple=True, separator="/")) for path, leaf in leaves]
    return [f"{size / 2**20:,.1f} MiB {name}" for size, name in sorted(sized, reverse=True)[:_NAMED]]


def _bytes(array: jax.Array | jax.ShapeDtypeStruct) -> int:
    """The bytes of an array on each of its devices."""
    shape = array.shape if array.sharding is None else array.sharding.shard_shape(array.shape)
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(array.dtype).itemsize


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
