"""Our models and their training in float64, so that comparisons are not limited by rounding."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from capibara.core import tree
from capibara.models import api
from capibara.models.layers import quantized_weights, relative
from capibara.models.parts.config import ComputeDtype

_ROOMS = (
    "capibara.kernels.",
    "capibara.models.",
    "capibara.objectives.",
    "capibara.training.",
    "capibara.optim",
    "capibara.optim.schedules",
    "capibara.optim.matrices",
)
# T5 chooses its buckets by float32 rounding, and the values of 4-bit codes are float32 numbers.
_AS_PUBLISHED = (relative, quantized_weights)
_OF_BLOCKS = ("scales", "means", "steps")


class _Wide:
    """A module of numbers whose float32 is float64."""

    def __init__(self, module: ModuleType):
        self._module = module
        self.float32 = module.float64

    def __getattr__(self, name: str):
        return getattr(self._module, name)


@contextlib.contextmanager
def precision(monkeypatch):
    """Makes every float32 of a model, its loss and its optimizer a float64."""
    with monkeypatch.context() as patch, jax.enable_x64(True):
        for name, module in [*sys.modules.items()]:
            if name.startswith(_ROOMS) and module not in _AS_PUBLISHED:
                for attribute, value in [*vars(module).items()]:
                    if value is jnp or value is np:
                        patch.setattr(module, attribute, _Wide(value))
        patch.setattr(ComputeDtype.FLOAT32, "_value_", "float64")
        patch.setitem(ComputeDtype._value2member_map_, "float64", ComputeDtype.FLOAT32)
        api.build.cache_clear()
        try:
            yield
        finally:
            api.build.cache_clear()


def wide(values):
    """The tree with float32 cast to float64, except the tables of 4-bit values."""

    def widened(name, x):
        kept = x.dtype != np.float32 or name.rpartition("/")[2] in _OF_BLOCKS
        return x if kept else np.asarray(x, np.float64)

    return tree.map_with_names(widened, values)
