"""Groups the dimensions of a weight into vector spaces, and finds the input and output side of a matrix.

Axes are a tuple of logical names, one (or None) per dimension: ("layers", "embed", "heads", "head_dim"). The dimensions
"heads" and "head_dim" together are one space: the features of all heads.
"""

from __future__ import annotations

Axes = tuple[str | None, ...]
Dims = tuple[int, ...]

STACK_AXES = ("layers", "stage", "experts")  # leading axes over which independent weights are stacked
HEAD_AXES = ("heads", "kv_heads", "head_dim")  # adjacent ones are one space: the features of all heads
LOOKUP_AXES = ("vocab", "position")  # tables of embeddings and the output head


def spaces(axes: Axes) -> list[list[int]]:
    """The dimensions of each space, after the leading stack axes."""
    first = next((i for i, name in enumerate(axes) if name not in STACK_AXES), len(axes))
    result: list[list[int]] = []
    for i in range(first, len(axes)):
        if i > first and axes[i] in HEAD_AXES and axes[i - 1] in HEAD_AXES:
            result[-1].append(i)
        else:
            result.append([i])
    return result


def sides(axes: Axes) -> tuple[Dims, Dims] | None:
    """The input and the output dimensions of a matrix; None: a bias or norm scale.

    The inputs are the first space after the stack axes and the outputs the rest; in a projection back to "embed" the
    outputs are the last space. Along stack axes there are independent matrices.
    """
    result = spaces(axes)
    if len(result) < 2 or {*axes} <= {"layers", "norm", None}:  # the latter are rates of decay
        return None
    back = axes[-1] == "embed" and axes[result[0][0]] != "embed"
    inputs, outputs = (result[:-1], result[-1:]) if back else (result[:1], result[1:])
    return tuple(sum(inputs, [])), tuple(sum(outputs, []))


def own_dims(axes: Axes) -> Dims:
    """All dimensions after the leading stack axes, along which independent weights are stacked."""
    result = spaces(axes)
    return tuple(range(result[0][0], len(axes))) if result else ()
