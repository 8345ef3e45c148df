"""The shapes of a checkpoint's arrays as text, so that two models can be told apart before anything is read."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from etils import epath

from capibara.core import tree
from capibara.core.types import PyTree, UserError


def of(arrays: PyTree) -> dict[str, str]:
    """Name -> "float32[2,3]" for every array."""
    described = (f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for leaf in jax.tree.leaves(arrays))
    return dict(zip(tree.path_names(arrays), described, strict=True))


def parsed(text: str) -> jax.ShapeDtypeStruct:
    """The array of which `of` gave this."""
    dtype, _, sizes = text.removesuffix("]").partition("[")
    return jax.ShapeDtypeStruct(tuple(map(int, filter(None, sizes.split(",")))), jax.numpy.dtype(dtype))


def check(folder: epath.Path, saved: Mapping[str, str], wanted: Mapping[str, str], *, cast: bool) -> None:
    """Compares a step's arrays with those wanted.

    Args:
      folder: of the step.
      saved, wanted: of `of`.
      cast: another floating-point dtype is no difference.

    Raises:
      UserError: they differ: names the first array that does.
    """
    # Parameters first: the moments of the optimizer differ only because they do.
    for path in sorted(saved.keys() | wanted.keys(), key=lambda p: (not p.startswith("params/"), p)):
        old, new = saved.get(path, "nothing"), wanted.get(path, "nothing")
        if old == new or (cast and _differ_in_precision(old, new)):
            continue
        part, absent = path.partition("/")[0], "nothing" in (old, new)
        other = {"opt_state": "another optimizer's state"}
        other |= {"ema": "another ema_decay's state"} if absent else {}
        other |= {"loss_scale": "another dtype's state"}
        hint = ", set Checkpointing.cast = True" if _differ_in_precision(old, new) else ""
        if not absent and any(f"/{moment}/" in path for moment in ("v", "v_row", "v_col")):
            hint = ", which of runs begun by an earlier version is Adafactor.factoring = 'dimensions'"
        raise UserError(
            f"checkpoint {folder} holds {other.get(part, 'another model')}: {path} is {old} there, {new} in this "
            f"configuration: restore the configuration of the run{hint}, or set another MODEL_DIR"
        )


def window(shapes: Mapping[str, str]) -> dict[str, str]:
    """Those of the window of losses, of `of`."""
    return {path: shape for path, shape in shapes.items() if path.startswith("losses/")}


def _differ_in_precision(old: str, new: str) -> bool:
    (old_dtype, old_shape), (new_dtype, new_shape) = (text.partition("[")[::2] for text in (old, new))
    return old_shape == new_shape and all("float" in dtype for dtype in (old_dtype, new_dtype))
