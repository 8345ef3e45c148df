"""Which dimensions of a weight are one space, and which of its spaces a matrix maps to which.

Axes are a tuple of logical names, one (or None) per dimension: ("layers", "embed", "heads", "head_dim").
"""

from __future__ import annotations

Axes = tuple[str | None, ...]
Dims = tuple[int, ...]

STACK_AXES = ("layers", "stage", "expert")  # leading axes over which independent weights are stacked
HEAD_AXES = ("heads", "kv_heads", "head_dim")  # neighbours among these are one space: all the heads' features
LOOKUP_AXES = ("vocab", "position")  # tables of embeddings and the output head


def spaces(axes: Axes) -> list[list[int]]:
    """Dimensions after the leading stack axes, grouped: neighbouring head axes are one space."""
    first = next((i for i, name in enumerate(axes) if name not in STACK_AXES), len(axes))
    found: list[list[int]] = []
    for i in range(first, len(axes)):
        if i > first and axes[i] in HEAD_AXES and axes[i - 1] in HEAD_AXES:
            found[-1].append(i)
        else:
            found.append([i])
    return found


def sides(axes: Axes) -> tuple[Dims, Dims] | None:
    """A matrix's input dimensions and its output dimensions; None: biases, norm scales.

    The inputs are the first space after the stack axes and the outputs the rest; in a projection back to "embed" the
    inputs are all but the last. Stack axes hold independent matrices.
    """
    found = spaces(axes)
    if len(found) < 2:
        return None
    back = axes[-1] == "embed" and axes[found[0][0]] != "embed"
    inputs, outputs = (found[:-1], found[-1:]) if back else (found[:1], found[1:])
    return tuple(sum(inputs, [])), tuple(sum(outputs, []))


def own_dims(axes: Axes) -> Dims:
    """The dimensions of one of the weights that are stacked: all after the leading stack axes."""
    found = spaces(axes)
    return tuple(range(found[0][0], len(axes))) if found else ()
