"""What the backward pass recomputes."""

from __future__ import annotations

import dataclasses
import enum

from capibara.core import projections


class Remat(enum.StrEnum):
    """What the backward pass recomputes of each layer.

    none: nothing. dots: all but matmul results. minimal: all but the results of projections, that is attention and
    elementwise operations. save: all but the results named in Plan.remat_names. offload: the same, with the named
    results kept in host memory. full: everything, from the layer's input.

    All but `none` keep each layer's input on the device, unless `offload` names it: "layer_input" in Plan.remat_names.
    """

    NONE = "none"
    DOTS = "dots"
    MINIMAL = "minimal"
    SAVE = "save"
    OFFLOAD = "offload"
    FULL = "full"


# Names of layers' inputs and intermediate results; MoE layers have those of the experts in place of the MLP's.
REMAT_NAMES = (
    projections.LAYER_INPUT,
    *projections.QKV,
    projections.ATTENDED,
    *(n for n in projections.RESULTS if n not in projections.QKV),
)


@dataclasses.dataclass(frozen=True)
class RematPolicy:
    """A Remat with the names that `save` and `offload` keep."""

    kind: Remat = Remat.NONE
    names: tuple[str, ...] = projections.QKV
