"""Rows of slots are read and written where they are."""

import jax
import numpy as np

from capibara.kernels.slots import put, take


def test_rows_of_slots():
    x, slots = np.arange(20.0).reshape(5, 2, 2), np.array([4, 0, 2], np.int32)
    np.testing.assert_array_equal(jax.jit(take)(x, slots), x[slots])
    want = x.copy()
    want[slots] = -x[:3]
    np.testing.assert_array_equal(jax.jit(put)(x, -x[:3], slots), want)
