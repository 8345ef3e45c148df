"""Each method against recorded results of mergekit (mergekit.json, by mergekit_peer.py), and what each must hold."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from capibara import config
from capibara.consensus.merging import METHODS
from capibara.consensus.merging.sparsify import Rescale
from capibara.core.types import UserError

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE))
import merge_cases as cases  # noqa: E402

PYTHON = os.environ.get("MERGEKIT_PYTHON")
TOLERANCE = 1e-5


def check(answers):
    for case, (method, settings, _, count, has_base) in cases.CASES.items():
        made = METHODS[method](**settings)
        made.check(count, has_base=has_base)
        for shape in cases.SHAPES:
            base, *models = cases.tensors(shape)
            got = made.merge(models[:count], base if has_base else None, cases.uniform(shape))
            assert got.dtype == np.float32 and got.shape == cases.SHAPES[shape], case
            np.testing.assert_allclose(got.reshape(-1), answers[case][shape], rtol=0, atol=TOLERANCE, err_msg=case)


def test_every_method_gives_what_mergekit_gave():
    assert {case[0] for case in cases.CASES.values()} == {*METHODS} - {"moe"}  # which has a program of its own there
    check(json.loads((HERE / "mergekit.json").read_text()))


@pytest.mark.heavy
@pytest.mark.skipif(not PYTHON, reason="MERGEKIT_PYTHON names no python with mergekit")
def test_every_method_gives_what_mergekit_gives():
    done = subprocess.run([PYTHON, str(HERE / "mergekit_peer.py")], capture_output=True, text=True, check=True)
    check(json.loads(done.stdout))


def models(count=2, size=400):
    draw = np.random.default_rng(1)
    base = draw.standard_normal((20, size // 20), np.float32)
    return base, [base + np.float32(0.1) * draw.standard_normal(base.shape, np.float32) for _ in range(count)]


@pytest.mark.parametrize("method", ["dare_linear", "della_linear"])
def test_random_masks_are_right_in_the_mean(method):
    """The mean over masks is the unmasked sum, with rescaling by probability."""
    base, given = models()
    made = METHODS[method](density=(0.4,), rescale=Rescale.PROBABILITY)
    count = 1500
    mean = np.mean([made.merge(given, base, np.random.default_rng(seed)) - base for seed in range(count)], axis=0)
    whole = sum(x - base for x in given)
    spread = np.sqrt(sum(np.square(x - base) for x in given) * 3 / count)  # (1 - p) / p, p is at least 0.25
    assert (np.abs(mean - whole) < 5.5 * spread).all()
    kept = made.merge(given[:1], base, np.random.default_rng(0)) != base
    assert abs(kept.mean() - 0.4) < 0.1


def test_larger_values_of_a_row_are_kept_more_often_by_della():
    base = np.zeros((1, 10), np.float32)
    given = np.arange(1, 11, dtype=np.float32).reshape(1, 10)
    made = METHODS["della_linear"](density=(0.5,), spread=0.4, rescale=Rescale.NONE)
    kept = np.mean([made.merge([given], base, np.random.default_rng(seed)) != 0 for seed in range(600)], axis=0)[0]
    np.testing.assert_allclose(kept, np.linspace(0.1, 0.9, 10), atol=0.08)


def test_equal_models_stay_as_they_are():
    base, (one, _) = models()
    for name, cls in METHODS.items():
        count = cls.most or 2
        if cls.base == "required" and name not in ("model_stock", "sce"):
            made = cls(normalize=True, **({"density": (1.0,)} if "density" in cls.__dataclass_fields__ else {}))
        else:
            made = cls()
        merges_base = cls.base != "unused" and name != "moe"  # whose base takes the place of the mean
        got = made.merge([one] * count, base if merges_base else None, np.random.default_rng(0))
        np.testing.assert_allclose(got, one, atol=1e-6, err_msg=name)


def test_tensors_of_zeros_and_of_one_value_are_merged():
    for name, cls in METHODS.items():
        for value in (
            np.zeros((3, 2), np.float32),
            np.zeros(1, np.float32),
            np.ones(1, np.float32),
            np.ones((1, 1), np.float32),
        ):
            base = value if cls.base != "unused" else None
            got = cls().merge([value] * (cls.most or 3), base, np.random.default_rng(0))
            assert got.shape == value.shape and np.isfinite(got).all(), name


MISTAKES = {
    "weights has nan, must be finite": ("linear", {"weights": (float("nan"), 1.0)}),
    "their sum must not be 0": ("multislerp", {"weights": (1.0, -1.0)}),
    "density is 0.0, must be greater than 0": ("ties", {"density": (0.0,)}),
    "density is 1.5, must be greater than 0 and at most 1": ("sce", {"density": 1.5}),
    "density is nan, must be": ("dare_ties", {"density": (float("nan"),)}),
    "spread is 0.5, must be at least 0 and keep": ("della", {"spread": 0.5}),
    "t is 1.5, must be from 0": ("slerp", {"t": 1.5}),
    "outliers is 1.0, must be": ("breadcrumbs", {"outliers": 1.0}),
    "scale is inf, must be finite": ("task_arithmetic", {"scale": float("inf")}),
    "max_iterations is 0": ("karcher", {"max_iterations": 0}),
}


@pytest.mark.parametrize("said", MISTAKES)
def test_wrong_settings_are_refused(said):
    method, settings = MISTAKES[said]
    with pytest.raises(UserError, match=said):
        METHODS[method](**settings)


def test_settings_that_do_not_fit_the_models_are_refused():
    def refused(said, count, has_base, method, **settings):
        with pytest.raises(UserError, match=said):
            METHODS[method](**settings).check(count, has_base=has_base)

    refused("weights has 2 numbers, must have one for each of the 3 models", 3, False, "linear", weights=(1.0, 2.0))
    refused("density has 2 numbers", 3, True, "ties", density=(0.1, 0.2))
    refused("ties needs the base model", 3, False, "ties")
    refused("slerp is given 3 models, must have exactly 2", 3, False, "slerp")
    refused("linear has no use for a base", 2, True, "linear")
    refused("model_stock is given 1 models, must have at least 2", 1, True, "model_stock")


def test_directions_that_cancel_out_are_refused():
    one = np.ones(4, np.float32)
    with pytest.raises(UserError, match="cancel out"):
        METHODS["multislerp"](weights=(1.0, 0.5, 0.5)).merge([one, -one, -one], None, np.random.default_rng(0))


def test_settings_are_bound_by_gin():
    config.parse([], ["Ties.density = (0.25, 0.5)", "Ties.normalize = False"])
    made = config.build(METHODS["ties"], scale=2.0)
    assert (made.density, made.normalize, made.scale) == ((0.25, 0.5), False, 2.0)
