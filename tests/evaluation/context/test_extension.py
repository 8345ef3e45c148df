"""The scalings from which a search starts, against the formulas of their papers."""

from __future__ import annotations

import math

import numpy as np

from capibara.evaluation.context.extension import Extension
from capibara.models.api import DecoderConfig, Rope

THETA, DIMS, ORIGINAL, RATIO = 500.0, 16, 256, 4
MODEL = DecoderConfig(
    vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, max_length=ORIGINAL, rope=Rope(theta=THETA)
)


def test_divisors_are_those_of_the_papers():
    known = Extension("m", MODEL, ORIGINAL, RATIO * ORIGINAL).known()
    plain = THETA ** (-np.arange(0, DIMS, 2) / DIMS)
    assert known["linear"] == ((4.0,) * 8, 1.0)
    higher_theta = THETA * RATIO ** (DIMS / (DIMS - 2))
    np.testing.assert_allclose(plain / known["ntk"][0], higher_theta ** (-np.arange(0, DIMS, 2) / DIMS), rtol=1e-6)
    assert known["ntk"][1] == 1.0
    # YaRN: frequencies with more than 32 rotations in a row stay, those with less than one are divided.
    first, last = (DIMS * math.log(ORIGINAL / (2 * math.pi * turns)) / (2 * math.log(THETA)) for turns in (32, 1))
    start, end = max(math.floor(first), 0), min(math.ceil(last), DIMS - 1)
    divided = np.clip((np.arange(DIMS // 2) - start) / (end - start), 0, 1)
    np.testing.assert_allclose(1 / np.array(known["yarn"][0]), divided / RATIO + 1 - divided, rtol=1e-5)
    assert 0 < divided[1] < divided[-2] <= 1 and known["yarn"][1] == 0.1 * math.log(RATIO) + 1
